"""Evaluation by a searcher: a response to each test query, beside the search.

The final evaluation has a process of its own (final_evaluation.py).
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from config import Config
from models.engine import Engine
from models.policy import encode_prompt
from runtime.responses.bootstrap import interval
from runtime.responses.scoring import Responses, Scorer, decode
from runtime.transport.board import Board
from runtime.transport.messages import Evaluation
from tasks import Query, sampling_for_tests
from weights import SharedWeights


class EvaluationRun:
    """Responses to each test query, generated in the engine beside whatever else runs there.

    samples: responses to each. Raises ValueError when no test prompt can be used.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        queries: Sequence[Query],
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        version: int,
        samples: int = 1,
    ):
        self.scorer, self.tokenizer, self.version = scorer, tokenizer, version
        self.samples = samples
        self.queries: dict[str, Query] = {}  # by request
        sampling = sampling_for_tests(config, scorer.task) | {"n": samples}
        for query in queries:
            request, prompt = f"evaluation.{query.id}", encode_prompt(tokenizer, query.prompt)
            if not 0 < len(prompt) <= config.max_prompt_tokens:
                continue
            # The samples of a request have the seeds that follow on its own.
            engine.add(request, prompt, version, **{"seed": query.id * samples % 2**32} | sampling)
            self.queries[request] = query
        if not self.queries:
            limit = config.max_prompt_tokens
            raise ValueError(f"no test prompt has 1 to --max_prompt_tokens {limit} tokens")
        self.long_prompts = len(queries) - len(self.queries)
        # None where score() gave no score.
        self.scored: list[tuple[Responses, float | None]] = []
        self.error: Exception | None = None  # the first that score() raised

    def finish(self, outputs: list) -> None:
        """Have its own among the engine's outputs scored."""
        own = [output for output in outputs if output.request_id in self.queries]
        if own:
            texts, finished = decode(self.tokenizer, [c for output in own for c in output.outputs])
            queries = [self.queries[output.request_id] for output in own for _ in output.outputs]
            rows = zip(queries, texts, finished)
            # Each alone: one without a score costs no other of its query.
            self.scorer.add([Responses(self, query, [text], [end]) for query, text, end in rows])

    def record(self, response: Responses, rewards: np.ndarray | Exception) -> None:
        """Take the score of one response, or why it has none."""
        if isinstance(rewards, Exception):
            if not self.error:
                self.error = rewards
                logging.error(
                    "a response to test query %d is left out, it got no score; "
                    "later ones are only counted",
                    response.query.id,
                    exc_info=rewards,
                )
            self.scored.append((response, None))
        else:
            self.scored.append((response, float(rewards[0])))

    @property
    def is_done(self) -> bool:
        return len(self.scored) == len(self.queries) * self.samples

    def result(self) -> Evaluation:
        scores = [score for _, score in self.scored if score is not None]
        mean, unscored = float(np.mean(scores or [0.0])), len(self.scored) - len(scores)
        ends = interval(np.array(scores)) if scores else None
        return Evaluation(self.version, mean, len(scores), self.long_prompts, unscored, ends)


class EvaluationService:
    """Serves the evaluations that the trainer asks for, one at a time.

    An evaluation is of one version: while it runs, no weights are loaded, and the slot of its
    version stays pinned, so that the trainer can compare log-probabilities under that version.

    begin: starts the EvaluationRun of a version. is_enabled: False for a searcher that serves none.
    """

    def __init__(
        self,
        begin: Callable[[int], EvaluationRun],
        weights: SharedWeights,
        pin: int,
        board: Board,
        row: str,
        is_enabled: bool,
    ):
        self.begin, self.weights, self.pin = begin, weights, pin
        self.is_enabled = is_enabled
        # The newest version that an evaluation was started for.
        self.started_version = int(board.get(row, "evaluated"))
        self.run: EvaluationRun | None = None

    @property
    def is_running(self) -> bool:
        return self.run is not None

    @property
    def is_due(self) -> bool:
        """Whether the trainer has asked for an evaluation that has not started."""
        return self.is_enabled and self.started_version < self.weights.evaluation_version

    def start_if_due(self, version: int) -> None:
        """Start a requested evaluation with the version in the engine.

        Version 0 is the base model, which is always evaluated.
        """
        requested = 0 if version == 0 else self.weights.evaluation_version
        if self.is_enabled and self.started_version < requested <= version:
            self.started_version = version
            self.run = self.begin(version)

    def finish(self, outputs: list) -> None:
        """Take what the engine finished."""
        if self.run:
            self.run.finish(outputs)

    def collect(self) -> list[Evaluation]:
        """Return the evaluation if it has ended: from now on new weights may come in."""
        if not self.run or not self.run.is_done:
            return []
        result, self.run = self.run.result(), None
        self.weights.unpin(self.pin)
        return [result]
