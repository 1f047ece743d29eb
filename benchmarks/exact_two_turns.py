"""Episodes of two turns, small enough to enumerate: what trajectory balance finds, and what not.

    python benchmarks/exact_two_turns.py        # five to twenty minutes on one core

The policy writes a letter, the environment answers with one of its own, the policy writes another
letter. The policy is a table of logits; each query has its own reference policy and rewards. The
best policy, which maximises E[r] - beta KL, is known exactly by dynamic programming. Shown is the
share of the attainable gain over the reference policy that a trained one has: 1 is the best.

The environment is a function of the turns (deterministic), draws its answer (stochastic), or draws
it from a hidden seed that the responses of a group share. Writes
benchmarks/results/exact_two_turns.md.
"""

import itertools
import statistics

import torch
from common import save, table

from loss import LossInputs
from objectives import LOSSES

LETTERS, ANSWERS, QUERIES, K, BETA = 3, 2, 4, 16, 0.5
EPISODES = torch.tensor([*itertools.product(range(LETTERS), range(ANSWERS), range(LETTERS))])
FIRST, ANSWER, SECOND = EPISODES.T  # of each of the R episodes
IN_LOSS = torch.tensor([1.0, 0.0, 1.0]).double()  # the environment's letter is not learnt
STEPS, LEARNING_RATE, SEEDS = 2000, 0.03, range(20)
KINDS = "deterministic", "stochastic", "hidden seed"
# Whose fixed point is the best policy whoever sampled.
ANYWHERE = ("tb", "tba_prime", "tba_prime_ratio")


class Problem:
    """Queries, their environments and rewards. kind: one of KINDS."""

    def __init__(self, kind: str, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.reference, self.behavior = self.random_policy(), self.random_policy()
        shape = QUERIES, LETTERS, ANSWERS, LETTERS
        self.rewards = 2 * torch.rand(shape, generator=self.generator).double()
        answers = torch.randn(QUERIES, LETTERS, ANSWERS, generator=self.generator).double()
        if kind == "deterministic":
            answers = torch.where(answers == answers.amax(-1, keepdim=True), 0.0, -torch.inf)
        self.answers = answers.log_softmax(-1)  # log P(answer | first letter): (Q, A, E)
        self.shares_seed = kind == "hidden seed"

    def random_policy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the first letter (Q, A), and of the second after both others (Q, A, E, B)."""
        shapes = (QUERIES, LETTERS), (QUERIES, LETTERS, ANSWERS, LETTERS)
        return tuple(torch.randn(shape, generator=self.generator).double() for shape in shapes)

    def objective(self, policy: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """E[r] - beta KL(policy || reference), exactly: (Q,)."""
        first, second = (logits.log_softmax(-1) for logits in policy)
        ref_first, ref_second = (logits.log_softmax(-1) for logits in self.reference)
        value = (second.exp() * (self.rewards - BETA * (second - ref_second))).sum(-1)  # (Q, A, E)
        value = (self.answers.exp() * value).sum(-1)  # (Q, A)
        return (first.exp() * (value - BETA * (first - ref_first))).sum(-1)

    def best(self) -> torch.Tensor:
        """The largest value of objective(), by dynamic programming: (Q,)."""
        ref_first, ref_second = (logits.log_softmax(-1) for logits in self.reference)
        value = BETA * (ref_second + self.rewards / BETA).logsumexp(-1)  # (Q, A, E)
        value = (self.answers.exp() * value).sum(-1)  # (Q, A)
        return BETA * (ref_first + value / BETA).logsumexp(-1)

    def gain(self, policy: tuple[torch.Tensor, torch.Tensor]) -> float:
        """The share of the attainable gain that a policy has, over all queries."""
        start = self.objective(self.reference)
        gained = (self.objective(policy) - start).sum() / (self.best() - start).sum()
        return float(gained)

    def draw(self, policy: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Draw K episodes for each query, as indices into EPISODES: (Q, K)."""
        first_probs, second_probs = (logits.softmax(-1) for logits in policy)
        first = torch.multinomial(first_probs, K, replacement=True, generator=self.generator)
        # One uniform number decides the answer to each first letter.
        uniform = torch.rand(QUERIES, 1 if self.shares_seed else K, generator=self.generator)
        below = self.answers.exp().cumsum(-1)  # (Q, A, E)
        query = torch.arange(QUERIES)[:, None]
        answer = (uniform.expand(-1, K)[..., None] > below[query, first]).sum(-1)
        answer = answer.clamp(max=ANSWERS - 1)
        probs = second_probs[query, first, answer].flatten(0, 1)  # (Q K, B)
        second = torch.multinomial(probs, 1, generator=self.generator).view(QUERIES, K)
        return (first * ANSWERS + answer) * LETTERS + second


def token_logprobs(policy: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Log-probabilities of the tokens of each episode, 0 for the answer: (Q, R, 3)."""
    first, second = (logits.log_softmax(-1) for logits in policy)
    chosen = first[:, FIRST], second[:, FIRST, ANSWER, SECOND]
    return torch.stack([chosen[0], torch.zeros_like(chosen[0]), chosen[1]], dim=-1)


def train(kind: str, objective: str, is_on_policy: bool, seed: int, steps: int = STEPS) -> float:
    """Train a policy from the reference. Returns the share of the attainable gain that it has."""
    problem = Problem(kind, seed)
    policy = tuple(logits.clone().requires_grad_() for logits in problem.reference)
    ref_logprobs = token_logprobs(problem.reference)
    rewards = problem.rewards.flatten(1)  # (Q, R)
    optimizer = torch.optim.Adam(policy, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        sampler = [logits.detach() for logits in policy] if is_on_policy else problem.behavior
        drawn = problem.draw(sampler)
        rows = drawn[..., None].expand(-1, -1, 3)
        logprobs, ref, behavior = (
            values.gather(1, rows).flatten(0, 1)
            for values in (token_logprobs(policy), ref_logprobs, token_logprobs(sampler))
        )
        inputs = LossInputs(
            logprobs=logprobs,
            ref_logprobs=ref,
            behavior_logprobs=behavior,
            mask=IN_LOSS.expand(len(logprobs), -1),
            rewards=rewards.gather(1, drawn).flatten(),
            group_size=K,
            beta=BETA,
        )
        loss, _ = LOSSES[objective](inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return problem.gain([logits.detach() for logits in policy])


def main() -> None:
    torch.set_num_threads(1)
    lines = []
    for kind in KINDS:
        for is_on_policy in (False, True):
            for objective in ANYWHERE:
                shares = [train(kind, objective, is_on_policy, seed) for seed in SEEDS]
                whose = "on-policy" if is_on_policy else "off-policy"
                figures = [f"{statistics.median(shares):.4f}", f"{min(shares):.4f}"]
                lines.append([kind, whose, f"`{objective}`", *figures])
                print(" | ".join(lines[-1]), flush=True)
    save(
        "exact_two_turns",
        False,
        f"{QUERIES} queries, {len(EPISODES)} episodes, K = {K}, β = {BETA}, {STEPS} steps, "
        f"{len(SEEDS)} seeds.",
        table(["environment", "episodes", "", "share of the gain, median", "worst"], lines),
    )


if __name__ == "__main__":
    main()
