"""Resets of the reference policy (--reference_reset_period; TBA', section 6).

Every rho steps the policy of that moment becomes the reference policy. Responses carry the version
of the reference that gave their log-probabilities.
"""

from buffer import Row
from config import Config
from learner import Learner
from tasks import load_task
from weights import SharedWeights


class ReferenceResets:
    """The trainer's side: publishes a reset, and renews rows that an earlier reference scored."""

    def __init__(self, config: Config, weights: SharedWeights, learner: Learner):
        self.period, self.weights, self.learner = config.reference_reset_period, weights, learner
        self.task = load_task(config.task, **config.options)

    def is_due(self, step: int) -> bool:
        """Return whether rho steps have gone by, or a multiple of rho, since the latest reset."""
        latest = self.weights.reference_version
        return step // self.period > latest // self.period

    def publish_if_due(self, step: int) -> None:
        """Make the policy the reference, if that is due and no searcher reads the old one."""
        if self.is_due(step):
            self.weights.publish_reference(step, self.learner.weights())

    def renew(self, rows: list[Row]) -> None:
        """Give rows that an earlier reference scored their log-probabilities under the present one.

        Done when they are first drawn: a reset leaves nothing to wait for, and what is never drawn
        costs nothing.
        """
        version = self.weights.reference_version
        old = [row for row in rows if row.reference_version != version]
        if not old:
            return
        logprobs = self.learner.logprobs_under(self.weights.reference_tensors(), old)
        for row, renewed in zip(old, logprobs):
            row.ref_logprobs = self.task.reference_logprobs(renewed)
            row.reference_version = version
