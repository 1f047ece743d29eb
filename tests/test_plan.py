"""The plan of a run: what it counts, what it is held against, and what it says when it is short."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer, flags
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Qwen2Config

from config import Config, UserError
from launch.command_line import find_presets
from launch.places import find_places, resolve
from launch.planning import plan
from launch.planning.memory import PolicyMemory
from launch.planning.plan import DISK, GIB, MEMORY, SHARED, Plan, make_plan
from models.logprobs import response_logprobs
from models.policy import cast_linear_layers
from runtime.memory_trial import largest_micro_batch
from tasks import find_task, load_task
from tba import main

# The shapes of RhoMath-1B (TinyLlama's), Qwen2.5-0.5B and -7B: no weights are needed.
SIZES = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads".split()
RHO = dict(zip(SIZES, (32_000, 2048, 5632, 32, 4)))
RHO_1B, FOUR_LAYERS = (LlamaConfig(**RHO, num_hidden_layers=layers) for layers in (22, 4))
QWEN, LARGE_QWEN = (151_936, 896, 4864, 14, 2), (152_064, 3584, 18_944, 28, 4)
QWEN_05B = Qwen2Config(**dict(zip(SIZES, QWEN)), num_hidden_layers=24, tie_word_embeddings=True)
QWEN_7B = Qwen2Config(**dict(zip(SIZES, LARGE_QWEN)), num_hidden_layers=28)
SHALLOW = LlamaConfig(hidden_size=1024, num_hidden_layers=2)
SHAPES = dict(rho=RHO_1B, four=FOUR_LAYERS, qwen=QWEN_05B, shallow=SHALLOW, qwen_7b=QWEN_7B)
SHAPES["huge"] = LlamaConfig(hidden_size=65_536, num_hidden_layers=4, num_attention_heads=64)
GSM8K = dict(task="gsm8k", max_prompt_tokens=512, max_response_tokens=512)
SHORT = dict(max_prompt_tokens=70, max_response_tokens=50, samples_per_query=5)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def make_shapes(root: Path) -> dict[str, str]:
    """Make directories with an architecture and nothing else."""
    for name, architecture in SHAPES.items():
        architecture.save_pretrained(root / name)
    return {name: str(root / name) for name in SHAPES}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> dict[str, str]:
    return make_shapes(tmp_path_factory.mktemp("shapes"))


def plan_on(gpus: str, available: dict | None = None, **settings) -> tuple[Plan, str | None]:
    """Plan a run on such GPUs, of which that much is available, else all.

    Returns the plan, and what is wrong with it.
    """
    count, gib = map(int, gpus.split("x"))
    config = Config(**GSM8K | settings)
    places = find_places(config, [str(gpu) for gpu in range(count)])
    cards = {f"GPU {gpu}": plan.USABLE * gib * GIB for gpu in range(count)}
    task = load_task(config.task, **config.options)
    made = make_plan(resolve(config, places), task, places, available or cards)
    try:
        made.check()
    except UserError as error:
        return made, str(error)
    return made, None


def bytes_of(made: Plan, process: str, purpose: str) -> float:
    """The bytes of the first need of a process whose purpose begins so."""
    needs = [need for own in made.needs.values() for need in own if need[0] == process]
    return next(nbytes for _, what, nbytes in needs if what.startswith(purpose))


def num_responses(made: Plan) -> int:
    """How many responses of full length the last searcher has room for."""
    return made.vllm(made.places[-1])[2]


def saved_bytes(model: torch.nn.Module, *arguments) -> int:
    """Measure what a backward pass of response_logprobs keeps, each storage once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        response_logprobs(model, *arguments)
    storages = {place: t.untyped_storage() for place, t in kept.items() if place not in own}
    return sum(storage.nbytes() for storage in storages.values())


def peak_bytes(model: torch.nn.Module, *arguments) -> int:
    """Measure by torch's allocator what a forward and backward pass takes, gradients aside."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    with torch.profiler.profile(profile_memory=True) as profile:
        logprobs = response_logprobs(model, *arguments).sum()
        if trained:
            logprobs.backward()
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return int(np.cumsum([nbytes for _, nbytes in sorted(changes, key=lambda x: x[0])]).max())


def inputs_of(config: Config, vocabulary: int) -> tuple[list, list]:
    """Prompts and responses of the largest batch of a step."""
    rows = largest_micro_batch(config, vocabulary)
    return [row.prompt for row in rows], [row.tokens["token"] for row in rows]


@DTYPES
@pytest.mark.parametrize("vocabulary", [1000, 20_000])
@pytest.mark.parametrize("hidden, layers", [pytest.param(64, 2, marks=pytest.mark.runs), (256, 6)])
@pytest.mark.parametrize("kind", [LlamaConfig, pytest.param(GPTNeoXConfig, marks=pytest.mark.runs)])
def test_counted_activations_are_within_15_percent_of_what_a_step_keeps_and_its_peak_is_near(
    kind, hidden, layers, vocabulary, dtype, tmp_path, record_property
):
    shape = dict(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers)
    architecture = kind(vocab_size=vocabulary, num_attention_heads=4, **shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(architecture).eval()
    architecture.save_pretrained(tmp_path)
    batch = dict(responses_per_query=5, tokens_per_micro_batch=2 * (70 + 5 * 50))
    config = Config(model=str(tmp_path), dtype=dtype, **SHORT, **batch)
    inputs = inputs_of(config, vocabulary)
    counted = PolicyMemory(config, on_gpu=False).count(inputs, is_trained=True)
    assert counted.is_counted
    kept = counted.kept / saved_bytes(model, *inputs, 1.0, getattr(torch, dtype))
    peak = counted.kept + counted.beyond
    peak /= peak_bytes(model, *inputs, 1.0, getattr(torch, dtype))
    record_property("kept, peak: counted / measured", (round(kept, 3), round(peak, 3)))
    assert 0.85 < kept < 1.15
    assert 0.9 < peak < 1.35, "rather more than less"


@DTYPES
def test_the_reference_policys_pass_is_counted_as_it_is_held(dtype, shapes, record_property):
    config = Config(model=shapes["shallow"], dtype=dtype, **SHORT)
    policy = AutoModelForCausalLM.from_config(SHALLOW).eval()
    cast_linear_layers(policy, getattr(torch, dtype))
    policy.requires_grad_(False)
    inputs = [part[:5] for part in inputs_of(config, SHALLOW.vocab_size)]
    measured = peak_bytes(policy, *inputs, 1.0, getattr(torch, dtype))
    ratio = Plan(config, find_places(config, []), {}).forward(inputs) / measured
    record_property("counted / measured", round(ratio, 3))
    assert 0.85 < ratio < 1.35


def test_the_plan_of_gsm8k_on_four_cards_has_every_part_in_its_place(shapes):
    made, problem = plan_on("4x80", model=shapes["rho"])
    assert problem is None
    assert [*made.needs] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3", MEMORY, SHARED, DISK]
    parameters = 1_100_048_384  # of TinyLlama
    for purpose, each in (("weights", 4), ("gradients", 4), ("AdamW", 8)):
        assert bytes_of(made, "trainer", purpose) == each * parameters
    assert bytes_of(made, "trainer", "activations, 20 responses") / GIB == pytest.approx(26, abs=1)
    vllm = bytes_of(made, "searcher 2", "vLLM: weights")
    room = bytes_of(made, "searcher 2", "vLLM: 1857 responses")
    assert vllm > 2 * parameters and vllm + room == pytest.approx(0.55 * plan.USABLE * 80 * GIB)
    # 2 x 22 layers x 4 heads x 64 numbers of 2 bytes for each of 1024 tokens.
    assert num_responses(made) == 1857 == int(room // (2 * 22 * 4 * 64 * 2 * 1024))
    # Embeddings in fp32, all else in bf16.
    embedding, reference = 32_000 * 2048, bytes_of(made, "searcher 0", "reference policy")
    assert reference == pytest.approx(2 * parameters + 2 * embedding, rel=1e-3)
    assert made.total(SHARED) == 3 * 2 * parameters
    assert bytes_of(made, "trainer", "checkpoints, at most 3") == 3 * 12 * parameters
    assert made.total(DISK) == (3 * 12 + 4) * parameters
    assert bytes_of(made, "all", "policies while they load") == 4 * 4 * parameters
    assert bytes_of(made, "all", "copies of the weights in shared") == 6 * parameters
    made, _ = plan_on("1x80", model=shapes["rho"], checkpoint_every=0)
    host = bytes_of(made, "all", "policies while they load, or what is written")
    assert host == 12 * parameters, "on a GPU even the last checkpoint is copied"


def test_a_tasks_own_models_are_planned_for_beside_the_reference_policy(shapes, tmp_path):
    options = dict(reward_model=shapes["rho"], gold_model=shapes["qwen"], data_dir=str(tmp_path))
    own = dict(task="tldr", model=shapes["rho"], options=options, max_response_tokens=53)
    made, _ = plan_on("2x80", **own)
    # Without the output embedding, in fp32 as these say nothing else.
    assert bytes_of(made, "searcher 0", "the task's rho") == 4 * (1_100_048_384 - 32_000 * 2048)
    assert bytes_of(made, "searcher 0", "the task's qwen") == 4 * 494_032_768


def test_the_plan_counts_the_share_of_each_trainer_process_and_what_it_gathers(shapes):
    settings = dict(model=shapes["four"], dtype="bfloat16", low_memory="off")
    whole, _ = plan_on("4x80", **settings)
    made, problem = plan_on("4x80", **settings, trainer_processes=2, checkpoint_every=0)
    assert problem is None
    parameters = made.policy.parameters
    layer = (parameters - made.policy.outside) // 4
    parts, other = (dict(need[1:] for need in made.needs[gpu]) for gpu in ("GPU 0", "GPU 1"))
    of = ", 1 / 2 of them"
    assert parts == other
    assert parts[f"weights, float32{of}"] == parts[f"gradients{of}"] == 2 * parameters
    assert parts[f"AdamW's two moments{of}"] == 4 * parameters
    gathered = 3 * 4 * (parameters - 4 * layer) + (4 * 2 + 2 * 4) * layer
    assert parts["weights and gradients that are gathered"] == gathered
    activations = "activations, 20 responses of 512 + 512 tokens"
    casts = bytes_of(whole, "trainer", activations) - parts[activations]
    assert casts == 2 * 4 * layer, "layers are gathered in bf16 for the moment, not cast"
    host = bytes_of(made, "all", "policies while they load, or what is written")
    assert host == max(4 * 4 * parameters, (12 + 4) * parameters), "a copy even of the last one"


def test_a_model_that_fake_tensors_cannot_go_through_is_estimated(shapes, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("it looks at numbers")

    counted, _ = plan_on("1x20", model=shapes["four"])
    monkeypatch.setattr(PolicyMemory, "count_layers", refuse)
    estimated, _ = plan_on("1x20", model=shapes["four"])
    rough = bytes_of(estimated, "trainer", "activations (estimated), 20 responses")
    assert 0.5 < rough / bytes_of(counted, "trainer", "activations, 20 responses") < 2


def test_gpus_are_counted_by_the_names_that_the_user_gave_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-8f2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    memory = [SimpleNamespace(total_memory=40 * GIB), SimpleNamespace(total_memory=24 * GIB)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: memory[number])
    found = plan.this_machine(Config())
    assert (found["GPU 1"], found["GPU GPU-8f2"]) == (40 * GIB, 24 * GIB)


def test_checkpoints_that_a_resumed_run_will_replace_count_as_room_for_its_own(tmp_path):
    directory = tmp_path / "checkpoints" / "step-00000001"
    directory.mkdir(parents=True)
    (directory / "learner.safetensors").touch()
    os.truncate(directory / "learner.safetensors", 10**10)  # sparse; others write to this disk too
    fresh, resumed = (Config(output_dir=str(tmp_path), resume=old) for old in ("", str(tmp_path)))
    free, own = (plan.this_machine(config)[DISK] for config in (fresh, resumed))
    assert own - free > 9e9


def test_the_command_prints_the_plan_for_given_cards_or_this_machine(shapes, tmp_path, capfd):
    where = flags(model=shapes["four"], output_dir=tmp_path / "run")
    command = ["gsm8k", *where, "--plan", "--plan_gpus"]
    capfd.readouterr()
    assert main([*command, "4x80"]) == 0, "it needs no data, no weights, no GPU"
    out, err = capfd.readouterr()
    assert err == ""
    for words in ("one pass", "GPU 0 ", "GPU 1 to 3, each", "10593 responses of full length"):
        assert out.count(words) == 1
    assert re.search(r"^ +3 searchers +Python and libraries +9.00$", out, re.MULTILINE)
    # 6 x 307,251,200 parameters x 7 x (512 + 20 x 512) tokens.
    last = "700 steps of 139 TFLOP, each response of full length, at 100 TFLOP/s: 16 minutes, "
    last += "calculated and never measured on a GPU\n"
    assert out.endswith(last + "fits, if there is as much host memory, shared memory and disk\n")
    assert main([*command, "1x6"]) == 2, "the table, and the error"
    out, err = capfd.readouterr()
    assert "GPU 0 is short" in err and "AdamW's two moments" in out and "fits" not in out
    # Without --plan_gpus it is held against this machine.
    assert main(["arithmetic", "--plan", *flags(output_dir=tmp_path / "run")]) == 0
    out, _ = capfd.readouterr()
    for place in (MEMORY, SHARED, DISK):
        assert re.search(rf"^{place} +of \d+\.\d\d ", out, re.MULTILINE)
    assert out.endswith("\nfits\n")
    assert not (tmp_path / "run").exists()


NO_GPU = r"preset 'figure1' of gsm8k is made for GPUs \(.*/rho has 1.1 B parameters\), and this "
NO_GPU += r"machine has no GPU .*: what runs here is `python tba.py arithmetic` or .*"


@pytest.mark.parametrize(
    "name, flag, words",
    [("huge", "", ".* is short: .*"), ("rho", "", NO_GPU), ("rho", "--plan", NO_GPU)],
)
def test_what_does_not_fit_or_lacks_its_presets_gpu_is_refused_before_anything_is_loaded(
    name, flag, words, shapes, gsm8k_data, tmp_path, monkeypatch, capfd
):
    byte_tokenizer().save_pretrained(shapes[name])
    monkeypatch.setitem(find_presets("gsm8k")["figure1"], "model", shapes["rho"])
    monkeypatch.setenv("PATH", str(tmp_path))  # a GPU machine has nvidia-smi
    monkeypatch.setattr(find_task("gsm8k"), "prepare", lambda self: pytest.fail("models come last"))
    run = ["gsm8k", *flags(data_dir=gsm8k_data, output_dir=tmp_path / "run"), *flag.split()]
    run += flags(model=shapes["huge"]) if name == "huge" else []
    capfd.readouterr()
    assert main(run) == 2 and not (tmp_path / "run").exists()
    out, err = capfd.readouterr()
    assert out == "" and re.fullmatch(f"error: {words}\n", err)


def test_without_the_hub_the_plan_says_that_a_config_is_enough(monkeypatch, capfd):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["arithmetic", "--plan", "--model", "no/such"]) == 2
    words = "a directory with its config.json, and nothing else, is enough as --model here"
    assert capfd.readouterr().err.endswith(f"; {words}\n")
