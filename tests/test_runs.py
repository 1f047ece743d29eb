"""Whole runs through the command line, on the real vLLM, and what a resumed one does."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import FOREVER, ROOT, SMALL, Run, flags, living, read, steps_of, tba
from test_fork import FILES
from test_size import MOST_IMPORTED
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import UserError
from launch import files
from launch.command_line import build_config
from launch.display.pictures import PANELS
from launch.resume import newest_whole
from runtime.checkpoints import checkpoint
from tba import main

OUTPUTS = "config.json starts.jsonl metrics.jsonl samples.jsonl timeline.json report.html".split()
OUTPUTS += ["curves.png", "timeline.png", "model"]
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


# Has each process write down which files of the project it has imported, until its end.
IMPORTED = """
import atexit, json, os, sys, threading, time
from pathlib import Path

def write():
    files = {{str(getattr(module, "__file__", "")) for module in list(sys.modules.values())}}
    own = [file for file in files if file.startswith({root!r}) and "site-packages" not in file]
    name = Path("/proc/self/comm").read_text().strip()
    unfinished = Path({folder!r}, str(os.getpid()))
    unfinished.write_text(json.dumps(own))
    unfinished.rename(Path({folder!r}, name))

def keep_writing():
    while True:
        time.sleep(0.5)
        write()

atexit.register(write)
threading.Thread(target=keep_writing, daemon=True).start()
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """The folder with what the processes of `finished` have imported."""
    return tmp_path_factory.mktemp("imported")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, imported) -> tuple[Path, str]:
    """The directory of a run of 250 steps that has ended, and what it said."""
    run_dir, site = tmp_path_factory.mktemp("finished") / "run", tmp_path_factory.mktemp("site")
    script = IMPORTED.format(root=f"{ROOT}/", folder=str(imported))
    (site / "sitecustomize.py").write_text(script)
    settings = flags(steps=250, eval_every=100, output_dir=run_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        result = tba("arithmetic", *SMALL, *settings)
    return run_dir, result.stdout


def test_what_a_run_imports_of_the_project_can_be_read_in_an_afternoon(finished, imported):
    """The core: what trainer and searcher of an ordinary run had imported when they ended."""
    lines: dict[str, int] = {}
    for process in ("trainer", "searcher 0"):
        own = {
            str(Path(file).relative_to(ROOT)): len(Path(file).read_text().splitlines())
            for file in json.loads((imported / f"tba {process}").read_text())
        }
        assert {"tba.py", "rollouts.py", "weights.py"} <= own.keys(), "they were seen"
        assert not [file for file in own if file.startswith(("launch", "extras"))]
        lines |= own
    assert {"trainer.py", "searcher.py"} <= lines.keys()
    most_files, most_lines = MOST_IMPORTED
    assert len(lines) <= most_files and sum(lines.values()) <= most_lines, lines


def test_an_arithmetic_run_learns_and_its_last_version_is_evaluated(finished):
    run_dir, out = finished
    lines = read(run_dir, "metrics.jsonl")
    evaluations = {line["step"]: line["accuracy"] for line in lines if "accuracy" in line}
    assert 0 in evaluations and len(evaluations) == 3, "the base model, and two on the way"
    assert evaluations[0] <= 0.60
    final = lines[-1]
    assert final.keys() == {"step", "base_model", "final_accuracy", "final_accuracy_interval"}
    assert final["step"] == 250
    saved = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    last = checkpoint.load_tensors(run_dir / "checkpoints" / "step-00000250", "learner")
    are_equal = [(last[f"policy.{name}"] == p).all() for name, p in saved.named_parameters()]
    assert all(are_equal), "what is evaluated at the end is the last version"
    assert final["final_accuracy"] > evaluations[0] + 0.1, "it learns"
    assert f"base accuracy: {evaluations[0]:.2f}" in out
    assert f"final accuracy: {final['final_accuracy']:.2f}" in out
    change = f"accuracy {evaluations[0]:.2f} → {final['final_accuracy']:.2f}"
    assert out.splitlines()[-2:] == [change, f"results: {run_dir}/report.html"]


def test_a_run_leaves_all_outputs_and_samples_from_what_its_busy_trainer_publishes(finished):
    run_dir, out = finished
    check_outputs(run_dir, 250)
    sample = read(run_dir, "samples.jsonl")[0]
    names = "version query_id prompt answer response extracted reward finished tokens sampled"
    assert sample.keys() == {*names.split(), "behavior_logprobs", "ref_logprobs"}
    lines = steps_of(run_dir)
    mismatch = max(line["mismatch"] for line in lines)
    assert 0 < mismatch < 1e-4, "what was published is what vLLM samples from"
    assert max(line["mismatch_version"] for line in lines) > 0, "and not only of the base model"
    assert lines[-1]["staleness_max"] > 2, "replay"
    busy = files.trainer_busy(run_dir)
    assert busy >= 0.90
    assert f"trainer busy: {busy:.3f}" in out


def test_eval_only_ends_with_what_the_run_found_as_json(finished, capfd):
    run_dir, _ = finished
    assert main(["arithmetic", "--eval_only", "--model", str(run_dir / "model")]) == 0
    metric, cut_off, best, *_, last = capfd.readouterr().out.splitlines()
    assert metric.startswith("accuracy: ") and metric.endswith(", on 1000 test queries)")
    assert "of the responses were cut off" in cut_off and best.startswith("  best: reward 1")
    found, final = json.loads(last), read(run_dir, "metrics.jsonl")[-1]
    value, low, high = found["metrics"]["accuracy"]
    assert 0 < low < value < high < 1
    assert value == pytest.approx(final["final_accuracy"], abs=0.002)
    assert [low, high] == pytest.approx(final["final_accuracy_interval"], abs=0.002)
    assert (found["queries"], found["long_prompts"], found["unscored"]) == (1000, 0, 0)


def test_a_run_with_the_readmes_objective_trains_until_ctrl_c_and_ends_soon(tmp_path):
    file, run_dir = tmp_path / "huber.py", tmp_path / "run"
    file.write_text(FILES[file.name])
    settings = flags(loss=file, max_staleness=4)
    with Run(run_dir, "arithmetic", *settings, *SMALL, *FOREVER) as run:
        run.is_at(40)
        start = time.monotonic()
        _, err = run.end()
        assert time.monotonic() - start < run.start_seconds
        command = f"python tba.py --resume {run_dir}"
        assert f"stopped by SIGINT: partial results are in {run_dir}; to go on: {command}" in err
        run.nothing_is_left()
    check_outputs(run_dir, run.step())
    lines = run.steps()
    # Of one step it may be 0, when all rewards of a group are equal.
    assert max(line["grad_norm"] for line in lines[-10:]) > 0
    assert {line["bad_steps"] for line in lines} == {0}
    assert 0 < max(line["staleness_max"] for line in lines) <= 4


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


def test_ctrl_c_is_heard_where_a_library_would_swallow_it_at_its_import(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SWALLOWED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = tba("arithmetic", "--steps", 1, code=130, directory=tmp_path)
    assert not (tmp_path / "runs").exists()
    assert result.stderr == "interrupted before the run began: nothing of it was written\n"


def test_ctrl_c_while_everything_still_loads_ends_a_run_at_once(tmp_path):
    with Run(None, "arithmetic", directory=tmp_path) as run:  # as the README has it: no flag
        # The command line, Python's resource tracker, a trainer and a searcher.
        run.until(lambda: len(living(run.tag)) >= 4, "four processes")
        os.killpg(run.process.pid, signal.SIGINT)  # to the whole process group, as a terminal does
        _, err = run.ends_with(130)
        assert "Traceback" not in err and living(run.tag) == []
        assert [path.name[:11] for path in (tmp_path / "runs").iterdir()] == ["arithmetic-"]


# Runs that are killed and resumed

OWN = """
import os, time
from pathlib import Path
from tasks import Query
from tasks.arithmetic import Arithmetic

class Own(Arithmetic):
"""
# Of the metrics; the rest is repeatable.
TIMING = "seconds trainer_busy searcher_busy searcher_tokens_per_second queue_depth".split()


def own_task(path: Path, body: str) -> Path:
    """Write a task that is arithmetic but for this body of its class."""
    path.write_text(OWN + body)
    return path


def metrics_of(run_dir: Path) -> list[str]:
    """What is repeatable in the metrics of the first 16 steps."""
    lines = [line for line in read(run_dir, "metrics.jsonl") if line["step"] <= 16]
    repeatable = [{k: v for k, v in line.items() if k not in TIMING} for line in lines]
    return sorted(json.dumps(line, sort_keys=True) for line in repeatable)


ALL_WEIGHTS = pytest.param([], id="all weights", marks=pytest.mark.faults)
LORA = pytest.param(["--lora_rank", 4], id="LoRA", marks=pytest.mark.runs)


@pytest.fixture(scope="module", params=[ALL_WEIGHTS, LORA])
def resumed(request, tmp_path_factory) -> Path:
    """A directory of two synchronous runs.

    `whole` was killed behind step 16; `killed` behind step 8, then resumed and killed behind 16.
    """
    directory = tmp_path_factory.mktemp("resumed")
    settings = flags(seed=7, checkpoint_every=4, reference_reset_period=5)
    settings = ["arithmetic", "--synchronous", *settings, *SMALL, *FOREVER, *request.param]
    for name, step, resume in ("whole", 16, False), ("killed", 8, False), ("killed", 16, True):
        saved = directory / name / "checkpoints" / f"step-{step:08}"
        with Run(directory / name, *([] if resume else settings), resume=resume) as run:
            run.until(saved.exists, f"the checkpoint of step {step}")
            run.process.kill()
            run.nothing_is_left()
    return directory


@pytest.fixture
def copied(resumed, tmp_path) -> Path:
    """A copy of the run that was resumed, to be changed."""
    return shutil.copytree(resumed / "killed", tmp_path / "run")


def change(run_dir: Path, **changed) -> dict:
    """Change settings in config.json; all of them."""
    settings = json.loads((run_dir / "config.json").read_text()) | changed
    (run_dir / "config.json").write_text(json.dumps(settings))
    return settings


def test_a_run_killed_and_resumed_gives_the_metrics_and_weights_of_one_that_was_not(resumed):
    assert metrics_of(resumed / "killed") == metrics_of(resumed / "whole")
    assert len(metrics_of(resumed / "whole")) == 16 + 1
    lines = steps_of(resumed / "whole")[:16]
    assert all(line["staleness_max"] == 0 and line["mismatch"] < 1e-4 for line in lines)
    last = [resumed / name / "checkpoints" / "step-00000016" for name in ("whole", "killed")]
    whole, killed = (checkpoint.load_tensors(path, "learner") for path in last)
    torch.testing.assert_close(whole, killed, rtol=0, atol=0)
    kept = [path.name for path in checkpoint.list_checkpoints(str(resumed / "whole"))]
    # A kill may come before the one before them is deleted.
    assert kept[-2:] == ["step-00000012", "step-00000016"], "the last two are kept"


FIXED = [
    ("--responses_per_query 4", "--responses_per_query is 4", "8: only steps, learning_rate"),
    ("--model {model}", "--model is '{model}'", ""),
    ("gsm8k", "--task is 'gsm8k'", "'arithmetic'"),
    ("--beta 3", "--beta is 3.0", "0.1"),
]


@pytest.mark.parametrize("words, given, saved", FIXED)
def test_a_run_is_resumed_with_its_own_settings(words, given, saved, resumed, untied_model, capsys):
    arguments = words.format(model=untied_model).split()
    assert main([*arguments, "--resume", str(resumed / "killed")]) == 2
    err = capsys.readouterr().err
    given = given.format(model=untied_model)
    assert err.count("\n") == 1 and f"{given}, but the run to resume has {saved}" in err


CHANGED = """
    def queries(self, split):
        return [Query(q.id, "0" + q.prompt, q.answer) for q in super().queries(split)]
"""


def test_a_resumed_run_trains_on_the_changed_prompts_of_its_task(copied, tmp_path):
    # As if the task's file had changed.
    change(copied, task=str(own_task(tmp_path / "changed.py", CHANGED)))
    (copied / "samples.jsonl").unlink()
    done = tba("--resume", copied, "--steps", 18)
    assert done.stderr == "warning: the rows of the task changed since that checkpoint\n"
    # All that a synchronous run trains on was generated since.
    assert steps_of(copied)[-1]["step"] == 18
    prompts = [line["prompt"] for line in read(copied, "samples.jsonl")]
    assert {(prompt[0], len(prompt)) for prompt in prompts} == {("0", len("0" + "12+34="))}


def test_a_resumed_run_may_change_its_steps_but_not_at_constant_staleness(copied):
    arguments = flags(resume=copied, steps=20)
    config = build_config([*arguments, "--learning_rate", "0.5"])
    assert (config.steps, config.learning_rate) == (20, 0.5)
    assert (config.queries_per_batch, config.constant_staleness) == (8, 0)
    change(copied, constant_staleness=2)
    with pytest.raises(UserError, match="--steps is 20, but the run to resume has 1000000"):
        build_config(arguments)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used_if_there_is_one(copied, capsys):
    newest, previous = (copied / "checkpoints" / f"step-{step:08}" for step in (16, 12))
    # The kill may have come before this one was deleted.
    shutil.rmtree(copied / "checkpoints" / "step-00000008", ignore_errors=True)
    names = {path.name for path in newest.iterdir()} - {"checksums.json"}
    assert {"learner.safetensors", "reference.safetensors", "buffer.npz"} < names
    for name in sorted(names):
        data = (newest / name).read_bytes()
        middle = len(data) // 2
        (newest / name).write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        complaints = [f"{newest} cannot be used: {name} is damaged"]
        assert newest_whole(str(copied)) == (previous, complaints)
        (newest / name).write_bytes(data)
    (newest / name).unlink()
    complaints = newest_whole(str(copied))[1]
    assert f"{newest} cannot be used: FileNotFoundError" in complaints[0]

    (previous / "buffer.npz").write_bytes((previous / "buffer.npz").read_bytes()[:-1])
    assert main(["--resume", str(copied)]) == 2
    complaints.append(f"{previous} cannot be used: buffer.npz is damaged")
    nothing = f"error: --resume {str(copied)!r} has no checkpoint that is whole"
    assert capsys.readouterr().err.splitlines() == [*complaints, nothing]
