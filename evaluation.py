"""Evaluation: the greedy responses to all test queries, scored. In mid-run it is served by a searcher, at the end by a process of its own."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from config import Config
from engine import Engine
from policy import load_tokenizer
from scoring import Scorer, Unscored
from tasks import Query


@dataclass
class Evaluation:
    """The mean score of the greedy responses to all test queries."""

    version: int
    score: float
    queries: int
    long_prompts: int  # test queries left out, their prompt exceeds the limit
    unscored: int  # test queries left out, score() failed on the response

    def __str__(self) -> str:
        return f"{self.score:.2f} ({self.score:.4f} on {self.queries} test queries, greedy)"


class EvaluationRun:
    """Greedy responses to all test queries, generated in the engine beside whatever else runs there."""

    def __init__(self, engine: Engine, scorer: Scorer, queries: Sequence[Query], tokenizer, config: Config, version: int):
        self.scorer, self.tokenizer, self.version = scorer, tokenizer, version
        prompts = [tokenizer(query.prompt).input_ids for query in queries]
        self.queries = {f"evaluation.{query.id}": query for query, p in zip(queries, prompts) if len(p) <= config.max_prompt_tokens}
        if not self.queries:
            raise ValueError(f"no test prompt of the task is within --max_prompt_tokens {config.max_prompt_tokens}")
        self.long_prompts = len(queries) - len(self.queries)
        self.scores: list[float | None] = []  # None where score() gave none
        for query, prompt in zip(queries, prompts):
            if f"evaluation.{query.id}" in self.queries:
                engine.add(f"evaluation.{query.id}", prompt, version, temperature=0.0, max_tokens=config.max_response_tokens)

    def finish(self, outputs: list) -> None:
        """Has its own among the engine's outputs scored."""
        own = [(self.queries[o.request_id], o.outputs[0]) for o in outputs if o.request_id in self.queries]
        texts = self.tokenizer.batch_decode([response.token_ids for _, response in own], skip_special_tokens=True)
        if own:
            self.scorer.add([Unscored(self, q, [text], [r.finish_reason == "stop"]) for (q, r), text in zip(own, texts)])

    def record(self, rewards: np.ndarray | Exception) -> None:
        self.scores.append(None if isinstance(rewards, Exception) else float(rewards[0]))

    def result(self) -> Evaluation | None:
        """Once all scores are there."""
        if len(self.scores) < len(self.queries):
            return None
        scores = [score for score in self.scores if score is not None]
        return Evaluation(self.version, float(np.mean(scores or [0.0])), len(scores), self.long_prompts, len(self.scores) - len(scores))


def evaluate_saved(config: Config, connection) -> None:
    """A process of its own: loads the model at config.model afresh and sends its Evaluation through `connection`."""
    engine, scorer = Engine(config), Scorer(config)
    evaluation = EvaluationRun(engine, scorer, scorer.task.queries("test"), load_tokenizer(config), config, config.steps)
    while (result := evaluation.result()) is None:
        evaluation.finish(engine.step() if engine.running else time.sleep(0.005) or [])
        for _, rewards in scorer.take():
            evaluation.record(rewards)
    connection.send(result)
