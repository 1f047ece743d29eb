"""Measure what staleness does to each objective.

The runs are the objectives x how many steps old their data are x seeds, on two tasks.

    python benchmarks/off_policy.py             # half an hour to an hour on 2 cores
    python benchmarks/off_policy.py --quick     # in minutes

A study that was interrupted continues where it was. The quick one has fewer steps, one seed, two
columns and no search for the learning rate.

Every run has the same number of steps and the same data budget: at each step 16 queries x 8
responses, trained on exactly `staleness` steps after the weights that made them
(--constant_staleness). Each objective has a learning rate of its own per task: of LEARNING_RATES
the one with the highest mean reward of the policy's samples (of held-out queries) after on-policy
training, with a seed that the tables do not use.
The tasks are arithmetic, where each query has one right answer, and addends, where it has many.
Writes benchmarks/results/off_policy.{jsonl,md,png}; with --quick benchmarks/results/quick/.
"""

import sys
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
from common import arguments, results_dir, save, table
from study import number, run_all, spread

OBJECTIVES = (
    "tb",
    "tba_prime",
    "tba_prime_ratio",
    "reinforce",
    "rloo",
    "proximal_rloo",
    "grpo",
    "dr_grpo",
    "online_dpo",
    "raft",
)
ALSO_AT_5_AND_15 = ("tb", "tba_prime", "proximal_rloo", "grpo", "online_dpo")
TASKS = {
    "arithmetic": ("accuracy", "reward", "kl"),
    "addends": ("accuracy", "reward", "kl", "distinct"),
}
MEANING = {
    "accuracy": "accuracy of greedy responses to held-out queries",
    "reward": "mean reward of samples, held-out queries",
    "kl": "KL to the reference policy, nats a response",
    "distinct": "different right responses among 100 samples of a query",
}
LEARNING_RATES = (3e-4, 1e-3, 3e-3)
SEARCH_SEEDS, SEEDS = (100,), (0, 1, 2)
BATCH = dict(queries_per_batch=16, queries_per_micro_batch=16)


def job(
    task: str, objective: str, staleness: int, learning_rate: float, seed: int, steps: int
) -> dict:
    """Describe a run for run_all."""
    settings = BATCH | dict(
        task=task,
        loss=objective,
        constant_staleness=staleness,
        learning_rate=learning_rate,
        seed=seed,
        steps=steps,
    )
    return {"settings": settings}


def pick_learning_rates(steps: int, file: Path) -> dict[tuple[str, str], float]:
    """Pick a learning rate for each (task, objective)."""
    pairs = [(task, objective) for task in TASKS for objective in OBJECTIVES]
    jobs = [
        job(task, objective, 0, rate, seed, steps)
        for task, objective in pairs
        for rate in LEARNING_RATES
        for seed in SEARCH_SEEDS
    ]
    rewards = iter([line["result"]["reward"] for line in run_all(jobs, file)])
    rates = {}
    for pair in pairs:
        totals = {rate: sum(next(rewards) for _ in SEARCH_SEEDS) for rate in LEARNING_RATES}
        rates[pair] = max(LEARNING_RATES, key=totals.get)
    return rates


def main() -> None:
    quick = arguments(__doc__).quick
    steps, seeds, columns = (50, SEEDS[:1], (0, 10)) if quick else (100, SEEDS, (0, 2, 5, 10, 15))
    output = results_dir(quick) / "off_policy"
    file = output.with_suffix(".jsonl")
    if quick:
        rates = {(task, objective): 1e-3 for task in TASKS for objective in OBJECTIVES}
    else:
        rates = pick_learning_rates(steps, file)
    cells = [
        (task, objective, staleness)
        for task in TASKS
        for objective in OBJECTIVES
        for staleness in columns
        if staleness in (0, 2, 10) or objective in ALSO_AT_5_AND_15
    ]
    jobs = [
        job(task, objective, staleness, rates[task, objective], seed, steps)
        for task, objective, staleness in cells
        for seed in seeds
    ]
    lines = run_all(jobs, file)
    results = {
        cell: [line["result"] for line in lines[i * len(seeds) : (i + 1) * len(seeds)]]
        for i, cell in enumerate(cells)
    }
    caption = f"{steps} steps, mean ± standard deviation of {len(seeds)} seeds"
    save("off_policy", quick, caption, *tables(results, rates, columns))
    draw(results, columns, output.with_suffix(".png"))


def tables(
    results: dict, rates: dict[tuple[str, str], float], columns: tuple[int, ...]
) -> list[str]:
    """Write a table per task and measure, a row per objective, a column per staleness."""
    header = ["objective (learning rate)", *(f"staleness {n}" for n in columns)]
    parts = []
    for task, measures in TASKS.items():
        for measure in measures:
            rows = []
            for objective in OBJECTIVES:
                row = [f"{objective} ({rates[task, objective]:g})"]
                for n in columns:
                    runs = results.get((task, objective, n))
                    row.append(spread([run[measure] for run in runs]) if runs else "")
                rows.append(row)
            parts.append(f"{task}: {MEANING[measure]}\n\n{table(header, rows)}")
    return parts


def draw(results: dict, columns: tuple[int, ...], path: Path) -> None:
    """Draw a panel per task and measure, but for accuracy."""
    plt.switch_backend("agg")
    panels = [
        (task, measure)
        for task, measures in TASKS.items()
        for measure in measures
        if measure != "accuracy"
    ]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 4), constrained_layout=True
    )
    for axis, (task, measure) in zip(axes, panels):
        for i, objective in enumerate(OBJECTIVES):
            stalenesses = [n for n in columns if (task, objective, n) in results]
            cells = [[run[measure] for run in results[task, objective, n]] for n in stalenesses]
            means, deviations = zip(*map(number, cells))
            axis.errorbar(
                stalenesses,
                means,
                yerr=deviations,
                label=objective,
                color=f"C{i}",
                capsize=2,
                linewidth=3 if objective == "tb" else 1,
            )
        axis.set(
            title=f"{task}: {measure}",
            xlabel="staleness, steps",
            ylabel=textwrap.fill(MEANING[measure], 30),
        )
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
