"""Compare which objectives find the policy that they aim at on stale data.

The language is small enough to enumerate, so that the best policy pi*, the best one near the
behaviour policy, b exp(r / beta) / Z, and log Z are known exactly.

    python benchmarks/exact_posterior.py        # four minutes; --quick: a tenth of the steps

There are three queries of different partition functions. Responses have up to 4 tokens: two letters
and an end-of-sequence token. The policy is a table of logits per query and prefix. All responses
are drawn from one fixed behaviour policy, which is neither the policy nor the reference; objectives
that ask for it are told a staleness of STALENESS steps. A second table has the drift: by how much
the log-probabilities of a batch's rows rise or fall together when it is trained on again and again.
Writes benchmarks/results/exact_posterior.{md,png}.
"""

import itertools
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from common import arguments, results_dir, save, table

from extras.objectives import LOSSES
from loss import LossInputs

LETTERS, LENGTH, QUERIES, K, BETA = 2, 4, 3, 16, 0.5
EOS = LETTERS
STEPS, MEASURE, SEEDS, STALENESS = 3000, 50, 3, 4
# Of Adam, decayed linearly to 0. Shown is the one that ends nearest to the objective's aim.
LEARNING_RATES = (0.1, 0.03, 0.01)
DRIFTING = ("tb", "tb_anchored", "tba_ema")
DRIFT_STEPS, DRIFT_RATE = 50, 0.03


def language() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Enumerate all R responses: tokens (R, T), mask (R, T), states (R, T).

    A token's state is the row of the logit table from which it is drawn.
    """
    prefixes = [p for n in range(LENGTH) for p in itertools.product(range(LETTERS), repeat=n)]
    state_of = {prefix: i for i, prefix in enumerate(prefixes)}
    cut_off = itertools.product(range(LETTERS), repeat=LENGTH)  # at the length limit
    responses = [(*prefix, EOS) for prefix in prefixes] + list(cut_off)
    tokens, mask, states = (torch.zeros(len(responses), LENGTH, dtype=torch.long) for _ in range(3))
    for i, response in enumerate(responses):
        for t, token in enumerate(response):
            tokens[i, t], mask[i, t], states[i, t] = token, 1, state_of[response[:t]]
    return tokens, mask, states


TOKENS, MASK, STATES = language()


def token_logprobs(tables: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token of each response to each query, (Q, R, T).

    tables: of logits, (Q, prefixes, LETTERS + 1).
    """
    return tables.log_softmax(-1)[:, STATES, TOKENS]


class Problem(NamedTuple):
    """Three queries: the reference policy and the behaviour policy, and the rewards (Q, R)."""

    reference: torch.Tensor  # tables
    behavior: torch.Tensor
    rewards: torch.Tensor
    generator: torch.Generator

    def draw(self) -> torch.Tensor:
        """Draw K responses to each query from the behaviour policy: (Q, K)."""
        probabilities = response_logprobs(self.behavior).exp()
        return torch.multinomial(probabilities, K, replacement=True, generator=self.generator)

    def inputs(self, tables: torch.Tensor, drawn: torch.Tensor) -> LossInputs:
        """Make what the objective reads of the drawn responses, under a policy's tables."""
        rows = drawn[..., None].expand(-1, -1, LENGTH)
        policies = tables, self.reference, self.behavior
        return LossInputs(
            *(token_logprobs(policy).gather(1, rows).flatten(0, 1) for policy in policies),
            mask=MASK[drawn].flatten(0, 1),
            rewards=self.rewards.gather(1, drawn).flatten(),
            group_size=K,
            beta=BETA,
            max_response_length=LENGTH,
            staleness=torch.full((QUERIES * K,), STALENESS),
        )


def make_problem(seed: int) -> Problem:
    """Draw a problem."""
    generator = torch.Generator().manual_seed(seed)
    shape = QUERIES, int(STATES.max()) + 1, LETTERS + 1
    tables = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    rewards = 2 * torch.rand(QUERIES, len(TOKENS), generator=generator, dtype=torch.float64)
    return Problem(*tables, rewards + torch.arange(QUERIES)[:, None], generator)


def response_logprobs(tables: torch.Tensor) -> torch.Tensor:
    """Log-probability of each response to each query, (Q, R)."""
    return (token_logprobs(tables) * MASK).sum(-1)


def train(objective: str, learning_rate: float, seed: int, steps: int) -> dict[str, list[float]]:
    """Train a policy on responses of a fixed behaviour policy; measure it every MEASURE steps.

    Returns KL(pi || pi*), the same to the best policy near the behaviour policy, and the error of
    log Z, all means over queries.
    """
    problem = make_problem(seed)
    unnormalised = response_logprobs(problem.reference) + problem.rewards / BETA  # (Q, R)
    true_log_z = unnormalised.logsumexp(-1)
    best = unnormalised - true_log_z[:, None]  # log pi*
    near_behavior = response_logprobs(problem.behavior) + problem.rewards / BETA
    near_behavior = near_behavior.log_softmax(-1)

    tables = problem.reference.clone().requires_grad_()
    optimizer = torch.optim.Adam([tables], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    history = defaultdict(list)
    for step in range(steps + 1):
        if step % MEASURE == 0:
            with torch.no_grad():
                log_pi = response_logprobs(tables)
                for name, aim in ("kl", best), ("kl_behavior", near_behavior):
                    kl = (log_pi.exp() * (log_pi - aim)).sum(-1)
                    history[name].append(float(kl.mean()))
                log_z_error = ((unnormalised - log_pi).mean(-1) - true_log_z).abs()
            history["log_z_error"].append(float(log_z_error.mean()))
        loss, _ = LOSSES[objective](problem.inputs(tables, problem.draw()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return history


def drift(objective: str, seed: int) -> float:
    """Return by how much log pi of the K rows of one batch, summed, changes in DRIFT_STEPS on it.

    The mean over queries, from the reference policy.
    """
    problem = make_problem(seed)
    drawn, tables = problem.draw(), problem.reference.clone().requires_grad_()
    before = response_logprobs(tables).gather(1, drawn).sum(1).detach()  # (Q,)
    optimizer = torch.optim.Adam([tables], lr=DRIFT_RATE)
    for _ in range(DRIFT_STEPS):
        optimizer.zero_grad()
        LOSSES[objective](problem.inputs(tables, drawn))[0].backward()
        optimizer.step()
    return float((response_logprobs(tables).gather(1, drawn).sum(1) - before).mean())


# These aim at the best policy near the behaviour policy. All else is held against pi*, whether it
# aims there (tb and its kin; the policy gradients with a KL, on fresh data) or at reward alone.
NEAR_BEHAVIOR = ("tb_behavior", "kimi_k2", "oapl")
REGRESSIONS = ("tb", "tba_prime", "tba_prime_ratio", *NEAR_BEHAVIOR)


def aim_of(objective: str) -> str:
    """The distance to what an objective is held against."""
    return "kl_behavior" if objective in NEAR_BEHAVIOR else "kl"


def main() -> None:
    torch.set_num_threads(1)
    quick, results, lines = arguments(__doc__).quick, {}, []
    steps = STEPS // 10 if quick else STEPS
    for objective in LOSSES:
        runs = {
            rate: [train(objective, rate, seed, steps) for seed in range(SEEDS)]
            for rate in LEARNING_RATES
        }
        aim = aim_of(objective)
        rate = min(runs, key=lambda rate: sum(run[aim][-1] for run in runs[rate]))
        results[objective] = best = runs[rate]
        shown = [", ".join(f"{run[kl][-1]:.1e}" for run in best) for kl in ("kl", "kl_behavior")]
        is_at_edge = {max(LEARNING_RATES): " (largest)", min(LEARNING_RATES): " (smallest)"}
        chosen = f"{rate}{is_at_edge.get(rate, '')}"
        off = f"{max(run['log_z_error'][-1] for run in best):.1e}"
        lines.append([f"`{objective}`", chosen, *shown, off])
        print(" | ".join(lines[-1]), flush=True)
    aims = "KL to π*, seeds 0, 1, 2", "KL to b e^(r/β) / Z"
    header = ["", "learning rate", *aims, "log Z off by, at most"]
    rows = [[f"`{o}`", ", ".join(f"{drift(o, seed):+.1f}" for seed in range(8))] for o in DRIFTING]
    save(
        "exact_posterior",
        quick,
        f"{QUERIES} queries, {len(TOKENS)} responses, K = {K}, β = {BETA}; after {steps} steps. "
        f"The rate is that of {', '.join(map(str, LEARNING_RATES))} which ends nearest to the aim.",
        table(header, lines),
        f"The drift: change of log π of the {K} rows of one stale batch, summed (nats), in "
        f"{DRIFT_STEPS} steps of Adam on it at {DRIFT_RATE}, from the reference:",
        table(["", "seeds 0 to 7"], rows),
    )
    draw(results, results_dir(quick) / "exact_posterior.png")


def draw(results: dict[str, list[dict]], path: Path) -> None:
    """Draw the distance to the aim by step: the geometric mean of the seeds, and their range."""
    plt.switch_backend("agg")
    figure, axis = plt.subplots(figsize=(9, 5), constrained_layout=True)
    others = "policy gradients, preferences, imitation"
    for objective, runs in results.items():
        kl = torch.tensor([run[aim_of(objective)] for run in runs])  # (SEEDS, measurements)
        kl = kl.clamp(min=1e-16)
        steps = [MEASURE * m for m in range(kl.shape[1])]
        if objective not in REGRESSIONS:
            style = dict(color="lightgray", zorder=1, label=others)
            others = None  # in the legend once
        else:
            # tb and tba_prime coincide: dashes on top let both be seen.
            style = dict(color=f"C{REGRESSIONS.index(objective)}", label=objective)
            style |= dict(linestyle="--", zorder=3) if objective == "tb" else dict(zorder=2)
            axis.fill_between(
                steps, kl.amin(0), kl.amax(0), color=style["color"], alpha=0.15, linewidth=0
            )
        axis.plot(steps, kl.log().mean(0).exp(), **style)
    axis.set(
        yscale="log",
        xlabel="step",
        ylabel="KL to what it aims at, mean over queries",
        title="Regressions reach their aim on fixed stale data",
    )
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
