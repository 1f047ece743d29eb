"""Every objective against its formula, written a second time in plain Python.

The formulas loop over rows and tokens, and their gradients are central differences. A reference
objective takes an example and returns its loss as a function of the policy's token
log-probabilities. What the objective detaches (log Z, advantages, the truncated ratio) is computed
once, from the example's own policy, and so stays fixed under the differences.
"""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch

from loss import LossInputs
from objectives import LOSSES, WITHOUT_REFERENCE

torch.set_num_threads(1)

K = 4
BETA = 0.3
# The constant that some objectives divide by, not the width of any tensor here.
MAX_LENGTH = 11
# Three queries; the second has no row of full width.
LENGTHS = [6, 3, 1, 5, 2, 4, 3, 1, 3, 5, 2, 4]
WIDTH = 6
PROMPTS = [7] * 4 + [2] * 4 + [30] * 4  # tokens of each row's prompt

NAMES = (
    "tb tba_prime tba_prime_ratio tba_prime_released reinforce rloo proximal_rloo grpo dr_grpo"
    " dr_grpo_ratio online_dpo raft tb_behavior kimi_k2 oapl opmd asymre topr gspo cispo tis icepop"
    " dppo"
).split()
NEED_BEHAVIOR = (
    "tba_prime_ratio tba_prime_released reinforce rloo proximal_rloo grpo dr_grpo dr_grpo_ratio"
    " tb_behavior kimi_k2 oapl topr gspo cispo tis icepop dppo"
).split()
# Stay bounded, or are defined, where policy and behaviour policy are e^50 apart.
STAND_EXTREMES = ["tb_behavior", "kimi_k2", "oapl", "topr", "gspo", "cispo", "tis", "icepop"]
REWARDS = {
    "mixed": [1.0, 0.3, -0.5, 0.7, -0.2, 0.9, 0.4, -1.1, 0.1, 0.6, 1.4, 0.2],
    "all equal": [0.7] * 4 + [-0.2] * 4 + [1.5] * 4,
    "all wrong": [0.0] * 12,
    "one right": [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    "another pattern in each group": [1.0, 0.3, -0.5, 0.7, 0.4, 0.4, 0.4, 0.4, 0.0, 1.0, 0.0, 0.0],
}

every_objective = pytest.mark.parametrize("name", NAMES)


@dataclass
class Example:
    """Token log-probabilities, a list for each row, as long as the row.

    The rows of one query are neighbours.
    """

    policy: list[list[float]]
    behavior: list[list[float]]
    reference: list[list[float]]
    rewards: list[float]
    prompts: list[int]

    def groups(self):
        return [range(first, first + K) for first in range(0, len(self.rewards), K)]

    def only(self, rows):
        columns = (self.policy, self.behavior, self.reference, self.rewards, self.prompts)
        return Example(*([column[row] for row in rows] for column in columns))


def make_example(pattern, far=False, extreme=False):
    """Make rows near to and far from the behaviour policy; with `extreme` e^50 and e^-50.

    `far` adds two tokens on which policy and reference differ by more than the KL clamp.
    """
    rng = random.Random(1)
    policy, behavior, reference = [], [], []
    for row, length in enumerate(LENGTHS):
        spread = (0.4, 0.05, 0.8, 0.2)[row % 4]
        policy.append([-rng.uniform(1.0, 3.0) for _ in range(length)])
        behavior.append([p + rng.gauss(0.0, spread) for p in policy[row]])
        reference.append([p + rng.gauss(0.0, 0.5) for p in policy[row]])
    if extreme:  # of tokens and of a response; the ratios of a row balance where one is e^50
        behavior[0][1], behavior[0][2] = policy[0][1] - 50.0, policy[0][2] + 50.0
        behavior[4][0] = policy[4][0] + 50.0
        return Example(policy, behavior, reference, REWARDS[pattern], PROMPTS)
    behavior[0][1] = policy[0][1] - 2.5  # a ratio above 8
    behavior[9][2] = policy[9][2] - 2.3
    behavior[7][0] = policy[7][0] + 0.6  # a whole row with a ratio below 0.8
    if far:
        reference[1][0] = policy[1][0] - 12.5
        policy[5][2], behavior[5][2], reference[5][2] = -13.5, -13.4, -1.5
        for row, p in (0, 0.7), (2, 0.7), (1, 0.4), (3, 0.4), (4, 0.4):  # dppo's mask
            policy[row][-1], behavior[row][-1] = math.log(p), math.log(1.1 - p)
    return Example(policy, behavior, reference, REWARDS[pattern], PROMPTS)


def to_inputs(example, width=WIDTH, filler=-0.7):
    """Make tensors of the example, with `filler` on the padding of all three log-probabilities.

    Those of the policy are a leaf that requires a gradient.
    """

    def padded(rows):
        filled = [row + [filler] * (width - len(row)) for row in rows]
        return torch.tensor(filled, dtype=torch.float64)

    return LossInputs(
        logprobs=padded(example.policy).requires_grad_(),
        ref_logprobs=padded(example.reference),
        behavior_logprobs=padded(example.behavior),
        mask=torch.tensor([[int(t < len(row)) for t in range(width)] for row in example.policy]),
        rewards=torch.tensor(example.rewards, dtype=torch.float64),
        group_size=K,
        beta=BETA,
        max_response_length=MAX_LENGTH,
        prompt_lengths=torch.tensor(example.prompts),
    )


def value_and_gradient(name, inputs):
    loss, _ = LOSSES[name](inputs)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return loss.detach(), gradient


# The formulas, a second time.


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def clamp(value, low, high):
    return min(max(value, low), high)


def clipped_loss(ratio, advantage):
    return max(-advantage * ratio, -advantage * clamp(ratio, 0.8, 1.2))


def minus_group_mean(e, values):
    means = [mean(values[row] for row in rows) for rows in e.groups()]
    return [value - means[row // K] for row, value in enumerate(values)]


def regularised_rewards(e):
    return [r - BETA * (sum(b) - sum(f)) for r, b, f in zip(e.rewards, e.behavior, e.reference)]


def leave_one_out_advantages(e):
    total = regularised_rewards(e)
    return [
        total[row] - mean(total[other] for other in rows if other != row)
        for rows in e.groups()
        for row in rows
    ]


def grpo_advantages(e):
    advantages = []
    for rows in e.groups():
        average = mean(e.rewards[row] for row in rows)
        std = math.sqrt(sum((e.rewards[row] - average) ** 2 for row in rows) / (K - 1))
        advantages += [(e.rewards[row] - average) / (std + 1e-4) for row in rows]
    return advantages


def row_kl(logprobs, reference):
    return sum(clamp(p - f, -10.0, 10.0) for p, f in zip(logprobs, reference))


def tba_prime_advantages(e):
    rows = zip(e.rewards, e.policy, e.reference)
    return minus_group_mean(e, [r - BETA * row_kl(p, f) for r, p, f in rows])


def over_rows(row_loss, *columns):
    """A function of the policy: the mean of row_loss(policy's row, *the row's of each column)."""
    return lambda policy: mean(row_loss(*row) for row in zip(policy, *columns))


def policy_gradient(e, advantages, weights=None, divisor=1.0):
    """Average -A times the (weighted) sum of a row's log-probabilities over the rows.

    All objectives without a live ratio have this form.
    """
    weights = weights or [[1.0] * len(row) for row in e.policy]

    def row_loss(row, advantage, row_weights):
        return -advantage * sum(w * p for w, p in zip(row_weights, row)) / divisor

    return over_rows(row_loss, advantages, weights)


def reference_tb(e):
    log_z = [
        mean(sum(e.reference[i]) - sum(e.policy[i]) + e.rewards[i] / BETA for i in rows)
        for rows in e.groups()
    ]

    def row_loss(row, reference, reward, i):
        return (log_z[i // K] + sum(row) - sum(reference) - reward / BETA) ** 2

    return over_rows(row_loss, e.reference, e.rewards, range(len(e.rewards)))


def reference_tba_prime_ratio(e):
    rows = zip(e.policy, e.behavior)
    ratios = [[clamp(math.exp(p - b), 0.0, 8.0) for p, b in zip(*row)] for row in rows]
    return policy_gradient(e, tba_prime_advantages(e), ratios, MAX_LENGTH)


def reference_proximal_rloo(e):
    def row_loss(row, behavior, advantage):
        return clipped_loss(math.exp(sum(row) - sum(behavior)), advantage)

    return over_rows(row_loss, e.behavior, leave_one_out_advantages(e))


def reference_grpo(e):
    def token_loss(p, b, f, advantage):
        return clipped_loss(math.exp(p - b), advantage) + 0.04 * (math.exp(f - p) - (f - p) - 1.0)

    def row_loss(*row):
        *logprobs, advantage = row
        return mean(token_loss(*token, advantage) for token in zip(*logprobs))

    return over_rows(row_loss, e.behavior, e.reference, grpo_advantages(e))


def reference_dr_grpo(e):
    def row_loss(row, behavior, advantage):
        tokens = zip(row, behavior)
        return sum(clipped_loss(math.exp(p - b), advantage) for p, b in tokens) / MAX_LENGTH

    return over_rows(row_loss, e.behavior, minus_group_mean(e, e.rewards))


def released_policy_gradient(e, advantages):
    """Average -A times the sum of a row's ratios, clamped to 0 to 8 and live, by its length."""

    def row_loss(row, behavior, advantage, prompt):
        ratios = [clamp(math.exp(p - b), 0.0, 8.0) for p, b in zip(row, behavior)]
        return -advantage * sum(ratios) / (prompt + len(row))

    return over_rows(row_loss, e.behavior, advantages, e.prompts)


def reference_tba_prime_released(e):
    kl = [row_kl(p, f) for p, f in zip(e.policy, e.reference)]
    behavior_kl = [row_kl(b, f) for b, f in zip(e.behavior, e.reference)]
    advantages = []
    for rows in e.groups():
        mean_reward = mean(e.rewards[row] for row in rows)
        mean_kl = mean(behavior_kl[row] for row in rows)
        advantages += [e.rewards[row] - mean_reward - BETA * (kl[row] - mean_kl) for row in rows]
    return released_policy_gradient(e, advantages)


def regression(e, values):
    """Average (l - b - r / beta - V)^2 over the rows; values: V of each query."""

    def row_loss(row, behavior, reward, i):
        return (sum(row) - sum(behavior) - reward / BETA - values[i // K]) ** 2

    return over_rows(row_loss, e.behavior, e.rewards, range(len(e.rewards)))


def reference_tb_behavior(e):
    residuals = [sum(p) - sum(b) - r / BETA for p, b, r in zip(e.policy, e.behavior, e.rewards)]
    return regression(e, [mean(residuals[row] for row in rows) for rows in e.groups()])


def reference_kimi_k2(e):
    return regression(e, [-mean(e.rewards[row] for row in rows) / BETA for rows in e.groups()])


def reference_oapl(e):
    sums = [mean(math.exp(e.rewards[row] / BETA) for row in rows) for rows in e.groups()]
    return regression(e, [-math.log(value) for value in sums])


def reference_topr(e):
    advantages = minus_group_mean(e, e.rewards)
    ratios = [math.exp(sum(p) - sum(b)) for p, b in zip(e.policy, e.behavior)]
    weights = [1.0 if a > 0.0 else min(ratio, 1.0) for a, ratio in zip(advantages, ratios)]
    return policy_gradient(e, [w * a for w, a in zip(weights, advantages)])


def reference_gspo(e):
    def row_loss(row, behavior, advantage):
        s = math.exp(mean(p - b for p, b in zip(row, behavior)))
        return max(-advantage * s, -advantage * clamp(s, 1.0 - 3e-4, 1.0 + 4e-4))

    return over_rows(row_loss, e.behavior, grpo_advantages(e))


def reference_dppo(e):
    def row_loss(row, behavior, sampled, advantage):
        kept = [
            (math.exp(s) - math.exp(b)) * math.copysign(1.0, advantage) <= 0.2
            for s, b in zip(sampled, behavior)
        ]
        gains = [math.exp(p - b) * advantage for p, b in zip(row, behavior)]
        log_ratios = [p - b for p, b in zip(row, behavior)]
        return sum(1e-3 * d**2 - g * keep for d, g, keep in zip(log_ratios, gains, kept))

    return over_rows(row_loss, e.behavior, e.policy, minus_group_mean(e, e.rewards))


def weighted_tokens(e, weight):
    """Policy gradient with A = r - mean r; each token is weighted by a function of its ratio."""
    rows = zip(e.policy, e.behavior)
    weights = [[weight(math.exp(p - b)) for p, b in zip(*row)] for row in rows]
    return policy_gradient(e, minus_group_mean(e, e.rewards), weights)


def best_and_worst(e, rows):
    """Find the best and the worst row, each the lowest of its ties.

    None where the rewards are all equal.
    """
    best = worst = rows[0]
    for row in rows:
        if e.rewards[row] > e.rewards[best]:
            best = row
        if e.rewards[row] < e.rewards[worst]:
            worst = row
    return None if best == worst else (best, worst)


def reference_online_dpo(e):
    pairs = [best_and_worst(e, rows) for rows in e.groups()]

    def pair_loss(policy, best, worst):
        reference_margin = sum(e.reference[best]) - sum(e.reference[worst])
        margin = sum(policy[best]) - sum(policy[worst]) - reference_margin
        return math.log(1.0 + math.exp(-0.1 * margin))

    return lambda policy: mean(pair_loss(policy, *pair) if pair else 0.0 for pair in pairs)


def reference_raft(e):
    pairs = [best_and_worst(e, rows) for rows in e.groups()]
    return lambda policy: mean(-sum(policy[pair[0]]) if pair else 0.0 for pair in pairs)


REFERENCES = {
    "tb": reference_tb,
    "tba_prime": lambda e: policy_gradient(e, tba_prime_advantages(e), divisor=MAX_LENGTH),
    "tba_prime_ratio": reference_tba_prime_ratio,
    "tba_prime_released": reference_tba_prime_released,
    "reinforce": lambda e: policy_gradient(e, regularised_rewards(e)),
    "rloo": lambda e: policy_gradient(e, leave_one_out_advantages(e)),
    "proximal_rloo": reference_proximal_rloo,
    "grpo": reference_grpo,
    "dr_grpo": reference_dr_grpo,
    "dr_grpo_ratio": lambda e: released_policy_gradient(e, minus_group_mean(e, e.rewards)),
    "online_dpo": reference_online_dpo,
    "raft": reference_raft,
    "tb_behavior": reference_tb_behavior,
    "kimi_k2": reference_kimi_k2,
    "oapl": reference_oapl,
    "opmd": lambda e: policy_gradient(e, minus_group_mean(e, e.rewards), divisor=1.0 + BETA),
    "asymre": lambda e: policy_gradient(e, [a + 0.1 for a in minus_group_mean(e, e.rewards)]),
    "topr": reference_topr,
    "gspo": reference_gspo,
    "dppo": reference_dppo,
    "cispo": lambda e: weighted_tokens(e, lambda ratio: min(ratio, 1.2)),
    "tis": lambda e: weighted_tokens(e, lambda ratio: min(ratio, 2.0)),
    "icepop": lambda e: weighted_tokens(e, lambda ratio: ratio if 0.5 <= ratio <= 5.0 else 0.0),
}


def central_differences(loss, policy, step=1e-5):
    """Compute the gradient of a function of the rows, (N, WIDTH), 0 on padding."""
    gradient = [[0.0] * WIDTH for _ in policy]
    for row, tokens in enumerate(policy):
        for t in range(len(tokens)):
            up, down = ([list(other) for other in policy] for _ in range(2))
            up[row][t] += step
            down[row][t] -= step
            gradient[row][t] = (loss(up) - loss(down)) / (2 * step)
    return gradient


# The tests.


def test_the_registry_holds_exactly_these_objectives_and_each_says_what_it_needs():
    assert sorted(LOSSES) == sorted(NAMES)
    for name, objective in LOSSES.items():
        needs = "Needs behaviour" if name in NEED_BEHAVIOR else "Needs no behaviour"
        assert needs in " ".join((objective.__doc__ or "").split()), name


@every_objective
@pytest.mark.parametrize("pattern", REWARDS)
@pytest.mark.parametrize("far", [False, True], ids=["near the reference", "far from the reference"])
def test_an_objective_has_the_value_and_the_gradient_of_its_formula(name, pattern, far):
    check_against_formula(name, make_example(pattern, far), atol=1e-7)


def check_against_formula(name: str, example: Example, atol: float) -> None:
    """Value and gradient are those of the loops. atol: of the gradient."""
    value, gradient = value_and_gradient(name, to_inputs(example))
    expected = REFERENCES[name](example)
    assert value.item() == pytest.approx(expected(example.policy), rel=1e-5, abs=1e-7)
    differences = central_differences(expected, example.policy)
    expected_gradient = torch.tensor(differences, dtype=torch.float64)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("name", STAND_EXTREMES)
@pytest.mark.parametrize("pattern", REWARDS)
def test_a_ratio_of_e_to_50_or_to_minus_50_leaves_an_objective_at_its_formula(name, pattern):
    check_against_formula(name, make_example(pattern, extreme=True), atol=1e-6)


@every_objective
@pytest.mark.parametrize("pattern", REWARDS)
def test_extreme_ratios_leave_value_and_gradient_finite_in_fp32(name, pattern):
    inputs = to_inputs(make_example(pattern, extreme=True))
    tensors = {
        field: getattr(inputs, field).detach().float()
        for field in ("logprobs", "ref_logprobs", "behavior_logprobs", "rewards")
    }
    tensors["logprobs"].requires_grad_()
    value, gradient = value_and_gradient(name, replace(inputs, **tensors))
    assert value.isfinite() and gradient.isfinite().all()


@every_objective
def test_an_objective_said_to_need_no_reference_reads_none_and_every_other_does(name):
    inputs = to_inputs(make_example("mixed"))
    value, gradient = value_and_gradient(name, inputs)
    other = replace(inputs, ref_logprobs=inputs.ref_logprobs * torch.linspace(0.1, 2.0, WIDTH))
    other_value, other_gradient = value_and_gradient(name, other)
    is_the_same = torch.equal(value, other_value) and torch.equal(gradient, other_gradient)
    assert is_the_same == (name in WITHOUT_REFERENCE)


@pytest.mark.parametrize("pattern", REWARDS)
def test_the_gradient_of_tb_is_that_of_gvpo(pattern):
    """GVPO (arXiv 2504.19599): ((beta D - mean beta D) - (r - mean r))^2 / 2, D = l - f."""
    example = make_example(pattern)
    rewards = minus_group_mean(example, example.rewards)

    def gvpo(policy):
        shifts = [BETA * (sum(p) - sum(f)) for p, f in zip(policy, example.reference)]
        rows = zip(minus_group_mean(example, shifts), rewards)
        return mean(0.5 * (shift - reward) ** 2 for shift, reward in rows)

    _, gradient = value_and_gradient("tb", to_inputs(example))
    differences = central_differences(gvpo, example.policy)
    expected = torch.tensor(differences, dtype=torch.float64)
    assert torch.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 0.999999
    torch.testing.assert_close(gradient * BETA**2 / 2, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("pattern", REWARDS)
def test_tb_behavior_and_kimi_k2_coincide_on_policy_and_differ_by_mean_delta_off_policy(pattern):
    example = make_example(pattern)
    fresh = to_inputs(replace(example, behavior=example.policy))
    both = (value_and_gradient(name, fresh) for name in ("tb_behavior", "kimi_k2"))
    for one, other in zip(*both):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    stale, _ = value_and_gradient("tb_behavior", to_inputs(example))
    shifts = [sum(p) - sum(b) for p, b in zip(example.policy, example.behavior)]
    means = [mean(shifts[row] for row in rows) for rows in example.groups()]
    # The residuals of tb_behavior have mean 0 in each query: squares of their sum just add.
    expected = stale + mean(value**2 for value in means)
    kimi, _ = value_and_gradient("kimi_k2", to_inputs(example))
    torch.testing.assert_close(kimi, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pattern", ["mixed", "one right", "another pattern in each group"])
def test_the_examples_lie_on_both_sides_of_every_clip_and_clamp(pattern):
    example = make_example(pattern, far=True)
    row_ratios = [math.exp(sum(p) - sum(b)) for p, b in zip(example.policy, example.behavior)]
    pairs_of_rows = zip(example.policy, example.behavior)
    token_ratios = [[math.exp(p - b) for p, b in zip(*pair)] for pair in pairs_of_rows]
    shifts = [p - f for pair in zip(example.policy, example.reference) for p, f in zip(*pair)]

    def kinds(pairs):
        """Name the sides of the clip range on which ratios lie, given their advantages."""
        found = set()
        for ratio, advantage in pairs:
            if 0.8 < ratio < 1.2:
                found.add("inside")
            elif advantage * (ratio - 1.0) < 0.0:
                found.add("outside with a gradient")
            elif advantage != 0.0:
                found.add("clipped above" if ratio > 1.2 else "clipped below")
        return found

    everything = {"inside", "outside with a gradient", "clipped above", "clipped below"}
    assert kinds(zip(row_ratios, leave_one_out_advantages(example))) == everything
    rows = zip(token_ratios, grpo_advantages(example))
    assert kinds((ratio, advantage) for row, advantage in rows for ratio in row) == everything
    rows = zip(example.policy, example.behavior, minus_group_mean(example, example.rewards))
    moved = [(math.exp(p) - math.exp(b), a) for *pair, a in rows for p, b in zip(*pair)]
    assert len({(m > 0, m * a > 0) for m, a in moved if abs(m) > 0.2}) == 4  # dppo's mask
    assert max(map(max, token_ratios)) > 8.0 > min(map(min, token_ratios))
    assert min(shifts) < -10.0 and max(shifts) > 10.0
    assert any(abs(shift) < 10.0 for shift in shifts)


@pytest.mark.parametrize("pattern", REWARDS)
def test_on_policy_the_gradient_of_tb_is_that_of_reinforce_with_a_mean_baseline_times_two_over_beta(
    pattern,
):
    example = make_example(pattern)
    example = replace(example, behavior=example.policy)
    _, gradient = value_and_gradient("tb", to_inputs(example))
    advantages = minus_group_mean(example, regularised_rewards(example))
    rows = zip(advantages, example.policy)
    reinforce = torch.tensor(
        [[-a / len(advantages) if t < len(row) else 0.0 for t in range(WIDTH)] for a, row in rows],
        dtype=torch.float64,
    )
    assert torch.cosine_similarity(gradient.flatten(), reinforce.flatten(), dim=0) > 0.9999
    torch.testing.assert_close(gradient, reinforce * 2.0 / BETA, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["tba_prime_released", "dr_grpo_ratio"])
def test_without_prompt_lengths_a_row_is_divided_by_its_response_alone(name):
    example = make_example("mixed")
    value, gradient = value_and_gradient(name, replace(to_inputs(example), prompt_lengths=None))
    expected = REFERENCES[name](replace(example, prompts=[0] * len(LENGTHS)))
    assert value.item() == pytest.approx(expected(example.policy), rel=1e-5)
    differences = central_differences(expected, example.policy)
    torch.testing.assert_close(gradient, torch.tensor(differences, dtype=torch.float64))


@pytest.mark.parametrize("name", NEED_BEHAVIOR)
def test_an_objective_that_needs_behavior_logprobs_says_so_when_they_are_none(name):
    with pytest.raises(ValueError, match="needs behavior_logprobs"):
        LOSSES[name](replace(to_inputs(make_example("mixed")), behavior_logprobs=None))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEED_BEHAVIOR])
def test_an_objective_that_needs_no_behavior_logprobs_gives_the_same_without_them(name):
    inputs = to_inputs(make_example("mixed", far=True))
    value, gradient = value_and_gradient(name, inputs)
    without = replace(inputs, behavior_logprobs=None)
    value_without, gradient_without = value_and_gradient(name, without)
    assert torch.equal(value, value_without) and torch.equal(gradient, gradient_without)


identical_rewards = pytest.mark.parametrize("pattern", ["all equal", "all wrong"])


@every_objective
@identical_rewards
def test_identical_rewards_leave_value_and_gradient_finite(name, pattern):
    value, gradient = value_and_gradient(name, to_inputs(make_example(pattern, far=True)))
    assert value.isfinite() and gradient.isfinite().all()


@every_objective
def test_a_row_without_a_token_in_the_loss_leaves_value_and_gradient_finite(name):
    inputs = to_inputs(make_example("mixed"))
    inputs.mask[2] = 0  # such as an end-of-sequence token that is masked
    value, gradient = value_and_gradient(name, inputs)
    assert value.isfinite() and gradient.isfinite().all() and not gradient[2].any()


@pytest.mark.parametrize("name", ["online_dpo", "raft"])
@identical_rewards
def test_a_group_without_a_best_response_adds_exactly_zero(name, pattern):
    value, gradient = value_and_gradient(name, to_inputs(make_example(pattern)))
    assert value == 0.0 and not gradient.any()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("reinforce", "asymre")])
@identical_rewards
def test_identical_rewards_move_nothing_where_policy_reference_and_behaviour_agree(name, pattern):
    example = make_example(pattern)
    example = replace(example, behavior=example.policy, reference=example.policy)
    _, gradient = value_and_gradient(name, to_inputs(example))
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("name", ["tb", "grpo"])
@identical_rewards
def test_under_identical_rewards_tb_and_grpo_still_pull_each_group_towards_the_reference(
    name, pattern
):
    inputs = to_inputs(make_example(pattern))
    _, gradient = value_and_gradient(name, inputs)
    away = inputs.logprobs.detach() - inputs.ref_logprobs
    # A descent step goes against `away`.
    along = (gradient * away).view(-1, K * WIDTH).sum(dim=1)
    assert (along > 1e-4).all()


@every_objective
@pytest.mark.parametrize("filler", [math.inf, -math.inf, math.nan])
def test_what_stands_on_padding_changes_neither_value_nor_gradient(name, filler):
    example = make_example("mixed")
    value, gradient = value_and_gradient(name, to_inputs(example))
    inputs = to_inputs(example, filler=filler)
    filled_value, filled_gradient = value_and_gradient(name, inputs)
    assert torch.equal(filled_value, value) and torch.equal(filled_gradient, gradient)
    assert not filled_gradient[inputs.mask == 0].any()


@every_objective
@pytest.mark.parametrize("pattern", ["mixed", "another pattern in each group"])
def test_queries_one_by_one_average_to_all_queries_at_once(name, pattern):
    example = make_example(pattern)
    value, gradient = value_and_gradient(name, to_inputs(example))
    parts = [value_and_gradient(name, to_inputs(example.only(rows))) for rows in example.groups()]
    average = torch.stack([v for v, _ in parts]).mean()
    torch.testing.assert_close(average, value, rtol=1e-9, atol=1e-12)
    average_gradient = torch.cat([g for _, g in parts]) / len(parts)
    torch.testing.assert_close(average_gradient, gradient, rtol=1e-9, atol=1e-12)


@every_objective
def test_the_width_of_the_tensors_changes_nothing(name):
    example = make_example("mixed").only(range(K, 2 * K))
    longest = max(map(len, example.policy))
    value, gradient = value_and_gradient(name, to_inputs(example))
    for width in (longest, WIDTH + 3):
        other_value, other_gradient = value_and_gradient(name, to_inputs(example, width))
        torch.testing.assert_close(other_value, value, rtol=1e-9, atol=1e-12)
        head, tail = other_gradient[:, :longest], other_gradient[:, longest:]
        torch.testing.assert_close(head, gradient[:, :longest], rtol=1e-9, atol=1e-12)
        assert not tail.any()


@pytest.mark.parametrize("name", ["online_dpo", "raft"])
@pytest.mark.parametrize(
    ("rewards", "best", "worst"),
    [
        ([1, 0, 1, 0], 0, 1),
        ([0, 1, 1, 0], 1, 0),
        ([0, 0, 1, 1], 2, 0),
        ([1, 1, 0, 0], 0, 2),
        ([0.5, 1, 0, 0], 1, 2),
    ],
)
def test_ties_for_best_and_worst_go_to_the_lowest_index(name, rewards, best, worst):
    example = replace(make_example("mixed").only(range(K)), rewards=rewards)
    _, gradient = value_and_gradient(name, to_inputs(example))
    expected = [0] * K
    expected[best] = -1  # descent makes it likelier
    expected[worst] = 1 if name == "online_dpo" else 0
    assert gradient.sum(dim=1).sign().tolist() == expected
