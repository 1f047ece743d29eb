"""Evaluation: a response to each test query, scored. In mid-run it is served by a searcher and is the mean score; at the end, and with --eval_only, a
process of its own takes all metrics of the task, with intervals.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from config import Config
from engine import Engine
from policy import load_tokenizer
from scoring import Scorer, Unscored
from tasks import Query, Task, load_task


RESAMPLES = 1000  # of the bootstrap
MEMORY_BESIDE_MODELS = 0.4  # of a GPU's memory, for vLLM where a task has models for its evaluation


@dataclass
class Evaluation:
    """The mean score of a response to each test query."""

    version: int
    score: float
    queries: int
    long_prompts: int  # test queries left out, their prompt exceeds the limit
    unscored: int  # test queries left out, score() failed on the response

    def __str__(self) -> str:
        return f"{self.score:.2f} ({self.score:.4f} on {self.queries} test queries{left_out(self)})"


@dataclass
class FinalEvaluation:
    """All metrics of the task."""

    metrics: dict[
        str, tuple[float, float, float]
    ]  # name -> value and the ends of its 95 % interval
    queries: int
    long_prompts: int
    unscored: int

    def __str__(self) -> str:
        """A table."""
        width = max(map(len, self.metrics))
        lines = [f"{'metric':{width}}     value   95 % interval"]
        lines += [
            f"{name:{width}}  {value:8.4f}   {low:.4f} to {high:.4f}"
            for name, (value, low, high) in self.metrics.items()
        ]
        return "\n".join([*lines, f"on {self.queries} test queries{left_out(self)}"])


def left_out(evaluation: Evaluation | FinalEvaluation) -> str:
    reasons = (
        (evaluation.long_prompts, "prompt over --max_prompt_tokens"),
        (evaluation.unscored, "score() failed"),
    )
    return "".join(f"; {count} left out, {reason}" for count, reason in reasons if count)


class EvaluationRun:
    """A response to each test query, generated in the engine beside whatever else runs there."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        queries: Sequence[Query],
        tokenizer,
        config: Config,
        version: int,
    ):
        self.scorer, self.tokenizer, self.version = scorer, tokenizer, version
        prompts = [tokenizer(query.prompt).input_ids for query in queries]
        self.queries = {
            f"evaluation.{query.id}": query
            for query, p in zip(queries, prompts)
            if len(p) <= config.max_prompt_tokens
        }
        if not self.queries:
            raise ValueError(
                f"no test prompt of the task is within --max_prompt_tokens {config.max_prompt_tokens}"
            )
        self.long_prompts = len(queries) - len(self.queries)
        self.scored: list[tuple[Unscored, float | None]] = []  # None where score() gave none
        self.error: Exception | None = None  # the first that score() raised
        for query, prompt in zip(queries, prompts):
            if f"evaluation.{query.id}" in self.queries:
                sampling = {
                    "max_tokens": config.max_response_tokens,
                    "seed": query.id,
                } | scorer.task.evaluation_sampling
                engine.add(f"evaluation.{query.id}", prompt, version, **sampling)

    def finish(self, outputs: list) -> None:
        """Has its own among the engine's outputs scored."""
        own = [
            (self.queries[o.request_id], o.outputs[0])
            for o in outputs
            if o.request_id in self.queries
        ]
        texts = self.tokenizer.batch_decode(
            [response.token_ids for _, response in own], skip_special_tokens=True
        )
        if own:
            self.scorer.add(
                [
                    Unscored(self, q, [text], [r.finish_reason == "stop"])
                    for (q, r), text in zip(own, texts)
                ]
            )

    def record(self, response: Unscored, rewards: np.ndarray | Exception) -> None:
        failed = isinstance(rewards, Exception)
        if failed and not self.error:
            self.error = rewards
            logging.error(
                "test query %d is left out, its response got no score; later ones are only counted",
                response.query.id,
                exc_info=rewards,
            )
        self.scored.append((response, None if failed else float(rewards[0])))

    @property
    def done(self) -> bool:
        return len(self.scored) == len(self.queries)

    def result(self) -> Evaluation:
        scores = [score for _, score in self.scored if score is not None]
        return Evaluation(
            self.version,
            float(np.mean(scores or [0.0])),
            len(scores),
            self.long_prompts,
            len(self.scored) - len(scores),
        )


def evaluate_model(config: Config, connection) -> None:
    """A process of its own: loads config.model afresh and sends its FinalEvaluation through `connection`."""
    task = load_task(config.task, **config.options)
    if type(task).evaluate is not Task.evaluate:  # there may be models in it
        config.gpu_memory_utilization = min(
            config.gpu_memory_utilization or 1.0, MEMORY_BESIDE_MODELS
        )
    engine, scorer = Engine(config), Scorer(config, task)
    run = EvaluationRun(
        engine, scorer, task.queries("test"), load_tokenizer(config), config, config.steps
    )
    while not run.done:
        run.finish(engine.step() if engine.running else time.sleep(0.005) or [])
        for response, rewards in scorer.take():
            run.record(response, rewards)
    scored = sorted(
        [(r, score) for r, score in run.scored if score is not None],
        key=lambda pair: pair[0].query.id,
    )  # they came in any order
    if not scored:
        raise ValueError(
            f"score() failed on every response to a test query: {run.error}"
        ) from run.error
    if scorer.pool:
        task.load()  # the workers have, this process has not yet
    queries, texts, finished = zip(*[(r.query, r.texts[0], r.finished[0]) for r, _ in scored])
    values = task.evaluate(
        list(queries), list(texts), list(finished), np.array([score for _, score in scored])
    )
    metrics = {name: (mean_of(value), *interval(value)) for name, value in values.items()}
    connection.send(
        FinalEvaluation(metrics, len(scored), run.long_prompts, len(run.scored) - len(scored))
    )


def mean_of(values: np.ndarray) -> float:
    """Of (N,) values, or of (N, N) over the pairs of two different rows."""
    return float(weighted_means(values, np.ones((1, len(values))))[0])


def interval(values: np.ndarray, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % percentile bootstrap over the N rows."""
    counts = np.random.default_rng(0).multinomial(
        len(values), np.full(len(values), 1 / len(values)), size=resamples
    )  # how often each row is drawn
    return tuple(np.quantile(weighted_means(values, counts), [0.025, 0.975]).tolist())


def weighted_means(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(R,) means for R samples of the N rows, in which row i occurs counts[r, i] times. A row is no pair with a copy of itself."""
    if values.ndim == 1:
        return counts @ values / counts.sum(axis=1)
    pairs = values - np.diag(np.diag(values))
    return np.einsum("ri,ri->r", counts @ pairs, counts) / (
        counts.sum(axis=1) ** 2 - (counts**2).sum(axis=1)
    )
