"""The reference policy: the searchers' copy of it, and its resets to the policy (TBA', section 6).

Every rho steps the policy of that moment becomes the reference policy. Responses carry the version
of the reference that gave their log-probabilities.
"""

import numpy as np
import torch

from buffer import Row
from config import Config
from learner import Learner
from models.device import compute_dtype, device
from models.logprobs import response_logprobs
from models.policy import load_policy
from objectives import WITHOUT_REFERENCE
from tasks import load_task
from weights import WRITING, SharedWeights


class Reference:
    """A searcher's copy of the reference policy, on its device: the trainer holds none.

    Where the objective reads no reference log-probabilities there is no model, and they are NaN.
    """

    def __init__(self, config: Config, weights: SharedWeights, pin: int):
        self.temperature, self.dtype = config.temperature, compute_dtype(config)
        self.weights, self.pin = weights, pin
        self.model: torch.nn.Module | None = None
        if config.loss not in WITHOUT_REFERENCE:
            self.model = load_policy(config, device(), linear_dtype=self.dtype)
        self.version = 0  # config.model is version 0

    @torch.no_grad()
    def take_reset(self) -> None:
        """Load the newest reference policy, if there was a reset."""
        if self.weights.reference_version <= self.version:
            return
        with self.weights.read_reference(self.pin) as (version, tensors):
            if version == WRITING:
                return
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[name])
        self.version = version

    @torch.no_grad()
    def logprobs(self, prompts: list[np.ndarray], responses: list[np.ndarray]) -> list[np.ndarray]:
        """Compute log pi_ref of each token, for each response: (T,) float32."""
        if self.model is None:
            return [np.full(len(response), np.nan, np.float32) for response in responses]
        # (N, T)
        padded = response_logprobs(self.model, prompts, responses, self.temperature, self.dtype)
        return [own[: len(response)] for own, response in zip(padded.cpu().numpy(), responses)]


class ReferenceResets:
    """The trainer's side: publishes a reset, and renews rows that an earlier reference scored."""

    def __init__(self, config: Config, weights: SharedWeights, learner: Learner):
        self.period, self.weights, self.learner = config.reference_reset_period, weights, learner
        self.task = load_task(config.task, **config.options)

    def is_due(self, step: int) -> bool:
        """Return whether rho steps have gone by, or a multiple of rho, since the latest reset."""
        latest = self.weights.reference_version
        return self.period > 0 and step // self.period > latest // self.period

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
