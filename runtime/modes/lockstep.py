"""Lockstep: each batch is made by one version and trained on a constant number of steps later.

Staleness 0 is synchronous, on-policy training; TBA' on MATH uses 2 and 10 (section 6). The searcher
asks LockstepWorkload what to generate, the trainer asks LockstepBatches what to train on; both obey
one rule, batches_of_version. Everything arrives and nothing is drawn by chance, so that a run that
was killed and resumed gives the metrics and weights of one that was not.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from buffer import Group, Row, rows_of
from config import Config
from runtime.modes.free_running import Rollout, Workload
from runtime.transport.board import Board
from tasks import Query
from weights import SharedWeights


def batches_of_version(version: int, staleness: int, num_steps: int) -> range:
    """Return the trainer steps whose batches this version makes.

    Version v makes the batch of step v + staleness. Version 0 makes those of the first steps too,
    which no earlier version can make. No batch is made for steps after the last.
    """
    first = 0 if version == 0 else version + staleness
    return range(first, min(version + staleness + 1, num_steps))


class LockstepWorkload(Workload):
    """Draws the queries that the version in the engine still owes to the batches that it makes."""

    has_seeds = True  # so that the run is repeatable

    def __init__(
        self,
        config: Config,
        queries: Sequence[Query],
        share: int,
        cursor: int,
        weights: SharedWeights,
    ):
        super().__init__(config, queries, share, cursor, weights)
        # This searcher's part of the B queries of a batch.
        self.queries_per_batch = len(range(share, config.queries_per_batch, config.searchers))
        # For each query that is to start, the trainer step that its group is for.
        self.owed: deque[int] = deque()

    def may_draw(self) -> bool:
        return bool(self.owed)

    def draw(self) -> Rollout | None:
        if rollout := super().draw():
            rollout.batch = self.owed.popleft()
        return rollout

    def drop(self, rollout: Rollout) -> None:
        super().drop(rollout)
        self.owed.appendleft(rollout.batch)  # the batch needs another query in its place

    def begin_version(self, version: int) -> None:
        config = self.config
        for batch in batches_of_version(version, config.constant_staleness, config.steps):
            self.owed.extend([batch] * self.queries_per_batch)

    def may_load(self) -> bool:
        """Return whether all rollouts are complete: every response is of one version."""
        return not self.owed and not self.in_flight


class LockstepBatches:
    """The trainer's batches without a buffer: step t trains on the groups that are for it."""

    is_exact = True  # a run that was killed and resumed comes to the same result

    def __init__(self, config: Config, board: Board):
        self.config, self.board = config, board
        self.arrived: dict[int, list[Group]] = {}  # by the step that they are for
        self.unobserved: list[Group] = []  # groups whose figures are not in the metrics yet
        self.received = 0  # responses in a buffer: there is none

    def add(self, groups: list[Group], step: int) -> None:
        for group in groups:
            self.arrived.setdefault(group.batch, []).append(group)

    def next(self, step: int) -> list[Row]:
        """Return the batch of this step, or [] if not all of it has arrived.

        Its order does not depend on which group came first.
        """
        if self.num_missing(step) > 0:
            return []
        groups = self.arrived.pop(step)
        groups.sort(key=lambda group: (group.query_id, group.tokens.tobytes()))
        self.unobserved = groups
        return [row for group in groups for row in rows_of(group, step)]

    def num_missing(self, step: int) -> int:
        return self.config.queries_per_batch - len(self.arrived.get(step, []))

    def awaited(self, step: int) -> str:
        """Say what next() lacks."""
        return f"{self.num_missing(step)} more groups for step {step}"

    def waiting(self) -> list[Group]:
        """Return the groups for later steps."""
        return [group for groups in self.arrived.values() for group in groups]

    def is_taken(self, newest_version: int) -> bool:
        """Return whether all searchers have taken this version: then none would miss it."""
        versions = [self.board.get(name, "version") for name in self.board.searchers]
        return newest_version < 0 or all(version == newest_version for version in versions)

    def is_settled(self, step: int, is_evaluation_pending: bool) -> bool:
        """Return whether all that was owed before this step's publish has arrived."""
        owed = range(step, min(step + self.config.constant_staleness, self.config.steps))
        is_whole = all(self.num_missing(later) <= 0 for later in owed)
        return is_whole and not is_evaluation_pending

    def figures(self) -> dict[str, int]:
        return {"received": 0, "buffer_responses": 0, "buffer_queries": 0}

    def state_dict(self) -> dict[str, np.ndarray]:
        return arrays_of(self.waiting())

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.add(groups_of(state), step=0)


def arrays_of(groups: list[Group]) -> dict[str, np.ndarray]:
    """Copy groups that are meant for a batch to plain arrays, fit for np.savez without pickle."""
    return {
        f"{i}.{name}": np.array(value)
        for i, group in enumerate(groups)
        for name, value in vars(group).items()
    }


def groups_of(arrays: dict[str, np.ndarray]) -> list[Group]:
    """Return the groups that gave these arrays_of()."""
    fields: dict[str, dict] = defaultdict(dict)  # by number of the group
    for key, value in arrays.items():
        i, name = key.split(".")
        if name != "appended":  # of a checkpoint from before there were masks
            fields[i][name] = value if value.ndim else value.item()
    return [Group(**values) for values in fields.values()]
