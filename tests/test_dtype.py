"""bfloat16 on a CPU takes the path of a GPU: autocast over fp32 masters, bf16 slots, bf16 vLLM.

And bf16 masters, as the official GSM8K run has them.
"""

import numpy as np
import pytest
import torch
from conftest import flags, read, steps_of, tba
from test_engine import changed, logprobs_of, mismatch, sample_group, take_over
from test_trainer import gradient, make_rows

from config import Config
from launch.checks import fetch
from learner import Learner
from models.architecture import weight_shapes
from models.attention import lay_out
from models.device import onednn_multiplies
from models.engine import Engine
from models.logprobs import response_logprobs
from models.policy import cast_linear_layers, load_policy
from tasks import load_task
from weights import SharedWeights

BF16 = dict(dtype="bfloat16")
# Mean |difference| of a token's log-probability between vLLM and the trainer, in nats, that bf16
# brings by itself: 0.03 to 0.06 on these random models of large logits. Weights are rounded alike
# on both sides, activations at other places.
NORMAL = 0.1


@pytest.fixture(params=["untied_model", "tied_model"])
def path(request) -> str:
    return str(request.getfixturevalue(request.param))


def test_published_bf16_weights_are_what_vllm_samples_from(path, record_property):
    config = Config(model=path, max_prompt_tokens=100, max_response_tokens=100, **BF16)
    model, engine = load_policy(config, torch.device("cpu")), Engine(config)
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "masters"
    weights = SharedWeights(weight_shapes(config), torch.bfloat16, readers=1)
    sampling = dict(n=8, temperature=0.7, max_tokens=40, seed=1)
    sizes = []
    for version in range(3):
        if version:
            take_over(model, changed(model, version))
            assert weights.publish(version, model.named_parameters())
            with weights.read(0) as (_, tensors):
                assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
                engine.load(version, tensors.items())
        group = sample_group(engine, list(range(50, 70)), **sampling)
        sizes.append(mismatch(group, logprobs_of(group, model, torch.bfloat16)))
        assert 0 < sizes[-1] < NORMAL, f"version {version}"
    record_property("mismatch in bf16, nats", [round(size, 4) for size in sizes])
    take_over(model, changed(model, 9))
    difference = mismatch(group, logprobs_of(group, model, torch.bfloat16))
    assert difference > 3 * NORMAL, "older weights would show"


def test_a_run_in_bf16_says_that_it_is_slow_where_the_processor_does_not_multiply_in_it(
    untied_model, capsys
):
    for settings, is_slow in ((BF16, not onednn_multiplies(torch.bfloat16)), ({}, False)):
        fetch(Config(model=str(untied_model), **settings), load_task("arithmetic"), None)
        assert ("bfloat16 is slow here" in capsys.readouterr().err) == is_slow


def make_learner(model, **settings) -> Learner:
    return Learner(Config(model=str(model), responses_per_query=3, **settings), print)


@pytest.mark.parametrize("masters", ["float32", "bfloat16"])
def test_the_gradient_in_bf16_points_where_that_in_fp32_does(masters, path):
    rows = make_rows(queries=7, per_query=3)
    expected = gradient(make_learner(path), rows)
    learner = make_learner(path, master_dtype=masters, **BF16)
    cosine = torch.cosine_similarity(gradient(learner, rows).float(), expected, dim=0).item()
    assert 0.99 < cosine < 1 - 1e-7, "bf16 it was"


def test_the_reference_policy_of_half_the_size_gives_the_same_numbers(path):
    """Its linear layers are held in bf16, where the trainer's policy is cast to it each time."""
    model = load_policy(Config(model=path), torch.device("cpu"))
    rows = make_rows(queries=7, per_query=3)
    prompts, tokens = [row.prompt for row in rows], [row.tokens["token"] for row in rows]
    with torch.no_grad():
        cast = response_logprobs(model, prompts, tokens, 0.7, torch.bfloat16)
        before = sum(p.nbytes for p in model.parameters())
        cast_linear_layers(model, torch.bfloat16)
        held = response_logprobs(model, prompts, tokens, 0.7, torch.bfloat16)
    assert torch.equal(held, cast)
    assert sum(p.nbytes for p in model.parameters()) < 0.8 * before


def test_logits_are_fp32_also_where_weights_and_states_are_bf16(policy, monkeypatch):
    """Logits of 16 to 64 that were rounded to bf16 would be 0.125 to 0.25 apart."""
    torch.set_float32_matmul_precision("highest")  # vLLM does it, in a searcher
    asked, matmul, plain = [], torch.backends.mkldnn.matmul, torch.Tensor.float
    noted = lambda x: (asked.append(matmul.fp32_precision), plain(x))[1]  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "float", noted)
    prompt = np.random.default_rng(0).integers(0, 256, size=10)
    same_state, last = [prompt] * 200, [np.array([token]) for token in range(200)]
    with torch.no_grad():
        policy.get_output_embeddings().weight.mul_(100)
        row = response_logprobs(policy, same_state, last, 1.0, torch.bfloat16)[:, 0]
    assert "bf16" in asked and matmul.fp32_precision == "ieee", "for these products alone"
    assert row.min() < -64
    # Rounded ones would be multiples of 1/8 less a normalizer of their row: few distinct fractions.
    fractions = (row - row[0]).remainder(1 / 16)
    assert len(fractions.unique()) > 150


def test_padded_segments_of_a_model_in_bf16_attend_in_fp32():
    """Under autocast too, which would take a layer's bf16 for all of it."""
    row = lay_out([np.arange(4)] * 2, [np.arange(5), np.arange(3)], torch.device("cpu"), False)
    q, k, v = (torch.randn(len(row.ids), 2, 8).bfloat16() for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        found = row.segments.attend(q, k, v, scale=None, window=3)
    whole = row.segments.attend(q.float(), k.float(), v.float(), scale=None, window=3)
    assert torch.equal(found, whole.bfloat16())


def test_with_bf16_masters_a_rate_of_1e_5_moves_only_small_weights(tied_model):
    rows = make_rows(queries=7, per_query=3)
    moved, sizes = {}, {}
    for masters in ("float32", "bfloat16"):
        learner = make_learner(tied_model, master_dtype=masters, learning_rate=1e-5, **BF16)
        assert {p.dtype for p in learner.policy.parameters()} == {getattr(torch, masters)}
        before = torch.cat([p.detach().flatten().clone() for p in learner.policy.parameters()])
        for _ in range(3):
            learner.update(rows)
        after = torch.cat([p.detach().flatten() for p in learner.policy.parameters()])
        moments = [state["exp_avg_sq"] for state in learner.optimizer.state.values()]
        assert {moment.dtype for moment in moments} == {getattr(torch, masters)}
        moved[masters], sizes[masters] = (before != after).numpy(), before.abs().float().numpy()
    assert moved["float32"].mean() > 0.9 and moved["bfloat16"].mean() < 0.2
    # Half a unit in the last place of a weight w in bf16 is at least |w| / 512: three steps of 1e-5
    # move nothing from 512 x 3e-5 on.
    assert sizes["bfloat16"][moved["bfloat16"]].max() < 512 * 3e-5


@pytest.mark.runs
@pytest.mark.parametrize("masters, rate", [("float32", 5e-4), ("bfloat16", 1e-3)])
@pytest.mark.long
def test_half_a_demo_in_bf16_ends_with_095_right(masters, rate, tmp_path, record_property):
    run_dir = tmp_path / "run"
    own = flags(**BF16, steps=1000, master_dtype=masters, learning_rate=rate)
    tba("arithmetic", *own, "--output_dir", run_dir)
    final = read(run_dir, "metrics.jsonl")[-1]["final_accuracy"]
    record_property(f"final accuracy in bf16 with {masters} masters", final)
    assert final >= 0.95
    assert 1e-6 < max(line["mismatch"] for line in steps_of(run_dir)) < NORMAL
