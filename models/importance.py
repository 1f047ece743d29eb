"""How far a batch is from on-policy: figures of the weights w = pi / b of importance sampling.

Of log-probabilities that a step computes anyway.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loss import LossInputs, Metrics, sequence_sum


class LogWeights(NamedTuple):
    """log w of a micro-batch."""

    tokens: Tensor  # of each sampled token, (their number,)
    responses: Tensor  # the sum of these over each response, (rows,)


def log_weights(x: LossInputs) -> LogWeights:
    """Compute log w of a micro-batch, on the CPU."""
    log_w = (x.logprobs.detach() - x.behavior_logprobs).double().cpu()  # (N, T)
    mask = (x.mask if x.sampled is None else x.sampled).cpu()
    return LogWeights(log_w[mask.bool()], sequence_sum(log_w, mask))


def importance_figures(parts: list[LogWeights]) -> Metrics:
    """Effective sample sizes as shares of the sample, and quantiles of log w of responses.

    parts: the micro-batches of a batch.
    """
    tokens, responses = (torch.cat(each) for each in zip(*parts))
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
