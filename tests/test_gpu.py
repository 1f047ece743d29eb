"""What wants a GPU: `make test-gpu`. Elsewhere each test is skipped, with the reason."""

import json

import numpy as np
import pytest
import torch
from conftest import ON_GPU, flags, read, steps_of, tba
from test_dtype import NORMAL
from test_engine import changed, logprobs_of, mismatch, sample_group, take_over
from test_trainer import gradient, make_rows

from config import Config
from launch.planning.memory import PolicyMemory
from learner import Learner
from models.architecture import weight_shapes
from models.device import device, lock_pages
from models.engine import Engine
from models.policy import load_policy
from runtime.memory_trial import largest_micro_batch
from weights import SharedWeights

why = "the CPU build of vLLM is installed here: make test-gpu on a machine with a GPU"
if ON_GPU:
    why = f"CUDA {torch.version.cuda} finds no GPU that it can use: see nvidia-smi"
is_skipped = not ON_GPU or not torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(is_skipped, reason=why)]


@pytest.mark.parametrize("kind", ["untied_model", "tied_model"])
def test_vllm_agrees_with_the_trainer_in_bf16_also_across_loads(kind, request, record_property):
    """CUDA graphs are captured at the start, and read the weights where they lie."""
    lengths = dict(max_prompt_tokens=100, max_response_tokens=100)
    path = str(request.getfixturevalue(kind))
    config = Config(model=path, gpu_memory_utilization=0.2, **lengths)
    model, engine = load_policy(config, device()), Engine(config)
    sampling = dict(n=8, temperature=0.7, max_tokens=40, seed=1)
    prompt, found = list(range(50, 70)), []
    for version in range(3):
        if version:
            engine.add("older", prompt, **sampling)
            for _ in range(5):
                engine.step()
            take_over(model, changed(model, version))
            weights = SharedWeights(weight_shapes(config), torch.bfloat16, readers=1)
            assert weights.publish(version, model.named_parameters())
            with weights.read(0) as (_, tensors):
                engine.load(version, tensors.items())
        group = sample_group(engine, prompt, **sampling)
        found.append(mismatch(group, logprobs_of(group, model, torch.bfloat16)))
        assert 0 < found[-1] < NORMAL, f"version {version}"
    record_property("mismatch on a GPU, nats", [round(value, 4) for value in found])
    take_over(model, changed(model, 9))
    assert mismatch(group, logprobs_of(group, model, torch.bfloat16)) > 3 * NORMAL


@pytest.mark.parametrize("low_memory", ["off", "on"])
def test_the_gradient_points_where_that_in_fp32_does(low_memory, tied_model, record_property):
    rows = make_rows(queries=7, per_query=3)
    own = dict(model=str(tied_model), responses_per_query=3, low_memory=low_memory)
    learners = (Learner(Config(dtype=dtype, **own), print) for dtype in ("bfloat16", "float32"))
    in_bf16, in_fp32 = (gradient(learner, rows) for learner in learners)
    assert in_bf16.is_cuda and torch.isfinite(in_bf16).all()
    cosine = torch.cosine_similarity(in_bf16, in_fp32, dim=0).item()
    record_property("cosine of the gradients on a GPU", round(cosine, 5))
    assert cosine > 0.99


def test_activations_take_what_the_plan_counts(tied_model, record_property):
    shape = dict(responses_per_query=20, max_prompt_tokens=200, max_response_tokens=400)
    config = Config(model=str(tied_model), low_memory="off", **shape)
    learner = Learner(config, print)
    rows = largest_micro_batch(config, 256)
    before = torch.cuda.memory_allocated()
    logprobs = learner.logprobs(rows)
    held = torch.cuda.memory_allocated() - before
    assert logprobs.shape == (20, 400)
    inputs = [row.prompt for row in rows], [row.tokens["token"] for row in rows]
    counted = PolicyMemory(config, on_gpu=True).count(inputs, is_trained=True).kept
    record_property("activations on a GPU, counted / held", round(counted / held, 3))
    assert 0.85 < counted / held < 1.15


def test_weights_are_published_from_a_gpu_into_locked_pages(tied_model):
    config = Config(model=str(tied_model))
    model = load_policy(config, device())
    weights = SharedWeights(weight_shapes(config), torch.bfloat16, readers=1)
    lock_pages(weights.memories, pytest.fail)
    assert weights.publish(1, model.named_parameters())
    with weights.read(0) as (_, tensors):
        for name, parameter in model.named_parameters():
            assert torch.equal(tensors[name], parameter.detach().bfloat16().cpu()), name


def test_a_gsm8k_run_of_20_steps_is_evaluated(untied_model, gsm8k_data, tmp_path, record_property):
    run_dir = tmp_path / "run"
    own = flags(model=untied_model, data_dir=gsm8k_data, output_dir=run_dir, steps=20)
    cut = flags(initial_responses=100, max_response_tokens=64, gpu_memory_utilization=0.2)
    result = tba("gsm8k", *own, *cut)
    assert result.returncode == 0 and "on GPU" in result.stdout, result
    lines = steps_of(run_dir)
    assert len(lines) == 20 and all(np.isfinite(line["loss"]) for line in lines)
    assert "final_accuracy" in read(run_dir, "metrics.jsonl")[-1]
    found = [line["mismatch"] for line in lines if "mismatch" in line]
    record_property("mismatch of a run on a GPU, nats", max(found))
    assert max(found) < NORMAL
    assert json.loads((run_dir / "config.json").read_text())["dtype"] == "bfloat16"
