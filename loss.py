"""Trajectory balance: what TBA minimises; and, below it, the objectives that it is compared with.

The best policy for "maximise reward, stay near the reference" is known in closed form (Eq. 2):
pi*(y|x) ∝ pi_ref(y|x) exp(r(y;x)/beta). Trajectory balance (Eq. 3) drives
log Z(x) + log pi(y|x) - log pi_ref(y|x) - r(y;x)/beta to zero, response by response. Nothing in it
asks who sampled y, and that is why a replay buffer and searchers that run behind are allowed.

A new objective is one function `LossInputs -> (loss, metrics)` and one entry in LOSSES.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
    # (N, T) 1 on response tokens, end-of-sequence included, 0 on padding; any dtype.
    mask: Tensor
    rewards: Tensor  # (N,)
    group_size: int  # K, responses per query; divides N
    beta: float  # strength of the pull towards the reference policy; times tau where a run has that
    # For objectives that divide by a constant length. Not T, which depends on the other rows of the
    # micro-batch.
    max_response_length: int = 1
    # (N,) tokens of each row's prompt, for objectives that divide by the length of both. None: 0.
    prompt_lengths: Tensor | None = None


Metrics = dict[str, float | Tensor]


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


# The objectives beside TBA. In their formulas l, b, f are the log-probability of a response (a sum
# over its tokens) under policy, behaviour policy, reference policy. All are means over the N rows,
# or over the N / K queries where a query gives one term.


def tba_prime(x: LossInputs) -> tuple[Tensor, Metrics]:
    """TBA' (section 6, Eq. 7): -A l / max_response_length, A = (r - mean r) - beta (KL - mean KL).

    KL = sum_t clamp(log pi - log pi_ref, -10, 10). A is detached, and its KL is the current
    policy's whoever sampled. But for the clamp this is the gradient of trajectory balance times a
    constant. Needs no behaviour log-probabilities.
    """
    weighted = _tba_prime_advantage(x) * sequence_sum(x.logprobs, x.mask)  # (N,)
    return -weighted.mean() / x.max_response_length, {}


def tba_prime_ratio(x: LossInputs) -> tuple[Tensor, Metrics]:
    """TBA' with importance sampling: tokens are weighted with clamp(pi / pi_behaviour, 0, 8).

    That is, in the sum l of tba_prime, and detached. Needs behaviour log-probabilities. Off-policy
    rows count by how likely the policy is to sample them now.
    """
    ratio = _token_ratio(x).detach().clamp(0.0, 8.0)  # (N, T)
    weighted = _tba_prime_advantage(x) * sequence_sum(ratio * x.logprobs, x.mask)  # (N,)
    return -weighted.mean() / x.max_response_length, {}


def tba_prime_released(x: LossInputs) -> tuple[Tensor, Metrics]:
    """TBA' as its authors released it: -sum_t clamp(rho_t, 0, 8) A / (P + T), rho = pi / pi_b.

    Unlike Eq. 7, each row is divided by its own length, prompt P and response T; the
    clamped ratio carries the gradient; and A = (r - mean r) - beta (KL - mean KL_b), detached, is
    centred with the KL of the behaviour policy, both KLs clamped as in tba_prime. Needs behaviour
    log-probabilities (recomputed by the trainer there, vLLM's here). On stale rows the gradient of
    a token fades as its ratio nears 0, and is 0 where the ratio is over 8.
    """
    kl = sequence_sum((x.logprobs - x.ref_logprobs).detach().clamp(-10.0, 10.0), x.mask)
    behavior_kl = sequence_sum((_behavior(x) - x.ref_logprobs).clamp(-10.0, 10.0), x.mask)
    mean_kl = behavior_kl.view(-1, x.group_size).mean(dim=1).repeat_interleave(x.group_size)
    advantage = _centred(x.rewards, x.group_size) - x.beta * (kl - mean_kl)
    return _bounded_ratio_loss(x, advantage), {}


def _tba_prime_advantage(x: LossInputs) -> Tensor:
    """A of Eq. 7, detached; (N,)."""
    kl = sequence_sum((x.logprobs - x.ref_logprobs).detach().clamp(-10.0, 10.0), x.mask)
    return _centred(x.rewards - x.beta * kl, x.group_size)


def reinforce(x: LossInputs) -> tuple[Tensor, Metrics]:
    """REINFORCE (Williams 1992) without a baseline: -R l, R = r - beta (b - f).

    R is the KL-regularised reward of the policy that sampled. Needs behaviour log-probabilities.
    Takes rows for on-policy ones: on stale data its fixed point is not pi*.
    """
    return -(_regularised_reward(x) * sequence_sum(x.logprobs, x.mask)).mean(), {}


def rloo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """REINFORCE leave-one-out (arXiv 2402.14740): -A l, A_i = R_i - mean_{j != i} R_j.

    R and stale rows as in reinforce. Needs behaviour log-probabilities.
    """
    return -(_leave_one_out(x) * sequence_sum(x.logprobs, x.mask)).mean(), {}


def proximal_rloo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """RLOO with PPO's clip (arXiv 1707.06347): max(-A rho, -A clip(rho, 0.8, 1.2)), A as in rloo.

    rho = exp(l - b), the ratio of whole responses (Eq. 6). Needs behaviour log-probabilities. A row
    that the policy has moved more than 20 % from, in the direction of A, has no gradient any more.
    """
    log_ratio = sequence_sum(x.logprobs, x.mask) - sequence_sum(_behavior(x), x.mask)  # (N,)
    return _clipped(_ratio(log_ratio), _leave_one_out(x)).mean(), {}


def grpo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """GRPO (arXiv 2402.03300): A = (r - mean r) / (std r + 1e-4), the clipped ratio token by token.

    The std is that with K - 1. + 0.04 k3 against the reference,
    k3 = exp(log pi_ref - log pi) - (log pi_ref - log pi) - 1, estimated as if rows were on-policy.
    Mean over the tokens of a row, then over rows. beta is not used. Needs behaviour
    log-probabilities. Clips like proximal_rloo, but each token by itself.
    """
    std = x.rewards.view(-1, x.group_size).std(dim=1).repeat_interleave(x.group_size)
    advantage = _centred(x.rewards, x.group_size) / (std + 1e-4)
    log_ratio = torch.where(x.mask.bool(), x.ref_logprobs - x.logprobs, 0.0)
    k3 = log_ratio.exp() - log_ratio - 1  # (N, T)
    per_token = _clipped(_token_ratio(x), advantage[:, None]) + 0.04 * k3
    return (sequence_sum(per_token, x.mask) / x.mask.bool().sum(dim=1)).mean(), {}


def dr_grpo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Dr. GRPO (arXiv 2503.20783): GRPO with A = r - mean r, no KL, and a constant length.

    Each row's sum over tokens is divided by max_response_length. beta is not used. Needs behaviour
    log-probabilities. Clips stale tokens as grpo does.
    """
    per_token = _clipped(_token_ratio(x), _centred(x.rewards, x.group_size)[:, None])
    return sequence_sum(per_token, x.mask).mean() / x.max_response_length, {}


def dr_grpo_ratio(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Dr. GRPO as TBA's authors released it, the baseline of Figure 6; no PPO clip.

    -sum_t clamp(rho_t, 0, 8) A / (P + T), A = r - mean r, rho and lengths as in tba_prime_released.
    beta is not used. Needs behaviour log-probabilities. Treats stale rows as that does.
    """
    return _bounded_ratio_loss(x, _centred(x.rewards, x.group_size)), {}


def online_dpo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Online DPO (arXiv 2402.04792) on the best and the worst of K.

    -log sigmoid(0.1 ((l_w - l_l) - (f_w - f_l))), a mean over queries. Needs no behaviour
    log-probabilities: a preference holds whoever sampled. Ties go to the lowest index; a group of
    equal rewards adds 0.
    """
    best, worst, differ = _best_and_worst(x)
    margin = sequence_sum(x.logprobs, x.mask) - sequence_sum(x.ref_logprobs, x.mask)  # (N,)
    loss = -F.logsigmoid(0.1 * (margin[best] - margin[worst]))  # (N / K,)
    return torch.where(differ, loss, 0.0).mean(), {"pairs": differ.to(loss.dtype).mean()}


def raft(x: LossInputs) -> tuple[Tensor, Metrics]:
    """RAFT (arXiv 2304.06767): -l of the best of K, not normalised by length; a mean over queries.

    Needs no behaviour log-probabilities: it imitates, whoever sampled. Ties go to the lowest index;
    a group of equal rewards adds 0. beta is not used.
    """
    best, _, differ = _best_and_worst(x)
    loss = -sequence_sum(x.logprobs, x.mask)[best]  # (N / K,)
    return torch.where(differ, loss, 0.0).mean(), {}


LOSSES: dict[str, Callable[[LossInputs], tuple[Tensor, Metrics]]] = {
    "tb": trajectory_balance,
    "tba_prime": tba_prime,
    "tba_prime_ratio": tba_prime_ratio,
    "tba_prime_released": tba_prime_released,
    "reinforce": reinforce,
    "rloo": rloo,
    "proximal_rloo": proximal_rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dr_grpo_ratio": dr_grpo_ratio,
    "online_dpo": online_dpo,
    "raft": raft,
}

CLIP = 0.2  # PPO's epsilon


def _clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    """PPO's surrogate, to be minimised."""
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))


def _bounded_ratio_loss(x: LossInputs, advantage: Tensor) -> Tensor:
    """Mean of -sum_t clamp(rho_t, 0, 8) A / (P + T): the released code's policy gradient."""
    prompts = 0 if x.prompt_lengths is None else x.prompt_lengths
    lengths = prompts + x.mask.bool().sum(dim=1)  # (N,)
    return -(sequence_sum(_token_ratio(x).clamp(0.0, 8.0), x.mask) * advantage / lengths).mean()


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
    """R_i minus the mean of the other K - 1: the deviation from the mean of all K, scaled; (N,)."""
    return _centred(_regularised_reward(x), x.group_size) * x.group_size / (x.group_size - 1)


def _token_ratio(x: LossInputs) -> Tensor:
    """pi / pi_behaviour of each token, (N, T); 1 on padding."""
    return _ratio(torch.where(x.mask.bool(), x.logprobs - _behavior(x), 0.0))


def _ratio(log_ratio: Tensor) -> Tensor:
    """exp, bounded far beyond every clip.

    An infinite ratio has a NaN gradient, and the responses of a long run drift far enough for one.
    """
    return log_ratio.clamp(max=20.0).exp()


def _best_and_worst(x: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """For each query the row of its best response, of its worst, and whether their rewards differ.

    Each (N / K,).
    """
    grouped = x.rewards.view(-1, x.group_size)
    best, worst = grouped.argmax(dim=1), grouped.argmin(dim=1)
    first = torch.arange(len(grouped), device=grouped.device) * x.group_size
    return first + best, first + worst, grouped.amax(dim=1) > grouped.amin(dim=1)


def _behavior(x: LossInputs) -> Tensor:
    if x.behavior_logprobs is None:
        raise ValueError(
            "this objective needs behavior_logprobs, the log-probabilities under the policy that "
            "sampled, and they are None"
        )
    return x.behavior_logprobs
