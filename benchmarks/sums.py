"""Compare what a real language model learns of sums in the same time, by objective.

    python benchmarks/sums.py            # 70 minutes on 2 cores: begin with --quick
    python benchmarks/sums.py --quick    # one seed

Needs SmolLM2-135M-Instruct (make demo-smollm installs it). Each run is the preset of tba.py sums at
the learning rate that is best for trajectory balance in peer_trl.py, constant, with what its row
names; it ends SECONDS after the base model was evaluated. A reward is the mean of the latest
SAMPLES responses that were trained on. Runs with --runs_dir are kept, and not made again.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import ROOT, arguments, as_flags, first_right, mean_and_each, save, table_of, trained_on

from launch.files import read_spans
from tasks import load_task

TARGET, SAMPLES, SECONDS = 0.6, 192, 200.0
SEEDS = (0, 1, 2)
SETTINGS = dict(learning_rate=2e-5, steps=1000, lr_schedule="constant")
SETTINGS |= dict(stable_steps=0, decay_steps=0)
VARIANTS = {
    "tb, one step stale (the preset)": [],
    "tb, synchronous": ["--synchronous"],
    "grpo": ["--loss", "grpo"],
    "rloo": ["--loss", "rloo"],
    "dr_grpo": ["--loss", "dr_grpo"],
}


def began(output: Path) -> float:
    """Read when the base model of a run had been evaluated, inf before."""
    spans = read_spans(str(output)).get("searcher-0", [])
    return next((end for kind, _, end in spans if kind == "eval"), np.inf)


def make_run(output: Path, flags: list[str], seed: int) -> None:
    settings = as_flags(**SETTINGS, seed=seed, output_dir=str(output))
    command = [sys.executable, str(ROOT / "tba.py"), "sums", *settings, *flags]
    with open(output.with_name(f"{output.name}.log"), "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    while time.monotonic() < began(output) + SECONDS:
        time.sleep(1.0)
        if process.poll() is not None:
            sys.exit(f"a run failed, see {log.name}")
    process.send_signal(signal.SIGINT)
    process.wait(timeout=180)


def figures_of(output: Path) -> dict[str, float]:
    start = began(output)
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
    rows = []
    for name, flags in VARIANTS.items():
        of_seeds = []
        for seed in SEEDS[: 1 if given.quick else None]:
            output = Path(given.runs_dir) / f"{name} {seed}"
            os.makedirs(output.parent, exist_ok=True)
            if not output.exists():
                make_run(output, flags, seed)
            of_seeds.append(figures_of(output))
            print(name, seed, of_seeds[-1], flush=True)
        columns = {title: mean_and_each([one[title] for one in of_seeds]) for title in of_seeds[0]}
        rows.append({"": name} | columns)
    save(
        "sums",
        given.quick,
        f"SmolLM2-135M-Instruct, for {SECONDS:.0f} s after its evaluation; seconds (inf: not in "
        f"that time) and reward of the latest {SAMPLES} responses; mean, and the seeds' values:",
        table_of(rows),
    )


if __name__ == "__main__":
    main()
