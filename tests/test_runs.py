"""Whole runs through the command line, on the real vLLM."""

import json
import os
import re
import shutil
import signal
import time
import uuid
from pathlib import Path

import pytest
import torch
from conftest import (
    FOREVER,
    PATIENCE,
    ROOT,
    SMALL,
    Run,
    living,
    read,
    start_tba,
    steps_of,
    tba,
    wait_for,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.checkpoints import checkpoint
from runtime.display.pictures import PANELS
from runtime.record import timeline
from tba import main

OUTPUTS = (
    "config.json starts.jsonl metrics.jsonl samples.jsonl curves.png timeline.json timeline.png"
    " report.html model"
).split()
METRICS = (
    "step reward equal_rewards loss log_z kl entropy staleness_mean staleness_max"
    " staleness_in_flight staleness_in_buffer ess_responses ess_tokens log_w_5 log_w_95 grad_norm"
    " learning_rate beta trainer_busy searcher_tokens_per_second searcher_busy queue_depth"
    " buffer_responses mismatch"
).split()


def check_outputs(run_dir: Path, steps: int) -> None:
    assert all((run_dir / name).exists() for name in OUTPUTS)
    lines = steps_of(run_dir)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert lines[-1].keys() >= set(METRICS)
    assert {name for names in PANELS.values() for name in names} <= set(METRICS), "curves.png"
    spans = json.loads((run_dir / "timeline.json").read_text())["traceEvents"]
    rows = {event["pid"]: event["args"]["name"] for event in spans if event["ph"] == "M"}
    seen = {(rows[event["pid"]], event["name"]) for event in spans if event["ph"] == "X"}
    assert {("trainer", name) for name in ("wait", "step", "publish")} <= seen
    activities = ("search", "score", "reference", "load", "eval")
    assert {("searcher-0", name) for name in activities} <= seen
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    assert model(input_ids=torch.tensor([tokenizer("1+2=").input_ids])).logits.isfinite().all()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """The directory of a run of 250 steps that has ended, and what it said."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    result = tba("arithmetic", *SMALL, "--steps", 250, "--eval_every", 100, "--output_dir", run_dir)
    assert result.returncode == 0, result.stderr
    return run_dir, result.stdout


def test_an_arithmetic_run_learns_and_its_last_version_is_evaluated(finished):
    run_dir, out = finished
    evaluations = {
        line["step"]: line["accuracy"]
        for line in read(run_dir, "metrics.jsonl")
        if "accuracy" in line
    }
    assert 0 in evaluations and len(evaluations) == 3, "the base model, and two on the way"
    assert evaluations[0] <= 0.60
    final = read(run_dir, "metrics.jsonl")[-1]
    assert final.keys() == {"step", "base_model", "final_accuracy", "final_accuracy_interval"}
    assert final["step"] == 250
    saved = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    last = checkpoint.load_tensors(run_dir / "checkpoints" / "step-00000250", "learner")
    are_equal = [(last[f"policy.{name}"] == p).all() for name, p in saved.named_parameters()]
    assert all(are_equal), "what is evaluated at the end is the last version"
    assert final["final_accuracy"] > evaluations[0] + 0.1, "it learns"
    assert f"base accuracy: {evaluations[0]:.2f}" in out
    assert f"final accuracy: {final['final_accuracy']:.2f}" in out


def test_a_run_leaves_every_output_and_its_samples_are_whole(finished):
    run_dir, _ = finished
    check_outputs(run_dir, 250)
    sample = read(run_dir, "samples.jsonl")[0]
    names = (
        "version query_id prompt answer response extracted reward finished tokens"
        " behavior_logprobs ref_logprobs sampled"
    )
    assert sample.keys() == set(names.split())


def test_the_trainer_is_busy_replays_and_what_it_published_is_sampled_from(finished):
    run_dir, out = finished
    lines = steps_of(run_dir)
    mismatch = max(line["mismatch"] for line in lines)
    assert 0 < mismatch < 1e-4, "what was published is what vLLM samples from"
    assert max(line["mismatch_version"] for line in lines) > 0, "and not only of the base model"
    assert lines[-1]["staleness_max"] > 2, "replay"
    busy = timeline.trainer_busy(run_dir)
    assert busy >= 0.90
    assert f"trainer busy: {busy:.3f}" in out


def test_eval_only_ends_with_what_the_run_found_as_json(finished, capfd):
    run_dir, _ = finished
    assert main(["arithmetic", "--eval_only", "--model", str(run_dir / "model")]) == 0
    *table, last = capfd.readouterr().out.splitlines()
    assert table[1].startswith("accuracy ") and table[-1] == "on 1000 test queries"
    found, final = json.loads(last), read(run_dir, "metrics.jsonl")[-1]
    value, low, high = found["metrics"]["accuracy"]
    assert 0 < low < value < high < 1
    assert value == pytest.approx(final["final_accuracy"], abs=0.002)
    assert [low, high] == pytest.approx(final["final_accuracy_interval"], abs=0.002)
    assert (found["queries"], found["long_prompts"], found["unscored"]) == (1000, 0, 0)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Run:
    """A run at constant staleness whose command line was killed behind step 20."""
    flags = ["--constant_staleness", 3, "--reference_reset_period", 5]
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    with Run(run_dir, "arithmetic", *flags, *SMALL, *FOREVER) as run:
        run.is_at(20)
        assert len(living(run.tag)) >= 3
        run.process.kill()
        run.process.wait()
        run.nothing_is_left()
    return run


def test_a_killed_command_line_takes_all_the_others_along_and_leaves_nothing_in_shared_memory(
    killed,
):
    assert killed.process.returncode == -signal.SIGKILL and killed.shared, "and both are gone"


def test_constant_staleness_has_batches_of_one_version_and_resets_to_that_policy(killed):
    run_dir = killed.run_dir
    lines = steps_of(run_dir)[:20]
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


def test_a_fork_with_the_readmes_objective_trains_until_ctrl_c_and_ends_soon(tmp_path, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = next(block for block in blocks if "LOSSES[" in block)
    assert len(code.splitlines()) < 10
    fork, run_dir = tmp_path / "fork", tmp_path / "run"
    shutil.copytree(ROOT, fork, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    with open(fork / "objectives.py", "a") as file:
        file.write("\n\n" + code)
    name = re.search(r'LOSSES\["(\w+)"\]', code)[1]
    flags = ["--loss", name, "--max_staleness", 4, "--reference_reset_period", 10]
    with Run(run_dir, "arithmetic", *flags, *SMALL, *FOREVER, root=fork) as run:
        run.is_at(40)
        start = time.monotonic()
        _, err = run.end()
        assert time.monotonic() - start < run.start_seconds
        command = f"python tba.py --resume {run_dir}"
        assert f"stopped by SIGINT: partial results are in {run_dir}; to go on: {command}" in err
        run.nothing_is_left()
    check_outputs(run_dir, run.step())
    lines = steps_of(run_dir)
    # Of one step it may be 0: just after a reset, when all rewards of a group are equal.
    assert max(line["grad_norm"] for line in lines[-10:]) > 0
    assert {line["bad_steps"] for line in lines} == {0}
    assert 0 < max(line["staleness_max"] for line in lines) <= 4
    assert main(["arithmetic", "--loss", name]) == 2
    assert "is one of tb" in capsys.readouterr().err, "only the fork has it"


SWALLOWED = """
import os, signal, sys, time

class Finder:
    def find_spec(name, *_):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            except KeyboardInterrupt:
                pass
sys.meta_path.insert(0, Finder)
"""


def test_ctrl_c_is_heard_where_a_library_would_swallow_it_while_it_is_imported(
    tmp_path, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text(SWALLOWED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = tba("arithmetic", "--steps", 1, directory=tmp_path)
    assert result.returncode == 130 and not (tmp_path / "runs").exists()
    assert result.stderr == "interrupted before the run began: nothing was written\n"


def test_ctrl_c_while_everything_still_loads_ends_a_run_at_once(tmp_path):
    tag = uuid.uuid4().hex
    process = start_tba(tag=tag, directory=tmp_path)  # as the README has it: no flag at all
    try:
        # The command line, Python's resource tracker, a trainer and a searcher.
        wait_for(lambda: len(living(tag)) >= 4 or process.poll() is not None, "four processes")
        os.killpg(process.pid, signal.SIGINT)  # to the whole process group, as a terminal does
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130, err
        assert "Traceback" not in err and living(tag) == []
        assert [path.name[:11] for path in (tmp_path / "runs").iterdir()] == ["arithmetic-"]
    finally:
        process.kill()
