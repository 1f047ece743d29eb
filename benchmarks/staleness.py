"""Chart what staleness does to each objective, each at its best learning rate at that staleness.

    python benchmarks/staleness.py             # two hours on 2 cores
    python benchmarks/staleness.py --quick     # four objectives, one rate, one seed: in 3 minutes
    python benchmarks/staleness.py --full      # all objectives, staleness 0 to 128: days

A study that was interrupted continues where it was; every run is kept.

stale    each batch is trained on exactly so many steps after the weights that made it
         (--constant_staleness), once
replay   batches come from the replay buffer, with most-on-policy probability m
reuse    the same with m = 0.25 and fewer responses generated: as many steps for each

Tasks: arithmetic (one right answer), addends (many), and a language small enough to enumerate
(exact_posterior.py), where KL to pi* is exact. A step is 16 queries x 8 responses, or 3 x 16 in the
language. The learning rate of a cell is the best of four, a factor of about three apart, with a
seed that the tables do not use: by the mean reward of samples for held-out queries, and in the
language, for those that aim at pi* with fresh data, by KL to that. Where the best lies at an edge,
the next rate is tried too. Where no rate beats the base model, the cell says so, and no more is
run.
Writes benchmarks/results/staleness.{jsonl,md,png}; with --quick benchmarks/results/quick/.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import exact_posterior
import matplotlib.pyplot as plt
import numpy as np
from common import results_dir, save, table
from study import base_model, number, run_all, spread, train

from objectives import LOSSES
from runtime.record.timeline import read_lines

OBJECTIVES = (
    "tb",
    "tba_prime",
    "tb_behavior",
    "kimi_k2",
    "oapl",
    "reinforce",
    "proximal_rloo",
    "grpo",
    "topr",
    "raft",
)
REGRESSIONS = ("tb", "tba_prime", "tb_behavior", "kimi_k2", "oapl")
# Those whose fixed point on fresh data is pi*.
AIM_AT_PI_STAR = ("tb", "tba_prime", "reinforce", "rloo", "proximal_rloo")
WITH_BUFFER = ("tb", "kimi_k2", "grpo", "raft")
LANGUAGE = "language"
TASKS = ("arithmetic", "addends", LANGUAGE)
STALENESS, MIXES, REUSES = (0, 8, 64), (0.25, 0.95), (1, 2, 4, 8)
RATES = {"arithmetic": (1e-4, 3e-4, 1e-3, 3e-3), "addends": (1e-4, 3e-4, 1e-3, 3e-3)}
RATES |= {LANGUAGE: (0.003, 0.01, 0.03, 0.1)}
FACTOR = 3.3  # about, between two rates
STEPS, LANGUAGE_STEPS = 300, 2000
RESPONSES = 128 * 75  # generated in a run of "reuse"
SEARCH_SEED, SEEDS = 100, (0, 1, 2)
BATCH = dict(queries_per_batch=16, tokens_per_micro_batch=4000, responses_per_query=8)
BUFFER = dict(samples_per_query=8, sync_period=1, initial_responses=256)
TARGETS = {"arithmetic": 0.9, "addends": 0.7}  # reward that "reuse" is to reach
MEANING = {
    "reward": "mean reward of samples, held-out queries",
    "kl": "KL to the reference policy, nats a response",
    "distinct": "different right responses among 100 samples of a query (addends), or e to the "
    "entropy (language)",
    "kl_star": "KL to π*",
    "ess": "effective sample size of π / b over the responses of a batch, mean of a run",
}

AXIS = {
    "reward": "reward",
    "distinct": "different right answers",
    "kl_star": "KL to π*",
}


@dataclass(frozen=True)
class Cell:
    """What is compared at its best learning rate: an objective on data of some age."""

    task: str
    objective: str
    kind: str  # stale, replay or reuse
    age: float  # staleness, m, or steps for each response


def job(cell: Cell, rate: float, seed: int, steps: int) -> dict:
    """Describe a run, for run()."""
    if cell.task == LANGUAGE:
        of_it = dict(objective=cell.objective, learning_rate=rate, seed=seed)
        return {"language": of_it | dict(staleness=int(cell.age), steps=LANGUAGE_STEPS)}
    settings = BATCH | dict(task=cell.task, loss=cell.objective, learning_rate=rate, seed=seed)
    if cell.kind == "stale":
        return {"settings": settings | dict(constant_staleness=int(cell.age), steps=steps)}
    groups = BATCH["queries_per_batch"]
    if cell.kind == "replay":
        settings |= BUFFER | dict(most_on_policy_prob=cell.age, steps=steps)
    else:
        reuse = int(cell.age)
        settings |= BUFFER | dict(most_on_policy_prob=0.25, steps=RESPONSES * reuse // 128)
        groups //= reuse
    return {"settings": settings, "groups_per_sync": groups}


def run(
    settings: dict | None = None,
    groups_per_sync: int = 0,
    language: dict | None = None,
    base: str = "",
) -> dict:
    """Make a run, or measure a task's base model. Returns its figures."""
    if base:
        return base_model(base)
    if settings:
        return train(settings, groups_per_sync)
    history = exact_posterior.train(**language)
    ends = {name: values[-1] for name, values in history.items()}
    return {
        "reward": ends["reward"],
        "kl": ends["kl_reference"],
        "kl_star": ends["kl"],
        "distinct": ends["distinct"],
        "history": {"ess_responses": history["ess"], "reward": history["reward"]},
    }


def language_base(seeds: tuple[int, ...]) -> dict[str, float]:
    """Measure the reference policy of the language, the mean over seeds."""
    begin = [exact_posterior.train("tb", 0.1, seed, staleness=0, steps=0) for seed in seeds]
    named = {"kl_star": "kl", "reward": "reward", "distinct": "distinct"}
    return {name: float(np.mean([b[key][0] for b in begin])) for name, key in named.items()}


def score(cell: Cell, result: dict) -> float:
    """What a learning rate is chosen by: the more the better."""
    is_near = cell.task == LANGUAGE and cell.objective in AIM_AT_PI_STAR
    found = -result["kl_star"] if is_near else result["reward"]
    return found if np.isfinite(found) else -np.inf


class Study:
    """The runs so far. do: makes those of a list that are missing."""

    def __init__(self, file: Path, steps: int, seeds: tuple[int, ...], do: Callable = run_all):
        self.file, self.steps, self.seeds, self.do = file, steps, seeds, do
        self.tried: dict[Cell, dict[float, float]] = {}  # rate -> score
        self.results: dict[Cell, list[dict]] = {}  # a result a seed; none where no rate is any good
        # What each task begins with, by the seed of the search and by those of the tables. Only in
        # the language are the two not the same: there a seed has reward and reference of its own.
        self.base: dict[str, dict] = {}
        self.shown_base: dict[str, dict] = {}

    def run_all(self, jobs: list[dict]) -> list[dict]:
        return [line["result"] for line in self.do(jobs, self.file, run=run)]

    def measure_base(self, tasks: list[str]) -> None:
        """Measure what each task begins with."""
        for task in tasks:
            if task == LANGUAGE:
                self.base[task] = language_base((SEARCH_SEED,))
                self.shown_base[task] = language_base(self.seeds)
            else:
                self.base[task] = self.shown_base[task] = self.run_all([{"base": task}])[0]

    def search(self, cells: list[Cell], rates: dict[str, tuple[float, ...]]) -> None:
        """Try each cell's learning rates, and the next one where the best lies at an edge."""
        wanted = [(cell, rate) for cell in cells for rate in rates[cell.task]]
        while wanted:
            jobs = [job(cell, rate, SEARCH_SEED, self.steps) for cell, rate in wanted]
            for (cell, rate), result in zip(wanted, self.run_all(jobs)):
                self.tried.setdefault(cell, {})[rate] = score(cell, result)
            wanted = []
            for cell in cells:
                best, tried = self.best(cell), self.tried[cell]
                if best is None or len(tried) > len(rates[cell.task]) or len(tried) == 1:
                    continue
                if best in (min(tried), max(tried)):
                    beyond = best / FACTOR if best == min(tried) else best * FACTOR
                    wanted.append((cell, float(f"{beyond:.1g}")))

    def best(self, cell: Cell) -> float | None:
        """The best learning rate of a cell; None if none beats the base model."""
        tried = self.tried[cell]
        rate = max(tried, key=tried.get)
        return rate if tried[rate] > score(cell, self.base[cell.task]) else None

    def measure(self, cells: list[Cell]) -> None:
        """Run each cell at its best rate with the seeds of the tables."""
        good = [cell for cell in cells if self.best(cell)]
        jobs = [job(c, self.best(c), seed, self.steps) for c in good for seed in self.seeds]
        found, count = self.run_all(jobs), len(self.seeds)
        self.results |= {cell: [] for cell in cells}
        self.results |= {cell: found[i * count :][:count] for i, cell in enumerate(good)}

    def values(self, cell: Cell, measure: str) -> list[float]:
        """A figure of each seed's run."""
        if measure == "ess":
            return [float(np.mean(r["history"]["ess_responses"])) for r in self.results[cell]]
        return [result[measure] for result in self.results[cell]]

    def shown(self, cell: Cell, measure: str) -> str:
        if not self.results[cell]:
            return "no rate beats the base model"
        return spread(self.values(cell, measure))


def tables(study: Study, cells: list[Cell]) -> list[str]:
    """A table a task, kind and measure: a row an objective, a column an age."""
    parts = []
    for kind in dict.fromkeys(cell.kind for cell in cells):
        for task in dict.fromkeys(cell.task for cell in cells if cell.kind == kind):
            own = [cell for cell in cells if (cell.kind, cell.task) == (kind, task)]
            measures = ["kl_star"] if task == LANGUAGE else []
            measures += ["reward", "kl", "ess"] + (["distinct"] if task != "arithmetic" else [])
            for measure in measures:
                rows = [
                    [f"`{name}`", *(study.shown(cell, measure) for cell in row)]
                    for name, row in by_objective(own).items()
                ]
                ages = list(dict.fromkeys(cell.age for cell in own))
                of_base = study.shown_base[task].get(measure)
                base = "" if of_base is None else f"; base model {of_base:.3f}"
                title = f"**{kind}, {task}**: {MEANING[measure]}{base}"
                parts.append(f"{title}\n\n{table([AGE[kind], *map(str, ages)], rows)}")
    return parts


AGE = {"stale": "staleness, steps", "replay": "m", "reuse": "steps for each response"}


def by_objective(cells: list[Cell]) -> dict[str, list[Cell]]:
    return {
        name: [cell for cell in cells if cell.objective == name]
        for name in dict.fromkeys(cell.objective for cell in cells)
    }


def rates_table(study: Study, cells: list[Cell]) -> str:
    """Every choice of a learning rate, and whether it lies at an edge of what was tried."""
    rows = []
    for cell in cells:
        tried, best = study.tried[cell], study.best(cell)
        edge = {min(tried): "smallest", max(tried): "largest"}.get(best, "no")
        scores = ", ".join(f"{rate:g}: {tried[rate]:.3f}" for rate in sorted(tried))
        chosen = "none" if best is None else f"{best:g}"
        where = [cell.kind, cell.task, f"`{cell.objective}`", f"{cell.age:g}"]
        rows.append([*where, chosen, "" if best is None else edge, scores])
    header = ["", "task", "objective", "age", "rate", "at an edge", "score by rate"]
    return "**every choice of a learning rate**\n\n" + table(header, rows)


def responses_table(study: Study, cells: list[Cell]) -> str:
    """What replay buys: how many responses are generated until a reward is reached."""
    rows = []
    for name, row in by_objective(cells).items():
        shown = [f"`{name}`"]
        for cell in row:
            needed = [
                responses_until(r["history"], TARGETS[cell.task]) for r in study.results[cell]
            ]
            reached = [count for count in needed if np.isfinite(count)]
            mean = f"{number(reached)[0]:.0f}" if reached else "never"
            few = f" ({len(reached)} of {len(needed)} seeds)" if len(reached) < len(needed) else ""
            shown.append(mean + few if needed else "no rate beats the base model")
        rows.append(shown)
    task = cells[0].task
    title = f"**what replay buys, {task}**: responses generated until new ones have a reward of "
    ages = [f"{cell.age:g}" for cell in next(iter(by_objective(cells).values()))]
    return f"{title}{TARGETS[task]}\n\n{table([AGE['reuse'], *ages], rows)}"


def responses_until(history: dict[str, list[float]], target: float) -> float:
    """Responses generated until those of a thirtieth of the run reached this reward; inf: never."""
    reached = [n for n, reward in zip(history["received"], history["reward"]) if reward >= target]
    return min(reached, default=float("inf"))


def collapse_table(cells: list[Cell], lines: list[dict]) -> str:
    """Does a small effective sample size foretell a collapse?

    In the first `staleness` steps: all data come from the base model, and rewards show nothing yet.
    Of all runs, those of the search too. Without staleness it is 1.
    """
    rows = []
    for age in sorted({cell.age for cell in cells} - {0}):
        runs = [
            line
            for line in lines
            if line["job"].get("settings", {}).get("constant_staleness") == age
        ]
        fallen = [run for run in runs if has_collapsed(run["result"]["history"]["reward"])]
        fine = [run for run in runs if run not in fallen]
        pairs = [(one, other) for one in fallen for other in fine]
        alike = [pair for pair in pairs if task_and_rate(pair[0]) == task_and_rate(pair[1])]
        shown = [
            f"{np.median([early_ess(run, age) for run in part]):.3f}" if part else ""
            for part in (fallen, fine)
        ]
        shown += [
            f"{np.mean([early_ess(a, age) < early_ess(b, age) for a, b in part]):.2f}"
            if part
            else ""
            for part in (pairs, alike)
        ]
        rows.append([f"{age:g}", str(len(fallen)), str(len(fine)), *shown])
    header = [
        "staleness",
        "collapsed",
        "not",
        "early ESS, median, where it collapses",
        "where not",
        "P(smaller where it collapses)",
        "the same, of runs of one task and rate",
    ]
    return "**does a small effective sample size foretell a collapse?**\n\n" + table(header, rows)


def early_ess(line: dict, age: float) -> float:
    """Mean effective sample size of a run's first `age` steps."""
    history = line["result"]["history"]
    return float(
        np.mean([e for s, e in zip(history["step"], history["ess_responses"]) if s <= age])
    )


def task_and_rate(line: dict) -> tuple[str, float]:
    settings = line["job"]["settings"]
    return settings["task"], settings["learning_rate"]


def has_collapsed(reward: list[float]) -> bool:
    """Whether the last tenth of a run has less than half of the best reward of the first half."""
    best = max(reward[: len(reward) // 2])
    return float(np.mean(reward[-len(reward) // 10 :])) < best / 2


def draw(study: Study, cells: list[Cell], path: Path) -> None:
    """Reward, right responses, and KL to pi*, against staleness; a line an objective."""
    plt.switch_backend("agg")
    own_tasks = [task for task in TASKS if task in {cell.task for cell in cells}]
    panels = [(task, "reward") for task in own_tasks if task != LANGUAGE]
    panels += [(task, "distinct") for task in own_tasks if task == "addends"]
    panels.append((LANGUAGE, "kl_star"))
    size = (4 * len(panels), 4.5)
    figure, axes = plt.subplots(1, len(panels), figsize=size, constrained_layout=True)
    ages = sorted({cell.age for cell in cells})
    places = {age: i for i, age in enumerate(ages)}
    for axis, (task, measure) in zip(axes, panels):
        own = by_objective([cell for cell in cells if cell.task == task])
        for i, (name, row) in enumerate(own.items()):
            good = [cell for cell in row if study.results[cell]]
            points = [number(study.values(cell, measure)) for cell in good]
            style = dict(linestyle="-" if name in REGRESSIONS else "--", color=f"C{i}", capsize=2)
            axis.errorbar(
                [places[cell.age] + 0.02 * (i - len(own) / 2) for cell in good],
                [mean for mean, _ in points],
                yerr=[deviation for _, deviation in points],
                linewidth=3 if name == "tb" else 1.5,
                label=name,
                **style,
            )
        axis.axhline(
            study.shown_base[task][measure], color="gray", linestyle=":", label="base model"
        )
        axis.set_xticks(range(len(ages)), [f"{age:g}" for age in ages])
        axis.set(title=f"{task}: {AXIS[measure]}", xlabel="staleness, steps")
        if measure == "kl_star":
            axis.set_yscale("log")
            axis.invert_yaxis()  # up is better in each panel
    figure.suptitle("What staleness does, each objective at its best learning rate (up: better)")
    kinds = "solid: regressions\ndashed: others"
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title=kinds)
    figure.savefig(path, dpi=80)


def main() -> None:
    if unknown := set(sys.argv[1:]) - {"--quick", "--full"}:
        sys.exit(f"error: {', '.join(sorted(unknown))}: the flags are --quick and --full")
    quick, full = "--quick" in sys.argv, "--full" in sys.argv
    objectives, staleness, tasks = OBJECTIVES, STALENESS, TASKS
    steps, seeds, rates = STEPS, SEEDS, RATES
    if quick:
        objectives, staleness, tasks, steps, seeds = WITH_BUFFER, (0, 8), TASKS[::2], 60, SEEDS[:1]
        rates = {task: values[-2:-1] for task, values in RATES.items()}
    if full:
        objectives, staleness = tuple(LOSSES), (0, *(2**i for i in range(8)))
    output = results_dir(quick) / "staleness"
    study = Study(output.with_suffix(".jsonl"), steps, seeds)
    stale = [Cell(t, o, "stale", age) for t in tasks for o in objectives for age in staleness]
    kinds = {} if quick else {"replay": MIXES, "reuse": REUSES}
    others = [
        Cell(task, objective, kind, age)
        for kind, ages in kinds.items()
        for task in TASKS[:2]
        for objective in WITH_BUFFER
        for age in ages
    ]
    study.measure_base(list(tasks))
    # A task after the other, the quick one first.
    for part in ([c for c in stale if c.task == task] for task in reversed(tasks)):
        study.search(part, rates)
        study.measure(part)
    if others:
        study.search(others, rates)
        study.measure(others)
    cells = stale + others
    parts = tables(study, cells)
    for task in TASKS[:2]:
        if reuse := [cell for cell in others if (cell.kind, cell.task) == ("reuse", task)]:
            parts.append(responses_table(study, reuse))
    parts += [collapse_table(stale, read_lines(study.file)), rates_table(study, cells)]
    save("staleness", quick, caption(steps, seeds) + (" (--full)" if full else ""), *parts)
    draw(study, stale, output.with_suffix(".png"))


def caption(steps: int, seeds: tuple[int, ...]) -> str:
    return (
        f"{steps} steps, in the language {LANGUAGE_STEPS}; mean ± standard deviation of "
        f"{len(seeds)} seeds, at the learning rate of the last table. The machine is the one that "
        "the last runs were made on"
    )


if __name__ == "__main__":
    main()
