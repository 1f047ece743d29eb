"""Trajectory balance finds pi* on stale data.

The language is small enough to write down every response, the best policy and log Z.
"""

import itertools

import numpy as np
import pytest
import torch

from loss import LossInputs, trajectory_balance

EOS, VOCABULARY, LENGTH, BETA = 0, 3, 4, 0.5
QUERIES, GROUP_SIZE, STEPS = 3, 16, 2500
# Added to r / beta. They set the partition functions apart and leave pi* alone.
LOG_Z_OFFSETS = (-4.0, 0.0, 5.0)


def strings(length: int) -> list[tuple[int, ...]]:
    """List all strings of that many letters; end-of-sequence is not a letter."""
    return list(itertools.product(range(1, VOCABULARY), repeat=length))


PREFIXES = [prefix for length in range(LENGTH) for prefix in strings(length)]
# A response ends with end-of-sequence, or is cut off at LENGTH tokens.
RESPONSES = [(*prefix, EOS) for prefix in PREFIXES] + strings(LENGTH)
# Where a response has a token: (R, T).
MASK = torch.tensor([[t < len(response) for t in range(LENGTH)] for response in RESPONSES])
# Where each token of a response stands in a table of prefixes x tokens: (R, T). Padding points at
# place 0, which the mask must leave out.
PLACES = torch.zeros(MASK.shape, dtype=torch.long)
for i, response in enumerate(RESPONSES):
    for t, token in enumerate(response):
        PLACES[i, t] = PREFIXES.index(response[:t]) * VOCABULARY + token


def token_logprobs(tables: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities (queries, R, T) of the tokens of every response.

    `tables` holds the policies as logits (queries, prefixes, tokens).
    """
    return tables.log_softmax(dim=-1).flatten(1)[:, PLACES]


def response_logprobs(tables: torch.Tensor) -> torch.Tensor:
    return (token_logprobs(tables) * MASK).sum(dim=-1)  # (queries, R)


class Problem:
    """Three queries with the data that was sampled before training began.

    Each query has its own reference policy, behaviour policy and rewards.
    """

    def __init__(self):
        generator = torch.Generator().manual_seed(0)

        def table() -> torch.Tensor:
            shape = (QUERIES, len(PREFIXES), VOCABULARY)
            return 0.7 * torch.randn(shape, generator=generator, dtype=torch.float64)

        self.reference, self.behavior = table(), table()
        noise = torch.rand(QUERIES, len(RESPONSES), generator=generator, dtype=torch.float64)
        self.rewards = noise + BETA * torch.tensor(LOG_Z_OFFSETS, dtype=torch.float64)[:, None]
        unnormalised = response_logprobs(self.reference) + self.rewards / BETA
        self.log_z = unnormalised.logsumexp(dim=1)  # (queries,)
        self.best = unnormalised - self.log_z[:, None]  # log pi*
        probabilities = response_logprobs(self.behavior).exp()
        self.data = torch.multinomial(probabilities, 4000, replacement=True, generator=generator)

    def kl(self, tables: torch.Tensor) -> torch.Tensor:
        """Compute KL(pi || pi*), a number per query."""
        log_pi = response_logprobs(tables)
        return (log_pi.exp() * (log_pi - self.best)).sum(dim=1)

    def inputs(self, policy, chosen, group_size: int) -> LossInputs:
        """Make the loss inputs of the responses `chosen`, (queries, K) indices.

        policy: the log-probabilities of the tokens of every response, (queries, R, T).
        """

        def flat(values: torch.Tensor) -> torch.Tensor:
            return values[torch.arange(QUERIES)[:, None], chosen].flatten(0, 1)

        return LossInputs(
            logprobs=flat(policy),
            ref_logprobs=flat(token_logprobs(self.reference)),
            behavior_logprobs=flat(token_logprobs(self.behavior)),
            mask=flat(MASK.expand(QUERIES, -1, -1)),
            rewards=flat(self.rewards),
            group_size=group_size,
            beta=BETA,
        )

    def train(self, group_size: int) -> tuple[torch.Tensor, float]:
        """Train a policy on the old data only, with all queries in each batch.

        It starts as the reference policy. Returns it, and the last log Z, a mean over queries.
        """
        tables = self.reference.clone().requires_grad_()
        optimizer = torch.optim.Adam([tables], lr=0.03)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, STEPS)
        rng = np.random.default_rng(0)
        for _ in range(STEPS):
            picks = torch.from_numpy(rng.integers(self.data.shape[1], size=(QUERIES, GROUP_SIZE)))
            inputs = self.inputs(token_logprobs(tables), self.data.gather(1, picks), group_size)
            optimizer.zero_grad()
            loss, metrics = trajectory_balance(inputs)
            loss.backward()
            optimizer.step()
            schedule.step()
        return tables.detach(), float(metrics["log_z"])


@pytest.fixture(scope="module")
def problem():
    return Problem()


def test_the_problem_is_what_it_claims_to_be(problem):
    ones = torch.ones(QUERIES, dtype=torch.float64)
    for table in (problem.reference, problem.behavior):
        torch.testing.assert_close(response_logprobs(table).exp().sum(dim=1), ones)
    assert all(len(seen.unique()) == len(RESPONSES) for seen in problem.data)  # full support
    assert problem.log_z.sort().values.diff().min() > 2
    assert problem.kl(problem.reference).min() > 0.03  # the start is no solution ...
    assert problem.kl(problem.behavior).min() > 0.1  # ... and neither is the policy that sampled


def test_at_the_best_policy_the_loss_is_zero_and_log_z_is_the_log_partition_function(problem):
    every = torch.arange(len(RESPONSES)).expand(QUERIES, -1)
    best = torch.zeros(QUERIES, *MASK.shape, dtype=torch.float64)
    best[:, :, 0] = problem.best  # all of log pi* on the first token: only the sum counts
    loss, metrics = trajectory_balance(problem.inputs(best, every, len(RESPONSES)))
    assert loss.item() < 1e-20, "it is the square of what log Z of each query is off by"
    assert float(metrics["log_z"]) == pytest.approx(problem.log_z.mean().item(), abs=1e-9)
    start = problem.inputs(token_logprobs(problem.reference), every, len(RESPONSES))
    assert trajectory_balance(start)[0].item() > 0.1


def test_stale_data_of_three_queries_in_one_batch_lead_to_the_best_policy(problem):
    tables, log_z = problem.train(group_size=GROUP_SIZE)
    assert problem.kl(tables).max().item() < 1e-3
    assert log_z == pytest.approx(problem.log_z.mean().item(), abs=1e-2)


def test_log_z_averaged_over_the_queries_leads_elsewhere(problem):
    tables, _ = problem.train(group_size=QUERIES * GROUP_SIZE)
    assert problem.kl(tables).min().item() > 1e-2
