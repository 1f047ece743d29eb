"""Every objective against its formula, written a second time in plain Python.

The formulas loop over rows and tokens in float64, and their gradients are central differences.
What the objective detaches (log Z, advantages, the truncated ratio) is computed once, from the
example's own policy, and so stays fixed under the differences.

The objectives with a formula here are those that come with TBA. One that is added needs no entry:
it gets the tests of what every objective must do.
"""

import math
from dataclasses import replace
from math import exp, log
from statistics import fmean as mean
from statistics import stdev
from types import SimpleNamespace

import pytest
import torch
from test_loss import (
    BETA,
    MAX_LENGTH,
    REWARDS,
    WIDTH,
    K,
    make_example,
    queries,
    to_inputs,
    value_and_gradient,
)
from torch.testing import assert_close

from extras.objectives import EXACT_SAMPLING, LOSSES, WITHOUT_REFERENCE
from loss import trajectory_balance

# The formulas, a second time.


def ratios(policy, behavior):
    return [exp(p - b) for p, b in zip(policy, behavior)]


def kl(logprobs, reference):
    return sum(min(max(p - f, -10.0), 10.0) for p, f in zip(logprobs, reference))


def clipped(ratio, advantage, below=0.2, above=0.2):
    return max(-advantage * ratio, -advantage * min(max(ratio, 1.0 - below), 1.0 + above))


def dot(weights, logprobs):
    return sum(w * p for w, p in zip(weights, logprobs))


def constants(example):
    """Compute what the objectives detach. A namespace for each row, with the fields of Row too."""
    found = []
    for query in queries(example):
        rows = [SimpleNamespace(**vars(row)) for row in query]
        rewards = [row.reward for row in rows]
        for x in rows:
            x.ratios = ratios(x.policy, x.behavior)
            x.regularised = x.reward - BETA * (sum(x.behavior) - sum(x.reference))
            x.kl, x.behavior_kl = kl(x.policy, x.reference), kl(x.behavior, x.reference)
            x.ema = 9.0 / max(x.staleness, 4) * kl(x.policy, x.behavior)
        for i, x in enumerate(rows):
            x.a = x.reward - mean(rewards)
            x.standardised = x.a / (stdev(rewards) + 1e-4)
            x.leave_one_out = x.regularised - mean(y.regularised for y in rows if y is not x)
            x.tba = x.a - BETA * (x.kl - mean(y.kl for y in rows))
            x.tba_released = x.a - BETA * (x.kl - mean(y.behavior_kl for y in rows))
            x.v_tb = mean(sum(y.policy) - sum(y.reference) - y.reward / BETA for y in rows)
            x.v_anchored = mean(sum(y.behavior) - sum(y.reference) - y.reward / BETA for y in rows)
            x.v_behavior = mean(sum(y.policy) - sum(y.behavior) - y.reward / BETA for y in rows)
            x.v_kimi = -mean(rewards) / BETA
            x.v_oapl = -log(mean(exp(reward / BETA) for reward in rewards))
            x.is_best = i == rewards.index(max(rewards)) and min(rewards) < max(rewards)
            x.is_worst = i == rewards.index(min(rewards)) and min(rewards) < max(rewards)
        found += rows
    return found


def regression(p, x, anchor, v):
    return (sum(p) - sum(anchor) - x.reward / BETA - v) ** 2


def released(p, x, advantage):
    """-A times the sum of a row's ratios, clamped to 0 to 8 and live, by the length of the row."""
    bounded = [min(ratio, 8.0) for ratio in ratios(p, x.behavior)]
    return -advantage * sum(bounded) / (x.prompt + len(p))


def grpo(p, x):
    shifts = [f - token for f, token in zip(x.reference, p)]
    clips = [clipped(ratio, x.standardised) for ratio in ratios(p, x.behavior)]
    return mean(clip + 0.04 * (exp(d) - d - 1.0) for clip, d in zip(clips, shifts))


def topr(p, x):
    weight = 1.0 if x.a > 0.0 else min(exp(sum(x.policy) - sum(x.behavior)), 1.0)
    return -weight * x.a * sum(p)


def dppo(p, x):
    moved = [exp(s) - exp(b) for s, b in zip(x.policy, x.behavior)]
    keeps = [m * math.copysign(1.0, x.a) <= 0.2 for m in moved]
    live = zip(ratios(p, x.behavior), keeps)
    return sum(1e-3 * log(ratio) ** 2 - keep * ratio * x.a for ratio, keep in live)


# The loss of a row, a mean over rows: p are the policy's log-probabilities of its tokens, and x is
# what is constant.
ROW_LOSSES = {
    "tb": lambda p, x: regression(p, x, x.reference, x.v_tb),
    "tb_anchored": lambda p, x: regression(p, x, x.reference, x.v_anchored),
    "tb_behavior": lambda p, x: regression(p, x, x.behavior, x.v_behavior),
    "kimi_k2": lambda p, x: regression(p, x, x.behavior, x.v_kimi),
    "oapl": lambda p, x: regression(p, x, x.behavior, x.v_oapl),
    "tba_prime": lambda p, x: -x.tba * sum(p) / MAX_LENGTH,
    "tba_prime_ratio": lambda p, x: -x.tba * dot([min(w, 8.0) for w in x.ratios], p) / MAX_LENGTH,
    "tba_prime_released": lambda p, x: released(p, x, x.tba_released),
    "tba_ema": lambda p, x: released(p, x, x.a - BETA * x.ema),
    "dr_grpo_ratio": lambda p, x: released(p, x, x.a),
    "reinforce": lambda p, x: -x.regularised * sum(p),
    "rloo": lambda p, x: -x.leave_one_out * sum(p),
    "proximal_rloo": lambda p, x: clipped(exp(sum(p) - sum(x.behavior)), x.leave_one_out),
    "grpo": grpo,
    "dr_grpo": lambda p, x: sum(clipped(w, x.a) for w in ratios(p, x.behavior)) / MAX_LENGTH,
    "gspo": lambda p, x: clipped(exp(mean(p) - mean(x.behavior)), x.standardised, 3e-4, 4e-4),
    "raft": lambda p, x: -K * x.is_best * sum(p),  # a mean over queries
    "opmd": lambda p, x: -x.a * sum(p) / (1.0 + BETA),
    "asymre": lambda p, x: -(x.a + 0.1) * sum(p),
    "topr": topr,
    "dppo": dppo,
    "cispo": lambda p, x: -x.a * dot([min(w, 1.2) for w in x.ratios], p),
    "tis": lambda p, x: -x.a * dot([min(w, 2.0) for w in x.ratios], p),
    "icepop": lambda p, x: -x.a * dot([w if 0.5 <= w <= 5.0 else 0.0 for w in x.ratios], p),
}


def over_rows(row_loss):
    return lambda policy, rows: mean(row_loss(p, x) for p, x in zip(policy, rows))


def online_dpo(policy, rows):
    losses = []
    for query in queries(list(zip(policy, rows))):
        margin = sum((x.is_best - x.is_worst) * (sum(p) - sum(x.reference)) for p, x in query)
        differ = any(x.is_best for _, x in query)
        losses.append(log(1.0 + exp(-0.1 * margin)) if differ else 0.0)
    return mean(losses)


# All objectives that come with TBA.
REFERENCES = {name: over_rows(loss) for name, loss in ROW_LOSSES.items()}
REFERENCES["online_dpo"] = online_dpo
# Where policy and behaviour policy are e^100 apart, these have a live ratio that no clip bounds.
UNBOUNDED = "proximal_rloo grpo dr_grpo dppo".split()


def check_against_formula(found, formula, example, atol=1e-7):
    """Compare value and gradient with those of a function (policy, constants). atol: of the latter.

    The gradient is that of central differences, 0 on padding.
    """
    value, gradient = found
    rows, policy, step = constants(example), [row.policy for row in example], 1e-5
    expected = torch.zeros(len(policy), WIDTH, dtype=torch.float64)
    for row, tokens in enumerate(policy):
        for t in range(len(tokens)):
            up, down = ([*map(list, policy)] for _ in range(2))
            up[row][t] += step
            down[row][t] -= step
            expected[row, t] = (formula(up, rows) - formula(down, rows)) / (2 * step)
    assert value.item() == pytest.approx(formula(policy, rows), rel=1e-5, abs=1e-7)
    assert_close(gradient, expected, rtol=1e-5, atol=atol)


# The tests of the objectives that come with TBA.

shipped_objective = pytest.mark.parametrize("name", REFERENCES)
every_objective = pytest.mark.parametrize("name", LOSSES)
any_rewards = pytest.mark.parametrize("pattern", REWARDS)
identical_rewards = pytest.mark.parametrize("pattern", ["all equal", "all wrong"])


@shipped_objective
@any_rewards
@pytest.mark.parametrize("distance", ["near", "far"])
def test_an_objective_has_the_value_and_the_gradient_of_its_formula(name, pattern, distance):
    example = make_example(pattern, distance)
    found = value_and_gradient(LOSSES[name], to_inputs(example))
    check_against_formula(found, REFERENCES[name], example)


@shipped_objective
@any_rewards
def test_extreme_ratios_leave_all_finite_in_fp32_and_bounded_ones_at_their_formula(name, pattern):
    example = make_example(pattern, "extreme")
    value, gradient = value_and_gradient(LOSSES[name], to_inputs(example, dtype=torch.float32))
    assert value.isfinite() and gradient.isfinite().all()
    if name not in UNBOUNDED:
        found = value_and_gradient(LOSSES[name], to_inputs(example))
        check_against_formula(found, REFERENCES[name], example, atol=1e-6)


@any_rewards
def test_the_gradient_of_tb_is_that_of_gvpo(pattern):
    """GVPO (arXiv 2504.19599): ((beta D - mean beta D) - (r - mean r))^2 / 2, D = l - f."""
    example = make_example(pattern)

    def gvpo(policy, rows):
        shifts = [BETA * (sum(p) - sum(x.reference)) for p, x in zip(policy, rows)]
        means = [mean(query) for query in queries(shifts) for _ in query]
        return mean(0.5 * (s - m - x.a) ** 2 for s, m, x in zip(shifts, means, rows))

    value, gradient = value_and_gradient(trajectory_balance, to_inputs(example))
    check_against_formula((value * BETA**2 / 2, gradient * BETA**2 / 2), gvpo, example)


@any_rewards
def test_tb_anchored_is_tb_where_the_rows_are_fresh_and_only_there(pattern):
    example = make_example(pattern)
    fresh = to_inputs([replace(row, behavior=row.policy) for row in example])
    both = [value_and_gradient(LOSSES[name], fresh) for name in ("tb", "tb_anchored")]
    assert_close(*both, rtol=1e-9, atol=1e-12)
    inputs = to_inputs(example)
    gradients = [value_and_gradient(LOSSES[n], inputs)[1] for n in ("tb", "tb_anchored")]
    pushes = [gradient[:, 0].view(-1, K).sum(dim=1).abs() for gradient in gradients]
    assert (pushes[0] < 1e-12).all() and (pushes[1] > 1e-3).all(), "one that all rows share"


@pytest.mark.parametrize("name", sorted(EXACT_SAMPLING))
def test_a_token_that_was_not_sampled_pushes_no_more_than_one_that_was_sampled_just_now(name):
    """An appended end has 0 in place of its log-probability, which no sampler gave."""
    rows = make_example("mixed")
    appended = to_inputs([replace(row, behavior=[*row.behavior[:-1], 0.0]) for row in rows])
    appended.sampled = appended.mask.clone()
    for i, row in enumerate(rows):
        appended.sampled[i, len(row.policy) - 1] = 0
    just_now = [replace(row, behavior=[*row.behavior[:-1], row.policy[-1]]) for row in rows]
    found = value_and_gradient(LOSSES[name], appended)
    assert_close(found, value_and_gradient(LOSSES[name], to_inputs(just_now)), rtol=1e-9, atol=0)


@any_rewards
def test_tb_behavior_and_kimi_k2_coincide_on_policy_and_differ_by_mean_delta_off_policy(pattern):
    example = make_example(pattern)
    fresh = to_inputs([replace(row, behavior=row.policy) for row in example])
    both = [value_and_gradient(LOSSES[name], fresh) for name in ("tb_behavior", "kimi_k2")]
    assert_close(*both, rtol=1e-9, atol=1e-12)
    means = [mean(sum(x.policy) - sum(x.behavior) for x in query) for query in queries(example)]
    stale, kimi = (LOSSES[name](to_inputs(example))[0] for name in ("tb_behavior", "kimi_k2"))
    # The residuals of tb_behavior have mean 0 in each query: squares of their sum just add.
    assert_close(kimi, stale + mean(value**2 for value in means), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pattern", ["mixed", "one right", "another pattern in each group"])
def test_the_examples_lie_on_both_sides_of_every_clip_and_clamp(pattern):
    rows = constants(make_example(pattern, "far"))

    def sides(pairs):
        """Name the sides of the clip range on which ratios lie, each with its advantage's sign."""
        return {((w > 1.2) - (w < 0.8), a > 0.0) for w, a in pairs if a}

    everything = {(side, is_good) for side in (-1, 0, 1) for is_good in (True, False)}
    responses = [(exp(sum(x.policy) - sum(x.behavior)), x.leave_one_out) for x in rows]
    assert sides(responses) == everything
    assert sides((ratio, x.standardised) for x in rows for ratio in x.ratios) == everything
    tokens = [(p, b, f, x.a) for x in rows for p, b, f in zip(x.policy, x.behavior, x.reference)]
    moved = [(exp(p) - exp(b), a) for p, b, _, a in tokens]
    assert len({(m > 0, m * a > 0) for m, a in moved if abs(m) > 0.2}) == 4  # dppo's mask
    assert max(max(x.ratios) for x in rows) > 8.0 > min(min(x.ratios) for x in rows)
    assert any(5.0 < ratio < 6.0 for x in rows for ratio in x.ratios)
    shifts = [p - f for p, _, f, _ in tokens]
    assert min(shifts) < -10.0 and max(shifts) > 10.0
    assert any(abs(shift) < 10.0 for shift in shifts)


@pytest.mark.parametrize("name", sorted(REFERENCES.keys() - {"reinforce", "asymre"}))
@identical_rewards
def test_identical_rewards_move_nothing_where_policy_reference_and_behaviour_agree(name, pattern):
    example = make_example(pattern)
    agreeing = [replace(row, behavior=row.policy, reference=row.policy) for row in example]
    _, gradient = value_and_gradient(LOSSES[name], to_inputs(agreeing))
    assert_close(gradient, torch.zeros_like(gradient), rtol=0.0, atol=1e-9)


@pytest.mark.parametrize(
    "rewards, signs",
    [
        ([1, 0, 1, 0], [-1, 1, 0, 0]),
        ([0, 1, 1, 0], [1, -1, 0, 0]),
        ([0, 0, 1, 1], [1, 0, -1, 0]),
        ([1, 1, 0, 0], [-1, 0, 1, 0]),
        ([0.5, 1, 0, 0], [0, -1, 1, 0]),
        ([0.7] * 4, [0] * 4),
        ([0] * 4, [0] * 4),
    ],
)
def test_ties_go_to_the_lowest_index_and_equal_rewards_add_exactly_zero(rewards, signs):
    """signs: of the gradient of online_dpo; descent makes the best likelier. raft has no worst."""
    query = make_example("mixed")[:K]
    inputs = to_inputs([replace(row, reward=reward) for row, reward in zip(query, rewards)])
    for name, expected in ("online_dpo", signs), ("raft", [min(sign, 0) for sign in signs]):
        value, gradient = value_and_gradient(LOSSES[name], inputs)
        assert gradient.sum(dim=1).sign().tolist() == expected
        assert (value != 0.0) == gradient.any() == any(signs)


# The tests of every objective in LOSSES.


@every_objective
def test_an_objective_gives_the_same_without_behavior_logprobs_or_says_that_it_needs_them(name):
    inputs = to_inputs(make_example("mixed", "far"))
    expected = value_and_gradient(LOSSES[name], inputs)
    try:
        found = value_and_gradient(LOSSES[name], replace(inputs, behavior_logprobs=None))
    except ValueError as error:
        assert "needs behavior_logprobs" in str(error)
    else:
        assert_close(found, expected, rtol=0.0, atol=0.0)


@every_objective
def test_an_objective_said_to_need_no_reference_reads_none_and_every_other_does(name):
    inputs = to_inputs(make_example("mixed"))
    other = replace(inputs, ref_logprobs=inputs.ref_logprobs * torch.linspace(0.1, 2.0, WIDTH))
    results = zip(value_and_gradient(LOSSES[name], inputs), value_and_gradient(LOSSES[name], other))
    is_the_same = all(torch.equal(one, another) for one, another in results)
    # One that is not said to read none is given a reference, which it may leave aside.
    if name in WITHOUT_REFERENCE or name in REFERENCES:
        assert is_the_same == (name in WITHOUT_REFERENCE)


@every_objective
def test_identical_rewards_or_a_row_without_a_token_leave_value_and_gradient_finite(name):
    for pattern in "all equal", "all wrong", "mixed":
        inputs = to_inputs(make_example(pattern, "far"))
        if pattern == "mixed":
            inputs.mask[2] = 0  # such as an end-of-sequence token that is masked
        value, gradient = value_and_gradient(LOSSES[name], inputs)
        assert value.isfinite() and gradient.isfinite().all()
    assert not gradient[2].any()


@every_objective
@pytest.mark.parametrize("filler", [math.inf, -math.inf, math.nan, 1e300])
def test_neither_what_stands_on_padding_nor_its_width_changes_value_or_gradient(name, filler):
    query = make_example("mixed")[K : 2 * K]
    longest = max(len(row.policy) for row in query)
    value, gradient = value_and_gradient(LOSSES[name], to_inputs(query, longest))
    for width in longest, WIDTH + 3:
        inputs = to_inputs(query, width, filler)
        filled = value_and_gradient(LOSSES[name], inputs)
        plain = value_and_gradient(LOSSES[name], to_inputs(query, width))
        assert_close(filled, plain, rtol=0.0, atol=0.0)
        assert not filled[1][inputs.mask == 0].any()
        padded = torch.nn.functional.pad(gradient, (0, width - longest))
        assert_close(plain, (value, padded), rtol=1e-9, atol=1e-12)


@every_objective
@pytest.mark.parametrize("pattern", ["mixed", "another pattern in each group"])
def test_queries_one_by_one_average_to_all_queries_at_once_in_any_order(name, pattern):
    example = queries(make_example(pattern))
    for order in example, example[::-1]:
        found = [value_and_gradient(LOSSES[name], to_inputs(query)) for query in order]
        values, gradients = zip(*found)
        average = torch.stack(values).mean(), torch.cat(gradients) / len(order)
        whole = value_and_gradient(LOSSES[name], to_inputs(sum(order, [])))
        assert_close(average, whole, rtol=1e-9, atol=1e-12)
