"""Figures of groups as they were generated, and the mismatch between vLLM and the trainer."""

import torch

from models.logprobs import mismatch
from runtime.lockstep import LockstepBatches
from runtime.replay import ReplayBatches
from runtime.report import describe
from weights import SharedWeights

MISMATCH_PERIOD = 50  # steps between two measurements of the mismatch with vLLM


class Health:
    """Looks at fresh groups: in the buffer, which drops duplicates, they would be distorted.

    figures: those of the latest fresh groups, for the metrics of a step.
    """

    def __init__(self, weights: SharedWeights, policy: torch.nn.Module):
        self.weights, self.policy = weights, policy
        self.figures: dict[str, float] = {}
        self.mismatch_due = 0  # step from which the mismatch is to be measured again

    def observe(self, batches: ReplayBatches | LockstepBatches, step: int) -> None:
        """Look at what is fresh in a batch source, once."""
        fresh, batches.fresh = batches.fresh, []
        if not fresh:
            return
        self.figures |= describe(fresh)
        if step < self.mismatch_due:
            return
        # A group that one version alone sampled, whose weights are still in a slot.
        held = self.weights.held()
        for group in reversed(fresh + batches.waiting()):
            if group.version == group.last_version and group.version in held:
                difference = mismatch(group, held[group.version], self.policy)
                self.figures["mismatch"] = difference
                self.figures["mismatch_version"] = group.version
                self.mismatch_due = step + MISMATCH_PERIOD
                return
