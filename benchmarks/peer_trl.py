"""Compare the wall-clock time in which a real language model learns sums: this project and TRL.

    python benchmarks/peer_trl.py            # an hour on 2 cores: begin with --quick
    python benchmarks/peer_trl.py --quick    # one seed, one learning rate

Needs SmolLM2-135M-Instruct (make demo-smollm installs it). TRL's GRPOTrainer generates, and then
trains, in one process, with transformers: its vLLM mode wants a GPU. It gets an environment of its
own, made here the first time. Both have the same base model, queries, rewards, K, rows a step,
temperature, dtype and cores (all of them to each). Not equal: GRPO without a reference policy, as
TRL has it by default, against trajectory balance with one; the schedules of the learning rate; and
the gradient's norm, which TRL clips to 1. Each has the learning rate that gets there first with a
seed that the table does not use. What counts is the seconds until TARGET of the latest SAMPLES
responses, drawn for training, were right, or SECONDS; "without start-up" begins with the first step
of TRL, and with our first engine step. A run ends there.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from common import ROOT, arguments, as_flags, first_right, means, save, table_of, trained_on

from launch.command_line import find_presets
from launch.files import read_spans
from tasks import load_task

REQUIREMENTS = ["trl==1.16.0", "torch==2.13.0", "transformers>=5.16,<5.20", "numpy>=2.0"]
LEARNING_RATES = (2e-5, 1e-5, 5e-6)
TARGET, SAMPLES, SECONDS = 0.6, 192, 900.0
SEARCH_SEED, SEEDS = 100, (0, 1, 2)
WITHOUT = "s without start-up"
OURS, TRL = "this implementation", "TRL GRPOTrainer"


def trl_python() -> str:
    """Find the interpreter of TRL's environment. Installs TRL the first time."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tba" / REQUIREMENTS[0]
    python = home / "bin" / "python"
    if not (home / "whole").exists():
        print("installing TRL …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        (home / "whole").touch()
    return str(python)


def command_of(name: str, output: Path, rate: float, seed: int) -> list[str]:
    """The command of a run that is longer than SECONDS."""
    settings = dict(learning_rate=rate, seed=seed, output_dir=str(output))
    if name == OURS:
        more = dict(steps=1000, lr_schedule="constant", stable_steps=0, decay_steps=0)
        flags = as_flags(**settings, **more)
        return [sys.executable, str(ROOT / "tba.py"), "sums", "--preset", "smollm", *flags]
    preset = find_presets("sums")["smollm"]
    settings |= dict(model=load_task("sums").base_model(), temperature=preset["temperature"])
    settings |= dict(group=preset["responses_per_query"], tokens=preset["max_response_tokens"])
    settings |= dict(rows=preset["queries_per_batch"] * preset["responses_per_query"])
    return [trl_python(), str(ROOT / "benchmarks" / "_trl_run.py"), json.dumps(settings)]


def samples_of(name: str, output: Path) -> tuple[float, list[tuple[float, int, float]]]:
    """Read when a run under way began, inf before it did, and its samples as of first_right()."""
    if name == OURS:
        searcher = read_spans(str(output)).get("searcher-0", [])
        began = (begin for kind, begin, _ in searcher if kind in ("search", "eval"))
        return next(began, np.inf), trained_on(output)
    lines = log_of(output).read_text().splitlines()
    events = [json.loads(line.removeprefix("EVENT ")) for line in lines if line[:5] == "EVENT"]
    samples = [(event["clock"], event["rows"], event["reward"]) for event in events[1:]]
    return next((event["clock"] for event in events), np.inf), samples


def log_of(output: Path) -> Path:
    """Name the file for what a run prints: not in its directory, which a run of ours makes."""
    return output.with_name(f"{output.name}.log")


def measure(
    name: str, directory: str, rate: float, seed: int, limit: float = SECONDS
) -> dict[str, float]:
    """Make a run until it is at TARGET, or for `limit` seconds. Returns figures by their title."""
    output = Path(directory) / f"{name} {rate} {seed}"
    start, memory = time.monotonic(), 0
    with open(log_of(output), "w") as log:
        command = command_of(name, output, rate, seed)
        process = subprocess.Popen(command, stdout=log, stderr=log)
        end = began = np.inf
        while end == np.inf and time.monotonic() - start < limit:
            time.sleep(2.0)
            if process.poll() is not None:
                sys.exit(f"a run failed:\n{log_of(output).read_text()[-3000:]}")
            memory = max(memory, memory_of(process.pid))
            began, samples = samples_of(name, output)
            end = first_right(samples, TARGET, SAMPLES) if samples else np.inf
        process.send_signal(signal.SIGINT)
        process.wait(timeout=180)
    rows = sum(rows for _, rows, _ in samples)
    figures = {
        WITHOUT: end - began,
        "s with start-up": end - start,
        "rows/s": rows / (samples[-1][0] - began) if rows else 0.0,
        "peak memory, GiB": memory / 2**30,
    }
    print(name, rate, seed, figures, flush=True)
    return figures


def memory_of(pid: int) -> int:
    """Bytes that a process and its descendants have, what they share counted once."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


def main() -> None:
    quick = arguments(__doc__).quick
    load_task("sums").base_model()  # made before any clock starts
    trl_python()
    rates, seeds = (LEARNING_RATES[:1], SEEDS[:1]) if quick else (LEARNING_RATES, SEEDS)
    found, figures = defaultdict(dict), defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        for name in (OURS, TRL):
            limit = SECONDS
            for rate in rates:
                search = measure(name, directory, rate, SEARCH_SEED, limit)
                found[name][rate] = search[WITHOUT]
                limit = min(limit, search["s with start-up"])  # no rate is chosen that takes longer
        best = {name: min(of_rate, key=of_rate.get) for name, of_rate in found.items()}
        for seed in seeds:
            for name in (OURS, TRL):
                figures[name].append(measure(name, directory, best[name], seed))
    rows = [{"": n, "learning rate": f"{best[n]:g}"} | means(runs) for n, runs in figures.items()]
    searched = "; ".join(
        f"{name}: " + ", ".join(f"{rate:g} {seconds:.0f}" for rate, seconds in of_rate.items())
        for name, of_rate in found.items()
    )
    save(
        "peer_trl",
        quick,
        f"Sums with SmolLM2-135M-Instruct, to {TARGET} right of the latest {SAMPLES} samples, "
        f"{SECONDS:.0f} s at most (inf: not in that time); mean, and the values of the seeds:",
        table_of(rows),
        f"The search, seconds without start-up (inf: longer than one before it): {searched}.",
    )


if __name__ == "__main__":
    sys.exit(main())
