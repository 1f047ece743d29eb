"""What a flag of an extra refuses, and what is said where the extra is not there."""

import json
import shutil
import sys

import pytest
from conftest import ROOT, SMALL, flags, python
from test_command_line import refused

from config import Config, UserError
from extras.objectives import EXACT_SAMPLING
from launch.checks import check_sampling
from launch.command_line import build_config
from tasks import Task

REFUSED = [
    ("--loss ppo", "--loss is 'ppo': it is one of tb"),
    ("--synchronous --searchers 64", "--searchers is 64, more than --queries_per_batch"),
    ("--max_staleness 5 --constant_staleness 5", "5 are both given: the first is for the buffer"),
    ("--search_ahead 2 --synchronous", "--search_ahead 2 and …0 are both given: the trainer"),
    ("--search_ahead 2 --max_staleness 9", "9 are both given: the trainer may wait"),
    ("--search_ahead 2 --ray auto", "auto are both given: each node would be so far ahead"),
    ("--reference_reset_period 5", "is 5, which does nothing without --constant_staleness: give"),
    ("{plan} 4x80 --trainer_processes 4", "is 4, … 4 GPUs: … a searcher another; give at most 3"),
    ("{plan} 8x80 --trainer_processes 4 --searchers 5", "is 5, … 8 GPUs: room for 4 beside 4"),
    ("--trainer_processes 33", "--trainer_processes is 33, more than --queries_per_batch 32"),
    ("arithmetic --max_episode_tokens 50", "has no reply()"),
    ("reach --max_episode_tokens None", "has episodes: give --max_episode_tokens"),
    ("reach --max_episode_tokens 16", "leaves no room for a turn"),
    ("--lora_alpha 16", "--lora_alpha is 16.0, …without --lora_rank: give that too, or … None"),
    ("--trainer_processes 2 --lora_rank 8", "--lora_rank 8 … 2 are both given: …are not sharded"),
    ("redteam --loss tba_ema", "the sampler for the policy, but …samples with temperature 1."),
    ("arithmetic --ray auto", "--ray needs Ray…pip install -r requirements/ray.txt"),
    ("--ray auto --synchronous", "--ray auto …0 are both given: further nodes search freely"),
]


@pytest.mark.parametrize("loss", sorted(EXACT_SAMPLING))
def test_a_sampler_that_is_not_the_policy_is_refused_by_what_takes_it_for_the_policy(loss):
    class Own(Task):
        def sampling(self, rng):
            return shaped

    config = Config(loss=loss, temperature=0.7)
    for shaped in (
        *(dict(temperature=1.0), dict(top_p=0.9), dict(top_k=20), dict(min_p=0.1)),
        *(dict(min_tokens=1), dict(presence_penalty=0.5), dict(logit_bias={1: 2.0})),
        *(dict(bad_words=["no"]), dict(allowed_token_ids=[1])),
    ):
        with pytest.raises(UserError, match=f"samples with {next(iter(shaped))} "):
            check_sampling(config, Own())
        check_sampling(Config(loss="tb", temperature=0.7), Own())
    shaped = dict(stop=["."], temperature=0.7, top_p=1.0, min_tokens=0, logit_bias=None)
    check_sampling(config, Own())
    shaped = dict(top_k=-1, bad_words=[], logit_bias={}, skip_special_tokens=False)
    check_sampling(config, Own())


@pytest.mark.parametrize("arguments, expected", REFUSED)
def test_an_extra_refuses_what_it_cannot_do(arguments, expected, untied_model, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith("extras.nodes")]:
        monkeypatch.delitem(sys.modules, name)
    plan = f"--model {untied_model} --plan --plan_gpus"
    refused(arguments.format(plan=plan).split(), expected, capfd)


@pytest.mark.parametrize("row, lacks", [({}, "'solution'"), ({"solution": "2"}, r"\boxed{}")])
def test_a_problem_of_math_that_cannot_be_used_is_named_with_its_line(row, lacks, tmp_path, capfd):
    (tmp_path / "train.jsonl").write_text(json.dumps({"problem": "1+1?"} | row))
    arguments = ["competition_math", "--data_dir", tmp_path]
    refused(arguments, f"train.jsonl line 1…has no {lacks}", capfd)


WANTED = [
    ("lockstep", "arithmetic --synchronous"),
    ("lockstep", "sums --preset smollm"),  # which has a constant staleness
    ("objectives", "arithmetic --loss grpo"),
    ("episodes", "reach"),
    ("score_workers", "jsonl --data absent.jsonl --match math"),
    ("lockstep", "arithmetic --reference_reset_period 2"),
    ("lora", "arithmetic --lora_rank 4"),
    ("sharding", "arithmetic --trainer_processes 2"),
    ("tracking", "arithmetic --track wandb"),
    ("nodes/joining", "arithmetic --ray auto"),
]


@pytest.mark.parametrize("name, words", WANTED)
def test_without_extras_what_wants_one_is_refused(name, words, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("launch.settings.EXTRAS", tmp_path / "extras")
    says = f"needs extras/{name}.py, which this copy of the project lacks"
    refused(words.split(), says, capfd)
    assert build_config(["arithmetic"]).loss == "tb"


@pytest.mark.runs
def test_a_copy_without_extras_and_their_tests_finds_its_other_tests_and_trains(tmp_path):
    """Whether those pass there, make test in such a copy shows."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("extras", "runs", ".*"))
    train = ["tba.py", "arithmetic", *SMALL, *flags(steps=20, output_dir=tmp_path / "run")]
    python("-m", "pytest", "-q", "--collect-only", "tests", cwd=copy)
    assert "final accuracy" in python(*train, cwd=copy).stdout
