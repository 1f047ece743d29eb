"""Measure how near objectives bring a real language model to its optimum, which is known exactly.

    python benchmarks/exact_real.py            # 47 runs of six minutes: 2.5 hours on 2 cores
    python benchmarks/exact_real.py --quick    # five runs

Needs SmolLM2-135M-Instruct (make demo-smollm installs it). All right answers of the task multiples
are known, and so are log Z and π* on the partition {each right answer, the rest}. E[r] - β KL there
is an upper bound, for drift within the rest is not seen; the same from samples, with the KL of
whole responses, stands beside it. Writes results/exact_real.{md,jsonl,png}, resumed as in study.py.
"""

from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import arguments, means, results_dir, save, table_of
from study import InlineSearcher, run_cells, train
from torch.distributions import Categorical

from models.logprobs import response_logprobs
from runtime.responses.final_metrics import over_queries
from runtime.transport.messages import Evaluation
from tasks import Query
from tasks.multiples import HELD_OUT, right_answers

OBJECTIVES = "tb", "tb_anchored", "grpo", "rloo"
DATA = {  # of each batch; "buffer": as many new rows as are trained on, and the preset's m
    "fresh": dict(constant_staleness=0),
    "buffer": {},
    "10 steps stale": dict(constant_staleness=10),
}
SEARCHED = {  # data, and the learning rates that are tried on it; tb_anchored has that of tb
    "tb": ("fresh", (2e-5, 4e-5, 8e-5)),
    "grpo": ("fresh", (1.25e-6, 2.5e-6, 5e-6, 1e-5)),
    "rloo": ("10 steps stale", (1.25e-6, 2.5e-6, 5e-6, 1e-5)),
}
SEARCH_SEED, SEEDS = 100, (0, 1, 2)
# On fresh batches the gradients of tb, tb_anchored and rloo are the same, but for a constant.
CELLS = [(o, data) for data in DATA for o in OBJECTIVES if data != "fresh" or o in ("tb", "grpo")]
SETTINGS = dict(task="multiples", eval_every=10)  # over its preset
SAMPLED = "pass@1", "pass@8", "pass@64", "distinct_answers"
SAMPLES, TRAINED = 64, 8  # of a query, at the end; queries of those trained on
CONSTANTS = "log Z", "attainable", "perplexity of π*"  # the same in all runs
KINDS = "new numbers", "new pairs", "trained"  # of queries; the second are of trained numbers
CAPTION = f"""SmolLM2-135M-Instruct on multiples, 40 steps, the learning rate decayed linearly.
Its peak is the best of those tried with another seed, by the share on queries that are trained on:
{{}} (`rloo` 10 steps stale, the others fresh). `rloo` is shown with that of `tb`, too.

Below, means over queries at the end of a run. attained: E[r] - β KL, at most; share: that as a
share of what is attainable, from the base model's 0 to the optimum's 1; mass: of all right answers;
covered: those that have half of what π* gives them; perplexity: over the right answers; pass@k,
distinct_answers (right ones that differ) and "by samples": {SAMPLES} samples to a query, all else
is exact. Mean, and the seeds' values:"""


def exact(policy: torch.Tensor, reference: torch.Tensor, beta: float) -> dict[str, float]:
    """Compare a policy with π* by log-probabilities of all right answers to a query, (S,) each."""
    # The last of S + 1 is the rest.
    ours, base = (
        torch.cat([x, torch.log1p(-x.exp().sum().clamp(max=1 - 1e-9))[None]])
        for x in (policy, reference)
    )
    target = torch.cat([base[:-1] + 1 / beta, base[-1:]])  # Eq. 2, unnormalised
    log_z, best = target.logsumexp(0), target.log_softmax(0)
    kl = ours.exp() @ (ours - best)  # E[r] - β KL(to the reference) = β (log Z - kl)
    found = {
        "log Z": log_z,
        "attained": beta * (log_z - kl),
        "attainable": beta * log_z,
        "mass": policy.exp().sum(),
        "KL to π*": kl,
        "covered": (policy > best[:-1] - np.log(2)).double().mean(),
        "perplexity": Categorical(logits=policy).perplexity(),
        "perplexity of π*": Categorical(logits=best[:-1]).perplexity(),
    }
    return {name: float(value) for name, value in found.items()}


class ExactSearcher(InlineSearcher):
    """Measures its policy at each evaluation."""

    def __init__(self, *parts: Any, **schedule: Any):
        super().__init__(*parts, **schedule)
        new, known = ([q for q in self.test if (q.answer in HELD_OUT) == n] for n in (True, False))
        kinds = new[::2], known, self.train[:: len(self.train) // TRAINED]
        self.measured = dict(zip(KINDS, kinds))

    @torch.no_grad()
    def compare(self, query: Query) -> dict[str, float]:
        """Compare the policy with the optimum for a query."""
        rows = [np.array(ids) for ids in self.tokenizer(right_answers(query.answer)).input_ids]
        prompts = [np.array(self.tokenizer(query.prompt).input_ids)] * len(rows)
        base = ours = torch.from_numpy(self.reference_logprobs(prompts, rows))
        if self.version:  # version 0 is the reference
            ours = response_logprobs(self.policy, prompts, rows, self.config.temperature)
        return exact(*(x.double().sum(1) for x in (ours, base)), self.config.beta)

    def evaluate(self) -> Evaluation:
        """Add a point to the curve: the means over each kind of queries."""
        point = {"step": self.version}
        for kind, queries in self.measured.items():
            each = [self.compare(query) for query in queries]
            point[kind] = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
        self.curve.append(point)
        return Evaluation(self.version, {}, len(self.test))

    def result(self, policy: torch.nn.Module) -> dict:
        """Return the curve, and what SAMPLES of the policy say at the end."""
        self.policy, self.version, sampled = policy, self.config.steps, {}
        self.evaluate()
        for kind in ("new numbers", "trained"):
            queries, beta = self.measured[kind], self.config.beta
            prompts, rows, ours, texts, _, rewards = self.generate(policy, queries, SAMPLES)
            log_ratio = ours.sum(1) - self.reference_logprobs(prompts, rows).sum(1)
            ids = np.repeat([query.id for query in queries], SAMPLES)
            found = over_queries(ids, rewards, np.where(rewards == 1, texts, None))
            weights = np.exp(rewards / beta - log_ratio).reshape(len(queries), SAMPLES)
            log_z = np.log(weights.mean(1)).tolist(), [self.compare(q)["log Z"] for q in queries]
            own = {"log Z": log_z, "attained": float((rewards - beta * log_ratio).mean())}
            sampled[kind] = {name: mean for name, (mean, *_) in found.items()} | own
        return {"curve": self.curve, "sampled": sampled}


def job(objective: str, data: str, rate: float, seed: int) -> dict:
    """Describe a run, for run_all()."""
    settings = SETTINGS | dict(loss=objective, learning_rate=rate, seed=seed) | DATA[data]
    return {"settings": settings} | ({"groups_per_sync": 4} if data == "buffer" else {})


def curve_of(result: dict, kind: str) -> list[dict[str, float]]:
    """Return the points of a run's curve; the last has what was sampled, too, if anything was."""
    curve, sampled = [point[kind] for point in result["curve"]], result["sampled"].get(kind)
    start = curve[0]["mass"]  # what the base model attains
    gain = curve[0]["attainable"] - start
    curve = [point | {"share": (point["attained"] - start) / gain} for point in curve]
    if sampled:
        curve[-1] |= {name: sampled[name] for name in SAMPLED}
        curve[-1]["share, by samples"] = (sampled["attained"] - start) / gain
        off = np.abs(np.subtract(*sampled["log Z"])).mean()
        curve[-1]["log Z off by, by samples"] = float(off)
    return curve


def draw(runs: dict[tuple, list[dict]], kind: str, file: Path) -> None:
    """Draw share and coverage by step: the mean of the seeds, and their range."""
    plt.switch_backend("agg")
    style = dict(figsize=(10, 5), sharex=True, sharey="row", constrained_layout=True)
    figure, axes = plt.subplots(2, len(DATA), **style)
    lines = {}  # by label, each with a color of its own
    for (objective, data, rate), results in runs.items():
        label = f"{objective}, rate {rate:g}"
        color = lines[label].get_color() if label in lines else f"C{len(lines)}"
        steps = [point["step"] for point in results[0]["curve"]]
        for axis, name in zip(axes[:, [*DATA].index(data)], ("share", "covered")):
            y = np.array([[point[name] for point in curve_of(r, kind)] for r in results])
            (lines[label],) = axis.plot(steps, y.mean(0), color=color)
            axis.fill_between(steps, y.min(0), y.max(0), color=color, alpha=0.15)
    for axis, data in zip(axes[0], DATA):
        axis.set(title=data)
    axes[0, 0].set(ylabel="share of the attainable, at most", ylim=(-0.9, 1))
    axes[1, 0].set(ylabel="right answers covered", ylim=(0, 1), xlabel=f"step ({kind} queries)")
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=5)
    figure.savefig(file, dpi=80)


def main() -> None:
    quick = arguments(__doc__).quick
    path, most = results_dir(quick) / "exact_real", 1 if quick else None  # of what is tried
    do = partial(train, searcher=ExactSearcher)
    run = partial(run_cells, job, path.with_suffix(".jsonl"), do)
    tried = [(o, data, rate) for o, (data, rates) in SEARCHED.items() for rate in rates[:most]]
    searched = run([(*cell, SEARCH_SEED) for cell in tried])
    shares = {cell: curve_of(one, "trained")[-1]["share"] for cell, (one,) in searched.items()}
    best = {objective: rate for objective, _, rate in sorted(shares, key=shares.get)}
    rates = {o: [best.get(o, best["tb"])] for o in OBJECTIVES}
    rates["rloo"].append(best["tb"])
    shown = CELLS[:2] if quick else CELLS
    cells = [(o, data, rate) for o, data in shown for rate in rates[o]]
    found = run([(*cell, seed) for seed in SEEDS[:most] for cell in cells])
    tables = []
    for kind in KINDS:
        ends = {cell: [curve_of(one, kind)[-1] for one in found[cell]] for cell in cells}
        constants = [f"{name} {ends[cells[0]][0][name]:.3g}" for name in CONSTANTS]
        rows = []
        for (objective, data, rate), runs in ends.items():
            own = [{name: end[name] for name in end if name not in CONSTANTS} for end in runs]
            rows += [{"": f"`{objective}`, {data}", "rate": f"{rate:g}"} | means(own)]
        tables += [f"**{kind}**: {', '.join(constants)}", table_of(rows)]
    search = ", ".join(f"`{o}` {rate:g} {share:.3f}" for (o, _, rate), share in shares.items())
    save("exact_real", quick, CAPTION.format(search), *tables)
    draw(found, KINDS[-1], path.with_suffix(".png"))


if __name__ == "__main__":
    main()
