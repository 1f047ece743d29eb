"""Compare which objectives find the best policy pi* on stale data.

The language is small enough to enumerate, so that pi* and log Z are known exactly.

    python benchmarks/exact_posterior.py        # under two minutes

There are three queries of different partition functions. Responses have up to 4 tokens: two letters
and an end-of-sequence token. The policy is a table of logits per query and prefix. All responses
are drawn from one fixed behaviour policy, which is neither the policy nor the reference.
Writes benchmarks/results/exact_posterior.{json,png}.
"""

import itertools
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from common import RESULTS

from loss import LossInputs
from objectives import LOSSES

LETTERS, LENGTH, QUERIES, K, BETA = 2, 4, 3, 16, 0.5
EOS = LETTERS
STEPS, MEASURE, SEEDS = 3000, 50, 3
# Of Adam, decayed linearly to 0. Each objective is shown with the one that ends nearest to pi*.
LEARNING_RATES = (0.1, 0.03, 0.01)


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


def train(objective: str, learning_rate: float, seed: int) -> dict[str, list[float]]:
    """Train a policy, and measure it every MEASURE steps.

    Returns KL(pi || pi*) and the error of log Z, means over queries.
    """
    generator = torch.Generator().manual_seed(seed)

    def random_tables() -> torch.Tensor:
        shape = QUERIES, int(STATES.max()) + 1, LETTERS + 1
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    reference, behavior = random_tables(), random_tables()
    shape = QUERIES, len(TOKENS)
    rewards = 2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    rewards += torch.arange(QUERIES)[:, None]
    ref_logprobs = token_logprobs(reference)  # (Q, R, T)
    behavior_logprobs = token_logprobs(behavior)  # (Q, R, T)
    unnormalised = (ref_logprobs * MASK).sum(-1) + rewards / BETA  # (Q, R)
    true_log_z = unnormalised.logsumexp(-1)
    best = unnormalised - true_log_z[:, None]  # log pi*
    sampling = (behavior_logprobs * MASK).sum(-1).exp()

    tables = reference.clone().requires_grad_()
    optimizer = torch.optim.Adam([tables], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    history = {"kl": [], "log_z_error": []}
    for step in range(STEPS + 1):
        if step % MEASURE == 0:
            with torch.no_grad():
                log_pi = (token_logprobs(tables) * MASK).sum(-1)
                kl = (log_pi.exp() * (log_pi - best)).sum(-1)
                log_z_error = ((unnormalised - log_pi).mean(-1) - true_log_z).abs()
            history["kl"].append(float(kl.mean()))
            history["log_z_error"].append(float(log_z_error.mean()))
        drawn = torch.multinomial(sampling, K, replacement=True, generator=generator)  # (Q, K)
        rows = drawn[..., None].expand(-1, -1, LENGTH)
        inputs = LossInputs(
            logprobs=token_logprobs(tables).gather(1, rows).flatten(0, 1),
            ref_logprobs=ref_logprobs.gather(1, rows).flatten(0, 1),
            behavior_logprobs=behavior_logprobs.gather(1, rows).flatten(0, 1),
            mask=MASK[drawn].flatten(0, 1),
            rewards=rewards.gather(1, drawn).flatten(),
            group_size=K,
            beta=BETA,
            max_response_length=LENGTH,
        )
        loss, _ = LOSSES[objective](inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return history


# Not the two that divide by the length of a prompt: here is none.
OBJECTIVES = [name for name in LOSSES if name not in ("tba_prime_released", "dr_grpo_ratio")]


def main() -> None:
    torch.set_num_threads(1)
    results = {}
    for objective in OBJECTIVES:
        runs = {
            rate: [train(objective, rate, seed) for seed in range(SEEDS)] for rate in LEARNING_RATES
        }
        rate = min(runs, key=lambda rate: sum(run["kl"][-1] for run in runs[rate]))
        results[objective] = {"learning_rate": rate, "runs": runs[rate]}
        kl, error = ([run[name][-1] for run in runs[rate]] for name in ("kl", "log_z_error"))
        shown = "  ".join(f"{value:.1e}" for value in kl)
        print(
            f"{objective:16} learning rate {rate:<5}  KL to pi* after {STEPS} steps: {shown}  "
            f"log Z off by {max(error):.1e} at most",
            flush=True,
        )
    output = RESULTS / "exact_posterior"
    output.with_suffix(".json").write_text(json.dumps(results))
    draw(results, output.with_suffix(".png"))


def draw(results: dict, path: Path) -> None:
    """Draw KL(pi || pi*) by step: the geometric mean of the seeds, and their range."""
    plt.switch_backend("agg")
    figure, axis = plt.subplots(figsize=(9, 5), constrained_layout=True)
    for i, (objective, result) in enumerate(results.items()):
        kl = torch.tensor([run["kl"] for run in result["runs"]])  # (SEEDS, measurements)
        kl = kl.clamp(min=1e-16)
        steps = [MEASURE * m for m in range(kl.shape[1])]
        # tb and tba_prime coincide: dashes on top let both be seen.
        style = dict(linestyle="--", zorder=3) if objective == "tb" else dict(zorder=2)
        axis.plot(
            steps,
            kl.log().mean(0).exp(),
            label=f"{objective} ({result['learning_rate']})",
            color=f"C{i}",
            **style,
        )
        axis.fill_between(steps, kl.amin(0), kl.amax(0), color=f"C{i}", alpha=0.15, linewidth=0)
    axis.set(
        yscale="log",
        xlabel="step",
        ylabel="KL(pi || pi*), mean over queries",
        title="Distance to the best policy, trained on fixed stale data",
    )
    axis.legend(title="objective (learning rate)", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
