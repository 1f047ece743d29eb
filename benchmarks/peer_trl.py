"""Compare the wall-clock time to the same accuracy on arithmetic: this implementation and TRL.

    python benchmarks/peer_trl.py            # 20 minutes on 2 cores
    python benchmarks/peer_trl.py --quick    # one seed, one learning rate

TRL's GRPOTrainer generates, and then trains, in one process, with transformers: its vLLM mode wants
a GPU. It gets an environment of its own, made here the first time. Both have the same base model,
rewards, K = 8, 256 rows a step, temperature, schedule and cores (all of them to each). Each has the
learning rate that gets there first with a seed that the table does not use. What counts is the
seconds until 0.95 of the latest 500 samples, drawn for training, were right; "without start-up"
begins with the first step of TRL, and with our first engine step. Accuracy is that of the end.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from common import ROOT, arguments, as_flags, first_right, mean_and_each, reached, save, table_of

from runtime.record.timeline import read_metrics, read_spans
from tasks import load_task

REQUIREMENTS = ["trl==1.16.0", "torch==2.13.0", "transformers>=5.16,<5.20", "numpy>=2.0"]
LEARNING_RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
TARGET, SEARCH_SEED, SEEDS = 0.95, 100, (0, 1, 2)
ROWS = 256  # a step
OURS, TRL = "this implementation", "TRL GRPOTrainer"
STEPS = {OURS: 400, TRL: 60}  # enough for each to get to TARGET


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


def launch(command: list[str]) -> str:
    """Run a command to its end. Returns what it printed."""
    out = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if out.returncode:
        sys.exit(f"a run failed:\n{out.stdout[-3000:]}{out.stderr[-3000:]}")
    return out.stdout


def measure(name: str, directory: str, rate: float, seed: int) -> tuple[float, float, float]:
    """Make a run. Returns the seconds to TARGET without and with start-up, and the accuracy."""
    output = Path(directory) / f"{name} {rate} {seed}"
    settings = dict(learning_rate=rate, seed=seed, steps=STEPS[name], output_dir=str(output))
    python = sys.executable if name == OURS else trl_python()
    start = time.monotonic()
    if name == OURS:
        flags = as_flags(**settings, eval_every=0, checkpoint_every=0)
        launch([python, str(ROOT / "tba.py"), "arithmetic", *flags])
        searcher = read_spans(str(output))["searcher-0"]
        begin = min(begin for kind, begin, _ in searcher if kind in ("search", "eval"))
        end, accuracy = reached(output, TARGET), read_metrics(str(output))[-1]["final_accuracy"]
    else:
        settings |= dict(model=load_task("arithmetic").base_model(), rows=ROWS)
        text = launch([python, str(ROOT / "benchmarks" / "_trl_run.py"), json.dumps(settings)])
        lines = [line for line in text.splitlines() if line.startswith("EVENT ")]
        events = [json.loads(line.removeprefix("EVENT ")) for line in lines]
        begin, accuracy = events[0]["clock"], events[-1]["accuracy"]
        samples = [(event["clock"], ROWS, event["reward"]) for event in events if "reward" in event]
        end = first_right(samples, TARGET)
    figures = end - begin, end - start, accuracy
    print(name, rate, seed, figures, flush=True)
    return figures


def main() -> None:
    quick = arguments(__doc__).quick
    load_task("arithmetic").base_model()  # made before any clock starts
    trl_python()
    rates, seeds = (LEARNING_RATES[3:4], SEEDS[:1]) if quick else (LEARNING_RATES, SEEDS)
    times = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        found = {
            name: {rate: measure(name, directory, rate, SEARCH_SEED)[0] for rate in rates}
            for name in STEPS
        }
        best = {name: min(of_rate, key=of_rate.get) for name, of_rate in found.items()}
        for seed in seeds:
            for name in STEPS:
                times[name].append(measure(name, directory, best[name], seed))
    titles = "without start-up", "with start-up", "held-out accuracy at the end"
    rows = [
        {"": name, "learning rate": f"{best[name]:g}"}
        | dict(zip(titles, map(mean_and_each, zip(*values))))
        for name, values in times.items()
    ]
    ratios = np.mean(times[TRL], axis=0) / np.mean(times[OURS], axis=0)
    searched = "; ".join(
        f"{name}: " + ", ".join(f"{rate:g} {seconds:.1f}" for rate, seconds in of_rate.items())
        for name, of_rate in found.items()
    )
    save(
        "peer_trl",
        quick,
        f"Arithmetic, seconds to {TARGET} right samples (mean, and the values of the seeds):",
        table_of(rows),
        f"TRL takes {ratios[0]:.2f} times as long without start-up, {ratios[1]:.2f} times with it. "
        f"The search, seconds without start-up: {searched}.",
    )


if __name__ == "__main__":
    sys.exit(main())
