"""Lockstep (--constant_staleness, --synchronous), and the walkthrough's commands that use it."""

import queue
import signal
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from conftest import FOREVER, SMALL, Run, flags, living, make_group, read, tba
from test_walkthrough import balance, commands

from config import Config
from extras.lockstep import Arrived, LockstepTrainer
from extras.lockstep_searcher import LockstepSearcher
from launch.command_line import build_config
from models.architecture import weight_shapes
from rollouts import Group
from runtime.transport.status import StatusTable
from searcher import Searcher
from tasks import Query
from weights import SharedWeights


def make_searcher(kind: type[Searcher], model, run_dir, **settings) -> Searcher:
    """Make a searcher as its process does, without an engine."""
    (run_dir / "logs").mkdir(exist_ok=True)
    config = Config(model=str(model), task="arithmetic", searchers=1, **settings)
    weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
    weights.reference = SharedWeights(weights.shapes, torch.float32, readers=1, slots=1)
    status = StatusTable(["trainer", "searcher 0"])
    with patch("searcher.Engine"):
        return kind(config, 0, weights, queue.Queue(), status, str(run_dir))


def score(searcher: Searcher) -> Group:
    """Have a searcher add log pi_ref to a group of two responses."""
    group = make_group(0, 0, [3, 5], range(8), texts=["", ""])
    group.query = Query(0, "", "")
    searcher.add_reference_logprobs([group])
    return group


def test_a_lockstep_checkpoint_waits_for_all_batches_that_no_later_version_makes():
    def is_settled() -> bool:
        found = []
        trainer.receive_until = lambda is_done, what: found.append(is_done())
        trainer.prepare_checkpoint()
        return found == [True]

    trainer = object.__new__(LockstepTrainer)
    trainer.config = Config(constant_staleness=2, queries_per_batch=1, steps=9)
    trainer.buffer, trainer.receive = Arrived(), lambda: None
    trainer.evaluations = SimpleNamespace(is_pending=False)
    trainer.learner = SimpleNamespace(step=4)
    assert not is_settled()
    for step, expected in (5, False), (4, True):
        trainer.add([make_group(0, 2, [1], [7], batch=step)])
        assert is_settled() == expected
    trainer.evaluations.is_pending = True
    assert not is_settled()
    trainer.evaluations.is_pending, trainer.learner.step = False, 8
    trainer.add([make_group(0, 6, [1], [7], batch=8)])
    assert is_settled(), "there are nine steps"


def test_at_a_shutdown_the_last_batch_is_generated_for_the_checkpoint(untied_model, tmp_path):
    searcher = make_searcher(LockstepSearcher, untied_model, tmp_path, constant_staleness=0)
    searcher.status.shutdown, searcher.generation = True, Mock(is_idle=False)
    searcher.step_engine()
    assert searcher.generation.step.called


def test_constant_staleness_has_batches_of_one_version_and_killed_leaves_nothing(tmp_path):
    settings = flags(constant_staleness=3, reference_reset_period=5)
    with Run(tmp_path / "run", "arithmetic", *settings, *SMALL, *FOREVER) as run:
        run.is_at(20)
        assert len(living(run.tag)) >= 3
        run.process.kill()
        assert run.process.wait() == -signal.SIGKILL
        run.nothing_is_left()
    lines = run.steps()[:20]
    staleness = [0, 1, 2] + [3] * 17
    assert [line["staleness_mean"] for line in lines] == staleness
    assert [line["staleness_max"] for line in lines] == staleness
    assert all(line["mismatch"] < 1e-4 for line in lines)
    # The policy that has just become the reference is at no distance from it: the responses of
    # version 5 are trained on at step 5 + 3, and so on.
    steps_without_kl = [line["step"] for line in lines if abs(line["kl"]) < 1e-5]
    at_reference = {step - 1 - 3 for step in steps_without_kl if step > 4}
    assert {5, 10, 15} <= at_reference
    assert not {9, 14} & at_reference


def test_a_synchronous_run_syncs_every_step_and_generates_what_it_trains_on(tmp_path):
    (tmp_path / "config.json").write_text('{"task": "gsm8k"}')
    for earlier in [], flags(config=tmp_path / "config.json"):
        config = build_config(["gsm8k", *earlier, "--synchronous"])
        assert (config.constant_staleness, config.sync_period) == (0, 1)
        assert config.samples_per_query == config.responses_per_query


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_each_command_of_the_page_makes_a_configuration(words):
    assert build_config(words).task == "arithmetic"


@pytest.mark.runs
def test_the_one_step_of_the_page_has_the_loss_that_its_responses_give(tmp_path):
    (words,) = (words for words in commands() if "--synchronous" in words)
    for seed in range(3, 15):  # on another processor other responses come of a seed
        run_dir = tmp_path / str(seed)
        tba(*words, *flags(seed=seed, output_dir=run_dir))
        samples = read(run_dir, "samples.jsonl")
        if len({line["reward"] for line in samples}) > 1:
            break
    log_ref = [sum(line["ref_logprobs"]) for line in samples]
    log_pi = [sum(line["behavior_logprobs"]) for line in samples]  # step 0: it sampled them
    loss, log_z = balance([line["reward"] for line in samples], log_ref, log_pi)
    (line,) = (line for line in read(run_dir, "metrics.jsonl") if "loss" in line)
    assert len(samples) == 4 and line["loss"] > 1, "rewards differ"
    assert (line["loss"], line["log_z"]) == pytest.approx((loss, log_z), abs=0.05)
