"""Trajectory balance: what TBA minimises.

The best policy for "maximise reward, stay near the reference" is known in closed form: pi*(y|x) ∝ pi_ref(y|x) exp(r(y;x)/beta).
Trajectory balance drives log Z(x) + log pi(y|x) - log pi_ref(y|x) - r(y;x)/beta to zero, response by response. Nothing in it asks
who sampled y, and that is why a replay buffer and searchers that run behind are allowed.

A new objective is one function `LossInputs -> (loss, metrics)` and one entry in LOSSES.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LossInputs:
    """N responses of at most T tokens. The rows of one query are contiguous: row i belongs to query i // group_size."""

    logprobs: Tensor  # (N, T) log pi of each response token under the policy that is trained; carries the gradient
    ref_logprobs: Tensor  # (N, T) the same tokens under the reference policy
    behavior_logprobs: Tensor  # (N, T) the same tokens under the policy that sampled them, as vLLM reported it
    mask: Tensor  # (N, T) 1 on response tokens, end-of-sequence included, 0 on padding; any dtype
    rewards: Tensor  # (N,)
    group_size: int  # K, responses per query; divides N
    beta: float  # strength of the pull towards the reference policy


Metrics = dict[str, float | Tensor]


def trajectory_balance(x: LossInputs) -> tuple[Tensor, Metrics]:
    """VarGrad trajectory balance (Eq. 4 and 5): the mean squared residual, with log Z(x) estimated from the K responses of x.

    Needs no behaviour log-probabilities: its minimum is pi* whoever sampled the responses.
    Returns the loss, a scalar that is averaged over all N rows, and log_z, the mean of log Z(x) over queries.
    """
    log_pi = sequence_sum(x.logprobs, x.mask)  # (N,)
    log_ref = sequence_sum(x.ref_logprobs, x.mask)  # (N,)
    target = log_ref + x.rewards / x.beta  # (N,) log of the unnormalised pi*

    # Eq. 5. A mean over each query's own rows: queries have different partition functions. Detached: log Z is an estimate, not a path.
    log_z = (target - log_pi).detach().view(-1, x.group_size).mean(dim=1)  # (N / K,)
    residual = log_z.repeat_interleave(x.group_size) + log_pi - target  # (N,)

    loss = residual.square().mean()  # Eq. 4
    return loss, {"log_z": log_z.mean()}


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """(N, T) -> (N,): log pi(y|x) is the sum over the tokens of y. Padding is left out by `where`: 0 * inf would be NaN."""
    return torch.where(mask.bool(), values, 0.0).sum(dim=1)


LOSSES: dict[str, Callable[[LossInputs], tuple[Tensor, Metrics]]] = {
    "tb": trajectory_balance,
}
