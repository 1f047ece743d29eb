"""A policy sharded over trainer processes learns what it learns in one.

Ready-made batches at the learner, on 1, 2 and 4 processes (gloo). Whole runs are below; what kills
and stops them is in test_faults.py.
"""

import faulthandler
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing
from conftest import PATIENCE, flags, read, steps_of, tba
from safetensors.torch import load_file, save_file
from test_trainer import make_rows
from transformers import AutoModelForCausalLM

from config import Config
from extras.objectives import LOSSES
from extras.sharding import Rank, ShardedLearner, connect
from launch import evaluate
from launch.command_line import build_config
from learner import make_learner
from models.architecture import weight_shapes
from models.logprobs import TOKENS_PER_FORWARD
from rollouts import Response, make_tokens
from runtime.memory_trial import try_largest_batch
from weights import SharedWeights

FEW, STEPS = 3, 10
# 7 queries: ranks differ in how many they have, and so in their micro-batches.
BATCH = dict(responses_per_query=3, samples_per_query=3, queries_per_batch=7)
LENGTHS = dict(max_prompt_tokens=20, max_response_tokens=30)
SETTINGS = BATCH | LENGTHS | dict(learning_rate=1e-4, beta=1.0, max_grad_norm=1.0)

spawn = torch.multiprocessing.get_context("spawn")


class Laboratory:
    """What a rank has: one learner after the other. Rank 0 says which, the others follow.

    rank: None for the one process that there is.
    """

    def __init__(self, rank: Rank | None = None):
        self.rank, self.learner = rank, None

    def call(self, name: str, *arguments) -> None:
        if self.rank:
            self.rank.send((name, arguments))

    def begin(self, model: str, settings: dict, tokens: int = 1024) -> None:
        """Load a policy. tokens: of a forward pass."""
        self.call("begin", model, settings, tokens)
        TOKENS_PER_FORWARD["cpu"] = tokens
        if self.learner and self.rank:
            self.rank.join = lambda: None  # they have met
        self.learner = make_learner(Config(model=model, **SETTINGS | settings), print, self.rank)

    def __getattr__(self, name: str):
        return getattr(self.learner, name)

    def parts(self) -> list[dict[str, np.ndarray]]:
        """The part of each parameter that each rank holds."""
        self.call("parts")
        held = self.learner.trained.items()
        return self.rank.gather({name: p.detach().to_local().numpy() for name, p in held})

    def trial(self, low_memory: str = "off", runs_out: bool = False) -> None:
        """The trial. runs_out: of memory, in the first backward pass on each rank, half-way."""
        self.call("trial", low_memory, runs_out)
        self.learner.low_memory = low_memory == "on"

        def fail(*_) -> None:
            handle.remove()
            raise torch.OutOfMemoryError

        if runs_out:
            layer = self.learner.policy.model.layers[0]
            handle = layer.register_full_backward_pre_hook(fail)
        try_largest_batch(self.learner.config, self.learner, print)


def rank_main(rank: Rank, experiment: Callable, arguments: tuple, connection) -> None:
    faulthandler.enable()
    if rank.rank:
        return rank.follow(Laboratory(rank), beat=lambda: None)
    try:
        connection.send(experiment(Laboratory(rank), *arguments))
    except Exception as error:
        connection.send(error)


def on_ranks(size: int, experiment: Callable, *arguments):
    """What experiment(laboratory, *arguments) returns on rank 0 of so many processes."""
    if size == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(TOKENS_PER_FORWARD, "cpu", TOKENS_PER_FORWARD["cpu"])
            result = experiment(Laboratory(), *arguments)
        assert not torch.distributed.is_initialized(), "one process makes no process group"
        return result
    ours, theirs = spawn.Pipe(duplex=False)
    ranks, alike = connect(size, PATIENCE), (experiment, arguments, theirs)
    processes = [spawn.Process(target=rank_main, args=(rank, *alike)) for rank in ranks]
    try:
        for process in processes:
            process.start()
        for connection in [theirs, *(end for rank in ranks for end in rank.connections)]:
            connection.close()
        assert ours.poll(PATIENCE), "rank 0 gave no result"
        try:
            result = ours.recv()
        except EOFError:
            for process in processes:
                process.join(10)
            result = RuntimeError(f"ranks ended with {[process.exitcode for process in processes]}")
        if isinstance(result, Exception):
            raise result
        return result
    finally:
        for process in processes:
            process.join(10)
            process.kill()


even_rows = partial(make_rows, 7, 3)


def uneven_rows(seed: int) -> list[Response]:
    """Rows of 7 queries; those of the first have 30 tokens each, all others 1 or 2.

    So the rank that has the first makes two passes of prompt and response, and others make one; and
    a rank whose responses all have one token would need none for the response.
    """
    rows, rng = even_rows(seed), np.random.default_rng(seed)
    for i, row in enumerate(rows):
        length = 30 if i < 3 else 1 + (i % 2 if i < 12 else 0)
        ids = rng.integers(0, 256, size=length)
        row.tokens = make_tokens(ids, ref_logprob=-5.0, behavior_logprob=-5.0)
    return rows


def whole(laboratory: Laboratory) -> dict[str, np.ndarray]:
    return copied((name, tensor.detach().float()) for name, tensor in laboratory.weights())


def copied(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in tensors}


def train(laboratory: Laboratory, model: str, settings: dict, make: Callable, steps: int):
    """Metrics of each step, and the weights after the last."""
    laboratory.begin(model, settings, tokens=50 if make is uneven_rows else 1024)
    metrics = [laboratory.update(make(seed)) for seed in range(steps)]
    return metrics, whole(laboratory)


CASES = {
    "tied": ("tied", {}, even_rows),
    "untied": ("untied", {}, even_rows),
    "tba_prime": ("untied", dict(loss="tba_prime"), even_rows),
    "uneven": ("untied", dict(tokens_per_micro_batch=1000), uneven_rows),
    "uneven, low memory": ("untied", dict(low_memory="on"), uneven_rows),
    "low memory": ("tied", dict(low_memory="on"), even_rows),
    "bf16": ("untied", dict(dtype="bfloat16"), even_rows),
    "bf16 masters": ("untied", dict(dtype="bfloat16", master_dtype="bfloat16"), even_rows),
}


def train_all(laboratory: Laboratory, models: dict[str, str], steps: int) -> dict[str, tuple]:
    return {
        name: train(laboratory, models[kind], settings, make, steps)
        for name, (kind, settings, make) in CASES.items()
    }


def everything(laboratory: Laboratory, models: dict[str, str], folder: str) -> dict:
    """All that the tests compare, of one number of processes: they start once for it."""
    size = laboratory.rank.size if laboratory.rank else 1
    found = train_all(laboratory, models, FEW)
    for loss in LOSSES:
        found[f"step of {loss}"] = train(laboratory, models["tied"], dict(loss=loss), even_rows, 1)
    # Half of the weights that it has, and its own again.
    laboratory.begin(models["tied"], {})
    rows, before = even_rows(0), whole(laboratory)
    own = {name: torch.from_numpy(weight) for name, weight in before.items()}
    half = {name: weight / 2 for name, weight in own.items()}
    found["under"] = [
        laboratory.logprobs_under(own, rows),
        laboratory.logprobs_under(half, rows[:1]),
        laboratory.logprobs_under(half, rows, 0.5),
    ]
    found["before"], found["after"] = before, whole(laboratory)
    # Saved by as many, and resumed by as many, in the middle of a run.
    laboratory.begin(models["tied"], {})
    for seed in range(3):
        laboratory.update(even_rows(seed))
    state = {name: tensor.clone().contiguous() for name, tensor in laboratory.state()}
    save_file(state, Path(folder, f"{size}.safetensors"))
    found["uninterrupted"] = [laboratory.update(even_rows(seed)) for seed in range(3, 6)]
    laboratory.save_model(Path(folder, f"model of {size}"))
    found["saved"] = whole(laboratory)
    if size > 1:
        for saved in (1, 2):
            path = f"{folder}/{saved}.safetensors"
            found[f"resumed from {saved}"] = resumed(laboratory, models["tied"], path)
        # What is published, against the parts that the ranks hold.
        laboratory.begin(models["untied"], {})
        shapes = weight_shapes(laboratory.config)
        weights = SharedWeights(shapes, torch.float32, readers=1)
        weights.publish(1, laboratory.weights())
        with weights.read(0) as (_, tensors):
            found["published"] = copied(tensors.items())
        found["parts"] = laboratory.parts()
        for low_memory in ("off", "on"):
            laboratory.trial(low_memory)
        found["after the trial"] = whole(laboratory)
    laboratory.begin(models["tied"], {})
    laboratory.trial(runs_out=True)
    steps = [laboratory.update(even_rows(seed)) for seed in range(3)]
    found["out of memory"] = laboratory.low_memory, steps, whole(laboratory)
    return found


def resumed(laboratory: Laboratory, model: str, path: str) -> tuple[int, list[dict]]:
    """The step of a checkpoint, and the metrics of the three steps after it."""
    laboratory.begin(model, {})
    laboratory.load_state(load_file(path))
    return laboratory.step, [laboratory.update(even_rows(seed)) for seed in range(3, 6)]


@pytest.fixture(scope="module")
def models(tied_model, untied_model) -> dict[str, str]:
    return {"tied": str(tied_model), "untied": str(untied_model)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def found(models, folder) -> dict[int, dict]:
    return {size: on_ranks(size, everything, models, str(folder)) for size in (1, 2)}


def check_equal(case: str, one: tuple, several: tuple) -> None:
    """Losses, gradient norms and weights are those of one process."""
    (metrics, weights), (others, other_weights) = one, several
    # In bf16 a product rounds by the rows beside it, and each step adds to that; so is a norm.
    is_bf16 = case.startswith("bf16")
    assert others[0]["loss"] == pytest.approx(metrics[0]["loss"], rel=1e-3 if is_bf16 else 1e-6)
    for name in ("loss", "grad_norm"):
        expected, figures = ([line[name] for line in lines] for lines in (metrics, others))
        assert figures == pytest.approx(expected, rel=2e-2 if is_bf16 else 1e-5)
    for name, weight in weights.items():
        atol = 1e-2 if is_bf16 else 1e-5
        np.testing.assert_allclose(other_weights[name], weight, rtol=0, atol=atol)
    for a, b in zip(metrics[:1] if is_bf16 else metrics, others):
        assert b == pytest.approx(a | {"grad_norm": b["grad_norm"]}, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_learn_what_one_does(case, found):
    check_equal(case, found[1][case], found[2][case])


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_of_every_objective_is_that_of_one_process(loss, found):
    (one,), (two,) = (found[size][f"step of {loss}"][0] for size in (1, 2))
    assert two == pytest.approx(one, rel=1e-5, abs=1e-6)


@pytest.mark.runs
def test_four_processes_learn_what_one_does_over_ten_steps(models):
    one, four = (on_ranks(size, train_all, models, STEPS) for size in (1, 4))
    for case in CASES:
        check_equal(case, one[case], four[case])


def test_a_rank_that_fills_up_makes_the_smallest_passes():
    """A whole one more, with its graph, would take memory that the largest-batch trial did not."""

    learner = object.__new__(ShardedLearner)
    learner.config = Config(responses_per_query=2)
    learner.rank = SimpleNamespace(gather=lambda value: [(3, 6), value])
    assert learner.with_shares(["a"]) == [("a", 1 / 7), ("a", 0.0), ("a", 0.0)]
    group = ["a", "b", "c", "d"]
    assert learner.with_shares([group]) == [(group, 0.4), (["a", "b"], 0.0), (["a", "b"], 0.0)]


def test_what_is_published_is_what_the_ranks_hold_bit_by_bit(found):
    two = found[2]
    parts, published = two["parts"], two["published"]
    assert len(parts) == 2
    assert all(part[name].size < published[name].size for part in parts for name in part)
    held = {name: np.concatenate([part[name] for part in parts]) for name in published}
    np.testing.assert_equal(published, held)
    # Nor did the largest-batch trial change any of them.
    np.testing.assert_equal(two["after the trial"], held)


def test_log_probabilities_under_other_weights_are_those_of_one_process(found):
    """For the mismatch with vLLM, and for rows that an earlier reference scored."""
    two = found[2]
    for one, other in zip(found[1]["under"], two["under"]):
        assert [len(row) for row in one] == [len(row) for row in other]
        np.testing.assert_allclose(np.concatenate(one), np.concatenate(other), rtol=0, atol=1e-5)
    own, _, half = two["under"]
    assert np.abs(np.concatenate(own) - np.concatenate(half)).max() > 0.1
    np.testing.assert_equal(two["after"], two["before"])


def test_a_trial_that_runs_out_of_memory_leaves_ranks_that_learn_what_one_process_does(found):
    (is_low, *one), (other_is_low, *several) = (found[size]["out of memory"] for size in (1, 2))
    assert is_low and other_is_low, "two passes fitted"
    check_equal("low memory", one, several)


def test_a_checkpoint_of_one_process_or_two_is_resumed_by_one_or_two(found, models, folder):
    by_one = on_ranks(1, resumed, models["tied"], str(folder / "2.safetensors"))
    for step, metrics in (by_one, *(found[2][f"resumed from {saved}"] for saved in (1, 2))):
        assert step == 3 and len(metrics) == 3
        for line, expected in zip(metrics, found[1]["uninterrupted"]):
            assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_saved_model_is_whole(found, folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model of 2")
    saved = copied((name, parameter.detach()) for name, parameter in model.named_parameters())
    np.testing.assert_equal(saved, found[2]["saved"])


LATE = flags(constant_staleness=2, loss="tba_prime", reference_reset_period=10)


@pytest.mark.faults
@pytest.mark.parametrize("mode", [["--synchronous"], LATE], ids=["synchronous", "late and reset"])
def test_a_run_in_lockstep_with_two_processes_has_the_losses_of_one(mode, tmp_path):
    losses, mismatches = [], []
    for processes in (1, 2):
        run_dir = tmp_path / str(processes)
        own = flags(steps=40, trainer_processes=processes, output_dir=run_dir)
        tba("arithmetic", *mode, *own)
        losses.append([line["loss"] for line in steps_of(run_dir)])
        mismatches.append(max(line.get("mismatch", 0.0) for line in steps_of(run_dir)))
    assert len(losses[0]) == 40 and losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert 0 < mismatches[1] < 2 * mismatches[0] + 1e-6
    saved = [AutoModelForCausalLM.from_pretrained(tmp_path / str(n) / "model") for n in (1, 2)]
    for one, two in zip(*(model.parameters() for model in saved)):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-3)


@pytest.mark.faults
@pytest.mark.long
def test_an_asynchronous_run_with_two_processes_reaches_095_and_its_weights_arrive(tmp_path):
    run_dir = tmp_path / "run"
    tba("arithmetic", *flags(steps=300, trainer_processes=2, output_dir=run_dir))
    assert read(run_dir, "metrics.jsonl")[-1]["final_accuracy"] >= 0.95
    mismatches = [line["mismatch"] for line in steps_of(run_dir) if "mismatch" in line]
    assert 0 < max(mismatches) < 1e-4, "as with one process, in fp32"


def test_an_evaluation_needs_no_gpus_for_trainer_processes(gpus, untied_model, monkeypatch):
    gpus(1)
    placed = []
    monkeypatch.setattr(evaluate, "evaluate", lambda config, place, _: placed.append(place))
    monkeypatch.setattr(evaluate.children, "Interrupt", lambda: SimpleNamespace(signal=0))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that what a fetch sets ends with this test
    settings = flags(model=untied_model, trainer_processes=4)
    evaluate.evaluate_only(build_config(["arithmetic", "--eval_only", *settings]))
    assert [place.gpu for place in placed] == ["0"]
