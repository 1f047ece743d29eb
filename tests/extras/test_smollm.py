"""What is held on toys elsewhere, on a real language model: make test-runs installs it."""

import gc
import re
import shutil
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import Run, flags
from test_dtype import NORMAL
from test_engine import changed, logprobs_of, mismatch, sample_group, take_over
from test_plan import DTYPES, peak_bytes

from config import Config, UserError
from extras.replies import encode_reply
from launch.display.alarms import NORMAL_MISMATCH
from launch.planning.memory import PolicyMemory
from learner import make_learner
from models.engine import Engine
from models.policy import load_policy
from models.tokens import encode_prompt, load_tokenizer
from runtime.checkpoints import checkpoint
from runtime.memory_trial import largest_micro_batch
from tasks import load_task
from tasks.sums import PRESETS
from tasks.support.smollm import FILE, HUB, PACKAGE, smollm

runs = pytest.mark.runs
ENDED = 2  # its end of a turn


def test_sums_are_asked_in_a_chat_and_those_to_test_on_are_not_trained_on():
    task = load_task("sums")
    train, test = task.queries("train"), task.queries("test")
    assert (len(train), len(test)) == (150, 75)
    assert not {query.id for query in train} & {query.id for query in test}
    *_, asked = train[0].prompt
    a, b = map(int, re.findall(r"\d+", asked["content"]))
    responses = f"{a} + {b} = {a + b}.", f"{a + b}, or {a}", "many"
    assert task.score([train[0]] * 3, responses, [True] * 3) == [1.0, 0.0, 0.0]
    assert task.score([train[0]], responses[:1], [False]) == [0.0], "it was cut off"
    assert [task.extract(response) for response in responses] == [str(a + b), str(a), None]


def test_without_the_package_the_model_is_the_hubs(monkeypatch):
    monkeypatch.setattr("tasks.support.smollm.find_spec", lambda name: None)
    assert load_task("sums").base_model() == HUB


def test_a_package_that_cannot_be_read_is_named_with_what_installs_the_rest(monkeypatch):
    found = {PACKAGE: ModuleSpec(PACKAGE, None, origin="/absent/__init__.py")}
    monkeypatch.setattr("tasks.support.smollm.find_spec", found.get)
    with pytest.raises(UserError, match="installed without gguf: make demo-smollm"):
        smollm()


@pytest.fixture(scope="module")
def model() -> Path:
    directory = smollm()
    assert directory != HUB, "make test-runs installs requirements/smollm.txt"
    return Path(directory)


@runs
def test_its_tokenizer_splits_digits_and_spaces_as_its_file_says(model):
    from gguf import GGUFReader

    fields = GGUFReader(Path(find_spec(PACKAGE).origin).with_name(FILE)).fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"  # digits first, then as GPT-2
    tokenizer = load_tokenizer(Config(model=str(model)))
    assert tokenizer.tokenize("a   21  7") == ["a", "ĠĠĠ", "2", "1", "ĠĠ", "7"]
    assert tokenizer.tokenize("x = 3.14\n") == ["x", "Ġ=", "Ġ", "3", ".", "1", "4", "Ċ"]


@runs
def test_a_turn_and_a_reply_are_what_its_template_makes_of_both(model):
    tokenizer = load_tokenizer(Config(model=str(model)))
    asked = [{"role": "user", "content": "What is 2 + 3?"}]
    turn = tokenizer("It is 5.").input_ids + [ENDED]
    tokens = encode_prompt(tokenizer, asked) + turn
    tokens += encode_reply(tokenizer, asked, "And 4 more?", turn[-1])
    said = [dict(role="assistant", content="It is 5."), dict(role="user", content="And 4 more?")]
    assert tokens == encode_prompt(tokenizer, asked + said)


@runs
@DTYPES
def test_vllm_agrees_with_transformers_before_and_after_a_load(model, dtype, record_property):
    gc.collect()
    config = Config(model=str(model), dtype=dtype, max_prompt_tokens=64, max_response_tokens=16)
    policy, engine = load_policy(config, torch.device("cpu")), Engine(config)
    prompt = encode_prompt(load_tokenizer(config), load_task("sums").queries("test")[0].prompt)
    sampling, found = dict(n=8, temperature=0.7, max_tokens=16, seed=1), []
    for version in range(2):
        if version:
            new = changed(policy, seed=1, size=0.01)
            take_over(policy, new)
            engine.load(version, new.items())
        group = sample_group(engine, prompt, **sampling)
        found.append(mismatch(group, logprobs_of(group, policy, getattr(torch, dtype))))
    record_property("mismatch, nats", [f"{value:.1e}" for value in found])
    assert max(found) < NORMAL_MISMATCH[getattr(torch, dtype)]
    other = load_policy(config, torch.device("cpu"))
    assert mismatch(group, logprobs_of(group, other, getattr(torch, dtype))) > 3 * NORMAL


@runs
def test_adapters_that_have_learnt_reach_vllm_merged(model, record_property):
    gc.collect()
    sizes = dict(max_prompt_tokens=64, max_response_tokens=16, queries_per_batch=1)
    lora = dict(lora_rank=4, learning_rate=1e-3, responses_per_query=8, low_memory="off")
    config = Config(model=str(model), dtype="float32", **sizes, **lora)
    learner, engine = make_learner(config, print), Engine(config)
    prompt = encode_prompt(load_tokenizer(config), load_task("sums").queries("test")[0].prompt)
    sampling = dict(n=8, temperature=1.0, max_tokens=16, seed=1)
    group = sample_group(engine, prompt, **sampling)
    group.rewards[:4] = 1.0
    for _ in range(2):  # after the first step A has not moved
        learner.update(group.responses())
    engine.load(1, learner.weights())
    group = sample_group(engine, prompt, **sampling)
    base = load_policy(config, torch.device("cpu"))
    merged, frozen = (
        mismatch(group, logprobs_of(group, policy, torch.float32))
        for policy in (learner.policy, base)
    )
    record_property("mismatch with adapters and without, nats", f"{merged:.1e}, {frozen:.1e}")
    assert merged < NORMAL_MISMATCH[torch.float32] < frozen / 100


@runs
def test_a_run_killed_and_resumed_has_the_weights_and_moments_of_one_that_was_not(model, tmp_path):
    settings = flags(queries_per_batch=2, responses_per_query=2, samples_per_query=2, seed=7)
    settings += flags(tokens_per_micro_batch=200, checkpoint_every=1, eval_every=0, steps=2)
    saved, found = tmp_path / "run" / "checkpoints" / "step-00000002", []
    for begin in ["sums", "--preset", "smollm", *settings], []:  # the second goes on from step 1
        with Run(tmp_path / "run", *begin, resume=not begin) as run:
            run.until(saved.exists, "the checkpoint of step 2")
            run.process.kill()
            run.nothing_is_left()
        found.append(checkpoint.load_tensors(saved, "learner"))
        shutil.rmtree(saved)
    torch.testing.assert_close(*found, rtol=0, atol=0)


@runs
def test_a_steps_peak_is_what_the_plan_counts(model, record_property):
    config = Config(model=str(model), **PRESETS["smollm"])
    rows = largest_micro_batch(config, vocabulary=49_152)
    inputs = [row.prompt for row in rows], [row.tokens["token"] for row in rows]
    counted = PolicyMemory(config, on_gpu=False).count(inputs, is_trained=True)
    policy = load_policy(config, torch.device("cpu"))
    measured = peak_bytes(policy, *inputs, config.temperature)
    ratio = (counted.kept + counted.beyond) / measured
    record_property("peak: counted / measured", round(ratio, 3))
    assert 0.9 < ratio < 1.35, "rather more than less"
