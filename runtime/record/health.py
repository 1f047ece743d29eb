"""Figures of groups as they were generated, and the mismatch between vLLM and the trainer."""

from buffer import rows_of
from learner import Learner
from models.logprobs import mismatch
from runtime.modes.lockstep import LockstepBatches
from runtime.modes.replay import ReplayBatches
from runtime.record.report import describe
from weights import SharedWeights

MISMATCH_PERIOD = 50  # steps between two measurements of the mismatch with vLLM


class Health:
    """Looks at groups as they arrive: the buffer drops duplicates, which would distort figures.

    figures: those of the latest groups, for the metrics of a step.
    """

    def __init__(self, weights: SharedWeights, learner: Learner):
        self.weights, self.learner = weights, learner
        self.figures: dict[str, float] = {}
        self.mismatch_due = 0  # step from which the mismatch is to be measured again

    def state_dict(self) -> dict:
        return {"fresh": self.figures, "mismatch_due": self.mismatch_due}

    def load_state_dict(self, state: dict) -> None:
        self.figures, self.mismatch_due = state["fresh"], state["mismatch_due"]

    def observe(self, batches: ReplayBatches | LockstepBatches, step: int) -> None:
        """Look at the groups of a batch source that were not looked at yet."""
        groups, batches.unobserved = batches.unobserved, []
        if not groups:
            return
        self.figures |= describe(groups)
        if step < self.mismatch_due:
            return
        # A group that one version alone sampled, whose weights are still in a slot.
        held = self.weights.held()
        for group in reversed(groups + batches.waiting()):
            if group.version == group.last_version and group.version in held:
                ours = self.learner.logprobs_under(
                    held[group.version], rows_of(group), group.temperature
                )
                self.figures["mismatch"] = mismatch(group, ours)
                self.figures["mismatch_version"] = group.version
                self.mismatch_due = step + MISMATCH_PERIOD
                return
