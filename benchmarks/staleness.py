"""Chart what stale data does to objectives: reward against KL, beside the best that there is.

    python benchmarks/staleness.py                  # 2,000 runs: four hours on 2 cores
    python benchmarks/staleness.py --objectives "tb tba_ema"    # searches these alone
    python benchmarks/staleness.py --quick          # two objectives, one seed: in ten minutes
    python benchmarks/staleness.py --cell "tb 8"    # an objective at a staleness, made again

A study that was interrupted continues where it was. A processor has a file of its own, for its
rounding decides what a run comes to: the tables show what is on record of each.

The task is addends, and all runs begin with the model in benchmarks/addends. A step is 16 queries x
8 responses. Each batch is trained on exactly 0, 8 or 32 steps after the weights that made it; or
its groups are 1, 4, 10 and 32 steps old, a quarter each; or it comes from the replay buffer:
m = 0.25, and as many new responses a step as are trained on.

Reward alone says little where objectives end at different distances from the reference. So each is
asked for the best reward - price x KL at three prices of a nat, the values of beta too. The optimum
is known: the reference, tempered (Eq. 2), whose right answers can be enumerated. A cell has nine
settings, three learning rates x three values of beta, or of what reads no reference, x three
numbers of steps. The best by the mean of three seeds is measured with three others.

Writes benchmarks/results/staleness.md and staleness.<processor>.{jsonl,png}; with --quick
results/quick/.
"""

import itertools
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import arguments, processor, results_dir, save, table
from study import base_model, key_of, number, recorded, run_all, small_config, spread

from extras.objectives import WITHOUT_REFERENCE
from models.hub import identify_weights
from models.logprobs import response_logprobs
from models.policy import load_policy
from models.tokens import load_tokenizer
from tasks import load_task

OBJECTIVES = ("tb", "tba_prime", "kimi_k2", "proximal_rloo", "topr", "dppo")
OBJECTIVES += ("tb_anchored", "tba_prime_ratio", "tba_prime_released", "tba_ema")
STALE, MIXED, REPLAY = (0, 8, 32), "mixed", "replay"
MIXED_AGES = 1, 4, 10, 32
AGES = (*STALE, MIXED, REPLAY)
PRICES = (0.03, 0.1, 0.3)  # of a nat, and beta of what reads a reference
# Of Adam, four apart as the two lags are: 8 x 1e-3 = 32 x 2.5e-4.
RATES = (2.5e-4, 1e-3, 4e-3)
STEPS = 200, 100, 50  # the first where beta is varied
SEARCH_SEEDS, SEEDS = (100, 101, 102), (0, 1, 2)
BATCH = dict(queries_per_batch=16, responses_per_query=8, tokens_per_micro_batch=4000)
BUFFER = dict(samples_per_query=8, sync_period=1, initial_responses=256, most_on_policy_prob=0.25)
CLIPPING = 8, 0.1  # age and price of the row without clipping
# The first two change no bit on an AMD processor, where MKL decides by itself.
OTHER_ROUNDING = dict(MKL_ENABLE_INSTRUCTIONS="AVX2", ONEDNN_MAX_CPU_ISA="AVX2")
OTHER_ROUNDING |= dict(MKL_CBWR="COMPATIBLE", ATEN_CPU_CAPABILITY="avx2")


class Setting(NamedTuple):
    """What is chosen for a cell."""

    rate: float
    beta: float
    steps: int


class Cell(NamedTuple):
    """An objective on data of some age: a staleness in steps, MIXED or REPLAY."""

    objective: str
    age: int | str


def settings_of(objective: str) -> list[Setting]:
    """The nine. Of kimi_k2 and tba_ema beta pulls towards the policy that sampled: it is 0.1."""
    if objective in WITHOUT_REFERENCE:
        return [Setting(rate, 0.1, steps) for rate in RATES for steps in STEPS]
    return [Setting(rate, beta, STEPS[0]) for rate in RATES for beta in PRICES]


def job(cell: Cell, setting: Setting, seed: int, **others) -> dict:
    """Describe a run, for run_all()."""
    chosen = dict(learning_rate=setting.rate, beta=setting.beta, steps=setting.steps, seed=seed)
    settings = BATCH | dict(task="addends", loss=cell.objective) | chosen | others
    if cell.age == REPLAY:
        groups = BATCH["queries_per_batch"]
        return {"settings": settings | BUFFER, "groups_per_sync": groups}
    if cell.age == MIXED:
        return {"settings": settings | dict(constant_staleness=1), "ages": [*MIXED_AGES]}
    return {"settings": settings | dict(constant_staleness=cell.age)}


def worth(result: dict, price: float) -> float:
    """Reward - price x KL: what a setting is chosen by, and what the tables compare."""
    found = result["reward"] - price * result["kl"]
    return found if np.isfinite(found) else -np.inf


class Study:
    """The runs of a processor.

    do(jobs, file): makes those that the file lacks, or gives None for them.
    """

    def __init__(self, file: Path, objectives=OBJECTIVES, ages=AGES, seeds=SEEDS, do=run_all):
        self.file, self.objectives, self.ages, self.do = file, objectives, ages, do
        self.seeds, self.search_seeds = seeds, SEARCH_SEEDS[: len(seeds)]
        self.cells = [Cell(objective, age) for objective in objectives for age in ages]
        self.results: dict[tuple, dict] = {}  # by cell, setting and seed

    def make(self) -> None:
        """Search the settings, then measure those that are chosen."""
        tried = {cell: settings_of(cell.objective) for cell in self.cells}
        self.run_all(tried, self.search_seeds)
        chosen = {
            cell: sorted({self.choice(cell, price) for price in PRICES})
            for cell in self.cells
            if self.has(cell, tried[cell], self.search_seeds)
        }
        self.run_all(chosen, self.seeds)
        whole = {cell for cell in chosen if self.has(cell, chosen[cell], self.seeds)}
        # What is shown: the ages that are on record, and what is whole at all of them.
        self.ages = [age for age in self.ages if any(cell.age == age for cell in whole)]
        cells = {o: [Cell(o, age) for age in self.ages] for o in self.objectives}
        self.objectives = [objective for objective in cells if whole.issuperset(cells[objective])]
        self.cells = [cell for objective in self.objectives for cell in cells[objective]]

    def has(self, cell: Cell, settings: list[Setting], seeds: tuple[int, ...]) -> bool:
        """Whether all these runs are there."""
        return all((cell, *run) in self.results for run in itertools.product(settings, seeds))

    def run_all(self, wanted: dict[Cell, list[Setting]], seeds: tuple[int, ...]) -> None:
        runs = [(c, setting, seed) for seed in seeds for c in wanted for setting in wanted[c]]
        lines = self.do([job(*run) for run in runs], self.file)
        self.results |= {run: line["result"] for run, line in zip(runs, lines) if line}

    def choice(self, cell: Cell, price: float) -> Setting:
        """The setting of the largest mean worth over the seeds of the search."""

        def mean_worth(setting: Setting) -> float:
            return np.mean([worth(r, price) for r in self.of(cell, setting, self.search_seeds)])

        return max(settings_of(cell.objective), key=mean_worth)

    def of(self, cell: Cell, setting: Setting, seeds: tuple[int, ...]) -> list[dict]:
        return [self.results[cell, setting, seed] for seed in seeds]

    def measured(self, cell: Cell, price: float) -> list[dict]:
        """What the tables show of a cell: a result for each seed."""
        return self.of(cell, self.choice(cell, price), self.seeds)

    def searched(self, objective: str, *ages: int | str) -> list[tuple]:
        """Runs of the search: (age, setting, seed, result)."""
        return [
            (cell.age, setting, seed, result)
            for (cell, setting, seed), result in self.results.items()
            if cell.objective == objective and cell.age in ages and seed in self.search_seeds
        ]


def right_shares(split: str) -> np.ndarray:
    """The base model's probability of a right answer to each query, all of them added up."""
    config = small_config(dict(task="addends"))
    model, tokenizer = load_policy(config, torch.device("cpu")), load_tokenizer(config)
    shares = []
    for query in load_task("addends").queries(split):
        answers = [f"{n:02}+{query.answer - n:02}" for n in range(query.answer + 1)]
        rows = [np.array([*tokenizer(a).input_ids, tokenizer.eos_token_id]) for a in answers]
        prompts = [np.array(tokenizer(query.prompt).input_ids)] * len(rows)
        with torch.no_grad():
            logprobs = response_logprobs(model, prompts, rows, config.temperature).sum(1)
        shares.append(float(logprobs.exp().sum()))
    return np.array(shares)


def optimum(shares: np.ndarray, price: float) -> tuple[float, float]:
    """Reward and KL of the best policy at this price: p e^(r / price) / Z, means over queries."""
    weight = np.exp(1 / price)
    z = 1 - shares + shares * weight
    reward = shares * weight / z
    return float(reward.mean()), float((reward / price - np.log(z)).mean())


def tables(studies: dict[str, Study], shares: dict[str, np.ndarray]) -> list[str]:
    """For each price what the objectives make of it: a row each and processor, a column an age."""
    ages = [age for age in AGES if any(age in study.ages for study in studies.values())]
    lines = [
        (objective, name, study)
        for objective in OBJECTIVES
        for name, study in studies.items()
        if objective in study.objectives
    ]
    parts = []
    for price in PRICES:
        reward, kl = optimum(shares["test"], price)
        trained, trained_kl = optimum(shares["train"], price)
        kinds = {
            f"reward − {price:g} × KL. The best there is has {reward - price * kl:.3f} "
            f"({reward:.3f} at {kl:.3f}), the base model {shares['test'].mean():.3f}": shown_worth,
            "reward at KL in nats, different right answers in 100 samples": shown_figures,
            f"reward − {price:g} × KL on the queries that were trained on. The best there is has "
            f"{trained - price * trained_kl:.3f}": lambda runs, price: shown_worth(
                [run["trained"] for run in runs], price
            ),
        }
        for title, show in kinds.items():
            rows = [
                [f"`{objective}`", name]
                + [
                    show(study.measured(Cell(objective, age), price), price)
                    if age in study.ages
                    else "not run"
                    for age in ages
                ]
                for objective, name, study in lines
            ]
            header = ["staleness", "on", *map(str, ages)]
            parts.append(f"**price {price:g}**: {title}\n\n{table(header, rows)}")
    return parts


def shown_worth(runs: list[dict], price: float) -> str:
    return spread([worth(run, price) for run in runs])


def shown_figures(runs: list[dict], _: float) -> str:
    means = [np.mean([run[name] for run in runs]) for name in ("reward", "kl", "distinct")]
    return "{:.2f} at {:.2f}, {:.0f}".format(*means)


def choices_table(study: Study) -> str:
    """Every choice, whether its rate lies at an edge, and what search and test say of it."""
    rows = []
    for cell, price in itertools.product(study.cells, PRICES):
        chosen = study.choice(cell, price)
        edge = {min(RATES): "smallest", max(RATES): "largest"}.get(chosen.rate, "no")
        found = [f"{price:g}", f"{chosen.rate:g}", edge, f"{chosen.beta:g}", f"{chosen.steps}"]
        searched = study.of(cell, chosen, study.search_seeds)
        shown = [shown_worth(runs, price) for runs in (searched, study.measured(cell, price))]
        rows.append([f"`{cell.objective}`", f"{cell.age}", *found, *shown])
    header = ["", "staleness", "price", "rate", "at an edge", "β", "steps", "search", "test"]
    return f"**every choice**\n\n{table(header, rows)}"


def lag_table(study: Study) -> str:
    """What staleness costs, by lag, by rate, and by their product: which of them explains it?"""
    pairs = sorted(itertools.product(STALE[1:], RATES), key=lambda pair: (pair[0] * pair[1], pair))
    rows = []
    for objective in study.objectives:
        fresh = {tuple(run[1:]): result["reward"] for *run, result in study.searched(objective, 0)}
        runs = study.searched(objective, *STALE[1:])
        lost = np.array([fresh[tuple(run[1:])] - result["reward"] for *run, result in runs])
        own = [(age, setting.rate) for age, setting, *_ in runs]
        shown = [f"{lost[[one == pair for one in own]].mean():.2f}" for pair in pairs]
        products = [f"{lag * rate:.3g}" for lag, rate in own]
        kinds = [lag for lag, _ in own], [rate for _, rate in own], products, own
        rows.append([f"`{objective}`", *shown, *(f"{explained(lost, kind):.2f}" for kind in kinds)])
    header = [f"{lag} × {rate:g} = {lag * rate:g}" for lag, rate in pairs]
    header += ["share explained by lag", "by rate", "by lag × rate", "by both"]
    title = "reward lost against fresh data, all else alike; runs of the search"
    return f"**lag × learning rate**: {title}\n\n{table(['', *header], rows)}"


def explained(values: np.ndarray, groups: list) -> float:
    """Share of the variance between groups, less what chance would give so many of them."""
    names = np.array([str(group) for group in groups])
    parts = [values[names == name] for name in set(names)]
    within = sum(((part - part.mean()) ** 2).sum() for part in parts)
    total = ((values - values.mean()) ** 2).sum()
    return 1 - within / (len(values) - len(parts)) * (len(values) - 1) / total


def ess_table(study: Study, base_reward: float) -> str:
    """Does a small effective sample size foretell that a run ends below the base model?

    That of the first steps, when all data come from the base model and rewards show nothing yet.
    """
    rows = []
    for objective in study.objectives:
        runs = study.searched(objective, *STALE[1:])
        fallen = np.array([result["reward"] < base_reward for *_, result in runs])
        lowest = np.median([min(result["history"]["log_w_5"]) for *_, result in runs])
        ess = np.array([early_ess(result["history"], age) for age, *_, result in runs])
        rate = np.array([setting.rate for _, setting, *_ in runs])
        alike = [str((age, setting.rate)) for age, setting, *_ in runs]
        shown = [foretold(-ess, fallen), foretold(rate, fallen), foretold(-ess, fallen, alike)]
        fell = f"{fallen.sum()} of {len(fallen)}", f"{lowest:.1f}"
        rows.append([f"`{objective}`", *fell, *shown])
    header = ["", "below the base model", "lowest log π / b of a run (5 % of the rows), median"]
    header += ["early effective sample size", "learning rate"]
    header.append("effective sample size, among runs of one lag and rate")
    title = "probability that of two runs the one that ends below the base model is told by …"
    return f"**foretelling a collapse**: {title} (95 % by bootstrap)\n\n{table(header, rows)}"


def early_ess(history: dict[str, list[float]], age: int) -> float:
    """Mean effective sample size of a run's first `age` steps."""
    pairs = zip(history["step"], history["ess_responses"])
    return float(np.mean([ess for step, ess in pairs if step <= age]))


def foretold(score: np.ndarray, fallen: np.ndarray, alike: list[str] | None = None) -> str:
    """The area under the curve of a score, where a large one says "falls", and its interval.

    alike: only pairs of the same are compared.
    """
    kinds = np.array(alike or [""] * len(score))

    def area(rows: np.ndarray) -> float:
        down, up = rows[fallen[rows]], rows[~fallen[rows]]
        is_pair = kinds[down][:, None] == kinds[up]
        differences = (score[down][:, None] - score[up])[is_pair]
        return float(np.mean((np.sign(differences) + 1) / 2)) if differences.size else np.nan

    everything = np.arange(len(score))
    if np.isnan(middle := area(everything)):
        return "no such pair"
    rng = np.random.default_rng(0)
    again = [area(rng.choice(everything, len(score))) for _ in range(1000)]
    low, high = np.nanpercentile(again, [2.5, 97.5])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def clipping_table(study: Study) -> str:
    """How much of a gradient is clipped, and what a run comes to unclipped."""
    rows, (age, price) = [], CLIPPING
    for objective in study.objectives:
        cell = Cell(objective, age)
        chosen, clipped = study.choice(cell, price), study.measured(cell, price)
        jobs = [job(cell, chosen, seed, max_grad_norm=None) for seed in study.seeds]
        unclipped = [line["result"] for line in study.do(jobs, study.file) if line]
        norm, share = (np.median([r[name] for r in clipped]) for name in ("grad_norm", "clipped"))
        shown = [shown_worth(part, price) if part else "not run" for part in (clipped, unclipped)]
        rows.append([f"`{objective}`", f"{norm:.2g}", f"{share:.2f}", *shown])
    header = ["", "median norm of the gradient", "share of steps clipped to 1", "clipped", "not"]
    title = f"reward − {price:g} × KL at staleness {age}, with and without"
    return f"**clipping**: {title}\n\n{table(header, rows)}"


def surrogate_table(study: Study) -> str:
    """What the penalty of tba_ema does on stale data: its rewards by beta, from next to none."""
    ages, betas = (*STALE[1:], MIXED), (1e-9, *PRICES)
    runs = list(itertools.product(ages, RATES[:2], betas, study.seeds))
    jobs = [job(Cell("tba_ema", age), Setting(r, b, STEPS[0]), seed) for age, r, b, seed in runs]
    lines, rows = study.do(jobs, study.file), []
    found = {run: line["result"] for run, line in zip(runs, lines) if line}
    for age, rate in itertools.product(ages, RATES[:2]):
        own = [[found.get((age, rate, b, seed)) for seed in study.seeds] for b in betas]
        shown = [shown_seeds(results) if all(results) else "not run" for results in own]
        rows.append([f"{age}", f"{rate:g}", *shown])
    header = ["staleness", "rate", *(f"β = {beta:g}" for beta in betas)]
    title = f"reward of each seed, at the mean KL, after {STEPS[0]} steps"
    return f"**the penalty of `tba_ema`**: {title}\n\n{table(header, rows)}"


def shown_seeds(results: list[dict]) -> str:
    rewards = " ".join(f"{result['reward']:.2f}" for result in results)
    return f"{rewards} at {np.mean([result['kl'] for result in results]):.2f}"


def rounding_table(study: Study, base_reward: float) -> str:
    """A random tenth of all runs again, computed as a processor without AVX-512 would round.

    The difference of two runs has sqrt 2 times the deviation of one.
    """
    runs = list(study.results)
    chosen = np.random.default_rng(0).choice(len(runs), max(1, len(runs) // 10), replace=False)
    runs = [runs[i] for i in sorted(chosen)]
    jobs = [job(*run) for run in runs]
    with patch.dict(os.environ, OTHER_ROUNDING):  # for the processes that make the runs
        lines = study.do(jobs, study.file.with_suffix(".rounded.jsonl"))
    kinds = "as in the tables", "of the search", "that end below the base model"
    deviations = {kind: [] for kind in kinds}
    for (cell, setting, seed), line in zip(runs, lines):
        if not line:  # not on record, and of another processor
            continue
        seeds = study.search_seeds if seed in study.search_seeds else study.seeds
        results, figures = study.of(cell, setting, seeds), []
        for price in PRICES:
            worths = [worth(result, price) for result in results]
            moved = worth(line["result"], price) - worths[seeds.index(seed)]
            figures += [moved / np.sqrt(2), number(worths)[1]]
        is_below = results[seeds.index(seed)]["reward"] < base_reward
        deviations[kinds[2 if is_below else seeds == study.search_seeds]].append(figures)
    rows = []
    for kind, figures in deviations.items():
        columns = figures or np.full((1, 2 * len(PRICES)), np.nan)
        found = np.sqrt(np.mean(np.square(columns), axis=0))
        rows.append([kind, f"{len(figures)}", *(f"{figure:.3f}" for figure in found)])
    header = ["", "runs"] + [f"price {p:g}, by {kind}" for p in PRICES for kind in ("it", "seed")]
    title = "standard deviation by rounding, a random tenth of the runs again, and by seed"
    return f"**another rounding**: {title}\n\n{table(header, rows)}"


def draw(study: Study, name: str, shares: np.ndarray) -> None:
    """Reward against KL, a panel an age, beside the best there is; `name` is the processor's."""
    plt.switch_backend("agg")
    columns = len(study.ages)
    style = dict(figsize=(3.6 * columns + 1.6, 4), constrained_layout=True)
    figure, axes = plt.subplots(1, columns, sharex=True, sharey=True, **style)
    best = [optimum(shares, price) for price in np.geomspace(0.05, 50, 100)]
    for axis, age in zip(axes, study.ages):
        axis.plot([kl for _, kl in best], [r for r, _ in best], "k", label="the best there is")
        axis.plot(0, shares.mean(), "ko", label="base model")
        for i, objective in enumerate(study.objectives):
            chosen = [study.measured(Cell(objective, age), price) for price in PRICES]
            points = sorted(
                [number([run[name] for run in runs]) for name in ("kl", "reward")]
                for runs in chosen
            )
            (x, dx), (y, dy) = np.transpose(points, (1, 2, 0))
            style = dict(linestyle="--" if objective in WITHOUT_REFERENCE else "-", color=f"C{i}")
            axis.errorbar(x, y, dy, dx, marker="o", label=objective, **style)
        axis.set(title=f"staleness: {age}", xlabel="KL to the reference, nats")
    axes[0].set_ylabel("reward, held-out queries")
    axes[-1].legend(title="dashed: no reference", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(f"Reward against KL: up and to the left is better ({name})")
    figure.savefig(study.file.with_suffix(".png"), dpi=80)


def again(cell: Cell, studies: dict[str, Study]) -> None:
    """Make a cell's runs again, each setting once, and print them beside what is recorded."""
    with tempfile.TemporaryDirectory() as empty:
        having = [(name, study) for name, study in studies.items() if cell in study.cells]
        if not having:
            sys.exit(f"error: {cell.objective} {cell.age} is not on record: run --objectives first")
        for (name, study), price in itertools.product(having, PRICES):
            chosen = study.choice(cell, price)
            jobs = [job(cell, chosen, seed) for seed in study.seeds]
            new = [line["result"] for line in run_all(jobs, Path(empty) / "again.jsonl")]
            then, now = (shown_worth(runs, price) for runs in (study.measured(cell, price), new))
            print(f"price {price:g}: {then} on record ({name}), {now} here; {chosen}", flush=True)


def on_record(directory: Path, *parts) -> dict[str, Study]:
    """The studies of all processors, by their names, as far as they were made."""

    def look_up(jobs: list[dict], file: Path) -> list[dict | None]:
        lines = recorded(file)
        return [lines.get(key_of(job)) for job in jobs]

    studies = {}
    for file in sorted(directory.glob("staleness.*.jsonl")):
        if ".rounded" not in file.suffixes:
            name = next(iter(recorded(file).values()))["processor"]
            studies[name] = Study(file, *parts, do=look_up)
            studies[name].make()
    return studies


def main() -> None:
    args = arguments(__doc__, ("--cell", None), ("--objectives", " ".join(OBJECTIVES)))
    parts = (("tb", "topr"), STALE, SEEDS[:1]) if args.quick else (OBJECTIVES, AGES, SEEDS)
    directory = results_dir(args.quick)
    if args.cell:
        cells = {f"{cell.objective} {cell.age}": cell for cell in Study(directory, *parts).cells}
        if args.cell not in cells:
            sys.exit(f"error: --cell {args.cell!r} is none of {', '.join(cells)}")
        return again(cells[args.cell], on_record(directory, *parts))
    own = re.sub(r"\W+", "-", processor().lower())
    chosen = parts if args.quick else (tuple(args.objectives.split()), *parts[1:])
    if unknown := set(chosen[0]) - set(OBJECTIVES):
        sys.exit(f"error: --objectives {', '.join(unknown)}: none of {', '.join(OBJECTIVES)}")
    Study(directory / f"staleness.{own}.jsonl", *chosen).make()
    studies = on_record(directory, *parts)
    studies[processor()].do = run_all  # what the others lack cannot be made here
    shares = {split: right_shares(split) for split in ("test", "train")}
    base_reward = shares["test"].mean()
    found = tables(studies, shares)
    for name, study in studies.items():
        found += [
            f"## {name}: {len(study.results)} runs",
            lag_table(study),
            ess_table(study, base_reward),
        ]
        found += [surrogate_table(study)] if "tba_ema" in study.objectives else []
        found += [clipping_table(study), rounding_table(study, base_reward), choices_table(study)]
        draw(study, name, shares["test"])
    caption = (
        f"Base model {identify_weights(base_model('addends'))}. The gradient is clipped to 1. "
        "Settings are chosen by the mean of three seeds; tables show mean ± standard deviation of "
        f"three others, with --quick of one. On record: runs on {' and on '.join(studies)}."
    )
    save("staleness", args.quick, caption, *found)


if __name__ == "__main__":
    main()
