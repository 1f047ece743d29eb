"""Measure the three changes of docs/walkthrough.md, each against what it was changed from.

    python benchmarks/walkthrough.py            # under ten minutes on 2 cores
    python benchmarks/walkthrough.py --quick    # one seed

Each is the demo, from the command line, with fewer steps; seeds 0, 1, 2.
Writes benchmarks/results/walkthrough.{md,png}; with --quick benchmarks/results/quick/.
"""

import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from common import arguments, as_flags, mean_and_values, results_dir, save, table
from overlap import run, steps_of

from runtime.display.pictures import STRETCHES, smoothed
from runtime.record.timeline import read_lines

DEMO = as_flags(steps=600, eval_every=0, checkpoint_every=0)
STALE = as_flags(constant_staleness=10, steps=300, eval_every=0, checkpoint_every=0)
SETTINGS = {
    "the demo, 600 steps": DEMO,
    "--beta 1": [*DEMO, *as_flags(beta=1)],
    "--most_on_policy_prob 1": [*DEMO, *as_flags(most_on_policy_prob=1)],
    "--constant_staleness 10, 300 steps": STALE,
    "--constant_staleness 10 --loss reinforce": [*STALE, *as_flags(loss="reinforce")],
}
# Panels of the picture, each with the settings that it compares.
PANELS = {
    "another beta": ("the demo, 600 steps", "--beta 1"),
    "the newest responses alone": ("the demo, 600 steps", "--most_on_policy_prob 1"),
    "an objective for fresh data": tuple(SETTINGS)[3:],
}
LATE = 10  # the last tenth of the steps
MEASURES = ("reward", "kl", "staleness_mean", "staleness_in_buffer", "ess_responses")


def measure(run_dir: Path) -> dict[str, float]:
    """Read the final accuracy of a run, and MEASURES as means over its last steps."""
    steps = steps_of(run_dir)
    late = steps[-len(steps) // LATE :]
    accuracy = read_lines(run_dir / "metrics.jsonl")[-1]["final_accuracy"]
    means = {name: float(np.mean([line[name] for line in late])) for name in MEASURES}
    return {"final_accuracy": accuracy} | means


def rewards(run_dir: Path) -> np.ndarray:
    """Read the steps of a run and the rewards of new responses, smoothed: (2, N)."""
    steps = steps_of(run_dir)
    points = np.array([(line["step"], line["reward"]) for line in steps], float).T
    return smoothed(points, len(steps) // STRETCHES)


def main() -> None:
    quick = arguments(__doc__).quick
    seeds = (0,) if quick else (0, 1, 2)
    runs: dict[str, list[Path]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            for i, (name, flags) in enumerate(SETTINGS.items()):
                run_dir = run(Path(directory), f"{i}-{seed}", *flags, *as_flags(seed=seed))
                runs[name].append(run_dir)
        rows = []
        for name, run_dirs in runs.items():
            measured = [measure(run_dir) for run_dir in run_dirs]
            rows.append(
                [name, *(mean_and_values([m[key] for m in measured]) for key in measured[0])]
            )
        draw(runs, results_dir(quick) / "walkthrough.png")
    save(
        "walkthrough",
        quick,
        f"Means over the last tenth of the steps; mean, and the values of {len(seeds)} seeds.",
        table(["", "final accuracy", *MEASURES], rows),
        "![reward of new responses](walkthrough.png)",
    )


def draw(runs: dict[str, list[Path]], path: Path) -> None:
    """Draw the reward of new responses: the mean over seeds, in the range of all."""
    plt.switch_backend("agg")
    figure, axes = plt.subplots(
        1, len(PANELS), figsize=(13, 3.5), sharey=True, constrained_layout=True
    )
    for axis, (title, names) in zip(axes, PANELS.items()):
        for i, name in enumerate(names):
            curves = [rewards(run_dir) for run_dir in runs[name]]
            steps, values = curves[0][0], np.stack([curve[1] for curve in curves])
            axis.plot(steps, values.mean(axis=0), color=f"C{i}", label=name)
            axis.fill_between(
                steps, values.min(axis=0), values.max(axis=0), color=f"C{i}", alpha=0.2, lw=0
            )
        axis.set(title=title, xlabel="trainer step")
        axis.legend(fontsize="small")
    axes[0].set_ylabel("reward of new responses")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
