"""Evaluations during a run, as the trainer sees them (a searcher makes them beside its search)."""

from config import Config
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable
from weights import SharedWeights


class EvaluationRequests:
    """Which version is to be evaluated, and which evaluation has arrived.

    A request is published with a version (SharedWeights). Version 0 is evaluated without one.
    """

    def __init__(self, config: Config, weights: SharedWeights, status: StatusTable):
        self.config, self.weights, self.status = config, weights, status
        self.asked_step = 0  # step of the latest request before a resume; -1: ask at once
        self.arrived_version = -1

    def is_due(self, step: int) -> bool:
        """Return whether a sync has passed a multiple of --eval_every since the latest request."""
        period, k = self.config.eval_every, self.config.sync_period
        latest = max(self.asked_step, self.weights.evaluation_version)
        step, latest = step - step % k, latest - latest % k  # each one's latest sync
        return step // period > latest // period if period else latest < 0

    def arrive(self, evaluation: Evaluation) -> None:
        self.arrived_version = max(self.arrived_version, evaluation.version)
        # Not before: a searcher that dies with it unsent is replaced by one that repeats it.
        self.status.set(self.status.searchers[0], "evaluated", evaluation.version)

    @property
    def is_pending(self) -> bool:
        """Return whether an evaluation was asked for and has not arrived: of version 0 always."""
        return self.arrived_version < max(0, self.weights.evaluation_version)

    def state_dict(self, step: int) -> dict:
        """Return what a run resumed at this step needs: it asks again for what has not arrived."""
        is_due = self.is_pending or self.is_due(step - 1)
        return {"evaluation_due": is_due, "evaluated": self.arrived_version}

    def load_state_dict(self, state: dict, step: int) -> None:
        self.arrived_version = state["evaluated"]
        self.asked_step = -1 if state["evaluation_due"] else step - 1
