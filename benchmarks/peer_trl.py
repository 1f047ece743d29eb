"""Compare the wall-clock time to the same accuracy: this implementation against TRL.

TRL's GRPOTrainer generates, and then trains, in one process.

    python benchmarks/peer_trl.py --data_dir DIR    # 35 minutes on 2 cores
    python benchmarks/peer_trl.py --quick           # arithmetic alone, one seed, one learning rate

GSM8K, which only gives the lengths, comes from the hub without --data_dir.

Arithmetic: both have the same base model, rewards, K = 8, 256 rows a step, temperature, linear
schedule with warm-up and cores (all of them to each). Each has the learning rate of LEARNING_RATES
that gets there first with a seed that the table does not use. TRL generates with transformers: its
vLLM mode wants a GPU. What counts is the seconds until 0.95 of the latest 500 samples, drawn for
training, were right. No evaluation takes part of that time, except of our base model, which belongs
to a run. Held-out accuracy is that of the end. "without start-up" begins with the first step of
TRL, and with our first engine step.

Long responses: a model of 21 M parameters that counts (common.counting_model), of the lengths of
GSM8K's solutions, rewarded for 200 tokens. 4 x 8 rows a step, one learning rate for both, mean
reward of samples against seconds.

TRL gets an environment of its own, made here the first time.
Writes benchmarks/results/peer_trl.md; with --quick benchmarks/results/quick/.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import (
    ROOT,
    arguments,
    as_flags,
    counting_model,
    first_right,
    gsm8k,
    mean_and_values,
    save,
    table,
)

from runtime.record.timeline import read_lines, read_spans
from tasks import load_task

REQUIREMENTS = ["trl==1.16.0", "torch==2.13.0", "transformers>=5.16,<5.20", "numpy>=2.0"]
LEARNING_RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
TARGET, SEARCH_SEED, SEEDS = 0.95, 100, (0, 1, 2)
ROWS = 256  # a step, on arithmetic
STEPS = {"ours": 400, "trl": 60}  # enough for each to get to TARGET
MARKS = (120, 180)  # seconds at which the long responses' reward is read
LONG_SECONDS = MARKS[-1] + 40  # that a run on long responses may take
LONG_RATE = 1e-3


def trl_python() -> str:
    """Find the interpreter of TRL's environment. Installs TRL the first time."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tba" / REQUIREMENTS[0]
    python = home / "bin" / "python"
    if (home / "whole").exists():
        return str(python)
    print("installing TRL …", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    # uv does not read pip's configuration.
    ask_pip = [python, "-m", "pip", "config", "get", "global.find-links"]
    find_links = subprocess.run(ask_pip, capture_output=True, text=True).stdout.strip()
    environment = os.environ | ({"UV_FIND_LINKS": find_links} if find_links else {})
    uv = str(Path(sys.prefix, "bin", "uv"))
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--system-certs"]
    install += ["--python", str(python), *REQUIREMENTS]
    if subprocess.run(install, env=environment).returncode:
        subprocess.run([*install, "--torch-backend=cpu"], env=environment, check=True)
    (home / "whole").touch()
    return str(python)


def run_trl(directory: str, seconds: float = 1200, **settings) -> tuple[float, list[dict]]:
    """Run TRL. Returns when it was started, and its events."""
    start = time.monotonic()
    settings = settings | {
        "output_dir": directory,
        "threads": len(os.sched_getaffinity(0)),
        "until": start + seconds,
    }
    out = subprocess.run(
        [trl_python(), str(ROOT / "benchmarks" / "_trl_run.py"), json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=seconds + 600,
    )
    lines = [line for line in out.stdout.splitlines() if line.startswith("EVENT ")]
    events = [json.loads(line.removeprefix("EVENT ")) for line in lines]
    if out.returncode or not events:
        sys.exit(f"TRL failed:\n{out.stderr[-3000:]}")
    return start, events


def run_ours(
    directory: str, task: str, seconds: float | None = None, **settings
) -> tuple[float, list[dict], float]:
    """Run this implementation, for so many seconds at most.

    Returns when it was started, the lines of metrics.jsonl with their "clock", and when the
    searcher began to search.
    """
    output = Path(directory) / f"ours-{time.monotonic()}"
    start = time.monotonic()
    flags = as_flags(**settings, output_dir=output, checkpoint_every=0)
    command = [sys.executable, str(ROOT / "tba.py"), task, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text, _ = process.communicate(timeout=seconds)
        if process.returncode:
            sys.exit(f"the run failed:\n{text[-3000:]}")
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate(timeout=120)
    spans = read_spans(str(output))
    ends = [stop for name, _, stop in spans["trainer"] if name == "step"]
    lines = [
        line | {"clock": ends[line["step"] - 1]}
        for line in read_lines(output / "metrics.jsonl")
        if 0 < line["step"] <= len(ends)
    ]
    begin = min(begin for name, begin, _ in spans["searcher-0"] if name in ("search", "eval"))
    return start, lines, begin


def to_target_ours(directory: str, rate: float, seed: int) -> tuple[float, float, float]:
    """Run ours: seconds to TARGET without and with start-up; held-out accuracy at the end."""
    start, lines, begin = run_ours(
        directory, "arithmetic", steps=STEPS["ours"], eval_every=0, learning_rate=rate, seed=seed
    )
    steps = [line for line in lines if "loss" in line]
    new = np.diff([0] + [line["received"] for line in steps])
    samples = [(line["clock"], count, line["reward"]) for line, count in zip(steps, new) if count]
    reached = first_right(samples, TARGET)
    accuracy = next(line["final_accuracy"] for line in lines if "final_accuracy" in line)
    return reached - begin, reached - start, accuracy


def to_target_trl(directory: str, rate: float, seed: int, model: str) -> tuple[float, float, float]:
    """Run TRL: the same three numbers as of to_target_ours."""
    start, events = run_trl(
        directory,
        task="arithmetic",
        model=model,
        rows=ROWS,
        responses_per_query=8,
        max_response_tokens=8,
        learning_rate=rate,
        steps=STEPS["trl"],
        evaluate=True,
        seed=seed,
    )
    samples = [(event["clock"], ROWS, event["reward"]) for event in events if "reward" in event]
    reached = first_right(samples, TARGET)
    return reached - events[0]["clock"], reached - start, events[-1]["accuracy"]


def arithmetic(directory: str, quick: bool) -> str:
    """Compare both on arithmetic. Returns the part of the results."""
    model = load_task("arithmetic").base_model()
    trl_python()
    contestants = {
        "ours": lambda rate, seed: to_target_ours(directory, rate, seed),
        "trl": lambda rate, seed: to_target_trl(directory, rate, seed, model),
    }
    search: dict[str, dict[float, float]] = {}  # name -> learning rate -> seconds
    for name, run in contestants.items():
        rates = LEARNING_RATES[1:2] if quick else LEARNING_RATES
        search[name] = {rate: run(rate, SEARCH_SEED)[0] for rate in rates}
        print(name, search[name], flush=True)
    best = {name: min(found, key=found.get) for name, found in search.items()}
    times = {name: [] for name in contestants}
    for seed in SEEDS[:1] if quick else SEEDS:
        for name, run in contestants.items():
            times[name].append(run(best[name], seed))
            print(name, times[name][-1], flush=True)
    titles = {"ours": "this implementation", "trl": "TRL GRPOTrainer"}
    lines = [
        [titles[name], f"{best[name]:g}", *map(mean_and_values, zip(*values))]
        for name, values in times.items()
    ]
    header = [
        "",
        "learning rate",
        "without start-up",
        "with start-up",
        "held-out accuracy at the end",
    ]
    ratios = np.mean(times["trl"], axis=0) / np.mean(times["ours"], axis=0)
    searched = "; ".join(
        f"{name}: " + ", ".join(f"{rate:g} {seconds:.1f}" for rate, seconds in found.items())
        for name, found in search.items()
    )
    return (
        f"Arithmetic, seconds to {TARGET} right samples (mean, and the values of the seeds):\n\n"
        f"{table(header, lines)}\n\n"
        f"TRL takes {ratios[0]:.2f} times as long without start-up, {ratios[1]:.2f} times with it. "
        f"The search, seconds without start-up: {searched}."
    )


def long_curve_ours(directory: str, task: str, model: str, seed: int) -> list[tuple[float, float]]:
    """Run ours on long responses: (seconds without start-up, reward) of each step."""
    _, lines, begin = run_ours(
        directory,
        task,
        model=model,
        steps=1000,
        queries_per_batch=4,
        tokens_per_micro_batch=20_000,
        responses_per_query=8,
        samples_per_query=8,
        max_prompt_tokens=64,
        max_response_tokens=512,
        temperature=1.0,
        beta=0.01,
        sync_period=1,
        initial_responses=32,
        most_on_policy_prob=1.0,
        learning_rate=LONG_RATE,
        max_grad_norm=1.0,
        loss="tb",
        seed=seed,
        seconds=LONG_SECONDS,
    )
    return [(line["clock"] - begin, line["reward"]) for line in lines if "loss" in line]


def long_curve_trl(directory: str, task: str, model: str, seed: int) -> list[tuple[float, float]]:
    """Run TRL on long responses: (seconds without start-up, reward) of each step."""
    _, events = run_trl(
        directory,
        task=task,
        model=model,
        rows=32,
        responses_per_query=8,
        max_response_tokens=512,
        learning_rate=LONG_RATE,
        steps=1000,
        evaluate=False,
        seed=seed,
        seconds=LONG_SECONDS,
    )
    begin = events[0]["clock"]
    return [(event["clock"] - begin, event["reward"]) for event in events if "reward" in event]


def long_responses(directory: str, data_dir: str) -> str:
    """Compare both on long responses. Returns the part of the results."""
    _, solutions, tokenizer = gsm8k(data_dir, 1024)
    lengths = [min(len(ids) + 1, 512) for ids in tokenizer(solutions).input_ids]
    model, task = str(Path(directory) / "counting"), str(ROOT / "benchmarks" / "_length_task.py")
    counting_model(Path(model), lengths, tokenizer, layers=6, intermediate=1408)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "8"  # GiB, for 256 rows of 6 layers
    # One curve of (seconds, reward) per seed.
    curves: dict[str, list] = {"this implementation": [], "TRL GRPOTrainer": []}
    for seed in SEEDS:
        curves["this implementation"].append(long_curve_ours(directory, task, model, seed))
        curves["TRL GRPOTrainer"].append(long_curve_trl(directory, task, model, seed))
        print({name: found[-1] for name, found in curves.items()}, flush=True)
    rows = []
    for name, found in curves.items():
        fewest = min(map(len, found))
        if fewest < 2 or max(curve[0][0] for curve in found) > MARKS[0]:
            sys.exit(
                f"{name} is too slow here: with a seed it made {fewest} steps in {LONG_SECONDS} s, "
                f"or none in {MARKS[0]} s"
            )
        rates = [(len(curve) - 1) / (curve[-1][0] - curve[0][0]) for curve in found]
        first = [curve[0][1] for curve in found]
        at_marks = [
            [np.mean([reward for clock, reward in curve if clock <= mark][-3:]) for curve in found]
            for mark in MARKS
        ]
        rows.append([name, *map(mean_and_values, (rates, first, *at_marks))])
    header = ["", "steps/s", "first", *(f"{mark} s" for mark in MARKS)]
    return (
        "Long responses, reward of samples (mean of the three latest steps) by seconds without "
        f"start-up; learning rate {LONG_RATE:g}; mean, and the values of the seeds:\n\n"
        f"{table(header, rows)}"
    )


def main() -> None:
    options = arguments(__doc__, ("--data_dir", ""))
    with tempfile.TemporaryDirectory() as directory:
        parts = [arithmetic(directory, options.quick)]
        save("peer_trl", options.quick, *parts)
        if not options.quick:
            save("peer_trl", options.quick, *parts, long_responses(directory, options.data_dir))


if __name__ == "__main__":
    sys.exit(main())
