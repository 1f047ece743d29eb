"""Compare what a real language model learns of sums in the same time: by objective, by schedule.

    python benchmarks/sums.py            # 90 minutes on 2 cores: begin with --quick
    python benchmarks/sums.py --quick    # one seed

Needs SmolLM2-135M-Instruct (make demo-smollm installs it). Each run is that of tba.py sums --preset
smollm, whose batches are one step stale, at a constant learning rate: of three, the one by which
trajectory balance is fastest (peer_trl.py). It ends SECONDS after the base model was evaluated.
Whole runs are kept in --runs_dir and not made again.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import ROOT, arguments, first_right, means, save, table_of, trained_on
from peer_trl import OURS, SAMPLES, TARGET, command_of, log_of

from launch.files import read_lines, read_spans
from tasks import load_task

LEARNING_RATE, SECONDS = 2e-5, 200.0
SEEDS = (0, 1, 2)
FREE = ["--constant_staleness", "None", "--sync_period", "1", "--samples_per_query", "8"]
FREE += ["--initial_responses", "64"]
VARIANTS = {
    "tb": [],
    "tb, synchronous": ["--synchronous"],
    "grpo": ["--loss", "grpo"],
    "rloo": ["--loss", "rloo"],
    "dr_grpo, without a reference policy": ["--loss", "dr_grpo"],
    "tb, free running": FREE,
    "tb, free running, throttled": [*FREE, "--search_ahead", "2"],
}


def end_of_evaluation(output: Path) -> float:
    """Read when the base model of a run had been evaluated, inf before. There is no other."""
    metrics = output / "metrics.jsonl"
    if not metrics.exists() or all("accuracy" not in line for line in read_lines(metrics)):
        return np.inf
    spans = read_spans(str(output))["searcher-0"]
    return max(end for kind, _, end in spans if kind == "eval")


def make_run(name: str, output: Path, seed: int) -> None:
    """Make a run of a variant. Its directory gets this name when it is whole."""
    unfinished = output.with_name(f"{output.name} {time.time():.0f} unfinished")
    command = command_of(OURS, unfinished, LEARNING_RATE, seed) + VARIANTS[name]
    with open(log_of(unfinished), "w") as log:
        process, start = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log), np.inf
    while time.monotonic() < start + SECONDS:
        time.sleep(1.0)
        if process.poll() is not None:
            sys.exit(f"a run failed, see {log.name}")
        if start == np.inf:
            start = end_of_evaluation(unfinished)
    process.send_signal(signal.SIGTERM)  # SIGINT a shell may have had ignored
    process.wait(timeout=180)
    unfinished.rename(output)


def figures_of(output: Path) -> dict[str, float]:
    """Read the figures of a run by the titles of their columns."""
    start = end_of_evaluation(output)
    samples = [sample for sample in trained_on(output) if sample[0] < start + SECONDS]
    rewards = [reward for _, rows, reward in samples for _ in range(rows)]
    return {
        f"seconds to {TARGET}": first_right(samples, TARGET, SAMPLES) - start,
        f"reward after {SECONDS:.0f} s": float(np.mean(rewards[-SAMPLES:])),
        "steps": len(samples),
    }


def main() -> None:
    given = arguments(__doc__, ("--runs_dir", "runs/sums"))
    load_task("sums").base_model()  # made before any clock starts
    seeds = SEEDS[: 1 if given.quick else None]
    found = {name: [] for name in VARIANTS}
    for seed in seeds:
        for name in VARIANTS:
            output = Path(given.runs_dir).resolve() / f"{name} {seed}"
            output.parent.mkdir(parents=True, exist_ok=True)
            if not output.exists():
                make_run(name, output, seed)
            found[name].append(figures_of(output))
            print(name, seed, found[name][-1], flush=True)
    rows = [{"": name} | means(runs) for name, runs in found.items()]
    save(
        "sums",
        given.quick,
        f"SmolLM2-135M-Instruct, for {SECONDS:.0f} s after its evaluation: seconds until {TARGET} "
        f"of the latest {SAMPLES} responses that were trained on were right (inf: not in that "
        f"time), and how many were at the end; mean, and the seeds' values:",
        table_of(rows),
    )


if __name__ == "__main__":
    main()
