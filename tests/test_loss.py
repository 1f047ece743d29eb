"""trajectory_balance against closed forms and numbers worked out by hand."""

import dataclasses

import pytest
import torch

from loss import LossInputs, trajectory_balance
from objectives import LOSSES


def ragged_inputs(
    queries: int = 3, group_size: int = 4, length: int = 6, beta: float = 0.3
) -> LossInputs:
    """Make random responses of 1 to `length` tokens.

    The rewards of the queries lie far apart, so that their partition functions do too.
    """
    generator = torch.Generator().manual_seed(0)
    rows = queries * group_size

    def logprobs() -> torch.Tensor:
        return torch.rand(rows, length, generator=generator, dtype=torch.float64).log()

    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[:2] = torch.tensor([1, length])
    noise = torch.randn(rows, generator=generator, dtype=torch.float64)
    rewards = noise + 5.0 * torch.arange(queries).repeat_interleave(group_size)
    return LossInputs(
        logprobs=logprobs().requires_grad_(),
        ref_logprobs=logprobs(),
        behavior_logprobs=logprobs(),
        mask=torch.arange(length) < lengths[:, None],
        rewards=rewards,
        group_size=group_size,
        beta=beta,
    )


def loss_and_gradient(x: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    loss, _ = trajectory_balance(x)
    return loss.detach(), torch.autograd.grad(loss, x.logprobs)[0]


def take(x: LossInputs, rows: torch.Tensor) -> LossInputs:
    """Take the same responses in another order, or some of them more than once."""
    return dataclasses.replace(
        x,
        logprobs=x.logprobs.detach()[rows].requires_grad_(),
        ref_logprobs=x.ref_logprobs[rows],
        behavior_logprobs=x.behavior_logprobs[rows],
        mask=x.mask[rows],
        rewards=x.rewards[rows],
    )


def deltas(x: LossInputs) -> list[float]:
    """Compute delta_ij of the identity, row by row in plain Python.

    It is (log pi_ref - log pi + r / beta)_ij minus its mean over the query's rows.
    """
    log_pi, log_ref = x.logprobs.tolist(), x.ref_logprobs.tolist()
    rewards, k = x.rewards.tolist(), x.group_size
    lengths = x.mask.sum(dim=1).tolist()
    values = [
        sum(log_ref[i][:n]) - sum(log_pi[i][:n]) + rewards[i] / x.beta
        for i, n in enumerate(lengths)
    ]
    return [value - sum(values[i // k * k : i // k * k + k]) / k for i, value in enumerate(values)]


def language(eos_logprob: float = -0.7) -> tuple[torch.Tensor, torch.Tensor]:
    """Write down the logprobs and the mask of every response of a small language.

    It has two letters, and its policy favours one. A response has at most three tokens: it ends
    with end-of-sequence or is cut off after the third.
    """
    eos = torch.tensor(eos_logprob, dtype=torch.float64)
    letters = (1 - eos.exp()) * torch.tensor([0.3, 0.7], dtype=torch.float64)
    complete: list[list[torch.Tensor]] = []
    prefixes: list[list[torch.Tensor]] = [[]]
    for _ in range(3):
        complete += [[*prefix, eos] for prefix in prefixes]
        prefixes = [[*prefix, letter.log()] for prefix in prefixes for letter in letters]
    complete += prefixes
    logprobs = torch.zeros(len(complete), 3, dtype=torch.float64)
    mask = torch.zeros(len(complete), 3)
    for i, tokens in enumerate(complete):
        logprobs[i, : len(tokens)] = torch.stack(tokens)
        mask[i, : len(tokens)] = 1
    assert logprobs.sum(dim=1).exp().sum().item() == pytest.approx(1.0)
    return logprobs, mask


def test_the_gradient_is_reinforce_with_a_mean_baseline_on_the_regularised_reward():
    x = ragged_inputs()
    _, gradient = loss_and_gradient(x)
    # d log pi(y) / d logprobs is the mask.
    delta = torch.tensor(deltas(x), dtype=torch.float64)
    expected = -2 * delta[:, None] * x.mask / len(x.rewards)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)


def test_the_gradient_identity_holds_for_the_parameters_of_a_policy():
    x = ragged_inputs()
    generator = torch.Generator().manual_seed(1)
    # One table of logits, shared by all rows.
    logits = torch.randn(x.mask.shape[1], 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    tokens = torch.randint(5, x.mask.shape, generator=generator)
    policy = logits.log_softmax(dim=-1)[torch.arange(tokens.shape[1]), tokens]
    x = dataclasses.replace(x, logprobs=policy)
    expected = torch.zeros_like(logits)
    for i, delta in enumerate(deltas(x)):
        log_pi = policy[i, : int(x.mask[i].sum())].sum()
        (gradient,) = torch.autograd.grad(log_pi, logits, retain_graph=True)
        expected += -2 * delta * gradient / len(x.rewards)
    (gradient,) = torch.autograd.grad(trajectory_balance(x)[0], logits)
    assert gradient.abs().max() > 0.1
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
    loss, metrics = trajectory_balance(x)
    # log pi_ref - log pi + r / beta: 1.5, 1 | 6, 2.
    # log Z: 1.25 | 4. Residuals: -0.25, 0.25 | -2, 2.
    assert loss.item() == pytest.approx((0.0625 + 0.0625 + 4 + 4) / 4)
    assert float(metrics["log_z"]) == pytest.approx((1.25 + 4) / 2)


def test_at_the_best_policy_the_loss_is_zero_and_log_z_is_the_log_partition_function():
    reference, mask = language()
    count, beta = len(mask), 0.5
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(2, count, generator=generator, dtype=torch.float64)
    rewards = noise + torch.tensor([[0.0], [3.0]])
    unnormalised = reference.sum(dim=1) + rewards / beta  # (2, count)
    log_z = unnormalised.logsumexp(dim=1)
    best = torch.zeros(2, count, 3, dtype=torch.float64)
    # log pi* of the response, all of it on the first token: only the sum counts.
    best[:, :, 0] = unnormalised - log_z[:, None]

    def inputs(logprobs: torch.Tensor, queries: slice) -> LossInputs:
        n = len(range(2)[queries])
        return LossInputs(
            logprobs=logprobs[queries].reshape(-1, 3),
            ref_logprobs=reference.repeat(n, 1),
            behavior_logprobs=reference.repeat(n, 1),
            mask=mask.repeat(n, 1),
            rewards=rewards[queries].reshape(-1),
            group_size=count,
            beta=beta,
        )

    loss, metrics = trajectory_balance(inputs(best, slice(None)))
    assert abs(log_z[1] - log_z[0]) > 1
    assert loss.item() < 1e-20
    assert float(metrics["log_z"]) == pytest.approx(log_z.mean().item(), abs=1e-9)
    for query in range(2):
        _, metrics = trajectory_balance(inputs(best, slice(query, query + 1)))
        assert float(metrics["log_z"]) == pytest.approx(log_z[query].item(), abs=1e-9)
    loss, _ = trajectory_balance(inputs(reference.expand(2, -1, -1), slice(None)))
    assert loss.item() > 0.1


def test_the_order_of_the_groups_does_not_matter():
    x = ragged_inputs(queries=4)
    order = torch.tensor([2, 0, 3, 1])
    rows = torch.arange(len(x.rewards)).view(4, -1)[order].flatten()
    shuffled = take(x, rows)
    loss, gradient = loss_and_gradient(x)
    log_z = float(trajectory_balance(x)[1]["log_z"])
    other_loss, other_gradient = loss_and_gradient(shuffled)
    other_log_z = float(trajectory_balance(shuffled)[1]["log_z"])
    torch.testing.assert_close(other_loss, loss, rtol=0, atol=1e-9)
    torch.testing.assert_close(other_gradient, gradient[rows], rtol=0, atol=1e-12)
    assert other_log_z == pytest.approx(log_z, abs=1e-9)


def test_behaviour_log_probabilities_do_not_matter():
    x = ragged_inputs()
    nan = torch.full_like(x.behavior_logprobs, float("nan"))
    other = dataclasses.replace(x, behavior_logprobs=nan)
    for result, expected in zip(loss_and_gradient(other), loss_and_gradient(x)):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("garbage", [float("inf"), float("-inf"), float("nan"), 1e300])
def test_what_stands_in_padding_does_not_matter(garbage):
    x = ragged_inputs()

    def spoil(values: torch.Tensor) -> torch.Tensor:
        return values.detach().masked_fill(~x.mask, garbage)

    spoilt = dataclasses.replace(
        x, logprobs=spoil(x.logprobs).requires_grad_(), ref_logprobs=spoil(x.ref_logprobs)
    )
    assert not x.mask.all()
    for result, expected in zip(loss_and_gradient(spoilt), loss_and_gradient(x)):
        assert torch.equal(result, expected)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.bfloat16]
)
def test_a_mask_of_any_dtype_gives_the_same(dtype):
    x = ragged_inputs()
    other = dataclasses.replace(x, mask=x.mask.to(dtype))
    for result, expected in zip(loss_and_gradient(other), loss_and_gradient(x)):
        assert torch.equal(result, expected)


def test_no_metric_carries_a_gradient():
    loss, metrics = trajectory_balance(ragged_inputs())
    assert loss.requires_grad and loss.shape == ()
    assert "log_z" in metrics
    assert not any(torch.is_tensor(value) and value.requires_grad for value in metrics.values())


def test_identical_rewards_in_a_group_give_finite_values():
    x = ragged_inputs()
    x = dataclasses.replace(x, rewards=torch.ones_like(x.rewards))
    loss, gradient = loss_and_gradient(x)
    assert loss.isfinite() and gradient.isfinite().all()
    assert loss > 0  # the pull towards the reference policy is left


def test_a_group_of_one_response_repeated_is_already_balanced():
    x = ragged_inputs()
    same = torch.arange(len(x.rewards)) // x.group_size * x.group_size
    loss, gradient = loss_and_gradient(take(x, same))
    assert loss < 1e-20 and gradient.abs().max() < 1e-10


def test_the_flag_tb_chooses_trajectory_balance():
    assert LOSSES["tb"] is trajectory_balance
