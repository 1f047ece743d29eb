"""The reference policy, of which each searcher has a copy: log pi_ref of what it generates."""

import numpy as np
import torch

from config import Config
from models.device import compute_dtype, device
from models.logprobs import response_logprobs
from models.policy import load_policy
from weights import WRITING, SharedWeights


class Reference:
    """A searcher's copy of the reference policy, on its device: the trainer holds none.

    Where the objective reads no reference log-probabilities there is no model, and they are NaN.
    """

    def __init__(self, config: Config, weights: SharedWeights, pin: int):
        self.temperature, self.dtype = config.temperature, compute_dtype(config)
        self.weights, self.pin = weights, pin
        self.model: torch.nn.Module | None = None
        if config.reads_reference:
            self.model = load_policy(config, device(), linear_dtype=self.dtype)
        self.version = 0  # config.model is version 0

    @torch.no_grad()
    def take_reset(self) -> None:
        """Load the newest reference policy, if there was a reset (--reference_reset_period)."""
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
