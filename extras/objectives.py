"""The objectives that trajectory balance is compared with, and the registry of all: LOSSES.

In their formulas l, b, f are the log-probability of a response (a sum over its tokens) under
policy, behaviour policy, reference policy; r is its reward; rho_t = pi / b of a token. mean is over
the K responses of a query. All are means over the N rows, or over the N / K queries where a query
gives one term: so the gradient does not depend on the micro-batch. Where b or rho is in a formula,
behaviour log-probabilities are needed: ValueError. Where beta is in none, it is not used.

Several papers are one regression with two switches. With D = l - anchor, residual D - r / beta - V,
V detached, the loss is the mean of squared residuals:

    V                          anchor f                   anchor b
    mean(D - r / beta)         tb; GVPO (2504.19599)      tb_behavior
    -mean r / beta                                        kimi_k2; Kimi k1.5's gradient; DRO
    -log mean exp(r / beta)                               oapl; Kimi k1.5 (2501.12599) as written

GVPO's loss is beta^2 / 2 times that of tb. tba_prime is tb's gradient, but for a clamp.
"""

import math
from dataclasses import replace
from inspect import isfunction

import torch
import torch.nn.functional as F
from torch import Tensor

from loss import LossInputs, Metrics, Objective, sequence_sum, trajectory_balance


def tb_anchored(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Trajectory balance, centred as in tba_prime_released: log Z(x) = mean(f + r / beta - b).

    In tb that mean has l in place of b: where the l of all K rows fall together, log Z rises with
    them, no residual changes, and nothing holds the probability that they lose. Here they are
    pulled back. Equal to tb where b = l, and only there: on stale rows pi* is not its minimum. b is
    the very policy's (EXACT_SAMPLING), and counts as l for a token that was not sampled.
    """
    log_pi = sequence_sum(x.logprobs, x.mask)  # (N,)
    log_b = sequence_sum(_sampler(x), x.mask)  # (N,)
    target = sequence_sum(x.ref_logprobs, x.mask) + x.rewards / x.beta  # (N,)
    log_z = (target - log_b).view(-1, x.group_size).mean(dim=1)  # (N / K,)
    residual = log_z.repeat_interleave(x.group_size) + log_pi - target  # (N,)
    return residual.square().mean(), {"log_z": log_z.mean()}


def tba_prime(x: LossInputs) -> tuple[Tensor, Metrics]:
    """TBA' (section 6, Eq. 7): -A l / max_response_length, A = (r - mean r) - beta (KL - mean KL).

    KL = sum_t clamp(log pi - log pi_ref, -10, 10). A is detached, and its KL is the current
    policy's whoever sampled. But for the clamp the gradient is that of tb, times a constant.
    """
    weighted = _tba_prime_advantage(x) * sequence_sum(x.logprobs, x.mask)  # (N,)
    return -weighted.mean() / x.max_response_length, {}


def tba_prime_ratio(x: LossInputs) -> tuple[Tensor, Metrics]:
    """TBA' with importance sampling: tokens are weighted with clamp(pi / pi_behaviour, 0, 8).

    That is, in the sum l of tba_prime, and detached. Off-policy rows count by how likely the policy
    is to sample them now.
    """
    ratio = _token_ratio(x).detach().clamp(0.0, 8.0)  # (N, T)
    weighted = _tba_prime_advantage(x) * sequence_sum(ratio * x.logprobs, x.mask)  # (N,)
    return -weighted.mean() / x.max_response_length, {}


def tba_prime_released(x: LossInputs) -> tuple[Tensor, Metrics]:
    """TBA' as its authors released it: -sum_t clamp(rho_t, 0, 8) A / (P + T), rho = pi / pi_b.

    Unlike Eq. 7, each row is divided by its own length, prompt P and response T; the clamped ratio
    carries the gradient; and A = (r - mean r) - beta (KL - mean KL_b), detached, is centred with
    the KL of the behaviour policy, both KLs clamped as in tba_prime. b is vLLM's here; there the
    trainer recomputes it. On stale rows the gradient of a token fades as its ratio nears 0, and is
    0 where the ratio is over 8. That centre kept stale runs from collapse: with the mean of the
    current policy's KL, as in Eq. 7 and tb, the authors saw 0.122 at the end in place of 0.836, 10
    steps stale (docs/experiments.md).
    """
    kl = sequence_sum((x.logprobs - x.ref_logprobs).detach().clamp(-10.0, 10.0), x.mask)
    behavior_kl = sequence_sum((_behavior(x) - x.ref_logprobs).clamp(-10.0, 10.0), x.mask)
    mean_kl = behavior_kl.view(-1, x.group_size).mean(dim=1).repeat_interleave(x.group_size)
    advantage = _centred(x.rewards, x.group_size) - x.beta * (kl - mean_kl)
    return _bounded_ratio_loss(x, advantage), {}


def tba_ema(x: LossInputs) -> tuple[Tensor, Metrics]:
    """TBA' towards a moving average of the policy, which is not kept: the authors' surrogate.

    -sum_t clamp(rho_t, 0, 8) A / (P + T), A = (r - mean r) - beta c sum_t clamp(log rho_t, -10,
    10), A detached, its KL not centred. log pi - log E of the average E, which takes 0.1 of the
    policy each step, is about c (log pi - log b), c = 9 / D, D the staleness, at least 4 (a floor
    that the authors suggest and did not try). rho of a token that was not sampled is 1. On stale
    rows it pulls towards b, the less the older they are. b is the very policy's (EXACT_SAMPLING).
    """
    sampler = _sampler(x)
    staleness = torch.zeros_like(x.rewards) if x.staleness is None else x.staleness
    log_ratio = (x.logprobs.detach() - sampler).clamp(-10.0, 10.0)  # (N, T)
    c = 9 / staleness.clamp(min=4).to(x.rewards)  # (N,)
    distance = c * sequence_sum(log_ratio, x.mask)  # (N,)
    advantage = _centred(x.rewards, x.group_size) - x.beta * distance
    return _bounded_ratio_loss(replace(x, behavior_logprobs=sampler), advantage), {}


def _tba_prime_advantage(x: LossInputs) -> Tensor:
    """A of Eq. 7, detached; (N,)."""
    kl = sequence_sum((x.logprobs - x.ref_logprobs).detach().clamp(-10.0, 10.0), x.mask)
    return _centred(x.rewards - x.beta * kl, x.group_size)


def tb_behavior(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Trajectory balance against the behaviour policy: D - r / beta - V, V = mean(D - r / beta).

    D = l - b. Its minimum is b exp(r / beta) / Z, whoever b is: on-policy a step of policy
    improvement, off-policy one from stale data.
    """
    residual = _log_ratio(x) - x.rewards / x.beta  # less its mean, through which no gradient comes
    return _centred(residual, x.group_size).square().mean(), {}


def kimi_k2(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Kimi K2's objective (arXiv 2507.20534), "PMD-mean": D - r / beta - V, V = -mean r / beta.

    D = l - b, so it is (r - mean r - beta D)^2 / beta^2. On fresh rows it is tb_behavior; on stale
    ones mean D, which that leaves out, stays in the residual and pulls the whole group back to b.
    """
    return (_log_ratio(x) - _centred(x.rewards, x.group_size) / x.beta).square().mean(), {}


def oapl(x: LossInputs) -> tuple[Tensor, Metrics]:
    """OAPL (arXiv 2602.19362, beta_1 = beta_2): D - r / beta - V, V = -log mean exp(r / beta).

    D = l - b, stale rows welcome. As K grows V is the true -log Z, the minimum b exp(r / beta) / Z.
    """
    target = (x.rewards / x.beta).view(-1, x.group_size)
    log_z = target.logsumexp(dim=1) - math.log(x.group_size)  # (N / K,)
    residual = _log_ratio(x) - x.rewards / x.beta + log_z.repeat_interleave(x.group_size)
    return residual.square().mean(), {}


def reinforce(x: LossInputs) -> tuple[Tensor, Metrics]:
    """REINFORCE (Williams 1992) without a baseline: -R l, R = r - beta (b - f).

    R is the KL-regularised reward of the policy that sampled. Takes rows for on-policy ones: on
    stale data its fixed point is not pi*.
    """
    return -(_regularised_reward(x) * sequence_sum(x.logprobs, x.mask)).mean(), {}


def rloo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """REINFORCE leave-one-out (arXiv 2402.14740): -A l, A_i = R_i - mean_{j != i} R_j.

    R and stale rows as in reinforce.
    """
    return -(_leave_one_out(x) * sequence_sum(x.logprobs, x.mask)).mean(), {}


def proximal_rloo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """RLOO with PPO's clip (arXiv 1707.06347): max(-A rho, -A clip(rho, 0.8, 1.2)), A as in rloo.

    rho = exp(l - b), the ratio of whole responses (Eq. 6). A row that the policy has moved more
    than 20 % from, in the direction of A, has no gradient any more.
    """
    return _clipped(_ratio(_log_ratio(x)), _leave_one_out(x)).mean(), {}


def grpo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """GRPO (arXiv 2402.03300): A = (r - mean r) / (std r + 1e-4), the clipped ratio token by token.

    The std is that with K - 1. + 0.04 k3 against the reference, k3 = exp(log pi_ref - log pi) -
    (log pi_ref - log pi) - 1, estimated as if rows were on-policy. Mean over the tokens of a row,
    then over rows. Clips like proximal_rloo, but each token by itself.
    """
    log_ratio = torch.where(x.mask.bool(), x.ref_logprobs - x.logprobs, 0.0)
    k3 = log_ratio.exp() - log_ratio - 1  # (N, T)
    per_token = _clipped(_token_ratio(x), _standardised(x)[:, None]) + 0.04 * k3
    return (sequence_sum(per_token, x.mask) / _lengths(x)).mean(), {}


def dr_grpo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Dr. GRPO (arXiv 2503.20783): GRPO with A = r - mean r, no KL, and a constant length.

    Each row's sum over tokens is divided by max_response_length. Clips stale tokens as grpo does.
    """
    per_token = _clipped(_token_ratio(x), _centred(x.rewards, x.group_size)[:, None])
    return sequence_sum(per_token, x.mask).mean() / x.max_response_length, {}


def dr_grpo_ratio(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Dr. GRPO as TBA's authors released it, the baseline of Figure 6; no PPO clip.

    -sum_t clamp(rho_t, 0, 8) A / (P + T), A = r - mean r, rho and lengths as in tba_prime_released.
    Treats stale rows as that does.
    """
    return _bounded_ratio_loss(x, _centred(x.rewards, x.group_size)), {}


def online_dpo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Online DPO (arXiv 2402.04792) on the best and the worst of K.

    -log sigmoid(0.1 ((l_w - l_l) - (f_w - f_l))), a mean over queries. A preference holds whoever
    sampled. Ties go to the lowest index; a group of equal rewards adds 0.
    """
    best, worst, differ = _best_and_worst(x)
    margin = sequence_sum(x.logprobs, x.mask) - sequence_sum(x.ref_logprobs, x.mask)  # (N,)
    loss = -F.logsigmoid(0.1 * (margin[best] - margin[worst]))  # (N / K,)
    return torch.where(differ, loss, 0.0).mean(), {"pairs": differ.to(loss.dtype).mean()}


def raft(x: LossInputs) -> tuple[Tensor, Metrics]:
    """RAFT (arXiv 2304.06767): -l of the best of K, not normalised by length; a mean over queries.

    It imitates, whoever sampled. Ties go to the lowest index; a group of equal rewards adds 0.
    """
    best, _, differ = _best_and_worst(x)
    loss = -sequence_sum(x.logprobs, x.mask)[best]  # (N / K,)
    return torch.where(differ, loss, 0.0).mean(), {}


def opmd(x: LossInputs) -> tuple[Tensor, Metrics]:
    """OPMD as Trinity-RFT has it (arXiv 2509.24203): -A l / (1 + beta), A = r - mean r.

    Stale rows are taken as they are.
    """
    weighted = _centred(x.rewards, x.group_size) * sequence_sum(x.logprobs, x.mask)
    return -weighted.mean() / (1 + x.beta), {}


def asymre(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Asymmetric REINFORCE (arXiv 2506.20520): -(r - (mean r - 0.1)) l.

    The lowered baseline weighs successes more than failures, which is safe on stale rows.
    """
    advantage = _centred(x.rewards, x.group_size) + 0.1
    return -(advantage * sequence_sum(x.logprobs, x.mask)).mean(), {}


def topr(x: LossInputs) -> tuple[Tensor, Metrics]:
    """TOPR (arXiv 2503.14286): -A l where A > 0, else -min(pi / b, 1) A l, A = r - mean r.

    The ratio is that of whole responses, detached: what the policy has left is pushed no further.
    """
    advantage = _centred(x.rewards, x.group_size)
    truncated = _log_ratio(x).detach().clamp(max=0.0).exp()
    weight = torch.where(advantage > 0, 1.0, truncated)
    return -(weight * advantage * sequence_sum(x.logprobs, x.mask)).mean(), {}


def gspo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """GSPO (arXiv 2507.18071): PPO's clip, 3e-4 below and 4e-4 above, on s = exp(mean_t log rho_t).

    A is grpo's, without its KL. Stale rows are clipped whole.
    """
    log_s = _log_ratio(x) / _lengths(x)  # (N,)
    return _clipped(_ratio(log_s), _standardised(x), 3e-4, 4e-4).mean(), {}


def cispo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """CISPO (arXiv 2506.13585): -sum_t min(rho_t, 1.2) A log pi_t, A = r - mean r, rho detached.

    The paper divides A by the group's standard deviation, and has a mean over the group's tokens,
    not its rows. No stale token loses its gradient, as PPO's clip would have it.
    """
    return _weighted_tokens(x, _token_ratio(x).clamp(max=1 + CLIP)), {}


def tis(x: LossInputs) -> tuple[Tensor, Metrics]:
    """Truncated importance sampling: -sum_t min(rho_t, 2) A log pi_t, A = r - mean r.

    rho is detached. For stale rows, and where vLLM and transformers differ.
    """
    return _weighted_tokens(x, _token_ratio(x).clamp(max=2.0)), {}


def icepop(x: LossInputs) -> tuple[Tensor, Metrics]:
    """IcePop: as tis without its bound, but 0 for tokens whose rho is outside 0.5 to 5.

    Tokens that are too stale are left out.
    """
    ratio = _token_ratio(x)
    return _weighted_tokens(x, torch.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0)), {}


def dppo(x: LossInputs) -> tuple[Tensor, Metrics]:
    """DPPO (arXiv 2602.04879, binary TV), prime-rl's form: sum_t (1e-3 log^2 rho_t - m_t rho_t A).

    A = r - mean r; rho carries the gradient. m_t is 0 where pi_t - b_t is over 0.2 and A > 0, or
    under -0.2 and A < 0. prime-rl averages over the batch's tokens. What masks a stale token is how
    far its probability has moved, not by what ratio.
    """
    advantage = _centred(x.rewards, x.group_size)[:, None]
    log_ratio = torch.where(x.mask.bool(), x.logprobs - _behavior(x), 0.0)  # (N, T)
    moved = (x.logprobs.detach().exp() - _behavior(x).exp()) * advantage.sign()
    gain = torch.where(moved <= 0.2, _ratio(log_ratio) * advantage, 0.0)
    return sequence_sum(1e-3 * log_ratio.square() - gain, x.mask).mean(), {}


# These read no reference log-probabilities: no searcher loads a reference policy for them.
WITHOUT_REFERENCE = frozenset(
    ("tb_behavior", "kimi_k2", "oapl", "dr_grpo", "dr_grpo_ratio", "raft", "opmd", "asymre")
    + ("topr", "gspo", "cispo", "tis", "icepop", "dppo", "tba_ema")
)
# In these a difference between policy and sampler is a push on all rows of a query: the task may
# not sample with another temperature, top-p, top-k or the like.
EXACT_SAMPLING = frozenset(("tb_anchored", "tba_ema"))

CLIP = 0.2  # PPO's epsilon


def _clipped(ratio: Tensor, advantage: Tensor, below: float = CLIP, above: float = CLIP) -> Tensor:
    """PPO's surrogate, to be minimised."""
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - below, 1 + above))


def _weighted_tokens(x: LossInputs, weights: Tensor) -> Tensor:
    """Mean of -sum_t w_t A log pi_t, A = r - mean r; weights, (N, T), are detached."""
    weighted = sequence_sum(weights.detach() * x.logprobs, x.mask)
    return -(_centred(x.rewards, x.group_size) * weighted).mean()


def _bounded_ratio_loss(x: LossInputs, advantage: Tensor) -> Tensor:
    """Mean of -sum_t clamp(rho_t, 0, 8) A / (P + T): the released code's policy gradient."""
    prompts = 0 if x.prompt_lengths is None else x.prompt_lengths
    ratios = sequence_sum(_token_ratio(x).clamp(0.0, 8.0), x.mask)  # (N,)
    return -(ratios * advantage / (prompts + _lengths(x))).mean()


def _lengths(x: LossInputs) -> Tensor:
    """(N,) tokens of each row in the loss; 1 where a row has none, whose sums are 0."""
    return x.mask.bool().sum(dim=1).clamp(min=1)


def _centred(values: Tensor, group_size: int) -> Tensor:
    """(N,) minus the mean of each query's own rows."""
    grouped = values.view(-1, group_size)
    return (grouped - grouped.mean(dim=1, keepdim=True)).flatten()


def _standardised(x: LossInputs) -> Tensor:
    """A of GRPO: (r - mean r) / (std r + 1e-4), the std with K - 1; (N,)."""
    std = x.rewards.view(-1, x.group_size).std(dim=1).repeat_interleave(x.group_size)
    return _centred(x.rewards, x.group_size) / (std + 1e-4)


def _regularised_reward(x: LossInputs) -> Tensor:
    """R = r - beta (b - f), (N,)."""
    kl = sequence_sum(_behavior(x), x.mask) - sequence_sum(x.ref_logprobs, x.mask)
    return x.rewards - x.beta * kl


def _leave_one_out(x: LossInputs) -> Tensor:
    """R_i minus the mean of the other K - 1: the deviation from the mean of all K, scaled; (N,)."""
    return _centred(_regularised_reward(x), x.group_size) * x.group_size / (x.group_size - 1)


def _log_ratio(x: LossInputs) -> Tensor:
    """l - b of each response, (N,)."""
    return sequence_sum(x.logprobs, x.mask) - sequence_sum(_behavior(x), x.mask)


def _sampler(x: LossInputs) -> Tensor:
    """Return log b of each token, (N, T); of one that was not sampled log pi, detached."""
    sampled = x.mask if x.sampled is None else x.sampled
    return torch.where(sampled.bool(), _behavior(x), x.logprobs.detach())


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


# The public functions of this file, by name.
LOSSES: dict[str, Objective] = {"tb": trajectory_balance} | {
    name: function
    for name, function in globals().items()
    if isfunction(function) and function.__module__ == __name__ and name[0] != "_"
}
