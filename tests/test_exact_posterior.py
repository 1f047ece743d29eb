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


def places(response: tuple[int, ...]) -> list[int]:
    """Find where each token of a response stands in a table of prefixes x tokens.

    Padding points at place 0, which the mask must leave out.
    """
    found = [PREFIXES.index(response[:t]) * VOCABULARY + response[t] for t in range(len(response))]
    return found + [0] * (LENGTH - len(response))


PLACES = torch.tensor([places(response) for response in RESPONSES])  # (R, T)


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

    def inputs(
        self, tables: torch.Tensor, chosen: torch.Tensor, queries: range, group_size: int
    ) -> LossInputs:
        """Make the loss inputs of the responses `chosen`, (queries, K) indices."""
        rows = torch.tensor(queries)[:, None], chosen

        def flat(values: torch.Tensor) -> torch.Tensor:
            return values[rows].flatten(0, 1)

        return LossInputs(
            logprobs=flat(token_logprobs(tables)),
            ref_logprobs=flat(token_logprobs(self.reference)),
            behavior_logprobs=flat(token_logprobs(self.behavior)),
            mask=MASK[chosen].flatten(0, 1),
            rewards=flat(self.rewards),
            group_size=group_size,
            beta=BETA,
        )

    def train(self, group_size: int) -> torch.Tensor:
        """Train a policy on the old data only, with all queries in each batch.

        It starts as the reference policy.
        """
        tables = self.reference.clone().requires_grad_()
        optimizer = torch.optim.Adam([tables], lr=0.03)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, STEPS)
        rng = np.random.default_rng(0)
        for _ in range(STEPS):
            picks = torch.from_numpy(rng.integers(self.data.shape[1], size=(QUERIES, GROUP_SIZE)))
            chosen = self.data.gather(1, picks)
            inputs = self.inputs(tables, chosen, range(QUERIES), group_size)
            loss, _ = trajectory_balance(inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return tables.detach()

    def estimated_log_z(self, tables: torch.Tensor) -> list[float]:
        """Estimate log Z of each query, as VarGrad does, from GROUP_SIZE responses of the data."""
        log_z = []
        for query in range(QUERIES):
            chosen = self.data[query : query + 1, :GROUP_SIZE]
            inputs = self.inputs(tables, chosen, range(query, query + 1), GROUP_SIZE)
            _, metrics = trajectory_balance(inputs)
            log_z.append(float(metrics["log_z"]))
        return log_z


@pytest.fixture(scope="module")
def problem():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Problem()
    torch.set_num_threads(threads)


def test_the_problem_is_what_it_claims_to_be(problem):
    ones = torch.ones(QUERIES, dtype=torch.float64)
    for table in (problem.reference, problem.behavior):
        torch.testing.assert_close(response_logprobs(table).exp().sum(dim=1), ones)
    assert all(len(seen.unique()) == len(RESPONSES) for seen in problem.data)  # full support
    assert problem.log_z.sort().values.diff().min() > 2
    assert problem.kl(problem.reference).min() > 0.03  # the start is no solution ...
    assert problem.kl(problem.behavior).min() > 0.1  # ... and neither is the policy that sampled


def test_stale_data_of_three_queries_in_one_batch_lead_to_the_best_policy(problem):
    tables = problem.train(group_size=GROUP_SIZE)
    assert problem.kl(tables).max().item() < 1e-3
    assert problem.estimated_log_z(tables) == pytest.approx(problem.log_z.tolist(), abs=1e-2)


def test_log_z_averaged_over_the_queries_leads_elsewhere(problem):
    tables = problem.train(group_size=QUERIES * GROUP_SIZE)
    assert problem.kl(tables).min().item() > 1e-2
    errors = np.abs(np.array(problem.estimated_log_z(tables)) - problem.log_z.numpy())
    assert errors.max() > 1e-1
