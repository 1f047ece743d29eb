"""The engine of a searcher, the real vLLM, against transformers before and after new weights."""

import queue
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer, drain
from test_preset_starts import make

from config import ENGINE_ROWS, Config
from models.architecture import weight_shapes
from models.engine import Engine, Generation, newest_version
from models.logprobs import response_logprobs
from models.policy import load_policy
from rollouts import Group
from runtime.record.metrics import StepMetrics, describe
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable
from searcher import Searcher
from tasks import Task
from weights import SharedWeights

BLOCK = 32  # tokens in a block of vLLM's prefix cache on a CPU
SAMPLING = dict(n=4, temperature=0.7, max_tokens=20, seed=1)
END = 256  # byte_tokenizer's
ENDING = dict(n=32, temperature=1.0, max_tokens=3, seed=0, logit_bias={END: 5.0})  # now and then


def changed(model: torch.nn.Module, seed: int, size: float = 0.1) -> dict[str, torch.Tensor]:
    """Make new weights for the model, by the names that the trainer publishes."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    return {name: p.detach() + size * draw(p.shape) for name, p in model.named_parameters()}


def take_over(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])


def sample_group(engine: Engine, prompt: list[int], task=None, **sampling) -> Group:
    """Generate one query's responses as a searcher does. task: what differs from Task."""
    own_task, tokenizer = Task(), byte_tokenizer()
    vars(own_task).update(task or {})
    tokenizer.pad_token = sampling.pop("pad_token", tokenizer.pad_token)
    generation = Generation(Config(), tokenizer, engine, own_task)
    group = Group(query_id=0, prompt=np.array(prompt, np.int32), request="group", sampling=sampling)
    generation.start(group)
    while group.tokens is None:
        generation.step()
    group.rewards = np.zeros(len(group.lengths), np.float32)
    return group


def tokens_of(group: Group) -> list[np.ndarray]:
    return [row.tokens for row in group.responses()]


@torch.no_grad()
def logprobs_of(group: Group, model, dtype: torch.dtype) -> list[np.ndarray]:
    """The policy's log-probabilities of each response of a group: (T,)."""
    responses = [tokens["token"] for tokens in tokens_of(group)]
    prompts, temperature = [group.prompt] * len(responses), group.temperature
    padded = response_logprobs(model, prompts, responses, temperature, dtype).cpu().numpy()
    return [logprobs[: len(tokens)] for logprobs, tokens in zip(padded, responses)]


def mismatch(group: Group, logprobs: list[np.ndarray]) -> float:
    metrics = StepMetrics(*[None] * 4)
    metrics.compare(group, logprobs, step=0)
    return metrics.figures["mismatch"]


def worst_difference(model, output, temperature: float = 0.7) -> float:
    """The largest of vLLM's log-probabilities from the model's."""
    responses = [np.array(c.token_ids, np.int32) for c in output.outputs]
    prompts = [np.array(output.prompt_token_ids, np.int32)] * len(responses)
    with torch.no_grad():
        ours = response_logprobs(model, prompts, responses, temperature).numpy()
    theirs = [[lp[t].logprob for t, lp in zip(c.token_ids, c.logprobs)] for c in output.outputs]
    return max(float(np.abs(row[: len(t)] - t).max()) for row, t in zip(ours, theirs))


def check_a_load(engine: Engine, model: torch.nn.Module, version: int) -> None:
    """Load new weights: vLLM's log-probabilities are theirs, and not the model's before."""
    tensors = changed(model, version)
    engine.load(version, tensors.items())
    engine.add("new", list(range(50, 60)), **SAMPLING)
    output = drain(engine)["new"]
    assert newest_version(output) == version
    assert output.prompt_token_ids == list(range(50, 60))
    assert worst_difference(model, output) > 0.01, "the weights did change"
    take_over(model, tensors)
    assert worst_difference(model, output) <= 1e-4, f"version {version}"


@pytest.mark.parametrize("kind", ["untied_model", "tied_model"])
def test_vllm_agrees_with_transformers_after_every_change_of_weights(kind, request):
    path = str(request.getfixturevalue(kind))
    config = Config(model=path, max_prompt_tokens=400, max_response_tokens=100)
    model, engine = load_policy(config, torch.device("cpu")), Engine(config)
    long = np.random.default_rng(0).integers(0, 256, size=2 * BLOCK + 20).tolist()
    for prompt in (list(range(50, 60)), long):
        engine.add(f"base{len(prompt)}", prompt, **SAMPLING)
    for output in drain(engine).values():
        assert worst_difference(model, output) <= 1e-4, "the base model"

    # Twice: the second load must not rest on what the first left behind.
    for version in (1, 2):
        check_a_load(engine, model, version)

    # A swap while responses run. The long prompt has filled two blocks of the prefix cache with
    # keys and values of version 2, which the newer ones must not meet.
    engine.add("older", long, **SAMPLING | dict(max_tokens=90))
    for _ in range(5):
        engine.step()
    tensors = changed(model, 3)
    engine.load(3, tensors.items())
    take_over(model, tensors)
    engine.add("newer", long, **SAMPLING)
    outputs = drain(engine)
    spans = [(span.version, span.start) for span in outputs["older"].outputs[0].weight_versions]
    assert spans == [("2", 0), ("3", 5)], "vLLM tells which tokens each version sampled"
    assert newest_version(outputs["older"]) == 3
    newer, older = (worst_difference(model, outputs[name]) for name in ("newer", "older"))
    assert newer <= 1e-4, "added after the swap, while older responses still ran"
    assert older > 0.01, "the older ones did run across the swap"


def test_a_model_that_vllm_runs_through_transformers_can_be_the_reference_policy_too(tmp_path):
    """A GPT-NeoX, as Pythia of TL;DR is. A searcher loads its reference after the engine, too."""
    path = make(tmp_path, "GPTNeoXForCausalLM", intermediate_size=128, initializer_range=0.2)
    config = Config(model=path, max_prompt_tokens=40, max_response_tokens=20)
    engine = Engine(config)
    check_a_load(engine, load_policy(config, torch.device("cpu")), version=1)


def test_a_task_that_seeds_global_generators_gets_no_response_twice(engine, monkeypatch):
    responses, numbers, seeds = [], [], []
    for name in ("first", "second"):
        torch.manual_seed(0)
        np.random.seed(0)
        numbers.append([np.random.random()])
        engine.add(name, [70, 71], n=4, temperature=1.0, max_tokens=20)  # without a seed
        responses.append([list(each.token_ids) for each in drain(engine)[name].outputs])
        numbers[-1].append(np.random.random())
        with monkeypatch.context() as patch:
            # What vLLM's runner on a GPU does for such a request.
            step = lambda: seeds.append(np.random.randint(2**31))  # noqa: E731
            patch.setattr(engine.llm.llm_engine, "step", step)
            np.random.seed(0)
            engine.step()
    assert responses[0] != responses[1] and seeds[0] != seeds[1]
    assert numbers[0] == numbers[1], "what the task draws goes on as if there were no vLLM"


def test_a_prompt_is_computed_once_for_its_responses_but_for_its_last_block(engine):
    prompt = list(range(3 * BLOCK + 5))
    for name in ("first", "second"):  # vLLM makes a group of requests like these
        engine.add(name, prompt, n=1, temperature=1.0, max_tokens=5)
    cached_tokens = {name: output.num_cached_tokens for name, output in drain(engine).items()}
    assert cached_tokens == {"first": 0, "second": 3 * BLOCK}


def test_the_end_of_sequence_token_is_in_response_and_log_probability(engine, policy):
    tokenizer = byte_tokenizer()  # whose end is its padding too
    sampling = dict(n=200, temperature=2.0, max_tokens=100, seed=0)
    engine.add("ends", tokenizer("ab").input_ids, **sampling)
    output = drain(engine)["ends"]
    ended = [list(c.token_ids) for c in output.outputs if c.finish_reason == "stop"]
    assert ended, "at this temperature some of 200 responses end by themselves"
    assert all(tokens.index(tokenizer.eos_token_id) == len(tokens) - 1 for tokens in ended)
    assert worst_difference(policy, output, 2.0) <= 1e-4


def test_a_response_that_was_cut_off_gets_an_end_where_the_task_wants_one(engine):
    tasks = {"append_eos": False}, {"append_eos": True}
    plain, ended = (sample_group(engine, [70, 71], task, **ENDING) for task in tasks)
    assert (plain.finished == ended.finished).all() and {*plain.finished} == {True, False}
    for is_finished, one, other in zip(plain.finished, tokens_of(plain), tokens_of(ended)):
        assert is_finished == (one["token"][-1] == END)
        assert one["in_loss"].all() and one["sampled"].all() and other["in_loss"].all()
        added = 0 if is_finished else 1
        assert other["token"].tolist() == one["token"].tolist() + [END] * added
        assert (
            other["behavior_logprob"].tolist() == one["behavior_logprob"].tolist() + [0.0] * added
        )
        assert other["sampled"].tolist() == [True] * len(one) + [False] * added


def test_a_stop_string_ends_a_response_and_is_part_of_it(engine):
    letters = dict.fromkeys(byte_tokenizer()("xy").input_ids, 6.0)
    sampling = ENDING | dict(max_tokens=6, logit_bias=letters, stop=["xy"])
    group = sample_group(engine, [70, 71], **sampling)
    assert {True, False} == {*group.finished}, "both kinds"
    for text, is_finished, tokens in zip(group.texts, group.finished, tokens_of(group)):
        ids = tokens["token"]
        assert is_finished == (text.endswith("xy") or ids[-1] == END)
        assert "xy" not in text[:-1] and byte_tokenizer().decode(ids[ids != END]) == text


@pytest.mark.parametrize("pad_token", [None, "<eos>"])
@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_an_end_that_pads_too_is_in_no_loss_where_wanted(pad_is_eos, pad_token, engine):
    options = dict(task={"pad_is_eos": pad_is_eos}, pad_token=pad_token)
    group = sample_group(engine, [70, 71], **options, **ENDING)
    is_out = (group.tokens["token"] == END) & (pad_is_eos and pad_token is None)
    assert (group.tokens["in_loss"] == ~is_out).all() and group.tokens["sampled"].all()
    assert group.finished.tolist() == [row["token"][-1] == END for row in tokens_of(group)]


def test_an_end_that_was_appended_is_no_part_of_the_mismatch_with_vllm(engine, policy):
    sampling = dict(n=8, temperature=1.0, max_tokens=3, seed=0)
    group = sample_group(engine, [70, 71], task={"append_eos": True}, **sampling)
    tokens = group.tokens
    assert (group.lengths == 4).all() and (tokens["sampled"].sum() == 8 * 3), "all were cut off"
    tokens["ref_logprob"] = tokens["behavior_logprob"]
    ours = logprobs_of(group, policy, torch.float32)
    assert mismatch(group, ours) < 1e-4
    figures = describe([group])
    assert figures["response_tokens"] == 3 and figures["kl"] == 0
    sampled = tokens["behavior_logprob"].reshape(8, 4)[:, :3]
    assert figures["entropy"] == pytest.approx(-sampled.mean()), "nor of the other figures"
    tokens["sampled"] = True
    assert mismatch(group, ours) > 0.1


def test_more_prompt_tokens_than_fit_into_one_step_are_no_trouble(engine, policy):
    prompts = np.random.default_rng(0).integers(0, 256, size=(10, 890)).tolist()
    for i, prompt in enumerate(prompts):
        engine.add(f"p{i}", prompt, n=2, temperature=1.0, max_tokens=5, seed=i)
    outputs = drain(engine)
    assert len(outputs) == len(prompts)
    assert max(worst_difference(policy, output, 1.0) for output in outputs.values()) <= 1e-4


@pytest.fixture
def searcher(engine, tied_model, tmp_path, monkeypatch) -> Searcher:
    """A searcher that found the engine loaded."""
    engine.set_version(0)
    monkeypatch.setattr("searcher.Engine", lambda config, seed: engine)
    (tmp_path / "logs").mkdir()
    sizes = dict(samples_per_query=24, max_prompt_tokens=16, max_response_tokens=60)
    own = dict(model=str(tied_model), task="arithmetic", searchers=1, temperature=2.0)
    config = Config(**own, **sizes)
    weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
    status = StatusTable(["trainer", "searcher 0"])
    return Searcher(config, 0, weights, queue.Queue(), status, str(tmp_path))


def test_a_searcher_that_finds_newer_weights_evaluates_the_base_model_too(searcher, policy):
    """Act as a restarted searcher, which died before it had evaluated the base model."""
    searcher.weights.publish(2, policy.named_parameters())
    searcher.evaluation.queries = searcher.evaluation.queries[:10]
    items = []

    def stop_at_an_evaluation(item) -> None:
        items.append(item)
        searcher.status.stop = isinstance(item, Evaluation) or len(items) == 50

    searcher.outgoing.put_nowait = stop_at_an_evaluation
    searcher.search()
    assert [item.version for item in items if isinstance(item, Evaluation)] == [0]


def test_a_searcher_leaves_the_cores_to_a_trainer_that_saves(searcher, monkeypatch):
    """In lockstep the last batch is wanted for the checkpoint: extras/test_lockstep.py."""
    searcher.start_queries()
    searcher.status.shutdown = True
    monkeypatch.setattr(searcher.generation, "step", pytest.fail)
    assert searcher.step_engine() == [] and searcher.generation.rows


def test_searchers_that_may_be_a_step_ahead_generate_a_batch_at_a_time(searcher, policy):
    searcher.weights.publish(1, policy.named_parameters())
    for searchers, groups in (2, 2), (1, 3):  # of a batch of three, each its share
        own = dict(search_ahead=1, queries_per_batch=3, searchers=searchers)
        searcher.config = replace(searcher.config, **own)
        searcher.start_queries()
        assert searcher.generation.rows == groups * 24 < ENGINE_ROWS


def test_weights_that_a_searcher_is_loading_are_not_overwritten(searcher, policy, monkeypatch):
    parameters = dict(policy.named_parameters())

    def load_slowly(version, tensors) -> None:
        searcher.engine.version, held = version, dict(tensors)
        for version in (3, 4, 5):
            searcher.weights.publish(version, ((name, p + 1) for name, p in parameters.items()))
        torch.testing.assert_close(held, parameters, rtol=0, atol=0)

    monkeypatch.setattr(searcher.engine, "load", load_slowly)
    searcher.weights.publish(2, parameters.items())
    searcher.take_new_weights()
    assert searcher.status.get("searcher 0", "version") == 2 and searcher.weights.version == 5
