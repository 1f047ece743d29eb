"""Lockstep (--constant_staleness, --synchronous): each batch is made by one version.

It is trained on a constant number of steps later. Staleness 0 is synchronous, on-policy training;
TBA' on MATH uses 2 and 10 (section 6). The searcher (extras/lockstep_searcher.py) and the trainer
obey one rule, batches_of_version. Everything arrives and nothing is drawn by chance, so that a run
that was killed and resumed gives the metrics and weights of one that was not.

TBA' resets the reference policy too (--reference_reset_period): every rho steps the policy of that
moment becomes the reference. It has a slot of its own, in fp32: searchers may compute in bf16, and
right after a reset log pi minus log pi_ref is to be 0. The trainer writes that slot only while all
searchers have the newest version and none reads it: so one is enough.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from config import Config
from rollouts import Group, Response
from runtime.record.metrics import describe
from tasks import load_task
from trainer import Trainer


def batches_of_version(version: int, config: Config) -> range:
    """Return the trainer steps whose batches this version makes.

    Version v makes the batch of step v + staleness. Version 0 makes those of the first steps too,
    which no earlier version can make. No batch is made for steps after the last.
    """
    first = 0 if version == 0 else version + config.constant_staleness
    return range(first, min(version + config.constant_staleness + 1, config.steps))


class LockstepTrainer(Trainer):
    """Trains on the groups that were made for each step."""

    is_exact = True

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.task = load_task(self.config.task, **self.config.options)

    def make_buffer(self) -> "Arrived":
        return Arrived()

    def add(self, groups: list[Group]) -> None:
        self.buffer.groups += groups

    def draw(self) -> list[Response]:
        """Return the batch of this step, or [] if not all of it has arrived."""
        if self.num_missing(self.step) > 0:
            return []
        self.drawn = self.buffer.take(self.step)
        return [response for group in self.drawn for response in group.responses(self.step)]

    def sample(self) -> list[Response]:
        """Take the batch of this step, with log pi_ref under the present reference."""
        if rows := super().sample():
            self.metrics.figures |= describe(self.drawn)
            self.measure_mismatch_if_due([*self.drawn, *self.buffer.groups])
            self.renew(self.drawn)
        return rows

    def renew(self, groups: list[Group]) -> None:
        """Give groups that an earlier reference scored log pi_ref under the present one."""
        reference = self.weights.reference
        version = max(0, reference.version) if reference else 0
        old = [group for group in groups if group.reference_version != version]
        if not old:
            return
        rows = [response for group in old for response in group.responses()]
        with self.timeline.span("reference"):
            logprobs = self.learner.logprobs_under(reference.held()[version], rows)
        for row, renewed in zip(rows, logprobs):  # their tokens are views of the groups'
            row.tokens["ref_logprob"] = self.task.reference_logprobs(renewed)
        for group in old:
            group.reference_version = version

    def num_missing(self, step: int) -> int:
        """Count the groups that a step still lacks."""
        return self.config.queries_per_batch - len(self.buffer.of_step(step))

    def awaited(self) -> str:
        return f"{self.num_missing(self.step)} more groups for step {self.step}"

    def publish(self) -> bool:
        """Publish once all searchers have the version before: each makes a batch.

        A reset comes first: a searcher that sees this version must find it.
        """
        newest, names, status = self.weights.version, self.status.searchers, self.status
        if newest == self.step:
            return True
        if newest >= 0:
            self.receive_until(
                lambda: all(status.get(name, "version") == newest for name in names),
                f"the searchers to take version {newest}",
            )
        if self.is_reset_due() and not self.weights.reference.publish(
            self.step, self.learner.weights()
        ):
            raise RuntimeError("a searcher that has the newest version reads the reference policy")
        return super().publish()

    def is_reset_due(self) -> bool:
        """Return whether rho steps have gone by, or a multiple of rho, since the latest reset."""
        reference, period = self.weights.reference, self.config.reference_reset_period
        return bool(reference) and self.step // period > max(0, reference.version) // period

    def prepare_checkpoint(self) -> None:
        """Receive all that was owed before this step's publish, an evaluation too."""
        super().prepare_checkpoint()
        owed = range(self.step, min(self.step + self.config.constant_staleness, self.config.steps))
        self.receive_until(
            lambda: not self.evaluations.is_pending and all(self.num_missing(s) <= 0 for s in owed),
            "the searchers to finish what a checkpoint is to hold",
        )


class Arrived:
    """The groups that have arrived for steps to come: what a buffer is elsewhere."""

    received = responses = queries = 0  # of a buffer: there is none

    def __init__(self):
        self.groups: list[Group] = []

    def of_step(self, step: int) -> list[Group]:
        return [group for group in self.groups if group.batch == step]

    def take(self, step: int) -> list[Group]:
        """Take out a step's groups, in an order that does not depend on which came first."""
        taken = self.of_step(step)
        self.groups = [group for group in self.groups if group.batch != step]
        return sorted(taken, key=lambda group: (group.query_id, group.tokens["token"].tobytes()))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the groups as plain arrays, fit for np.savez without pickle."""
        return {
            f"{i}.{name}": np.array(value)
            for i, group in enumerate(self.groups)
            for name, value in group.__getstate__().items()
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        fields: dict[str, dict] = defaultdict(dict)  # by number of the group
        for key, value in state.items():
            i, name = key.split(".")
            fields[i][name] = value if value.ndim else value.item()
        self.groups = [Group(**values) for values in fields.values()]
