"""Ask whether ages that are mixed within a group do what ages between groups do not.

    python benchmarks/ages.py            # 60 runs of addends: 20 minutes on 2 cores
    python benchmarks/ages.py --real     # 12 of SmolLM2-135M-Instruct: over an hour
    python benchmarks/ages.py --quick    # one seed of addends

The rows of a batch are 1, 4, 10 and 32 steps old, a quarter each: whole groups of one age, or K / 4
rows of each age in every group, as a replay buffer draws them. The authors of trajectory balance
with asynchrony left the question open (docs/experiments.md). --real: the runs of exact_real.py, for
100 steps. Writes benchmarks/results/ages.md and ages_real.md, with a line for each run in .jsonl.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch
from common import arguments, means, results_dir, save, table_of
from exact_real import KINDS, SETTINGS, ExactSearcher, curve_of
from staleness import BATCH, MIXED_AGES, SEEDS
from study import InlineSearcher, run_cells, train

from extras.objectives import LOSSES, tba_ema
from loss import LossInputs, Metrics
from runtime.transport.messages import Evaluation

ONE_C = "tba_ema, one c"
BETAS = {"tb": 0.03, "tb_anchored": 0.03, "tba_ema": 0.1, ONE_C: 0.1, "tba_ema, β = 0": 1e-9}
RATES, REAL_RATE = (1e-3, 4e-3), 4e-5  # the first: those of staleness.py at which runs fall
BETWEEN, WITHIN = "between groups", "within groups"
WHEN = {2: "step 40", -1: "at the end"}


def tba_ema_one_c(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """tba_ema with the c of the largest age for all rows."""
    return tba_ema(replace(x, staleness=torch.full_like(x.rewards, max(MIXED_AGES))))


LOSSES[ONE_C] = tba_ema_one_c


class Watched(InlineSearcher):
    """Measures the policy's reward at each evaluation, and at the end."""

    def evaluate(self) -> Evaluation:
        self.curve.append(self.measure(self.policy)["reward"])
        return Evaluation(self.version, {}, len(self.test))

    def result(self, policy: torch.nn.Module) -> dict:
        return {"rewards": [*self.curve, self.measure(policy)["reward"]]}


def job(name: str, rate: float, kind: str, seed: int) -> dict:
    """Describe a run, for run_all()."""
    settings = dict(learning_rate=rate, seed=seed, constant_staleness=1, eval_every=20)
    if rate == REAL_RATE:
        settings = SETTINGS | settings | dict(loss=name, steps=100)
    else:
        loss = name if name in LOSSES else "tba_ema"
        settings |= BATCH | dict(task="addends", loss=loss, beta=BETAS[name], steps=200)
    return {"settings": settings, "ages": [*MIXED_AGES], "within": kind == WITHIN}


def figures_of(result: dict) -> dict[str, float]:
    """Describe a run by the titles of columns; points of a curve are 20 steps apart."""
    if "curve" in result:
        columns = product(KINDS, WHEN.items())
        return {f"{kind}, {w}": curve_of(result, kind)[i]["share"] for kind, (i, w) in columns}
    y = np.array(result["rewards"])
    fall = float((np.maximum.accumulate(y) - y).max())
    figures = {"best": y.max(), "at the end": y[-1], "largest fall": fall}
    return figures | {"step of the lowest": 20.0 * int(y.argmin())}


def main() -> None:
    given = arguments(__doc__, ("--real", False))
    name, searcher, objectives, rates, shown = "ages", Watched, BETAS, RATES, "Reward, held out"
    if given.real:
        name, searcher, shown = "ages_real", ExactSearcher, "Share of the attainable"
        objectives, rates = ("tb", "tb_anchored"), [REAL_RATE]
    runs = product(SEEDS[: 1 if given.quick else None], rates, objectives, (BETWEEN, WITHIN))
    cells = [(objective, rate, kind, seed) for seed, rate, objective, kind in runs]
    file, do = results_dir(given.quick) / f"{name}.jsonl", partial(train, searcher=searcher)
    rows = [
        {"": f"`{o}`", "rate": f"{rate:g}", "ages are mixed": kind}
        | means([figures_of(result) for result in results])
        for (o, rate, kind), results in run_cells(job, file, do, cells).items()
    ]
    caption, command = f"{shown}; mean, and the seeds' values:", name.replace("_real", ".py --real")
    save(name, given.quick, caption, table_of(rows), command=command if given.real else "")


if __name__ == "__main__":
    main()
