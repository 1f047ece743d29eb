"""Episodes of two turns, small enough to enumerate: what trajectory balance finds, and what not.

    python benchmarks/exact_two_turns.py            # five to twenty minutes on one core
    python benchmarks/exact_two_turns.py --quick    # one seed

The policy, a table of logits, writes a letter, the environment answers, the policy writes another.
Each query has its own reference policy and rewards. The best policy, which maximises E[r] - beta
KL, is known exactly by dynamic programming. Shown is the share of the attainable gain over the
reference policy that a trained one has. The environment is a function of the turns (deterministic),
draws its answer (stochastic), or from a hidden seed that the responses of a group share.
"""

import itertools
import statistics

import torch
from common import arguments, save, table
from torch import Tensor

from extras.objectives import LOSSES
from loss import LossInputs

LETTERS, ANSWERS, QUERIES, K, BETA = 3, 2, 4, 16, 0.5
EPISODES = torch.tensor([*itertools.product(range(LETTERS), range(ANSWERS), range(LETTERS))])
FIRST, ANSWER, SECOND = EPISODES.T  # of each of the R episodes
IN_LOSS = torch.tensor([1.0, 0.0, 1.0]).double()  # the environment's letter is not learnt
STEPS, LEARNING_RATE, SEEDS = 2000, 0.03, range(20)
KINDS = "deterministic", "stochastic", "hidden seed"
# Whose fixed point is the best policy whoever sampled.
ANYWHERE = ("tb", "tba_prime", "tba_prime_ratio")
Policy = tuple[Tensor, Tensor]  # logits: of the first letter (Q, A), of the second (Q, A, E, B)


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

    def random_policy(self) -> Policy:
        """Draw logits; those of the second letter depend on both others."""
        shapes = (QUERIES, LETTERS), (QUERIES, LETTERS, ANSWERS, LETTERS)
        return tuple(torch.randn(shape, generator=self.generator).double() for shape in shapes)

    def objective(self, policy: Policy | tuple[None, None]) -> Tensor:
        """Compute E[r] - beta KL(policy || reference) exactly: (Q,). None: of the best policy."""

        def expect(value: Tensor, logits: Tensor | None, ref_logits: Tensor) -> Tensor:
            ref = ref_logits.log_softmax(-1)
            if logits is None:
                return BETA * (ref + value / BETA).logsumexp(-1)
            logprobs = logits.log_softmax(-1)
            return (logprobs.exp() * (value - BETA * (logprobs - ref))).sum(-1)

        value = expect(self.rewards, policy[1], self.reference[1])  # (Q, A, E)
        value = (self.answers.exp() * value).sum(-1)  # (Q, A)
        return expect(value, policy[0], self.reference[0])

    def gain(self, policy: Policy) -> float:
        """Return the share of the attainable gain that a policy has, over all queries."""
        start = self.objective(self.reference)
        best = self.objective((None, None)) - start
        return float((self.objective(policy) - start).sum() / best.sum())

    def draw(self, policy: Policy) -> Tensor:
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


def token_logprobs(policy: Policy) -> Tensor:
    """Compute those of the tokens of each episode, 0 for the answer: (Q, R, 3)."""
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
    quick = arguments(__doc__).quick
    seeds, rows = SEEDS[:1] if quick else SEEDS, []
    torch.set_num_threads(1)
    for kind, is_on_policy, objective in itertools.product(KINDS, (False, True), ANYWHERE):
        shares = [train(kind, objective, is_on_policy, seed) for seed in seeds]
        figures = f"{statistics.median(shares):.4f}", f"{min(shares):.4f}"
        rows.append([kind, f"{'on' if is_on_policy else 'off'}-policy", f"`{objective}`", *figures])
        print(" | ".join(rows[-1]), flush=True)
    sizes = f"{QUERIES} queries, {len(EPISODES)} episodes, K = {K}, β = {BETA}, {STEPS} steps"
    header = ["environment", "episodes", "", "share of the gain, median", "worst"]
    save("exact_two_turns", quick, f"{sizes}, {len(seeds)} seeds.", table(header, rows))


if __name__ == "__main__":
    main()
