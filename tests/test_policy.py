import numpy as np
import torch

import policy
from config import Config
from policy import load_policy, load_tokenizer, response_logprobs, weight_shapes


def ragged_rows(seed: int = 0, rows: int = 13):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 256, size=rng.integers(1, 40)).astype(np.int32) for _ in range(rows)]
    responses = [rng.integers(0, 256, size=rng.integers(1, 30)).astype(np.int32) for _ in range(rows)]
    return prompts, responses


def plain_logprobs(model, prompt, response, temperature):
    """The definition: one row, no padding, the softmax of all logits."""
    ids = torch.tensor(np.concatenate([prompt, response])[None], dtype=torch.long)
    logprobs = (model(input_ids=ids).logits / temperature).log_softmax(-1)[0]
    return torch.stack([logprobs[len(prompt) + t - 1, token] for t, token in enumerate(response.tolist())])


def test_log_probabilities_equal_those_of_each_row_alone(untied_model, tied_model, monkeypatch):
    monkeypatch.setattr(policy, "TOKENS_PER_FORWARD", 150)  # several chunks, of several rows each
    monkeypatch.setitem(policy.POSITIONS_PER_LOGITS, "cpu", 7)
    prompts, responses = ragged_rows()
    for path in (untied_model, tied_model):
        model = load_policy(Config(model=str(path)), torch.device("cpu"))
        with torch.no_grad():
            ours = response_logprobs(model, prompts, responses, temperature=0.7)
            assert ours.shape == (13, max(map(len, responses))) and ours.dtype == torch.float32
            for row, prompt, response in zip(ours, prompts, responses):
                torch.testing.assert_close(row[: len(response)], plain_logprobs(model, prompt, response, 0.7), atol=2e-5, rtol=0)
                assert (row[len(response) :] == 0).all()


def test_gradients_equal_those_of_each_row_alone(tied_model, monkeypatch):
    monkeypatch.setattr(policy, "TOKENS_PER_FORWARD", 150)
    monkeypatch.setitem(policy.POSITIONS_PER_LOGITS, "cpu", 7)
    prompts, responses = ragged_rows()
    model = load_policy(Config(model=str(tied_model)), torch.device("cpu"))
    weights = np.random.default_rng(1).normal(size=len(prompts))
    (response_logprobs(model, prompts, responses, 1.0).sum(1) * torch.tensor(weights, dtype=torch.float32)).sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for prompt, response, weight in zip(prompts, responses, weights):
        (plain_logprobs(model, prompt, response, 1.0).sum() * weight).backward()
    for mine, parameter in zip(ours, model.parameters()):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-4, rtol=1e-4)


def test_logits_of_all_positions_never_exist_at_once(tied_model, monkeypatch):
    monkeypatch.setitem(policy.POSITIONS_PER_LOGITS, "cpu", 16)
    model = load_policy(Config(model=str(tied_model)), torch.device("cpu"))
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output.shape[0]))
    prompts, responses = ragged_rows(rows=20)
    response_logprobs(model, prompts, responses, 1.0).sum().backward()
    assert max(seen) == 16
    assert sum(seen) == 2 * sum(map(len, responses)), "response positions only: once forward, once more in the backward pass"


def test_weight_names_and_shapes_are_known_without_loading_the_model(untied_model, tied_model):
    for path in (untied_model, tied_model):
        config = Config(model=str(path))
        loaded = load_policy(config, torch.device("cpu"))
        assert weight_shapes(config) == {name: tuple(p.shape) for name, p in loaded.named_parameters()}
    assert "lm_head.weight" not in weight_shapes(Config(model=str(tied_model)))


def test_an_architecture_that_transforms_its_logits_is_refused(tied_model):
    model = load_policy(Config(model=str(tied_model)), torch.device("cpu"))
    policy.check_head(model)
    forward = model.forward

    def scaled(**inputs):
        output = forward(**inputs)
        output.logits = output.logits * 0.5
        return output

    model.forward = scaled
    try:
        policy.check_head(model)
    except ValueError as error:
        assert "logits" in str(error)
    else:
        raise AssertionError("a model with scaled logits was accepted")


def test_the_tokenizer_of_the_tests_pads_with_end_of_sequence(untied_model):
    tokenizer = load_tokenizer(Config(model=str(untied_model)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id, "the tests of the mask rest on it"
