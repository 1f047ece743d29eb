"""trajectory_balance against a closed form and numbers worked out by hand.

What every objective must do, padding and the order of the queries among it, is in
test_objectives.py; the best policy and log Z are in test_exact_posterior.py.
"""

import random
from dataclasses import dataclass, replace
from math import log

import pytest
import torch

from loss import LossInputs, trajectory_balance

K = 4
BETA = 0.3
# The constant that some objectives divide by, not the width of any tensor here.
MAX_LENGTH = 11
# Three queries; the second has no row of full width.
LENGTHS = [6, 3, 1, 5, 2, 4, 3, 1, 3, 5, 2, 4]
WIDTH = 6
PROMPTS = [7] * 4 + [2] * 4 + [30] * 4  # tokens of each row's prompt
REWARDS = {
    "mixed": [1.0, 0.3, -0.5, 0.7, -0.2, 0.9, 0.4, -1.1, 0.1, 0.6, 1.4, 0.2],
    "all equal": [0.7] * 4 + [-0.2] * 4 + [1.5] * 4,
    "all wrong": [0.0] * 12,
    "one right": [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    "another pattern in each group": [1.0, 0.3, -0.5, 0.7, 0.4, 0.4, 0.4, 0.4, 0.0, 1.0, 0.0, 0.0],
}


@dataclass
class Row:
    """Log-probabilities of a response's tokens, its reward, and the length of its prompt."""

    policy: list[float]
    behavior: list[float]
    reference: list[float]
    reward: float
    prompt: int
    staleness: int


def make_example(pattern, distance="near"):
    """Make rows near to and far from the behaviour policy; the rows of one query are neighbours.

    distance: "far" adds two tokens on which policy and reference differ by more than the KL clamp;
    "extreme" has ratios of e^100 and e^-100, which fp32 does not hold, instead.
    """
    rng, rows = random.Random(1), []
    for i, length in enumerate(LENGTHS):
        policy = [-rng.uniform(1.0, 3.0) for _ in range(length)]
        behavior = [p + rng.gauss(0.0, (0.4, 0.05, 0.8, 0.2)[i % 4]) for p in policy]
        reference = [p + rng.gauss(0.0, 0.5) for p in policy]
        rows.append(Row(policy, behavior, reference, REWARDS[pattern][i], PROMPTS[i], 3 * i))
    shifts = [(0, 1, -2.5), (9, 2, -2.3), (7, 0, 0.6)]  # ratios above 8, and a row's below 0.8
    if distance == "extreme":  # of tokens and of a response; the ratios of row 0 balance
        shifts = [(0, 1, -100.0), (0, 2, 100.0), (4, 0, 100.0)]
    for row, t, shift in shifts:
        rows[row].behavior[t] = rows[row].policy[t] + shift
    if distance == "far":
        rows[1].reference[0] = rows[1].policy[0] - 12.5
        rows[6].behavior[1] = rows[6].policy[1] - 1.7  # a ratio little above icepop's bound, 5
        rows[5].policy[2], rows[5].behavior[2], rows[5].reference[2] = -13.5, -13.4, -1.5
        for row, p in (0, 0.7), (2, 0.7), (1, 0.4), (3, 0.4), (4, 0.4):  # dppo's mask
            rows[row].policy[-1], rows[row].behavior[-1] = log(p), log(1.1 - p)
    return rows


def queries(rows):
    return [rows[first : first + K] for first in range(0, len(rows), K)]


def to_inputs(rows, width=WIDTH, filler=-0.7, dtype=torch.float64):
    """Make tensors of the rows, with `filler` on the padding of all three log-probabilities.

    Those of the policy are a leaf that requires a gradient.
    """

    def padded(field):
        lists = [getattr(row, field) for row in rows]
        return torch.tensor([[*x] + [filler] * (width - len(x)) for x in lists], dtype=dtype)

    return LossInputs(
        logprobs=padded("policy").requires_grad_(),
        ref_logprobs=padded("reference"),
        behavior_logprobs=padded("behavior"),
        mask=torch.tensor([[int(t < len(row.policy)) for t in range(width)] for row in rows]),
        rewards=torch.tensor([row.reward for row in rows], dtype=dtype),
        group_size=K,
        beta=BETA,
        max_response_length=MAX_LENGTH,
        prompt_lengths=torch.tensor([row.prompt for row in rows]),
        staleness=torch.tensor([row.staleness for row in rows]),
    )


def value_and_gradient(objective, inputs):
    loss, _ = objective(inputs)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return loss.detach(), gradient


def test_the_gradient_is_reinforce_with_a_mean_baseline_on_the_regularised_reward():
    """delta = (log pi_ref - log pi + r / beta) minus its mean over the query's rows."""
    rows = make_example("mixed", "far")
    for i, row in enumerate(rows):  # the partition functions lie far apart
        row.reward += 5.0 * (i // K)
    deltas = []
    for query in queries(rows):
        values = [sum(x.reference) - sum(x.policy) + x.reward / BETA for x in query]
        deltas += [value - sum(values) / K for value in values]
    inputs = to_inputs(rows)
    _, gradient = value_and_gradient(trajectory_balance, inputs)
    # d log pi(y) / d logprobs is the mask.
    expected = -2 * torch.tensor(deltas, dtype=torch.float64)[:, None] * inputs.mask / len(rows)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)


def test_two_queries_give_the_numbers_worked_out_by_hand():
    x = LossInputs(
        # log pi is -1, -2 | -3, -1, and log pi_ref is -1.5, -1 | -3, -1.
        logprobs=torch.tensor([[-0.5, -0.5], [-2.0, 0.0], [-1.0, -2.0], [-1.0, 0.0]]),
        ref_logprobs=torch.tensor([[-1.0, -0.5], [-1.0, 0.0], [-2.0, -1.0], [-1.0, 0.0]]),
        behavior_logprobs=torch.zeros(4, 2),
        mask=torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]]),
        rewards=torch.tensor([1.0, 0.0, 3.0, 1.0]),
        group_size=2,
        beta=0.5,
    )
    x.logprobs.requires_grad_()
    loss, metrics = trajectory_balance(x)
    # log pi_ref - log pi + r / beta: 1.5, 1 | 6, 2.
    # log Z: 1.25 | 4. Residuals: -0.25, 0.25 | -2, 2.
    assert loss.item() == pytest.approx((0.0625 + 0.0625 + 4 + 4) / 4)
    assert float(metrics["log_z"]) == pytest.approx((1.25 + 4) / 2)
    assert loss.requires_grad and loss.shape == ()
    assert not any(torch.is_tensor(value) and value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("dtype", "int64 int32 uint8 float32 float64 bfloat16".split())
def test_a_mask_of_any_dtype_gives_the_same(dtype):
    x = to_inputs(make_example("mixed"))
    masks = x.mask.to(getattr(torch, dtype)), x.mask.bool()
    found = [value_and_gradient(trajectory_balance, replace(x, mask=mask)) for mask in masks]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_group_of_one_response_repeated_is_already_balanced():
    rows = [row for query in queries(make_example("mixed")) for row in [query[0]] * K]
    loss, gradient = value_and_gradient(trajectory_balance, to_inputs(rows))
    assert loss < 1e-20 and gradient.abs().max() < 1e-10
