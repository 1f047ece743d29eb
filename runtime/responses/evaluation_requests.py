"""The evaluations that the trainer asks the searchers for."""

from config import Config
from runtime.transport.messages import Evaluation
from weights import SharedWeights


class EvaluationRequests:
    """Which version is to be evaluated, and which evaluation has arrived.

    A request travels with a version: SharedWeights.publish(..., evaluate=True).
    """

    def __init__(self, config: Config, weights: SharedWeights):
        self.config, self.weights = config, weights
        self.is_due = False  # the next version that is published asks for an evaluation
        self.arrived_version = -1

    def update(self, step: int) -> None:
        """Note at a sync whether an evaluation is due."""
        period = self.config.eval_every
        self.is_due |= step > 0 and period > 0 and step % period < self.config.sync_period

    def state_dict(self) -> dict:
        """What a resumed run needs: it asks again for an evaluation that has not arrived."""
        is_due = self.is_due or self.is_pending
        return {"evaluation_due": is_due, "evaluated": self.arrived_version}

    def load_state_dict(self, state: dict) -> None:
        self.is_due, self.arrived_version = state["evaluation_due"], state["evaluated"]

    def arrived(self, evaluation: Evaluation) -> None:
        self.arrived_version = max(self.arrived_version, evaluation.version)

    @property
    def is_pending(self) -> bool:
        """Whether an evaluation was asked for and has not arrived: of the base model always."""
        return self.arrived_version < max(0, self.weights.evaluation_version)
