"""--low_memory: a step in two passes has the gradient of the usual one, for every objective."""

import re

import pytest
import torch
from test_trainer import SHORT, gradient, make_rows, make_trainer

from config import Config, UserError
from extras.objectives import LOSSES
from learner import Learner
from models import logprobs
from runtime.memory_trial import try_largest_batch

ROWS = make_rows(queries=4, per_query=3)
SETTINGS = dict(responses_per_query=3, queries_per_batch=4, tokens_per_micro_batch=160, beta=0.3)
SETTINGS |= SHORT


@pytest.fixture
def small_passes(monkeypatch):
    """Several forward passes for a micro-batch, of several rows each."""
    monkeypatch.setitem(logprobs.TOKENS_PER_FORWARD, "cpu", 60)
    monkeypatch.setitem(logprobs.TOKENS_IN_LOW_MEMORY, "cpu", 60)


@pytest.mark.parametrize("loss", LOSSES)
def test_two_passes_have_the_gradient_of_one(loss, tied_model, small_passes):
    learner = Learner(Config(model=str(tied_model), loss=loss, **SETTINGS), print)
    learner.policy.double()
    learner.dtype = torch.float64
    usual = gradient(learner, ROWS)  # leaves the weights as they are
    learner.low_memory, learner.step = True, 0
    two_passes = gradient(learner, ROWS)
    assert usual.norm() > 0
    assert (two_passes - usual).norm() / usual.norm() < 1e-7


def test_two_passes_hold_the_graph_of_a_few_rows_only(tied_model, small_passes):
    saved = {}
    for low_memory in ("off", "on"):
        config = Config(model=str(tied_model), low_memory=low_memory, **SETTINGS)
        learner, held = Learner(config, print), [0, 0]  # now, at most

        class Kept:
            """A saved tensor, counted while its graph lives."""

            def __init__(self, tensor, held=held):
                self.tensor, self.held = tensor, held
                held[0] += tensor.nbytes
                held[1] = max(held)

            def __del__(self):
                self.held[0] -= self.tensor.nbytes

        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            learner.update(ROWS)
        saved[low_memory] = held[1]
    assert saved["on"] < 0.7 * saved["off"], saved


def put_on_a_small_card(learner: Learner, fits: bool) -> None:
    """Let only two passes fit, or nothing."""
    learner.low_memory, backward = False, Learner.backward

    def backward_there(rows):
        if not (learner.low_memory and fits):
            raise torch.OutOfMemoryError
        return backward(learner, rows)

    learner.backward = backward_there


def test_a_batch_that_does_not_fit_makes_the_learner_take_two_passes(tied_model):
    config = Config(model=str(tied_model), **SETTINGS)
    learner, said = Learner(config, print), []
    put_on_a_small_card(learner, fits=True)
    try_largest_batch(config, learner, said.append)
    assert learner.low_memory and said[:2] == [
        "trying the largest batch: 12 responses of 8 tokens to 4 prompts of 8 …",
        "it does not fit into memory: a step takes two passes (--low_memory)",
    ]
    words = r"it takes \d+\.\d s: all 1000 steps take \d+ (min|h) at most"
    assert re.fullmatch(words, said[2]) and len(said) == 3
    put_on_a_small_card(learner, fits=False)
    with pytest.raises(MemoryError, match="12 responses of 8 . 8 tokens do not fit"):
        try_largest_batch(config, learner, said.append)
    off = Config(model=str(tied_model), low_memory="off", **SETTINGS)
    put_on_a_small_card(learner, fits=True)
    with pytest.raises(MemoryError, match="--tokens_per_micro_batch or try --low_memory on"):
        try_largest_batch(off, learner, said.append)
    assert all(parameter.grad is None for parameter in learner.policy.parameters())


def test_an_objective_whose_gradient_takes_another_way_too_is_refused(tied_model, monkeypatch):
    """Without a word it would learn from a part of its gradient."""

    def with_entropy(self, rows):
        inputs = loss_inputs(self, rows)
        inputs.entropy = -inputs.logprobs.mean(dim=1)
        return inputs

    loss_inputs = Learner.loss_inputs
    monkeypatch.setattr(Learner, "loss_inputs", with_entropy)
    learner = Learner(Config(model=str(tied_model), **SETTINGS), print)
    try_largest_batch(learner.config, learner, print)
    learner.low_memory = True
    with pytest.raises(UserError, match=r"LossInputs\.entropy.* --low_memory off"):
        try_largest_batch(learner.config, learner, print)


def test_a_step_has_the_figures_of_its_own_batch_in_one_pass_or_two(untied_model, tmp_path):
    same = dict(learning_rate=0.0)  # the weights stay as they are
    learner = make_trainer(untied_model, tmp_path, **same).learner
    alone = make_trainer(untied_model, tmp_path / "alone", low_memory="on", **same).learner
    learner.update(make_rows(4, 3, seed=0))
    found, expected = (each.update(make_rows(4, 3, seed=1)) for each in (learner, alone))
    for name in ("ess_responses", "ess_tokens", "log_w_5", "log_w_95"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3)
