"""Trajectory balance: what TBA minimises.

The best policy for "maximise reward, stay near the reference" is known in closed form (Eq. 2):
pi*(y|x) ∝ pi_ref(y|x) exp(r(y;x)/beta). Trajectory balance (Eq. 3) drives
log Z(x) + log pi(y|x) - log pi_ref(y|x) - r(y;x)/beta to zero, response by response. Nothing in it
asks who sampled y, and that is why a replay buffer and searchers that run behind are allowed.

The objectives that it is compared with are in extras/objectives.py. A new one is one function
`LossInputs -> (loss, metrics)` in a file of your own (--loss FILE), or in its LOSSES.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LossInputs:
    """N responses of at most T tokens, those of one query contiguous.

    Row i belongs to query i // group_size.
    """

    # (N, T) log pi of each response token, at --temperature, under the policy that is trained.
    # Carries the gradient.
    logprobs: Tensor
    # (N, T) the same under the reference policy; divided by gamma tau where a run has these
    # temperatures (learner.py).
    ref_logprobs: Tensor
    # (N, T) of the same tokens under the policy that sampled them, as vLLM reported it.
    behavior_logprobs: Tensor | None
    # (N, T) 1 on the tokens of the response, end-of-sequence included, 0 on padding and on what the
    # policy is not to learn, such as an environment's answer; any dtype. A row may be all zeros.
    mask: Tensor
    rewards: Tensor  # (N,)
    group_size: int  # K, responses per query; divides N
    beta: float  # strength of the pull towards the reference policy; times tau where a run has that
    # For objectives that divide by a constant length. Not T, which depends on the other rows of the
    # micro-batch.
    max_response_length: int = 1
    # (N,) tokens of each row's prompt, for objectives that divide by the length of both. None: 0.
    prompt_lengths: Tensor | None = None
    # (N, T) 1 on tokens that the policy chose, for figures of importance sampling: not on an end
    # that was appended. None: as mask.
    sampled: Tensor | None = None
    # (N,) trainer step minus the version that began to sample the row: 0 for a fresh one. None: 0.
    staleness: Tensor | None = None


Metrics = dict[str, float | Tensor]
Objective = Callable[[LossInputs], tuple[Tensor, Metrics]]


def trajectory_balance(x: LossInputs) -> tuple[Tensor, Metrics]:
    """VarGrad trajectory balance: mean squared residuals, with log Z(x) from the K responses of x.

    Needs no behaviour log-probabilities: its minimum is pi* whoever sampled the responses.
    Returns the loss, a scalar that is averaged over all N rows, and log_z, the mean of log Z(x)
    over queries.
    """
    log_pi = sequence_sum(x.logprobs, x.mask)  # (N,)
    log_ref = sequence_sum(x.ref_logprobs, x.mask)  # (N,)
    target = log_ref + x.rewards / x.beta  # (N,) log of the unnormalised pi*

    # Eq. 4. A mean over each query's own rows: queries have different partition functions.
    # Detached: log Z is an estimate, not a path for the gradient.
    log_z = (target - log_pi).detach().view(-1, x.group_size).mean(dim=1)  # (N / K,)
    residual = log_z.repeat_interleave(x.group_size) + log_pi - target  # (N,), of Eq. 3

    loss = residual.square().mean()  # Eq. 5
    return loss, {"log_z": log_z.mean()}


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens of each response, as log pi(y|x) is one: (N, T) -> (N,).

    Padding is left out by `where`: 0 * inf would be NaN.
    """
    return torch.where(mask.bool(), values, 0.0).sum(dim=1)
