"""LoRA: adapters are trained, merged weights are published, saved and become the reference."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import flags, make_group, read, steps_of, tba
from safetensors.torch import load_file
from test_plan import peak_bytes, saved_bytes
from test_preset_starts import make
from test_trainer import make_rows, make_trainer
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from config import Config, UserError
from extras import lora
from extras.lockstep import LockstepTrainer
from launch.checks import check_for_plan
from launch.launcher import launch
from launch.places import find_places
from launch.planning.plan import Plan
from models.architecture import trained_shapes, weight_shapes
from models.logprobs import response_logprobs
from models.policy import cast_linear_layers, load_policy, trained_parameters
from runtime.memory_trial import largest_micro_batch, try_largest_batch

peft = pytest.importorskip("peft", reason="pip install -r requirements/lora.txt")


@pytest.fixture(scope="module", params=["tied_model", "untied_model", "conv1d"])
def model(request, tmp_path_factory) -> str:
    """A Qwen2 with tied embeddings, a Llama without, and GPT-2, whose layers are Conv1D."""
    if request.param == "conv1d":
        directory = tmp_path_factory.mktemp("lora")
        return make(directory, "GPT2LMHeadModel", max_position_embeddings=1024)
    return str(request.getfixturevalue(request.param))


def trained(model, run_dir, steps: int = 3, **settings):
    """A trainer with adapters of rank 4 that has made some steps."""
    trainer = make_trainer(model, run_dir, lora_rank=4, learning_rate=1e-2, **settings)
    for seed in range(steps):
        trainer.learner.update(make_rows(4, 3, seed))
    return trainer


def scored(policy, rows, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The log-probabilities of all tokens of these rows, at temperature 0.7."""
    prompts, tokens = [row.prompt for row in rows], [row.tokens["token"] for row in rows]
    with torch.no_grad():
        padded = response_logprobs(policy, prompts, tokens, 0.7, dtype).numpy()
    return np.concatenate([logprobs[: len(row.tokens)] for logprobs, row in zip(padded, rows)])


def test_what_is_published_and_saved_is_what_peft_merges(model, tmp_path):
    trainer = trained(model, tmp_path)
    before = dict(load_policy(Config(model=model), torch.device("cpu")).named_parameters())
    assert trainer.publish()
    trainer.learner.save_model(tmp_path / "model")
    load, base = AutoModelForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained(model)
    saved, report = load(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    with trainer.weights.read(0) as (version, published):
        assert version == 3 and published.keys() == before.keys()
        torch.testing.assert_close(published, dict(saved.named_parameters()), rtol=0, atol=0)
        expected = dict(adapted.named_parameters())
        torch.testing.assert_close(published, expected, rtol=0, atol=1e-6)
        changed = {name for name in before if not torch.equal(published[name], before[name])}
    linear = {name for name in before if before[name].ndim == 2}
    embeddings = {name for name in linear if re.search("embed|lm_head|wte|wpe", name)}
    assert changed == linear - embeddings, "every linear layer but the head, and nothing else"


def test_the_base_never_changes_and_only_adapters_have_gradients_and_moments(model, tmp_path):
    trainer = trained(model, tmp_path, steps=0)
    now = dict(trainer.learner.policy.named_parameters())
    frozen = {name: parameter.clone() for name, parameter in now.items() if "lora" not in name}
    trainer.learner.update(make_rows(4, 3))
    torch.testing.assert_close({name: now[name] for name in frozen}, frozen, rtol=0, atol=0)
    assert all("lora" in name for name in trainer.learner.trained)
    assert len(trainer.learner.optimizer.state) == len(trainer.learner.trained)
    assert trainer.learner.trained.keys() == trained_shapes(trainer.config).keys()


@pytest.mark.parametrize("alpha, factor", [(None, 2.0), (6.0, 1.5)])
def test_adapters_get_the_gradient_of_the_whole_policy(alpha, factor, untied_model, tmp_path):
    """d loss / d A = alpha / rank B^T G, where G is the gradient of W, and likewise for B."""
    settings = dict(beta=1.0, lora_alpha=alpha)
    with_adapters = trained(untied_model, tmp_path / "adapters", **settings).learner
    whole = make_trainer(untied_model, tmp_path / "whole", beta=1.0).learner
    whole.policy.load_state_dict(dict(with_adapters.weights()))
    rows = make_rows(4, 3, seed=9)
    for learner in (with_adapters, whole):
        learner.backward(rows)
    layer = with_adapters.policy.model.layers[1].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    gradient = whole.policy.model.layers[1].mlp.up_proj.weight.grad
    for own, expected in ((a.grad, factor * b.T @ gradient), (b.grad, factor * gradient @ a.T)):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5 * float(own.abs().max()))


def test_weights_of_another_version_are_scored_without_the_adapters(model, tmp_path):
    """For the mismatch with vLLM, and for rows that an earlier reference scored."""
    learner, rows = trained(model, tmp_path).learner, make_rows(2, 3)
    base = load_policy(Config(model=model), torch.device("cpu"))
    policy = dict(learner.policy.named_parameters())
    own = {name: value.clone() for name, value in policy.items()}
    found = np.concatenate(learner.logprobs_under(dict(base.named_parameters()), rows, 0.7))
    np.testing.assert_allclose(found, scored(base, rows), rtol=0, atol=1e-6)
    torch.testing.assert_close(policy, own, rtol=0, atol=0)  # it has its own weights again


def test_a_reference_reset_takes_the_merged_policy_of_that_moment(model, tmp_path):
    resets, group = dict(reference_reset_period=2), make_group(0, 0, [3, 9], range(12))
    trainer = trained(model, tmp_path, steps=2, kind=LockstepTrainer, **resets)
    expected = {name: value.clone() for name, value in trainer.learner.weights()}
    trainer.publish()
    reference = trainer.weights.reference.held()[2]
    torch.testing.assert_close(reference, expected, rtol=0, atol=0)
    logprobs = scored(trainer.learner.policy, group.responses())
    trainer.learner.update(make_rows(4, 3))  # which leaves the reference as it is
    trainer.renew([group])
    np.testing.assert_allclose(group.tokens["ref_logprob"], logprobs, rtol=0, atol=1e-4)


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
    resumed, expected = (dict(one.learner.weights()) for one in (again, trainer))
    torch.testing.assert_close(resumed, expected, rtol=0, atol=0)


def test_the_largest_batch_trial_gives_the_base_no_gradient(tied_model, tmp_path):
    learner, seen = trained(tied_model, tmp_path, steps=0).learner, []

    def backward(rows) -> None:
        named = learner.policy.named_parameters()
        seen.append({name for name, parameter in named if parameter.grad is not None})

    learner.backward = backward
    try_largest_batch(learner.config, learner, print)
    assert seen == [set(learner.trained)] * 2, "a small pass for the clock, and the largest"


@pytest.mark.runs
def test_a_run_with_adapters_learns_and_samples_from_what_it_has_learnt(tmp_path):
    run_dir = tmp_path / "run"
    result = tba("arithmetic", *flags(steps=300, lora_rank=8, output_dir=run_dir))
    assert "LoRA of rank 8: 0.02 M parameters are trained" in result.stdout
    lines = read(run_dir, "metrics.jsonl")
    base = next(line["accuracy"] for line in lines if "accuracy" in line)
    assert lines[-1]["final_accuracy"] > base + 0.2
    assert all(line["mismatch"] < 1e-4 for line in steps_of(run_dir))


@pytest.mark.parametrize("masters", ["float32", "bfloat16"])
def test_in_bf16_the_base_takes_half_and_the_saved_model_is_whole(masters, untied_model, tmp_path):
    settings = dict(dtype="bfloat16", master_dtype=masters)
    learner = trained(untied_model, tmp_path, **settings).learner
    layer = learner.policy.model.layers[0].mlp.up_proj
    assert layer.base_layer.weight.dtype == torch.bfloat16
    assert {p.dtype for p in learner.trained.values()} == {getattr(torch, masters)}
    learner.policy.register_buffer("scale", torch.tensor([0.5]))
    learner.save_model(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert saved.pop("scale").item() == 0.5, "buffers are saved too"
    assert {tensor.dtype for tensor in saved.values()} == {getattr(torch, masters)}
    assert saved.keys() == weight_shapes(learner.config).keys()


@pytest.mark.runs
def test_in_bf16_part_of_a_small_update_is_lost_on_its_way_to_the_searchers(
    untied_model, tmp_path, record_property
):
    """W + alpha / rank B A is rounded as a whole, which the trainer's own policy is not."""
    settings = dict(lora_rank=32, learning_rate=1e-5, dtype="bfloat16")
    learner = make_trainer(untied_model, tmp_path, **settings).learner
    layer, rows = learner.policy.model.layers[0].mlp.up_proj, make_rows(4, 3)
    kept = {}
    for step in range(1, 201):
        learner.update(make_rows(4, 3, seed=step))
        if step in (5, 200):
            base, update = layer.base_layer.weight.float(), layer.get_delta_weight("default")
            arrived = (base + update).to(torch.bfloat16) - base
            kept[step] = round(float((arrived * update).sum() / update.square().sum()), 2)
    published = {name: value.to(torch.bfloat16) for name, value in learner.weights()}
    found = np.concatenate(learner.logprobs_under(published, rows))
    apart = float(np.abs(found - scored(learner.policy, rows, torch.bfloat16)).mean())
    record_property("share of the update that is published, by step", kept)
    record_property("nats a token between what trains and what samples", round(apart, 4))
    assert kept[5] < kept[200] <= 1.1
    assert 0 < apart < 0.1


def test_two_passes_of_low_memory_give_the_same_adapters(tied_model, tmp_path):
    one, two = (trained(tied_model, tmp_path / low, low_memory=low) for low in ("off", "on"))
    torch.testing.assert_close(two.learner.trained, one.learner.trained, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_counts_what_adapters_keep_and_no_gradient_of_the_base(dtype, tmp_path):
    shape = dict(hidden_size=256, intermediate_size=768, vocab_size=1000)
    architecture = LlamaConfig(num_hidden_layers=6, num_attention_heads=4, **shape)
    policy = AutoModelForCausalLM.from_config(architecture).eval()
    architecture.save_pretrained(tmp_path)
    batch = dict(responses_per_query=5, max_prompt_tokens=70, max_response_tokens=50)
    config = Config(model=str(tmp_path), lora_rank=8, dtype=dtype, **batch)
    dtype = getattr(torch, dtype)
    cast_linear_layers(policy, dtype)
    lora.add_adapters(policy, config)
    rows = largest_micro_batch(config, 1000)
    inputs = [row.prompt for row in rows], [row.tokens["token"] for row in rows]
    places = find_places(config, [])
    plan = Plan(config, places, {})
    counted = plan.policy.count(inputs, is_trained=True)
    assert counted.is_counted
    assert 0.85 < counted.kept / saved_bytes(policy, *inputs, 1.0, dtype) < 1.15
    peak = peak_bytes(policy, *inputs, 1.0, dtype)
    assert 0.9 < (counted.kept + counted.beyond) / peak < 1.35

    numbers = sum(parameter.numel() for parameter in trained_parameters(policy).values())
    parts, ((*_, written),) = dict(plan.trainer()), plan.loaded_or_written()
    assert parts["base policy"] == sum(p.nbytes for p in policy.parameters() if not p.requires_grad)
    assert (parts["gradients"], parts["AdamW's two moments"]) == (4 * numbers, 8 * numbers)
    assert plan.checkpoint == 12 * numbers
    assert written == 12 * numbers + plan.policy.masters, "and model/, merged"
    whole = Plan(replace(config, lora_rank=0), places, {}).policy
    assert plan.policy.count_head(100, is_trained=True) < whole.count_head(100, is_trained=True)
    short = Plan(replace(config, max_response_tokens=1, max_prompt_tokens=1), places, {})
    assert "weights of an earlier version, beyond that" in dict(short.trainer())


def test_what_cannot_be_had_is_one_line(tied_model, monkeypatch):
    config = Config(model=str(tied_model), lora_rank=8)
    with monkeypatch.context() as patch:
        patch.setattr(lora, "find_spec", lambda name: None)
        for start in (launch, check_for_plan):  # before data or models are looked for
            with pytest.raises(UserError, match=r"^--lora_rank 8 needs peft: pip install -r req"):
                start(replace(config, model="absent"))
    no_linear = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.LayerNorm(4))
    with pytest.raises(UserError, match="a Sequential, has no linear layer besides its head"):
        lora.add_adapters(no_linear, config)
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    experts = Qwen3MoeConfig(**shape, num_experts=4, num_key_value_heads=2, head_dim=16)
    with pytest.raises(UserError, match="has experts, whose adapters could not be merged"):
        lora.add_adapters(AutoModelForCausalLM.from_config(experts), config)
