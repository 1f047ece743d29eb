"""Trajectory balance: what TBA minimises; and, below it, the objectives that it is compared with.

The best policy for "maximise reward, stay near the reference" is known in closed form: pi*(y|x) ∝ pi_ref(y|x) exp(r(y;x)/beta).
Trajectory balance drives log Z(x) + log pi(y|x) - log pi_ref(y|x) - r(y;x)/beta to zero, response by response. Nothing in it asks
who sampled y, and that is why a replay buffer and searchers that run behind are allowed.

A new objective is one function `LossInputs -> (loss, metrics)` and one entry in LOSSES.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class LossInputs:
    """N responses of at most T tokens. The rows of one query are contiguous: row i belongs to query i // group_size."""

    logprobs: Tensor  # (N, T) log pi of each response token, at --temperature, under the policy that is trained; carries the gradient
    ref_logprobs: Tensor  # (N, T) the same under the reference policy; divided by gamma tau where a run has these temperatures (learner.py)
    behavior_logprobs: (
        Tensor | None
    )  # (N, T) of the same tokens under the policy that sampled them, as vLLM reported it
    mask: Tensor  # (N, T) 1 on response tokens, end-of-sequence included, 0 on padding; any dtype
    rewards: Tensor  # (N,)
    group_size: int  # K, responses per query; divides N
    beta: float  # strength of the pull towards the reference policy; times tau where a run has that
    max_response_length: int = 1  # for objectives that divide by a constant length: not T, which depends on the other rows of the micro-batch


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


# The objectives beside TBA. In their formulas l, b, f are the log-probability of a response (a sum over its tokens) under policy,
# behaviour policy, reference policy. All are means over the N rows, or over the N / K queries where a query gives one term.


def tba_prime(x: LossInputs) -> tuple[Tensor, Metrics]:
    """TBA' (Eq. 7): -A l / max_response_length, A = (r - mean r) - beta (KL - mean KL), KL = sum_t clamp(log pi - log pi_ref, -10, 10).

    A is detached, and its KL is the current policy's whoever sampled. But for the clamp this is the gradient of trajectory balance times a constant.
    Needs no behaviour log-probabilities.
    """
    return -(
        _tba_prime_advantage(x) * sequence_sum(x.logprobs, x.mask)
    ).mean() / x.max_response_length, {}


def tba_prime_ratio(x: LossInputs) -> tuple[Tensor, Metrics]:
    """TBA' with importance sampling: in the sum l of tba_prime each token is weighted with clamp(pi / pi_behaviour, 0, 8), detached.

    Needs behaviour log-probabilities. Off-policy rows count by how likely the policy is to sample them now.
    """
    ratio = _token_ratio(x).detach().clamp(0.0, 8.0)  # (N, T)
    weighted = sequence_sum(ratio * x.logprobs, x.mask)
    return -(_tba_prime_advantage(x) * weighted).mean() / x.max_response_length, {}


def _tba_prime_advantage(x: LossInputs) -> Tensor:
    kl = sequence_sum((x.logprobs - x.ref_logprobs).detach().clamp(-10.0, 10.0), x.mask)
    return _centred(x.rewards - x.beta * kl, x.group_size)


def reinforce(x: LossInputs) -> tuple[Tensor, Metrics]:
    """REINFORCE (Williams 1992) without a baseline: -R l with R = r - beta (b - f), the KL-regularised reward of the policy that sampled.

    Needs behaviour log-probabilities. Takes rows for on-policy ones: on stale data its fixed point is not pi*.
    """
    return -(_regularised_reward(x) * sequence_sum(x.logprobs, x.mask)).mean(), {}


def rloo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """REINFORCE leave-one-out (arXiv 2402.14740): -A l with A_i = R_i - mean_{j != i} R_j, R as in reinforce. Stale rows as in reinforce.

    Needs behaviour log-probabilities.
    """
    return -(_leave_one_out(x) * sequence_sum(x.logprobs, x.mask)).mean(), {}


def proximal_rloo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """RLOO with PPO's (arXiv 1707.06347) clipped ratio of whole responses: max(-A rho, -A clip(rho, 0.8, 1.2)), rho = exp(l - b), A as in rloo.

    Needs behaviour log-probabilities. A row that the policy has moved more than 20 % from, in the direction of A, has no gradient any more.
    """
    ratio = _ratio(sequence_sum(x.logprobs, x.mask) - sequence_sum(_behavior(x), x.mask))  # (N,)
    return _clipped(ratio, _leave_one_out(x)).mean(), {}


def grpo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """GRPO (arXiv 2402.03300): A = (r - mean r) / (std r + 1e-4), the std with K - 1; the clipped ratio token by token; + 0.04 k3 against the
    reference, k3 = exp(log pi_ref - log pi) - (log pi_ref - log pi) - 1. Mean over the tokens of a row, then over rows. beta is not used.

    Needs behaviour log-probabilities. Clips like proximal_rloo, but each token by itself; k3 is estimated as if rows were on-policy.
    """
    std = x.rewards.view(-1, x.group_size).std(dim=1).repeat_interleave(x.group_size)
    advantage = _centred(x.rewards, x.group_size) / (std + 1e-4)
    log_ratio = torch.where(x.mask.bool(), x.ref_logprobs - x.logprobs, 0.0)
    k3 = log_ratio.exp() - log_ratio - 1  # (N, T)
    per_token = _clipped(_token_ratio(x), advantage[:, None]) + 0.04 * k3
    return (sequence_sum(per_token, x.mask) / x.mask.bool().sum(dim=1)).mean(), {}


def dr_grpo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Dr. GRPO (arXiv 2503.20783): GRPO with A = r - mean r, no KL, and each row's sum over tokens divided by the constant max_response_length.

    Needs behaviour log-probabilities. Clips stale tokens as grpo does. beta is not used.
    """
    per_token = _clipped(_token_ratio(x), _centred(x.rewards, x.group_size)[:, None])
    return sequence_sum(per_token, x.mask).mean() / x.max_response_length, {}


def online_dpo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Online DPO (arXiv 2402.04792) on the best and the worst of K: -log sigmoid(0.1 ((l_w - l_l) - (f_w - f_l))), a mean over queries.

    Needs no behaviour log-probabilities: a preference holds whoever sampled. Ties go to the lowest index; a group of equal rewards adds 0.
    """
    best, worst, differ = _best_and_worst(x)
    margin = sequence_sum(x.logprobs, x.mask) - sequence_sum(x.ref_logprobs, x.mask)  # (N,)
    loss = -F.logsigmoid(0.1 * (margin[best] - margin[worst]))  # (N / K,)
    return torch.where(differ, loss, 0.0).mean(), {"pairs": differ.to(loss.dtype).mean()}


def raft(x: LossInputs) -> tuple[Tensor, Metrics]:
    """RAFT (arXiv 2304.06767): -l of the best of K, a sum over its tokens, not normalised by length; a mean over queries.

    Needs no behaviour log-probabilities: it imitates, whoever sampled. Ties go to the lowest index; a group of equal rewards adds 0.
    beta is not used.
    """
    best, _, differ = _best_and_worst(x)
    loss = -sequence_sum(x.logprobs, x.mask)[best]  # (N / K,)
    return torch.where(differ, loss, 0.0).mean(), {}


LOSSES: dict[str, Callable[[LossInputs], tuple[Tensor, Metrics]]] = {
    "tb": trajectory_balance,
    "tba_prime": tba_prime,
    "tba_prime_ratio": tba_prime_ratio,
    "reinforce": reinforce,
    "rloo": rloo,
    "proximal_rloo": proximal_rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "online_dpo": online_dpo,
    "raft": raft,
}

CLIP = 0.2  # PPO's epsilon


def _clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    """PPO's surrogate, to be minimised."""
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))


def _centred(values: Tensor, group_size: int) -> Tensor:
    """(N,) minus the mean of each query's own rows."""
    grouped = values.view(-1, group_size)
    return (grouped - grouped.mean(dim=1, keepdim=True)).flatten()


def _regularised_reward(x: LossInputs) -> Tensor:
    """R = r - beta (b - f), (N,)."""
    return x.rewards - x.beta * (
        sequence_sum(_behavior(x), x.mask) - sequence_sum(x.ref_logprobs, x.mask)
    )


def _leave_one_out(x: LossInputs) -> Tensor:
    """R_i minus the mean of the other K - 1, (N,): the deviation from the mean of all K, stretched."""
    return _centred(_regularised_reward(x), x.group_size) * x.group_size / (x.group_size - 1)


def _token_ratio(x: LossInputs) -> Tensor:
    """pi / pi_behaviour of each token, (N, T); 1 on padding."""
    return _ratio(torch.where(x.mask.bool(), x.logprobs - _behavior(x), 0.0))


def _ratio(log_ratio: Tensor) -> Tensor:
    """exp, bounded far beyond every clip: an infinite ratio has a NaN gradient, and the responses of a long run drift far enough for one."""
    return log_ratio.clamp(max=20.0).exp()


def _best_and_worst(x: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Row of each query's best response, row of its worst, and whether they differ in reward: each (N / K,)."""
    grouped = x.rewards.view(-1, x.group_size)
    best, worst = grouped.argmax(dim=1), grouped.argmin(dim=1)
    first = torch.arange(len(grouped), device=grouped.device) * x.group_size
    return first + best, first + worst, grouped.amax(dim=1) > grouped.amin(dim=1)


def _behavior(x: LossInputs) -> Tensor:
    if x.behavior_logprobs is None:
        raise ValueError(
            "this objective needs behavior_logprobs, the log-probabilities under the policy that sampled, and they are None"
        )
    return x.behavior_logprobs
