"""LoRA: adapters are trained, merged weights are published, saved and become the reference."""

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_model, read, steps_of, tba
from safetensors import safe_open
from test_plan import peak_bytes, saved_bytes
from test_preset_starts import make
from test_trainer import make_rows, make_trainer
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from config import Config, UserError
from models import lora, sizes
from models.logprobs import response_logprobs
from models.lora import merged
from models.policy import hold_as_multiplied, load_policy, weight_shapes
from models.sizes import Pass
from runtime.command_line import build_config
from runtime.launch import run
from runtime.planning.memory_trial import largest_micro_batch, try_largest_batch
from runtime.planning.needs import Needs
from runtime.planning.plan import show_plan
from runtime.processes.places import find_places
from tba import main

peft = pytest.importorskip("peft", reason="pip install -r requirements-lora.txt")
KINDS = ("tied", "untied", "conv1d")


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory) -> str:
    """A Qwen2 with tied embeddings, a Llama without, and GPT-2, whose layers are Conv1D."""
    directory = tmp_path_factory.mktemp("lora")
    if request.param == "conv1d":
        return make(directory, "GPT2LMHeadModel", max_position_embeddings=1024)
    return str(make_model(directory / "model", tied=request.param == "tied"))


def trained(model: str, run_dir, steps: int = 3, **settings):
    """A trainer with adapters of rank 4 that has made some steps."""
    trainer = make_trainer(model, run_dir, lora_rank=4, learning_rate=1e-2, **settings)
    for seed in range(steps):
        trainer.learner.update(make_rows(4, 3, seed))
    return trainer


def test_published_weights_are_those_that_peft_merges(model, tmp_path):
    trainer = trained(model, tmp_path)
    before = dict(load_policy(Config(model=model), torch.device("cpu")).named_parameters())
    assert trainer.publish()
    with trainer.weights.read(0) as (version, views):
        published = {name: view.clone() for name, view in views.items()}
    assert version == 3
    expected = dict(trainer.learner.adapted.merge_and_unload().named_parameters())
    assert published.keys() == expected.keys() == before.keys()
    for name, value in expected.items():
        torch.testing.assert_close(published[name], value.detach(), rtol=0, atol=1e-6)
    changed = {name for name in before if not torch.equal(published[name], before[name])}
    linear = {name for name in before if before[name].ndim == 2}
    embeddings = {
        name for name in linear if any(part in name for part in ("embed", "lm_head", "wte", "wpe"))
    }
    assert changed == linear - embeddings, "every linear layer but the head, and nothing else"


def test_the_base_never_changes_and_only_adapters_have_gradients_and_moments(model, tmp_path):
    trainer = trained(model, tmp_path, steps=0)
    frozen = {
        name: parameter.clone()
        for name, parameter in trainer.learner.policy.named_parameters()
        if "lora" not in name
    }
    trainer.learner.update(make_rows(4, 3))
    now = dict(trainer.learner.policy.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items())
    assert all("lora" in name for name in trainer.learner.trained)
    assert len(trainer.learner.optimizer.state) == len(trainer.learner.trained)
    assert trainer.learner.trained.keys() == lora.trained_shapes(trainer.config).keys()


@pytest.mark.parametrize("alpha, factor", [(None, 2.0), (6.0, 1.5)])
def test_the_gradient_is_that_of_the_whole_policy_on_its_way_to_the_adapters(
    alpha, factor, tmp_path
):
    """d loss / d A = alpha / rank B^T G, where G is the gradient of W, and likewise for B."""
    model = str(make_model(tmp_path / "model", tied=False))
    with_adapters = trained(model, tmp_path / "adapters", beta=1.0, lora_alpha=alpha).learner
    whole = make_trainer(model, tmp_path / "whole", beta=1.0).learner
    with torch.no_grad():
        for (name, own), (merged_name, value) in zip(
            whole.policy.named_parameters(), merged(with_adapters.policy)
        ):
            assert name == merged_name
            own.copy_(value)
    rows = make_rows(4, 3, seed=9)
    for learner in (with_adapters, whole):
        learner.backward(rows, beta=1.0)
    layer = with_adapters.policy.model.layers[1].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    gradient = whole.policy.model.layers[1].mlp.up_proj.weight.grad
    for own, expected in ((a.grad, factor * b.T @ gradient), (b.grad, factor * gradient @ a.T)):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5 * float(own.abs().max()))


def test_weights_of_another_version_are_scored_without_the_adapters(model, tmp_path):
    """For the mismatch with vLLM, and for rows that an earlier reference scored."""
    trainer, rows = trained(model, tmp_path), make_rows(2, 3)
    prompts, tokens = [row.prompt for row in rows], [row.tokens for row in rows]
    base = load_policy(Config(model=model), torch.device("cpu"))
    with torch.no_grad():
        expected = response_logprobs(base, prompts, tokens, 0.7)
    weights = dict(base.named_parameters())
    own = {name: value.clone() for name, value in trainer.learner.policy.named_parameters()}
    found = trainer.learner.logprobs_under(weights, rows, 0.7)
    for logprobs, row in zip(found, expected.numpy()):
        np.testing.assert_allclose(logprobs, row[: len(logprobs)], rtol=0, atol=1e-6)
    for name, value in trainer.learner.policy.named_parameters():
        assert torch.equal(value, own[name]), "it has its own weights again"


def test_a_reference_reset_takes_the_merged_policy_of_that_moment(model, tmp_path):
    trainer = trained(model, tmp_path, steps=2, reference_reset_period=2)
    expected = {name: value.clone() for name, value in merged(trainer.learner.policy)}
    trainer.sync()
    assert trainer.weights.reference_version == 2
    reference = trainer.weights.reference_tensors()
    assert all(torch.equal(reference[name], value) for name, value in expected.items())
    rows = make_rows(2, 3)
    prompts, tokens = [row.prompt for row in rows], [row.tokens for row in rows]
    with torch.no_grad():
        logprobs = response_logprobs(trainer.learner.policy, prompts, tokens, 0.7).numpy()
    trainer.learner.update(make_rows(4, 3))  # which leaves the reference as it is
    trainer.resets.renew(rows)
    for row, expected_row in zip(rows, logprobs):
        length = len(row.tokens)
        np.testing.assert_allclose(row.ref_logprobs, expected_row[:length], rtol=0, atol=1e-4)


def test_model_is_saved_merged_and_the_adapter_loads_with_peft(model, tmp_path):
    trainer = trained(model, tmp_path)
    expected = {name: value.clone() for name, value in merged(trainer.learner.policy)}
    trainer.learner.save_model(tmp_path / "model")
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    for name, value in adapted.named_parameters():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_a_checkpoint_holds_adapters_and_their_moments_alone(model, tmp_path):
    trainer = trained(model, tmp_path)
    state = dict(trainer.learner.state())
    assert all("lora" in name for name in state if name != "counters")
    trainer.save_checkpoint()
    trainer.checkpoints.wait()
    again = trained(model, tmp_path / "again", steps=0)
    again.state.load(str(tmp_path / "checkpoints" / "step-00000003"))
    for learner in (trainer.learner, again.learner):
        learner.update(make_rows(4, 3, seed=5))
    pairs = zip(merged(trainer.learner.policy), merged(again.learner.policy))
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)


def test_buffers_of_the_model_are_saved_too(tmp_path):
    learner = trained(str(make_model(tmp_path / "model", tied=True)), tmp_path / "run").learner
    learner.policy.register_buffer("scale", torch.tensor([0.5]))
    learner.save_model(tmp_path / "run" / "model")
    with safe_open(tmp_path / "run" / "model" / "model.safetensors", "pt") as file:
        assert file.get_tensor("scale").item() == 0.5


def test_the_largest_batch_trial_gives_the_base_no_gradient(tmp_path):
    model = str(make_model(tmp_path / "model", tied=True))
    learner = trained(model, tmp_path / "run", steps=0).learner
    seen = []
    backward = learner.backward

    def watched(rows, beta):
        seen.append({name for name, p in learner.policy.named_parameters() if p.grad is not None})
        return backward(rows, beta)

    learner.backward = watched
    config = replace(learner.config, max_prompt_tokens=20, max_response_tokens=20)
    try_largest_batch(config, learner, print)
    assert seen == [set(learner.trained)]


@pytest.mark.runs
def test_a_run_with_adapters_learns_and_its_model_is_the_base_with_the_adapter(tmp_path):
    result = tba("arithmetic", "--steps", 300, "--lora_rank", 8, "--output_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert "LoRA of rank 8: 0.02 M parameters are trained" in result.stdout
    lines = read(tmp_path / "run", "metrics.jsonl")
    base = next(line["accuracy"] for line in lines if "accuracy" in line)
    assert lines[-1]["final_accuracy"] > base + 0.2
    assert all(line["mismatch"] < 1e-4 for line in steps_of(tmp_path / "run"))
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    began = AutoModelForCausalLM.from_pretrained(settings["model"])
    adapted = peft.PeftModel.from_pretrained(began, tmp_path / "run" / "adapter")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    expected = dict(adapted.merge_and_unload().named_parameters())
    for name, value in saved.named_parameters():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("masters", ["float32", "bfloat16"])
def test_in_bf16_the_base_takes_half_and_masters_are_the_adapters(masters, tmp_path):
    model = str(make_model(tmp_path / "model", tied=False))
    settings = dict(dtype="bfloat16", master_dtype=masters)
    learner = trained(model, tmp_path / "run", **settings).learner
    layer = learner.policy.model.layers[0].mlp.up_proj
    assert layer.base_layer.weight.dtype == torch.bfloat16
    assert {p.dtype for p in learner.trained.values()} == {getattr(torch, masters)}
    learner.save_model(tmp_path / "run" / "model")
    with safe_open(tmp_path / "run" / "model" / "model.safetensors", "pt") as file:
        names = list(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {getattr(torch, masters)}
    assert set(names) == weight_shapes(learner.config).keys()


@pytest.mark.runs
def test_in_bf16_part_of_a_small_update_is_lost_on_its_way_to_the_searchers(
    tmp_path, record_property
):
    """W + alpha / rank B A is rounded as a whole, which the trainer's own policy is not."""
    model = str(make_model(tmp_path / "model", tied=False))
    learner = make_trainer(
        model, tmp_path / "run", lora_rank=32, learning_rate=1e-5, dtype="bfloat16"
    ).learner
    layer, rows = learner.policy.model.layers[0].mlp.up_proj, make_rows(4, 3)
    inputs = [row.prompt for row in rows], [row.tokens for row in rows], 0.7, torch.bfloat16
    kept = {}
    for step in range(1, 201):
        learner.update(make_rows(4, 3, seed=step))
        if step in (5, 200):
            base, update = layer.base_layer.weight.float(), layer.get_delta_weight("default")
            arrived = (base + update).to(torch.bfloat16) - base
            kept[step] = round(float((arrived * update).sum() / update.square().sum()), 2)
    published = {name: value.to(torch.bfloat16) for name, value in merged(learner.policy)}
    found = np.concatenate(learner.logprobs_under(published, rows))
    with torch.no_grad():
        padded = response_logprobs(learner.policy, *inputs).numpy()
    own = np.concatenate([logprobs[: len(row.tokens)] for logprobs, row in zip(padded, rows)])
    apart = float(np.abs(found - own).mean())
    record_property("share of the update that is published, by step", kept)
    record_property("nats a token between what trains and what samples", round(apart, 4))
    assert kept[5] < kept[200] <= 1.1
    assert 0 < apart < 0.1


def test_two_passes_of_low_memory_give_the_same_adapters(tmp_path):
    model = str(make_model(tmp_path / "model", tied=True))
    one, two = (
        trained(model, tmp_path / low, low_memory=low).learner.trained for low in ("off", "on")
    )
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_plan_counts_what_adapters_keep_and_no_gradient_of_the_base(
    dtype, tmp_path, record_property
):
    architecture = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
    )
    policy = AutoModelForCausalLM.from_config(architecture).eval()
    architecture.save_pretrained(tmp_path)
    config = Config(
        model=str(tmp_path),
        lora_rank=8,
        dtype=str(dtype).removeprefix("torch."),
        max_prompt_tokens=70,
        max_response_tokens=50,
        responses_per_query=5,
    )
    hold_as_multiplied(policy, dtype)
    lora.add_adapters(policy, config)
    rows = largest_micro_batch(config, 1000)
    inputs = [row.prompt for row in rows], [row.tokens for row in rows], 1.0, dtype
    counted = sizes.pass_bytes(config, [Pass(5, 1, *config.longest_row)], dtype, has_gradient=True)
    assert counted.is_counted
    kept = counted.kept / saved_bytes(policy, *inputs)
    places = find_places(config, [])
    needs = Needs(config, places, {})
    expected = counted.kept + max(needs.head(5 * 50, passes=1), counted.beyond)
    peak = expected / peak_bytes(policy, *inputs)
    record_property("counted / measured, kept and at the peak", (round(kept, 3), round(peak, 3)))
    assert 0.85 < kept < 1.15 and 0.9 < peak < 1.35
    numbers = sum(parameter.numel() for parameter in lora.trained_parameters(policy).values())
    parts = dict(needs.trainer())
    assert parts["gradients"] == 4 * numbers
    assert parts["AdamW's two moments"] == 8 * numbers
    base = sum(p.nbytes for p in policy.parameters() if not p.requires_grad)
    assert parts["base policy"] == base
    assert needs.checkpoint == 12 * numbers
    (written,) = needs.loading_or_written()
    assert written.bytes == 12 * numbers + needs.masters, "and model/, merged"
    assert needs.head(100, passes=1) < Needs(replace(config, lora_rank=0), places, {}).head(100, 1)
    short = Needs(replace(config, max_response_tokens=1, max_prompt_tokens=1), places, {})
    assert "weights of an earlier version, beyond that" in dict(short.trainer())


def test_what_cannot_be_had_is_one_line(tmp_path, monkeypatch):
    model = str(make_model(tmp_path / "model", tied=True))
    config = Config(model=model, lora_rank=8)
    with monkeypatch.context() as patch:
        patch.setattr(lora, "find_spec", lambda name: None)
        for start in (run, show_plan):  # before data or models are looked for
            with pytest.raises(UserError, match=r"^--lora_rank 8 needs peft: pip install -r req"):
                start(replace(config, task="no such task"))
    assert lora.trained_shapes(config).keys() != weight_shapes(config).keys()
    no_linear = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.LayerNorm(4))
    with pytest.raises(UserError, match="a Sequential, has no linear layer besides its head"):
        lora.add_adapters(no_linear, config)
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    experts = Qwen3MoeConfig(**shape, num_experts=4, num_key_value_heads=2, head_dim=16)
    with pytest.raises(UserError, match="has experts, whose adapters could not be merged"):
        lora.add_adapters(AutoModelForCausalLM.from_config(experts), config)


def test_a_run_with_adapters_is_resumed_with_their_rank(tmp_path):
    settings = dataclasses.asdict(Config(lora_rank=4))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert build_config(["--resume", str(tmp_path)]).lora_rank == 4
    with pytest.raises(UserError, match="--lora_rank is 8, but the run to resume has 4"):
        build_config(["--resume", str(tmp_path), "--lora_rank", "8"])
    again = ["--config", str(tmp_path / "config.json"), "--lora_rank", "0"]
    assert build_config(again).lora_rank == 0


def test_alpha_without_a_rank_is_one_line(capsys):
    assert main(["arithmetic", "--lora_alpha", "16"]) == 2
    assert capsys.readouterr().err.strip() == (
        "error: --lora_alpha is 16.0, but --lora_rank 0 trains all weights: "
        "give a rank, or --lora_alpha None"
    )
