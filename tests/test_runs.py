"""Whole runs through the command line, on the real vLLM."""

import json
import os
import re
import shutil
import signal
import time
import uuid
from pathlib import Path

import torch
from conftest import FOREVER, ROOT, SMALL, Run, living, read, start_tba, steps_of, tba
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime import checkpoint, timeline

OUTPUTS = (
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "curves.png",
    "timeline.json",
    "timeline.png",
    "model",
)
METRICS = {
    "step",
    "reward",
    "loss",
    "log_z",
    "kl",
    "entropy",
    "staleness_mean",
    "staleness_max",
    "grad_norm",
    "learning_rate",
    "beta",
    "trainer_busy",
    "searcher_tokens_per_second",
    "searcher_busy",
    "queue_depth",
    "buffer_responses",
    "mismatch",
}


def check_outputs(run_dir: Path, steps: int) -> None:
    assert all((run_dir / name).exists() for name in OUTPUTS)
    lines = steps_of(run_dir)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert METRICS <= lines[-1].keys()
    spans = json.loads((run_dir / "timeline.json").read_text())["traceEvents"]
    rows = {event["pid"]: event["args"]["name"] for event in spans if event["ph"] == "M"}
    seen = {(rows[event["pid"]], event["name"]) for event in spans if event["ph"] == "X"}
    assert {("trainer", name) for name in ("wait", "step", "publish")} <= seen
    assert {
        ("searcher-0", name) for name in ("search", "score", "reference", "load", "eval")
    } <= seen
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    assert model(input_ids=torch.tensor([tokenizer("1+2=").input_ids])).logits.isfinite().all()


def test_an_arithmetic_run_learns_and_leaves_every_output(tmp_path):
    run_dir = tmp_path / "run"
    result = tba("arithmetic", *SMALL, "--steps", 250, "--eval_every", 100, "--output_dir", run_dir)
    assert result.returncode == 0, result.stderr
    check_outputs(run_dir, 250)
    evaluations = {
        line["step"]: line["accuracy"]
        for line in read(run_dir, "metrics.jsonl")
        if "accuracy" in line
    }
    assert 0 in evaluations and len(evaluations) == 3, "the base model, and two on the way"
    assert evaluations[0] <= 0.60
    final = read(run_dir, "metrics.jsonl")[-1]
    assert final.keys() == {"step", "final_accuracy"} and final["step"] == 250
    saved = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    last = checkpoint.load_tensors(run_dir / "checkpoints" / "step-00000250", "learner")
    assert all((last[f"policy.{name}"] == p).all() for name, p in saved.named_parameters()), (
        "what is evaluated at the end is the last version"
    )
    assert final["final_accuracy"] > evaluations[0] + 0.1, "it learns"
    assert (
        f"base accuracy: {evaluations[0]:.2f}" in result.stdout
        and f"final accuracy: {final['final_accuracy']:.2f}" in result.stdout
    )
    lines = steps_of(run_dir)
    assert 0 < max(line["mismatch"] for line in lines) < 1e-4, (
        "what was published is what vLLM samples from"
    )
    assert max(line["mismatch_version"] for line in lines) > 0, "and not only of the base model"
    assert lines[-1]["staleness_max"] > 2, "replay"
    assert (
        timeline.trainer_busy(run_dir) >= 0.90
        and f"trainer busy: {timeline.trainer_busy(run_dir):.3f}" in result.stdout
    )
    sample = read(run_dir, "samples.jsonl")[0]
    assert {
        "version",
        "query_id",
        "prompt",
        "answer",
        "response",
        "extracted",
        "reward",
        "finished",
    } == sample.keys()


def test_a_gsm8k_run_on_a_local_model_counts_the_prompts_that_are_too_long(
    tmp_path, untied_model, gsm8k_data
):
    run_dir = tmp_path / "run"
    flags = [
        "--model",
        untied_model,
        "--data_dir",
        gsm8k_data,
        "--responses_per_query",
        3,
        "--samples_per_query",
        4,
        "--initial_responses",
        30,
        "--max_prompt_tokens",
        250,
        "--max_response_tokens",
        40,
    ]
    with Run(run_dir, "gsm8k", *flags, *FOREVER) as run:
        run.is_at(6)
        run.until(
            lambda: any("accuracy" in line for line in read(run_dir, "metrics.jsonl")),
            60,
            "the base model's evaluation",
        )
        out, _ = run.end(signal.SIGINT)
    check_outputs(run_dir, run.step())
    rows = [json.loads(line) for line in (gsm8k_data / "test.jsonl").read_text().splitlines()]
    prompt = "[MATH TASK] Problem:\n{}\n\nSolution:\n"
    long = sum(len(prompt.format(row["question"]).encode()) > 250 for row in rows)
    train = [json.loads(line) for line in (gsm8k_data / "train.jsonl").read_text().splitlines()]
    skipped = sum(len(prompt.format(row["question"]).encode()) > 250 for row in train)
    assert steps_of(run_dir)[-1]["long_prompts"] == skipped > 0
    assert f"{skipped} queries were skipped: prompt over --max_prompt_tokens 250" in out
    assert (
        f" on {len(rows) - long} test queries; {long} left out, prompt over --max_prompt_tokens)"
        in out
    )


def test_with_constant_staleness_each_batch_is_of_one_version_and_a_reset_takes_the_policy_of_that_version(
    tmp_path,
):
    run_dir = tmp_path / "run"
    with Run(
        run_dir,
        "arithmetic",
        "--constant_staleness",
        3,
        "--reference_reset_period",
        5,
        *SMALL,
        *FOREVER,
    ) as run:
        run.is_at(20)
    lines = steps_of(run_dir)[:20]
    assert [(line["staleness_mean"], line["staleness_max"]) for line in lines] == [
        (s, s) for s in [0, 1, 2] + [3] * 17
    ]
    assert all(line["mismatch"] < 1e-4 for line in lines)
    # Where the policy that sampled has just become the reference it is at no distance from it: that of version 5 at step 5 + 3, and so on.
    at_reference = {
        line["step"] - 1 - 3 for line in lines if abs(line["kl"]) < 1e-5 and line["step"] > 4
    }
    assert {5, 10, 15} <= at_reference and not {9, 14} & at_reference


def test_a_fork_adds_the_objective_of_the_readme_and_trains_until_ctrl_c_ends_it_with_every_output_within_15_seconds(
    tmp_path,
):
    code = next(
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "LOSSES[" in block
    )
    assert len(code.splitlines()) < 10
    fork, run_dir = tmp_path / "fork", tmp_path / "run"
    shutil.copytree(ROOT, fork, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    with open(fork / "loss.py", "a") as file:
        file.write("\n\n" + code)
    name = re.search(r'LOSSES\["(\w+)"\]', code)[1]
    flags = ["--loss", name, "--max_staleness", 4, "--reference_reset_period", 10]
    with Run(run_dir, "arithmetic", *flags, *SMALL, *FOREVER, root=fork) as run:
        run.is_at(40)
        _, err = run.end(signal.SIGINT)
        assert (
            f"stopped by SIGINT: partial results are in {run_dir}; to go on: python tba.py --resume {run_dir}"
            in err
        )
        run.nothing_is_left(1)
    check_outputs(run_dir, run.step())
    lines = steps_of(run_dir)
    assert lines[-1]["grad_norm"] > 0 and {line["bad_steps"] for line in lines} == {0}
    assert 0 < max(line["staleness_max"] for line in lines) <= 4
    refused = tba("arithmetic", "--loss", name)
    assert refused.returncode == 2 and "is one of tb" in refused.stderr, "only the fork has it"


def test_ctrl_c_while_everything_still_loads_ends_a_run_at_once(tmp_path):
    tag = uuid.uuid4().hex
    process = start_tba(tag=tag, directory=tmp_path)  # as the README has it: no flag at all
    try:
        deadline = time.monotonic() + 120
        while (
            len(living(tag)) < 4
        ):  # the command line, Python's resource tracker, a trainer, a searcher
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the whole process group
        _, err = process.communicate(timeout=15)
        assert process.returncode == 130, err
        assert "Traceback" not in err and living(tag) == []
        assert [path.name[:11] for path in (tmp_path / "runs").iterdir()] == ["arithmetic-"]
    finally:
        process.kill()
