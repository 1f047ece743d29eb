"""The log-probabilities of responses, and the models that are refused."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config import Config, UserError
from models import logprobs
from models.logprobs import check_architecture, response_logprobs
from models.policy import load_policy


def ragged_rows(seed: int = 0, rows: int = 13):
    rng = np.random.default_rng(seed)

    def random_tokens(limit: int) -> np.ndarray:
        return rng.integers(0, 256, size=rng.integers(1, limit)).astype(np.int32)

    prompts = [random_tokens(40) for _ in range(rows)]
    responses = [random_tokens(30) for _ in range(rows)]
    # As in a batch: responses share a prompt, and some are the same.
    for i in range(0, rows - 2, 4):
        prompts[i + 1] = prompts[i].copy()
        prompts[i + 2], responses[i + 2] = prompts[i].copy(), responses[i].copy()
    return prompts, responses


def load(path):
    return load_policy(Config(model=str(path)), torch.device("cpu"))


def plain_logprobs(model, prompt, response, temperature):
    """Follow the definition: one row, no padding, the softmax of all logits."""
    ids = torch.tensor(np.concatenate([prompt, response])[None], dtype=torch.long)
    of_all = (model(input_ids=ids).logits / temperature).log_softmax(-1)[0]  # (positions, V)
    return of_all[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]


def check_against_each_row_alone(model, temperature: float, atol: float) -> None:
    prompts, responses = ragged_rows()
    weights = torch.randn(len(prompts), generator=torch.Generator().manual_seed(1))
    ours = response_logprobs(model, prompts, responses, temperature)
    assert ours.shape == (13, max(map(len, responses))) and ours.dtype == torch.float32
    (ours.sum(dim=1) * weights).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for row, prompt, response, weight in zip(ours, prompts, responses, weights):
        alone = plain_logprobs(model, prompt, response, temperature)
        torch.testing.assert_close(row[: len(response)], alone, atol=atol, rtol=0)
        assert (row[len(response) :] == 0).all()
        (alone.sum() * weight).backward()
    for mine, parameter in zip(gradients, model.parameters()):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-4, rtol=1e-4)


def test_log_probabilities_and_gradients_are_each_rows_own(untied_model, tied_model, monkeypatch):
    # Several chunks, of several rows each.
    monkeypatch.setitem(logprobs.TOKENS_PER_FORWARD, "cpu", 150)
    monkeypatch.setitem(logprobs.POSITIONS_PER_LOGITS, "cpu", 7)
    for path in (untied_model, tied_model):
        for temperature in (1.0, 0.7):
            check_against_each_row_alone(load(path), temperature, atol=2e-5)


SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)


@pytest.mark.parametrize(
    "kind, sizes",
    [
        ("gpt2", dict(n_embd=64, n_layer=2, n_head=2)),
        ("gpt_neox", SIZES),
        ("mistral", SIZES | dict(num_key_value_heads=1, sliding_window=20)),
        ("phi", SIZES),
    ],
)
def test_log_probabilities_and_gradients_are_right_for_other_architectures_too(kind, sizes):
    """Try absolute positions, another rotary layout, a sliding window and a bias of the logits."""
    torch.manual_seed(0)
    shape = AutoConfig.for_model(kind, vocab_size=257, **sizes)
    model = AutoModelForCausalLM.from_config(shape).eval()
    with torch.no_grad():
        # Far from the zeros and small numbers of a fresh model.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    check_architecture(model)
    check_against_each_row_alone(model, temperature=0.7, atol=1e-4)


def test_each_prompt_and_each_response_run_through_the_model_once(policy):
    model, seen = policy, []
    model.base_model.register_forward_pre_hook(
        lambda module, arguments, inputs: seen.append(tuple(inputs["input_ids"].shape)),
        with_kwargs=True,
    )
    prompt = np.arange(50, dtype=np.int32)
    responses = [np.arange(i, i + 9, dtype=np.int32) for i in (1, 2, 1, 3, 2)]
    found = response_logprobs(model, [prompt.copy() for _ in responses], responses, 1.0)
    # One prompt, and three different responses without their last token: nothing follows it.
    assert seen == [(1, 50), (3, 8)]
    assert torch.equal(found[:2], found[[2, 4]])
    assert not torch.allclose(found[0], found[3])


def test_logits_of_all_positions_never_exist_at_once(tied_model, monkeypatch, logits_made):
    monkeypatch.setitem(logprobs.POSITIONS_PER_LOGITS, "cpu", 16)
    model = load(tied_model)
    seen = logits_made(model)
    prompts, responses = ragged_rows(rows=20)
    response_logprobs(model, prompts, responses, 1.0).sum().backward()
    assert max(seen) == 16
    distinct = {(tuple(prompt), tuple(response)) for prompt, response in zip(prompts, responses)}
    # Response positions only: once forward, once more in the backward pass.
    assert sum(seen) == 2 * sum(len(response) for _, response in distinct)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_weight_that_is_not_finite_is_named(value, tied_model, tmp_path):
    model = load(tied_model)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"model.layers.1.mlp.up_proj.weight of .*{tmp_path}"):
        load(tmp_path)


def test_an_architecture_that_transforms_its_logits_or_keeps_no_plain_cache_is_refused(tied_model):
    model = load(tied_model)
    check_architecture(model)

    def halve(module, arguments, output) -> None:
        output.logits = output.logits * 0.5

    model.register_forward_hook(halve)
    with pytest.raises(ValueError, match="logits"):
        check_architecture(model)
    shape = AutoConfig.for_model("mamba", vocab_size=257, hidden_size=64, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(shape).eval()
    with pytest.raises(ValueError, match="MambaForCausalLM keeps no plain cache"):
        check_architecture(model)
