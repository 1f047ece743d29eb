"""Measure what the settings of trajectory balance with a replay buffer do.

The settings are those of the paper's Figures 7 and 9: m, k, K at a fixed batch, beta and
prioritisation.

    python benchmarks/ablations.py              # under ten minutes on 2 cores
    python benchmarks/ablations.py --quick      # in minutes: fewer steps, one seed

A study that was interrupted continues where it was.

The task is arithmetic, in the buffer mode; one setting at a time is moved away from BASE. The
searcher finds as many responses a trainer step in every run.
Writes benchmarks/results/ablations.{jsonl,md,png}; with --quick benchmarks/results/quick/.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from common import arguments, results_dir, save, table
from study import number, run_all, spread

ROWS_PER_STEP, GROUPS_FOUND_PER_STEP = 128, 6
BASE = dict(
    task="arithmetic",
    loss="tb",
    samples_per_query=16,
    responses_per_query=8,
    most_on_policy_prob=0.5,
    sync_period=2,
    beta=0.1,
    reward_inverse_temperature=0.0,
    learning_rate=1e-3,
    initial_responses=400,
)
VALUES = {
    "most_on_policy_prob": (0.0, 0.25, 0.5, 0.75, 1.0),
    "sync_period": (1, 2, 5, 10, 20),
    "responses_per_query": (2, 4, 8, 16),
    "beta": (0.03, 0.1, 0.3, 1.0),
    "reward_inverse_temperature": (0.0, 1.0, 5.0),
}
NAMES = dict(zip(VALUES, ("m", "k", "K", "β", "prioritisation")))
AXIS_NAMES = NAMES | {"reward_inverse_temperature": "reward softmax (0: uniform)"}
SEEDS = (0, 1, 2)
MEASURES = ("accuracy", "reward", "kl")


def job(setting: str, value: float, seed: int, steps: int) -> dict:
    """Describe a run for run_all: BASE but for one setting."""
    settings = BASE | {setting: value} | dict(seed=seed, steps=steps)
    queries = ROWS_PER_STEP // settings["responses_per_query"]
    settings |= dict(queries_per_batch=queries, tokens_per_micro_batch=4000)
    return {
        "settings": settings,
        "groups_per_sync": GROUPS_FOUND_PER_STEP * settings["sync_period"],
    }


def main() -> None:
    quick = arguments(__doc__).quick
    steps, seeds = (50, SEEDS[:1]) if quick else (100, SEEDS)
    output = results_dir(quick) / "ablations"
    cells = [(setting, value) for setting, values in VALUES.items() for value in values]
    jobs = [job(*cell, seed, steps) for cell in cells for seed in seeds]
    lines = run_all(jobs, output.with_suffix(".jsonl"))
    results = {
        cell: [line["result"] for line in lines[i * len(seeds) : (i + 1) * len(seeds)]]
        for i, cell in enumerate(cells)
    }
    rows = []
    for setting, value in cells:
        base = " (base)" if value == BASE[setting] else ""
        runs = results[setting, value]
        shown = [spread([run[measure] for run in runs]) for measure in MEASURES]
        rows.append([f"{NAMES[setting]} = {value:g}{base}", *shown])
    caption = f"{steps} steps, mean ± standard deviation of {len(seeds)} seeds"
    save("ablations", quick, caption, table(["", *MEASURES], rows))
    draw(results, output.with_suffix(".png"))


def draw(results: dict, path: Path) -> None:
    """Draw a panel per measure and setting."""
    plt.switch_backend("agg")
    figure, axes = plt.subplots(
        len(MEASURES),
        len(VALUES),
        figsize=(3 * len(VALUES), 2.2 * len(MEASURES)),
        sharey="row",
        constrained_layout=True,
    )
    for row, measure in zip(axes, MEASURES):
        row[0].set_ylabel(measure)
        for axis, (setting, values) in zip(row, VALUES.items()):
            cells = [[run[measure] for run in results[setting, value]] for value in values]
            means, deviations = zip(*map(number, cells))
            axis.errorbar(range(len(values)), means, yerr=deviations, marker="o", capsize=3)
            axis.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    for axis, setting in zip(axes[-1], VALUES):
        axis.set_xlabel(AXIS_NAMES[setting])
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
