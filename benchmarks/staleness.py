"""Chart what stale data does to objectives: reward against KL, beside the best that there is.

    python benchmarks/staleness.py                  # 2,000 runs: four hours on 2 cores
    python benchmarks/staleness.py --objectives "tb tba_ema"    # searches these alone
    python benchmarks/staleness.py --quick          # two objectives, one seed: in ten minutes

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
import re
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import arguments, processor, results_dir, save, table
from study import ADDENDS, MODEL, key_of, number, recorded, run_all, small_config, spread

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


def job(cell: Cell, setting: Setting, seed: int) -> dict:
    """Describe a run, for run_all()."""
    chosen = dict(learning_rate=setting.rate, beta=setting.beta, steps=setting.steps, seed=seed)
    settings = BATCH | dict(task="addends", loss=cell.objective) | chosen
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


def right_shares(split: str) -> np.ndarray:
    """The base model's probability of a right answer to each query, all of them added up."""
    config = small_config(dict(task="addends"))
    model, tokenizer = load_policy(config, torch.device("cpu")), load_tokenizer(config)
    shares = []
    for query in load_task(ADDENDS).queries(split):
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


def on_record(directory: Path, *parts) -> dict[str, Study]:
    """The studies of all processors, by their names, as far as they were made."""

    def look_up(jobs: list[dict], file: Path) -> list[dict | None]:
        lines = recorded(file)
        return [lines.get(key_of(job)) for job in jobs]

    studies = {}
    for file in sorted(directory.glob("staleness.*.jsonl")):
        name = next(iter(recorded(file).values()))["processor"]
        studies[name] = Study(file, *parts, do=look_up)
        studies[name].make()
    return studies


def main() -> None:
    args = arguments(__doc__, ("--objectives", " ".join(OBJECTIVES)))
    parts = (("tb", "topr"), STALE, SEEDS[:1]) if args.quick else (OBJECTIVES, AGES, SEEDS)
    directory = results_dir(args.quick)
    own = re.sub(r"\W+", "-", processor().lower())
    chosen = parts if args.quick else (tuple(args.objectives.split()), *parts[1:])
    if unknown := set(chosen[0]) - set(OBJECTIVES):
        sys.exit(f"error: --objectives {', '.join(unknown)}: none of {', '.join(OBJECTIVES)}")
    Study(directory / f"staleness.{own}.jsonl", *chosen).make()
    studies = on_record(directory, *parts)
    shares = {split: right_shares(split) for split in ("test", "train")}
    found = tables(studies, shares)
    for name, study in studies.items():
        found += [f"## {name}: {len(study.results)} runs", choices_table(study)]
        draw(study, name, shares["test"])
    caption = (
        f"Base model {identify_weights(MODEL)}. The gradient is clipped to 1. "
        "Settings are chosen by the mean of three seeds; tables show mean ± standard deviation of "
        f"three others, with --quick of one. On record: runs on {' and on '.join(studies)}."
    )
    save("staleness", args.quick, caption, *found)


if __name__ == "__main__":
    main()
