"""The log-probabilities of responses, and the models that are refused."""

import numpy as np
import pytest
import torch
import torch._inductor.config
from transformers import AutoConfig, AutoModelForCausalLM

from config import Config, UserError
from models import logprobs
from models.architecture import weight_shapes
from models.attention import Padded
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
    with torch.no_grad():
        without_gradient = response_logprobs(model, prompts, responses, temperature)
    ours = response_logprobs(model, prompts, responses, temperature)
    torch.testing.assert_close(without_gradient, ours, atol=atol, rtol=0)
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
    # Several passes without a gradient, of several rows each.
    monkeypatch.setitem(logprobs.TOKENS_PER_FORWARD, "cpu", 150)
    monkeypatch.setitem(logprobs.POSITIONS_PER_LOGITS, "cpu", 7)
    for path in (untied_model, tied_model):
        for temperature in (1.0, 0.7):
            check_against_each_row_alone(load(path), temperature, atol=2e-5)


SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)


def random_model(kind: str, **sizes) -> torch.nn.Module:
    """Make a model whose parameters are far from the zeros and small numbers of a fresh one."""
    torch.manual_seed(0)
    shape = AutoConfig.for_model(kind, vocab_size=257, **sizes)
    model = AutoModelForCausalLM.from_config(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


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
    model = random_model(kind, **sizes)
    check_architecture(model)
    check_against_each_row_alone(model, temperature=0.7, atol=1e-4)


def test_each_prompt_and_each_response_run_through_the_model_once_and_nothing_is_padded(policy):
    model, seen = policy, []
    model.base_model.register_forward_pre_hook(
        lambda module, arguments, inputs: seen.append(tuple(inputs["input_ids"].shape)),
        with_kwargs=True,
    )
    prompt, other = np.arange(50, dtype=np.int32), np.arange(9, dtype=np.int32)
    responses = [np.arange(i, i + 9, dtype=np.int32) for i in (1, 2, 1, 3, 2)]
    prompts, short = [prompt.copy() for _ in responses], np.arange(2, dtype=np.int32)
    found = response_logprobs(model, [*prompts, other], [*responses, short], 1.0)
    # Of three different responses and a short one all but the last token: nothing follows it.
    assert seen == [(1, 50 + 3 * 8 + 9 + 1)]
    assert torch.equal(found[:2], found[[2, 4]])
    assert not torch.allclose(found[0], found[3])


def test_logits_of_all_positions_never_exist_at_once(tied_model, monkeypatch, logits_made):
    monkeypatch.setitem(logprobs.POSITIONS_PER_LOGITS, "cpu", 16)
    model = load(tied_model)
    model.get_output_embeddings().forward = None  # it would make all of them
    logits_made.clear()
    prompts, responses = ragged_rows(rows=20)
    response_logprobs(model, prompts, responses, 1.0).sum().backward()
    assert max(logits_made) == 16
    distinct = {(tuple(prompt), tuple(response)) for prompt, response in zip(prompts, responses)}
    # Response positions only: once forward, once more in the backward pass.
    assert sum(logits_made) == 2 * sum(len(response) for _, response in distinct)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_weight_that_is_not_finite_is_named(value, tied_model, tmp_path):
    model = load(tied_model)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"model.layers.1.mlp.up_proj.weight of .*{tmp_path}"):
        load(tmp_path)


def test_an_architecture_that_transforms_its_logits_is_refused(tied_model):
    model = load(tied_model)
    check_architecture(model)

    def halve(module, arguments, output) -> None:
        output.logits = output.logits * 0.5

    model.register_forward_hook(halve)
    with pytest.raises(ValueError, match="logits"):
        check_architecture(model)


LAYERS = dict(num_hidden_layers=2, num_attention_heads=2)
GPT, ITS_OWN = dict(n_embd=64, n_layer=2, n_head=2), "attends in a way of its own"
PATTERN = dict(num_layers=2, num_heads=2, attention_types=[[["global"], 2]])
REFUSED = {
    "gptj": (GPT, ITS_OWN),
    "gpt_neo": (dict(hidden_size=64) | PATTERN, ITS_OWN),
    "codegen": (GPT, ITS_OWN),
    "bloom": (dict(hidden_size=64, n_layer=2, n_head=2), ITS_OWN),
    "falcon": (dict(hidden_size=64) | LAYERS, ITS_OWN),
    "mpt": (dict(d_model=64, n_layers=2, n_heads=2), ITS_OWN),
    "mamba": (dict(hidden_size=64, num_hidden_layers=2), ITS_OWN),
    "lfm2": (SIZES | dict(layer_types=["conv", "full_attention"]), ITS_OWN),
    "gemma2": (SIZES, "wants softcap"),
    "gpt_oss": (SIZES | dict(num_local_experts=4), "wants s_aux"),
    "stablelm": (SIZES, "wants a mask of its own"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_with_an_attention_of_its_own_is_refused_before_it_is_loaded(
    kind, tmp_path
):
    sizes, problem = REFUSED[kind]
    AutoConfig.for_model(kind, vocab_size=257, **sizes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{problem}.*use another architecture"):
        weight_shapes(Config(model=str(tmp_path)))


def test_a_window_that_attention_does_not_keep_to_is_found_on_a_short_row(monkeypatch):
    model = random_model("mistral", **SIZES, num_key_value_heads=1, sliding_window=4096)
    check_architecture(model)
    whole = Padded.attend
    monkeypatch.setattr(Padded, "attend", lambda *given: whole(*given[:-1], None))
    with pytest.raises(ValueError, match="attends in a way of its own"):
        check_architecture(model)
    assert model.config.sliding_window == 4096


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """It begins anew, and is off again afterwards."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._dynamo.reset()


@pytest.mark.runs
def test_compiled_layers_compute_what_others_do(untied_model, compiler):
    rows, found = ragged_rows(), []
    torch._dynamo.utils.counters.clear()
    for compile in (False, True):
        config = Config(model=str(untied_model), compile=compile)
        model = load_policy(config, torch.device("cpu"))
        with torch.no_grad():
            response_logprobs(model, *rows, 0.7)
        logprobs = response_logprobs(model, *rows, 0.7)
        logprobs.sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((logprobs.detach(), gradient))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 3, "the trial's; with a gradient, without"
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=0)
    assert (found[0][1] - found[1][1]).norm() / found[0][1].norm() < 1e-4


@pytest.mark.runs
def test_a_compiler_that_fails_costs_a_line(untied_model, compiler, monkeypatch, caplog):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/bin/false"))
    model = load_policy(Config(model=str(untied_model), compile=True), torch.device("cpu"))
    (line,) = [each.getMessage() for each in caplog.records if "--compile" in each.getMessage()]
    assert "No working C++ compiler" in line and "\n" not in line
    response_logprobs(model, *ragged_rows(), 0.7).sum().backward()
