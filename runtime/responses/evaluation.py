"""Evaluation: responses to the test queries, which the trainer asks for and a searcher makes.

The final evaluation has a process of its own (launch/evaluate.py).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from config import Config
from models.tokens import encode_prompt
from rollouts import Group
from runtime.responses.samples import look_at
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable
from tasks import Query, Task, sampling_for_tests
from weights import SharedWeights

RESAMPLES = 1000  # of the bootstrap


class EvaluationRequests:
    """The trainer's side: which version is to be evaluated, which evaluation has arrived.

    A request is published with a version (SharedWeights). Version 0 is evaluated without one.
    """

    def __init__(self, config: Config, weights: SharedWeights, status: StatusTable):
        self.config, self.weights, self.status = config, weights, status
        self.asked_step = 0  # step of the latest request before a resume; -1: ask at once
        self.arrived_version = -1

    def is_due(self, step: int) -> bool:
        """Return whether a sync has passed a multiple of --eval_every since the latest request."""
        period, k = self.config.eval_every, self.config.sync_period
        latest = max(self.asked_step, self.weights.evaluation_version)
        step, latest = step - step % k, latest - latest % k  # each one's latest sync
        return step // period > latest // period if period else latest < 0

    def arrive(self, evaluation: Evaluation) -> None:
        self.arrived_version = max(self.arrived_version, evaluation.version)
        # Not before: a searcher that dies with it unsent is replaced by one that repeats it.
        self.status.set(self.status.searchers[0], "evaluated", evaluation.version)

    @property
    def is_pending(self) -> bool:
        """Return whether an evaluation was asked for and has not arrived: of version 0 always."""
        return self.arrived_version < max(0, self.weights.evaluation_version)

    def state_dict(self, step: int) -> dict:
        """Return what a run resumed at this step needs: it asks again for what has not arrived."""
        is_due = self.is_pending or self.is_due(step - 1)
        return {"evaluation_due": is_due, "evaluated": self.arrived_version}

    def load_state_dict(self, state: dict, step: int) -> None:
        self.arrived_version = state["evaluated"]
        self.asked_step = -1 if state["evaluation_due"] else step - 1


@dataclass
class EvaluationService:
    """The searcher's side: serves these requests, one at a time.

    An evaluation is of one version: while it runs, no weights are loaded, and the slot of its
    version stays pinned, so that the trainer can compare log-probabilities under that version.

    rank: of the searcher; 0 serves them. started_version: the newest that one was started for.
    """

    config: Config
    task: Task
    queries: Sequence[Query]
    tokenizer: PreTrainedTokenizerBase
    weights: SharedWeights
    rank: int
    started_version: int
    run: "EvaluationRun | None" = None

    @property
    def is_due(self) -> bool:
        """Whether the trainer has asked for an evaluation that has not started."""
        return self.rank == 0 and self.started_version < self.weights.evaluation_version

    def start_if_due(self, version: int) -> list[Group]:
        """Start a requested evaluation of the version in the engine. Returns its groups, or [].

        Version 0 is the base model, which is always evaluated.
        """
        requested = 0 if version == 0 else self.weights.evaluation_version
        if self.rank != 0 or not self.started_version < requested <= version:
            return []
        self.started_version = version
        self.run = EvaluationRun(self.config, self.task, self.queries, self.tokenizer, version)
        return self.run.groups

    def collect(self) -> list[Evaluation]:
        """Return the evaluation if it has ended: from now on new weights may come in."""
        if not self.run or not self.run.is_done:
            return []
        result, self.run = self.run.result(), None
        self.weights.unpin(self.rank)
        return [result]


class EvaluationRun:
    """An evaluation of one version: a group of one for each response.

    Greedy, unless the task or a flag says otherwise. num_samples: responses to a query. Raises
    ValueError when no test prompt can be used.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        queries: Sequence[Query],
        tokenizer: PreTrainedTokenizerBase,
        version: int,
        num_samples: int = 1,
    ):
        self.task, self.version, self.num_samples = task, version, num_samples
        self.groups: list[Group] = []
        sampling, self.long_prompts = sampling_for_tests(config, task) | {"n": 1}, 0
        for query in queries:
            prompt = np.array(encode_prompt(tokenizer, query.prompt), np.int32)
            if not 0 < len(prompt) <= config.max_prompt_tokens:
                self.long_prompts += 1
                continue
            seed = sampling.get("seed", query.id * num_samples)
            for i in range(num_samples):
                number = query.id * num_samples + i
                group = Group(
                    query_id=query.id,
                    query=query,
                    prompt=prompt,
                    request=f"evaluation.{number}",
                    index=number,
                    is_for_evaluation=True,
                    sampling=sampling | {"seed": (seed + i) % 2**32},
                )
                self.groups.append(group)
        if not self.groups:
            limit = config.max_prompt_tokens
            raise ValueError(f"no test prompt has 1 to --max_prompt_tokens {limit} tokens")
        self.scored: list[Group] = []
        self.unscored: list[Group] = []  # score() gave no score

    def record(self, group: Group) -> None:
        """Take one response with its score, or why it has none."""
        if group.error is None:
            self.scored.append(group)
            return
        self.unscored.append(group)
        if len(self.unscored) == 1:
            what = f"a response to test query {group.query.id} is left out, it got no score"
            logging.error(f"{what}; later ones are only counted", exc_info=group.error)

    @property
    def is_done(self) -> bool:
        return len(self.scored) + len(self.unscored) == len(self.groups)

    def result(self, evaluate: Callable[..., dict[str, np.ndarray]] | None = None) -> Evaluation:
        """Return the mean score, or the means of what an `evaluate` like the task's gives."""
        self.scored.sort(key=lambda group: group.index)  # they came in any order
        queries = [group.query for group in self.scored]
        texts = [group.texts[0] for group in self.scored]
        finished = [bool(group.finished[0]) for group in self.scored]
        scores = np.array([float(group.rewards[0]) for group in self.scored])
        ids = [query.id for query in queries]
        counts = len(set(ids)), self.num_samples, self.long_prompts, len(self.unscored)
        if not ids:
            return Evaluation(self.version, {self.task.metric: (np.nan,) * 3}, *counts)
        values = {self.task.metric: scores}
        if evaluate:
            values = evaluate(queries, texts, finished, scores)
        metrics = {name: mean_and_interval(value, ids) for name, value in values.items()}
        answers = look_at(self.task, queries, texts, scores.tolist(), finished)
        return Evaluation(self.version, metrics, *counts, answers)


def mean_and_interval(values: np.ndarray, query_ids: Sequence[int]) -> tuple[float, float, float]:
    """Return a mean and the ends of its 95 % interval, over the queries.

    Wilson's interval for a share, a percentile bootstrap for other means. values: (N,) of
    responses, or (N, N) of their pairs: then the mean is over pairs of different responses.
    query_ids: of the N responses.
    """
    queries, query_of_response = np.unique(query_ids, return_inverse=True)
    mean = float(weighted_means(values, np.ones((1, len(values))))[0])
    if values.ndim == 1 and np.isin(values, (0, 1)).all():
        # Samples of one query are alike: as many independent ones would have this variance.
        count, variance = len(values), mean * (1 - mean)
        of_sum = float((np.bincount(query_of_response, values - mean) ** 2).sum())
        independent = variance * count**2 / max(of_sum, variance * count) if variance else None
        return mean, *wilson(mean, independent or len(queries))
    probabilities = np.full(len(queries), 1 / len(queries))
    # How often each query is drawn: (RESAMPLES, queries); each of its responses as often.
    drawn = np.random.default_rng(0).multinomial(len(queries), probabilities, size=RESAMPLES)
    means = weighted_means(values, drawn[:, query_of_response])
    return mean, *np.quantile(means, [0.025, 0.975]).tolist()


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % interval of a share of `count` independent responses.

    Unlike the bootstrap's it is not empty where all are right, or none.
    """
    z2 = 1.96**2 / count
    middle, half = share + z2 / 2, (z2 * (share * (1 - share) + z2 / 4)) ** 0.5
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def weighted_means(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return (R,) means for R samples of the N responses: i occurs counts[r, i] times in sample r.

    values: (N,), or (N, N) for pairs; a response is no pair with a copy of itself.
    """
    if values.ndim == 1:
        return counts @ values / counts.sum(axis=1)
    pairs = values - np.diag(np.diag(values))
    num_pairs = counts.sum(axis=1) ** 2 - (counts**2).sum(axis=1)
    return np.einsum("ri,ri->r", counts @ pairs, counts) / num_pairs
