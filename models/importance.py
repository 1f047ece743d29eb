"""How far a batch is from on-policy: figures of the weights w = pi / b of importance sampling.

Of log-probabilities that a step computes anyway.
"""

import torch
from torch import Tensor

from loss import Metrics, sequence_sum


def importance_figures(parts: list[tuple[Tensor, Tensor]]) -> Metrics:
    """Effective sample sizes as shares of the sample, and quantiles of log w of responses.

    parts: of each micro-batch of a batch log w of its tokens, and 1 on those that were sampled,
    both (N, T).
    """
    parts = [(log_w.double().cpu(), mask.cpu()) for log_w, mask in parts]
    tokens = torch.cat([log_w[mask.bool()] for log_w, mask in parts])
    responses = torch.cat([sequence_sum(log_w, mask) for log_w, mask in parts])
    low, high = responses.quantile(torch.tensor([0.05, 0.95]).to(responses)).tolist()
    return {
        "ess_responses": effective_share(responses),
        "ess_tokens": effective_share(tokens),
        "log_w_5": low,
        "log_w_95": high,
    }


def effective_share(log_w: Tensor) -> float:
    """Return the effective sample size of weights, (sum w)^2 / sum w^2, as a share of their number.

    1 where all are equal, 1 / N where one outweighs all others.
    """
    w = (log_w - log_w.max()).exp()
    return float(w.sum().square() / w.square().sum() / len(w))
