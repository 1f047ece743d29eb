"""How far a batch is from on-policy: figures of the weights w = pi / b of importance sampling.

Of log-probabilities that a step computes anyway.
"""

import torch
from torch import Tensor

from loss import LossInputs, Metrics, sequence_sum

LARGEST = 300.0  # of log w, so that its square stays finite in float64


class Importance:
    """Collects log w of the rows of a batch, a micro-batch at a time."""

    def __init__(self):
        self.tokens: list[Tensor] = []  # log w of each response token, (sum of lengths,)
        self.responses: list[Tensor] = []  # the sum of these over each response, (rows,)

    def add(self, x: LossInputs) -> None:
        """Take in a micro-batch."""
        log_w, mask = (x.logprobs.detach() - x.behavior_logprobs).double().cpu(), x.mask.cpu()
        self.tokens.append(log_w[mask.bool()])  # log_w: (N, T)
        self.responses.append(sequence_sum(log_w, mask))

    @staticmethod
    def of(parts: "list[Importance]") -> "Importance":
        """Join those of several ranks (models/sharding.py)."""
        whole = Importance()
        for part in parts:
            whole.tokens += part.tokens
            whole.responses += part.responses
        return whole

    def figures(self) -> Metrics:
        """Effective sample sizes as shares of the sample, and quantiles of log w of responses."""
        responses = torch.cat(self.responses)
        low, high = responses.quantile(torch.tensor([0.05, 0.95]).to(responses)).tolist()
        return {
            "ess_responses": effective_share(responses),
            "ess_tokens": effective_share(torch.cat(self.tokens)),
            "log_w_5": low,
            "log_w_95": high,
        }


def effective_share(log_w: Tensor) -> float:
    """Return the effective sample size of weights, (sum w)^2 / sum w^2, as a share of their number.

    1 where all are equal, 1 / N where one outweighs all others.
    """
    w = (log_w - log_w.max()).clamp(min=-LARGEST).exp()
    return float(w.sum().square() / w.square().sum() / len(w))
