"""Wall-clock to the same accuracy: this implementation against TRL's GRPOTrainer, which generates, and then trains, in one process.

    python benchmarks/peer_trl.py --data_dir DIR    # 35 minutes on 2 cores; GSM8K, for the lengths, from the hub without the flag
    python benchmarks/peer_trl.py --quick           # arithmetic alone, one seed, one learning rate

Arithmetic: the same base model, rewards, K = 8, 256 rows a step, temperature, linear schedule with warm-up, cores (all of them to each). Each has the
learning rate of LEARNING_RATES that gets there first with a seed that the table does not use. TRL generates with transformers: its vLLM mode wants a GPU.
Seconds until 0.95 of the latest 500 samples, drawn for training, were right: no evaluation is in the way, except of our base model, which belongs to a
run. Held-out accuracy is that of the end. "without start-up" begins with the first step of TRL, and with our first engine step.
Long responses: a model of 21 M parameters that counts (common.counting_model), of the lengths of GSM8K's solutions, rewarded for 200 tokens; 4 x 8 rows a
step, one learning rate for both, mean reward of samples against seconds.
TRL gets an environment of its own, made here the first time. Writes benchmarks/results/peer_trl.md; with --quick benchmarks/results/quick/.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import ROOT, arguments, counting_model, first_right, gsm8k, mean_and_values, save, table

from runtime.timeline import read_lines, read_spans
from tasks import load_task

REQUIREMENTS = ["trl==1.16.0", "torch==2.13.0", "transformers>=5.16,<5.20", "numpy>=2.0"]
LEARNING_RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
TARGET, SEARCH_SEED, SEEDS = 0.95, 100, (0, 1, 2)
ROWS = 256  # a step, on arithmetic
STEPS = {"ours": 400, "trl": 60}  # enough for each to get to TARGET
MARKS = (120, 180)  # seconds at which the long responses' reward is read
LONG_RATE = 1e-3


def trl_python() -> str:
    """Of TRL's environment."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tba" / REQUIREMENTS[0]
    python = home / "bin" / "python"
    if not (home / "whole").exists():
        print("installing TRL …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        find_links = subprocess.run(
            [python, "-m", "pip", "config", "get", "global.find-links"],
            capture_output=True,
            text=True,
        ).stdout.strip()
        environment = os.environ | ({"UV_FIND_LINKS": find_links} if find_links else {})
        install = [
            str(Path(sys.prefix, "bin", "uv")),
            "pip",
            "install",
            "--quiet",
            "--compile-bytecode",
            "--system-certs",
            "--python",
            str(python),
        ]
        if subprocess.run([*install, *REQUIREMENTS], env=environment).returncode:
            subprocess.run(
                [*install, *REQUIREMENTS, "--torch-backend=cpu"], env=environment, check=True
            )
        (home / "whole").touch()
    return str(python)


def run_trl(directory: str, seconds: float = 1200, **settings) -> tuple[float, list[dict]]:
    """When it was started, and its events."""
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
    events = [
        json.loads(line.removeprefix("EVENT "))
        for line in out.stdout.splitlines()
        if line.startswith("EVENT ")
    ]
    if out.returncode or not events:
        sys.exit(f"TRL failed:\n{out.stderr[-3000:]}")
    return start, events


def run_ours(
    directory: str, *flags, seconds: float | None = None
) -> tuple[float, list[dict], float]:
    """When it was started, the lines of metrics.jsonl with their "clock", and when the searcher began to search."""
    output = Path(directory) / f"ours-{time.monotonic()}"
    start = time.monotonic()
    command = [
        sys.executable,
        str(ROOT / "tba.py"),
        *map(str, flags),
        "--output_dir",
        str(output),
        "--checkpoint_every",
        "0",
    ]
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
    return (
        start,
        lines,
        min(begin for name, begin, _ in spans["searcher-0"] if name in ("search", "eval")),
    )


def to_target_ours(directory: str, rate: float, seed: int) -> tuple[float, float, float]:
    """Seconds to TARGET without and with start-up; held-out accuracy at the end."""
    start, lines, begin = run_ours(
        directory,
        "arithmetic",
        "--steps",
        STEPS["ours"],
        "--eval_every",
        0,
        "--learning_rate",
        rate,
        "--seed",
        seed,
    )
    steps = [line for line in lines if "loss" in line]
    new = np.diff([0] + [line["received"] for line in steps])
    reached = first_right(
        [(line["clock"], count, line["reward"]) for line, count in zip(steps, new) if count], TARGET
    )
    return (
        reached - begin,
        reached - start,
        next(line["accuracy"] for line in reversed(lines) if "accuracy" in line),
    )


def to_target_trl(directory: str, rate: float, seed: int, model: str) -> tuple[float, float, float]:
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
    reached = first_right(
        [(event["clock"], ROWS, event["reward"]) for event in events if "reward" in event], TARGET
    )
    return reached - events[0]["clock"], reached - start, events[-1]["accuracy"]


def arithmetic(directory: str, quick: bool) -> str:
    model = load_task("arithmetic").base_model()
    trl_python()
    contestants = {
        "ours": lambda rate, seed: to_target_ours(directory, rate, seed),
        "trl": lambda rate, seed: to_target_trl(directory, rate, seed, model),
    }
    search, lines = {}, []
    for name, run in contestants.items():
        search[name] = {
            rate: run(rate, SEARCH_SEED)[0]
            for rate in (LEARNING_RATES[1:2] if quick else LEARNING_RATES)
        }
        print(name, search[name], flush=True)
    times = {name: [] for name in contestants}
    for seed in SEEDS[:1] if quick else SEEDS:
        for name, run in contestants.items():
            times[name].append(run(min(search[name], key=search[name].get), seed))
            print(name, times[name][-1], flush=True)
    for name, values in times.items():
        rate = min(search[name], key=search[name].get)
        lines.append(
            [
                {"ours": "this implementation", "trl": "TRL GRPOTrainer"}[name],
                f"{rate:g}",
                *map(mean_and_values, zip(*values)),
            ]
        )
    ratios = np.mean(times["trl"], axis=0) / np.mean(times["ours"], axis=0)
    searched = "; ".join(
        f"{name}: " + ", ".join(f"{rate:g} {seconds:.1f}" for rate, seconds in found.items())
        for name, found in search.items()
    )
    return (
        f"Arithmetic, seconds to {TARGET} right samples (mean, and the values of the seeds):\n\n"
        + table(
            [
                "",
                "learning rate",
                "without start-up",
                "with start-up",
                "held-out accuracy at the end",
            ],
            lines,
        )
        + f"\n\nTRL takes {ratios[0]:.2f} times as long without start-up, {ratios[1]:.2f} times with it. "
        f"The search, seconds without start-up: {searched}."
    )


def long_responses(directory: str, data_dir: str) -> str:
    _, solutions, tokenizer = gsm8k(data_dir, 1024)
    lengths = [min(len(ids) + 1, 512) for ids in tokenizer(solutions).input_ids]
    model, task = str(Path(directory) / "counting"), str(ROOT / "benchmarks" / "_length_task.py")
    counting_model(Path(model), lengths, tokenizer, layers=6, intermediate=1408)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "8"  # GiB, for 256 rows of 6 layers
    curves: dict[str, list] = {
        "this implementation": [],
        "TRL GRPOTrainer": [],
    }  # of each seed (seconds, reward)
    for seed in SEEDS:
        _, lines, begin = run_ours(
            directory,
            task,
            "--model",
            model,
            "--steps",
            1000,
            "--queries_per_batch",
            4,
            "--queries_per_micro_batch",
            4,
            "--responses_per_query",
            8,
            "--samples_per_query",
            8,
            "--max_prompt_tokens",
            64,
            "--max_response_tokens",
            512,
            "--temperature",
            1.0,
            "--beta",
            0.01,
            "--sync_period",
            1,
            "--initial_responses",
            32,
            "--most_on_policy_prob",
            1.0,
            "--learning_rate",
            LONG_RATE,
            "--max_grad_norm",
            1.0,
            "--loss",
            "tb",
            "--seed",
            seed,
            seconds=MARKS[-1] + 40,
        )
        curves["this implementation"].append(
            [(line["clock"] - begin, line["reward"]) for line in lines if "loss" in line]
        )
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
            seconds=MARKS[-1] + 40,
        )
        curves["TRL GRPOTrainer"].append(
            [
                (event["clock"] - events[0]["clock"], event["reward"])
                for event in events
                if "reward" in event
            ]
        )
        print({name: found[-1] for name, found in curves.items()}, flush=True)
    rows = []
    for name, found in curves.items():
        if min(map(len, found)) < 2 or max(curve[0][0] for curve in found) > MARKS[0]:
            sys.exit(
                f"{name} is too slow here: with a seed it made {min(map(len, found))} steps in {MARKS[-1] + 40} s, or none in {MARKS[0]} s"
            )
        rates = [(len(curve) - 1) / (curve[-1][0] - curve[0][0]) for curve in found]
        at = [
            [np.mean([reward for clock, reward in curve if clock <= mark][-3:]) for curve in found]
            for mark in MARKS
        ]
        rows.append(
            [
                name,
                mean_and_values(rates),
                mean_and_values([curve[0][1] for curve in found]),
                *map(mean_and_values, at),
            ]
        )
    return (
        f"Long responses, reward of samples (mean of the three latest steps) by seconds without start-up; learning rate {LONG_RATE:g}; mean, and the "
        "values of the seeds:\n\n"
        + table(["", "steps/s", "first", *(f"{mark} s" for mark in MARKS)], rows)
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
