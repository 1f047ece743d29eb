"""Lockstep (--constant_staleness, --synchronous): each batch is made by one version.

It is trained on a constant number of steps later. Staleness 0 is synchronous, on-policy training;
TBA' on MATH uses 2 and 10 (section 6). The searcher's workload and the trainer obey one rule,
batches_of_version. Everything arrives and nothing is drawn by chance, so that a run that was killed
and resumed gives the metrics and weights of one that was not.
"""

from collections import defaultdict, deque
from typing import Any

import numpy as np

from buffer import Group, Row, rows_of
from rollouts import Rollout, Workload
from trainer import Trainer


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

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
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
        # This searcher's part of the B queries of a batch.
        own_queries = len(range(self.share, config.queries_per_batch, config.searchers))
        for batch in batches_of_version(version, config.constant_staleness, config.steps):
            self.owed.extend([batch] * own_queries)

    def may_load(self) -> bool:
        """Return whether all rollouts are complete: every response is of one version."""
        return not self.owed and not self.in_flight


class LockstepTrainer(Trainer):
    """Trains on the groups that were made for each step."""

    is_exact = True

    def make_buffer(self) -> "Arrived":
        return Arrived()

    def add(self, groups: list[Group]) -> None:
        self.buffer.add(groups)

    def draw(self) -> list[Row]:
        """Return the batch of this step, or [] if not all of it has arrived."""
        if self.num_missing(self.step) > 0:
            return []
        self.drawn = self.buffer.take(self.step)
        return [row for group in self.drawn for row in rows_of(group, self.step)]

    def next_batch(self) -> list[Row]:
        rows = super().next_batch()
        if rows:
            self.metrics.observe(self.drawn, later=self.buffer.groups())
        return rows

    def num_missing(self, step: int) -> int:
        """Count the groups that a step still lacks."""
        return self.config.queries_per_batch - len(self.buffer.of_step[step])

    def awaited(self) -> str:
        return f"{self.num_missing(self.step)} more groups for step {self.step}"

    def publish(self) -> bool:
        """Publish once all searchers have the version before: each makes a batch."""
        if 0 <= (newest := self.weights.version) != self.step:
            names, status = self.status.searchers, self.status
            self.receive_until(
                lambda: all(status.get(name, "version") == newest for name in names),
                f"the searchers to take version {newest}",
            )
        return super().publish()

    def receive_what_is_saved(self) -> None:
        """Receive all that was owed before this step's publish, an evaluation too."""
        super().receive_what_is_saved()
        owed = range(self.step, min(self.step + self.config.constant_staleness, self.config.steps))
        self.receive_until(
            lambda: not self.evaluations.is_pending and all(self.num_missing(s) <= 0 for s in owed),
            "the searchers to finish what a checkpoint is to hold",
        )


class Arrived:
    """The groups that have arrived, by the step that they are for: what a buffer is elsewhere."""

    received = responses = queries = 0  # of a buffer: there is none

    def __init__(self):
        self.of_step: dict[int, list[Group]] = defaultdict(list)

    def add(self, groups: list[Group]) -> None:
        for group in groups:
            self.of_step[group.batch].append(group)

    def take(self, step: int) -> list[Group]:
        """Take out a step's groups, in an order that does not depend on which came first."""
        groups = self.of_step.pop(step)
        return sorted(groups, key=lambda group: (group.query_id, group.tokens.tobytes()))

    def groups(self) -> list[Group]:
        return [group for groups in self.of_step.values() for group in groups]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the groups as plain arrays, fit for np.savez without pickle."""
        return {
            f"{i}.{name}": np.array(value)
            for i, group in enumerate(self.groups())
            for name, value in vars(group).items()
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        fields: dict[str, dict] = defaultdict(dict)  # by number of the group
        for key, value in state.items():
            i, name = key.split(".")
            fields[i][name] = value if value.ndim else value.item()
        self.add([Group(**values) for values in fields.values()])
