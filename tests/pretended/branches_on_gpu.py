"""Code that asks for a device or dtype, on the GPU of cuda.py: test_pretended_gpu.py runs this."""

from types import SimpleNamespace

import cuda
import numpy as np
import pytest
import torch
from conftest import make as make_model
from cuda import OnCuda
from test_tldr import REWARD
from test_trainer import SHORT, make_rows
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig

from config import Config
from launch.planning.memory import PolicyMemory
from learner import Learner
from models.architecture import weight_shapes
from models.attention import Packed, Padded
from models.device import compute_dtype, device, lock_pages
from models.logprobs import TokenLogprobs, response_logprobs
from models.policy import load_policy
from runtime.checkpoints.writer import CheckpointWriter
from tasks.support.classifier import Classifier, Sampler
from weights import SharedWeights

ROWS = make_rows(queries=4, per_query=3)
BATCH = dict(responses_per_query=3, queries_per_batch=4, tokens_per_micro_batch=160) | SHORT


def make(model, **settings) -> Learner:
    return Learner(Config(model=str(model), **BATCH | settings), pytest.fail)


def gradient(learner: Learner) -> torch.Tensor:
    """The gradient of ROWS, all parameters in one vector, on the CPU."""
    learner.accumulate(ROWS)
    found = torch.cat([p.grad.detach().flatten().float().cpu() for p in learner.trained.values()])
    learner.optimizer.zero_grad()
    return found


def check_gradient(model, **settings) -> None:
    settings |= dict(dtype="float32", beta=0.5)
    expected = gradient(make(model, **settings))
    with cuda.pretend():
        learner = make(model, **settings)
        found, inputs = gradient(learner), vars(learner.loss_inputs(ROWS))
    tolerance = 1e-5 * float(expected.abs().max()) + 1e-9
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert all(tensor.is_cuda for tensor in inputs.values() if torch.is_tensor(tensor))


def test_a_step_has_the_gradient_that_it_has_on_a_cpu_and_its_inputs_are_on_the_gpu(tied_model):
    check_gradient(tied_model)


def check_computes_in_bf16(model, **settings) -> None:
    cuda.dtypes.clear()
    in_bf16 = make(model, **settings)
    assert {p.dtype for p in in_bf16.policy.parameters()} == {torch.float32}
    found = gradient(in_bf16)
    assert torch.bfloat16 in cuda.dtypes and torch.float16 not in cuda.dtypes
    expected = gradient(make(model, dtype="float32", **settings))
    assert torch.cosine_similarity(found, expected, dim=0) > 0.99


@pytest.mark.parametrize("kind", ["tied_model", "untied_model"])
def test_layers_compute_in_bf16_over_fp32_masters(kind, gpu, request):
    check_computes_in_bf16(request.getfixturevalue(kind))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_host_waits_for_nothing_until_the_backward_pass_is_queued(dtype, gpu, untied_model):
    learner = make(untied_model, dtype=dtype)
    cuda.waits.clear()
    for _ in range(2):
        loss, _ = learner.backward(ROWS)
    assert cuda.waits == []
    float(loss)
    assert len(cuda.waits) == 1


@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_for_packed_segments_is_told_what_a_padded_batch_attends_to(
    window, gpu, monkeypatch
):
    heads = dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=window)
    shape = MistralConfig(hidden_size=64, num_hidden_layers=2, vocab_size=50, **heads)
    model = AutoModelForCausalLM.from_config(shape).eval().to(device())
    rng = np.random.default_rng(0)
    prompts = [np.arange(length) for length in (40, 40, 40, 3, 1)]
    responses = [rng.integers(50, size=length) for length in (9, 1, 20, 2, 7)]
    found = []
    for other, card in ((Padded, (9, 0)), (Packed, (7, 5))):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda *_, card=card: card)
            patch.delattr(other, "attend")
            model.zero_grad()
            logprobs = response_logprobs(model, prompts, responses, 1.0, torch.bfloat16)
            logprobs.sum().backward()
        gradient = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
        found.append((logprobs.detach().cpu(), gradient))
    torch.testing.assert_close(found[0][0], found[1][0], atol=0.02, rtol=0)
    assert torch.cosine_similarity(found[0][1], found[1][1], dim=0) > 0.999


def test_logits_of_bf16_states_are_in_fp32(gpu):
    torch.manual_seed(0)
    states, weight = (8 * torch.randn(shape).bfloat16() for shape in ((9, 64), (50, 64)))
    targets = torch.arange(9)
    logits = states.double() @ weight.double().T
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    on_gpu = (tensor.to(device()) for tensor in (states, weight))
    found = TokenLogprobs.apply(*on_gpu, None, targets.to(device()))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-3)


def test_activations_take_what_the_plan_counts_under_cudas_autocast(tmp_path):
    # One head, for here attention keeps its matrix, which a GPU makes again.
    shape = dict(n_embd=256, n_layer=4, n_head=1, vocab_size=50, eos_token_id=0, bos_token_id=0)
    model = AutoModelForCausalLM.from_config(GPT2Config(**shape)).eval()
    model.config.save_pretrained(tmp_path)
    inputs = [np.arange(7)] * 20, [*np.random.default_rng(0).integers(50, size=(20, 40))]
    config, kept = Config(model=str(tmp_path), dtype="bfloat16"), {}
    policies = (PolicyMemory(config, on_gpu) for on_gpu in (True, False))
    counted, as_on_cpu = (policy.count(inputs, is_trained=True) for policy in policies)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = getattr(tensor, "inner", tensor).untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with cuda.pretend(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.to(device())
        response_logprobs(model, *inputs, 1.0, torch.bfloat16)
    own = {parameter.inner.data_ptr() for parameter in model.parameters()}
    held = sum(storage.nbytes() for place, storage in kept.items() if place not in own)
    assert 0.95 < counted.kept / held < 1.05 and as_on_cpu.kept < 0.85 * held


def test_a_published_version_is_whole_when_searchers_may_look(gpu, tied_model):
    policy = load_policy(Config(model=str(tied_model)), device())
    weights = SharedWeights(weight_shapes(Config(model=str(tied_model))), torch.bfloat16, readers=1)
    assert weights.publish(1, policy.named_parameters())
    with weights.read(0) as (_, tensors):
        for name, parameter in policy.named_parameters():
            assert not isinstance(tensors[name], OnCuda)
            assert torch.equal(tensors[name], parameter.detach().bfloat16().cpu()), name


@pytest.mark.parametrize("code", [0, 1])
def test_all_that_is_published_is_locked_whole_or_cuda_forgets_the_failure(code, gpu, monkeypatch):
    weights = SharedWeights({"a": (1000,)}, torch.bfloat16, readers=1)
    weights.reference = SharedWeights({"a": (1000,)}, torch.float32, readers=1, slots=1)
    asked, said, launched = [], [], []
    register = lambda *arguments: asked.append(arguments) or code  # noqa: E731
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *a, **b: launched.append(b) or ones(*a, **b))
    lock_pages(weights.memories, said.append)
    parts = [*weights.slots, *weights.reference.slots]
    wanted = [(part.data_ptr(), 2000 + 2000 * (part is parts[-1])) for part in parts]
    assert [arguments[:2] for arguments in asked] == (wanted[:1] if code else wanted)
    assert len(said) == len(launched) == code


@pytest.mark.parametrize("masters", ["float32", "bfloat16"])
def test_a_checkpoint_is_on_the_host_and_resumes_alike(masters, gpu, untied_model, tmp_path):
    whole, resumed = (make(untied_model, master_dtype=masters) for _ in range(2))
    whole.update(ROWS)
    writer = CheckpointWriter(str(tmp_path), None, pytest.fail)
    state = {name: writer.take("policy", name, t, False) for name, t in whole.state()}
    assert not any(isinstance(tensor, OnCuda) for tensor in state.values())
    resumed.load_state(state)
    figures = [learner.update(ROWS) for learner in (whole, resumed)]
    assert figures[0] == pytest.approx(figures[1])
    for one, other in zip(whole.trained.values(), resumed.trained.values()):
        moments = resumed.optimizer.state[other]
        assert {t.dtype for t in (other, moments["exp_avg"])} == {getattr(torch, masters)}
        assert all(value.is_cuda for value in (other, *moments.values()))
        assert torch.equal(one.detach().cpu(), other.detach().cpu())


def test_models_of_a_task_are_on_the_gpu(gpu, tmp_path, untied_model):
    classifier = Classifier(make_model(tmp_path, **REWARD))
    sampler = Sampler(str(untied_model))
    for model in (classifier.model, sampler.model):
        assert all(p.is_cuda for p in model.parameters())
    scores = classifier.rewards(["good", "bad and longer"])
    assert len(scores) == 2 and np.isfinite(scores).all()
    texts = sampler.sample(["a", "bc"], per_text=2, temperature=1.0, top_p=1.0, max_tokens=3)
    assert len(texts) == 4


def test_of_attention_only_cudnns_is_off(gpu):
    assert compute_dtype(Config()) == torch.bfloat16
    flags = torch.backends.cuda
    assert not flags.cudnn_sdp_enabled()
    assert flags.mem_efficient_sdp_enabled() and flags.flash_sdp_enabled()
