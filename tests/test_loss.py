"""trajectory_balance against a closed form and numbers worked out by hand.

What every objective must do, padding and the order of the queries among it, is in
test_objectives.py; the best policy and log Z are in test_exact_posterior.py.
"""

from dataclasses import replace

import pytest
import torch
from test_objectives import BETA, K, make_example, queries, to_inputs, value_and_gradient

from loss import LossInputs, trajectory_balance


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
    _, gradient = value_and_gradient("tb", inputs)
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
    other = value_and_gradient("tb", replace(x, mask=x.mask.to(getattr(torch, dtype))))
    boolean = value_and_gradient("tb", replace(x, mask=x.mask.bool()))
    torch.testing.assert_close(other, boolean, rtol=0, atol=0)


def test_a_group_of_one_response_repeated_is_already_balanced():
    rows = [row for query in queries(make_example("mixed")) for row in [query[0]] * K]
    loss, gradient = value_and_gradient("tb", to_inputs(rows))
    assert loss < 1e-20 and gradient.abs().max() < 1e-10
