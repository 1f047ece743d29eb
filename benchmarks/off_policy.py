"""What staleness does to each objective: the objectives x how many steps old their data are x seeds, on two tasks.

    python benchmarks/off_policy.py             # half an hour to an hour on 2 cores; a broken-off study goes on where it was
    python benchmarks/off_policy.py --quick     # in minutes: fewer steps, one seed, two columns, no search for the learning rate

Every run has the same number of steps and the same data budget: at each step 16 queries x 8 responses, trained on exactly `staleness` steps after
the weights that made them (--constant_staleness). Each objective has a learning rate of its own per task: of LEARNING_RATES the one with the
highest mean reward of the policy's samples (of held-out queries) after on-policy training, with a seed that the tables do not use.
Tasks: arithmetic, where each query has one right answer, and addends, where a query has many.
Writes benchmarks/results/off_policy.{jsonl,md,png}; with --quick benchmarks/results/quick/.
"""

import sys
import textwrap
from pathlib import Path

from common import RESULTS, arguments, save, table
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
    return {
        "settings": BATCH
        | dict(
            task=task,
            loss=objective,
            constant_staleness=staleness,
            learning_rate=learning_rate,
            seed=seed,
            steps=steps,
        )
    }


def pick_learning_rates(steps: int, file: Path) -> dict[tuple[str, str], float]:
    """(task, objective) -> learning rate."""
    grid = [
        (task, objective, rate)
        for task in TASKS
        for objective in OBJECTIVES
        for rate in LEARNING_RATES
    ]
    jobs = {
        cell: [job(cell[0], cell[1], 0, cell[2], seed, steps) for seed in SEARCH_SEEDS]
        for cell in grid
    }
    results = run_all(sum(jobs.values(), []), file)
    reward = {
        cell: sum(
            results[i * len(SEARCH_SEEDS) + s]["result"]["reward"] for s in range(len(SEARCH_SEEDS))
        )
        for i, cell in enumerate(grid)
    }
    return {
        (task, objective): max(LEARNING_RATES, key=lambda rate: reward[task, objective, rate])
        for task in TASKS
        for objective in OBJECTIVES
    }


def main() -> None:
    quick = arguments(__doc__).quick
    steps, seeds, columns = (50, SEEDS[:1], (0, 10)) if quick else (100, SEEDS, (0, 2, 5, 10, 15))
    output = (RESULTS / "quick" if quick else RESULTS) / "off_policy"
    file = output.with_suffix(".jsonl")
    rates = (
        {(t, o): 1e-3 for t in TASKS for o in OBJECTIVES}
        if quick
        else pick_learning_rates(steps, file)
    )
    cells = [
        (t, o, n)
        for t in TASKS
        for o in OBJECTIVES
        for n in columns
        if n in (0, 2, 10) or o in ALSO_AT_5_AND_15
    ]
    lines = run_all(
        [job(t, o, n, rates[t, o], seed, steps) for t, o, n in cells for seed in seeds], file
    )
    results = {
        cell: [line["result"] for line in lines[i * len(seeds) : (i + 1) * len(seeds)]]
        for i, cell in enumerate(cells)
    }

    text = []
    for task, measures in TASKS.items():
        for measure in measures:
            rows = [
                [f"{objective} ({rates[task, objective]:g})"]
                + [
                    spread([r[measure] for r in results[task, objective, n]])
                    if (task, objective, n) in results
                    else ""
                    for n in columns
                ]
                for objective in OBJECTIVES
            ]
            text.append(
                f"{task}: {MEANING[measure]}\n\n"
                + table(["objective (learning rate)", *(f"staleness {n}" for n in columns)], rows)
            )
    save(
        "off_policy",
        quick,
        f"{steps} steps, mean ± standard deviation of {len(seeds)} seeds",
        *text,
    )
    draw(results, columns, output.with_suffix(".png"))


def draw(results: dict, columns: tuple[int, ...], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

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
            points = [
                (n, [r[measure] for r in results[task, objective, n]])
                for n in columns
                if (task, objective, n) in results
            ]
            means, deviations = zip(*(number(values) for _, values in points))
            axis.errorbar(
                [n for n, _ in points],
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
