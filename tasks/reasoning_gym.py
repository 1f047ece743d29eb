"""The procedural tasks of the library reasoning-gym, each with a verifier.

It is optional: pip install -r requirements/gym.txt.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from config import UserError
from tasks import LazyQueries, Query, Task
from tasks.competition_math import TBA_PRIME

# The prompt's last sentence, by --answer_in.
ANSWER_IN = {
    "tag": "Give the final answer between <answer> and </answer>.",
    "last_line": "Give the final answer alone on the last line.",
    "response": "Reply with the final answer only.",
}
PRESETS = {
    "plain": {},
    # What the authors of TBA' ran after the paper (docs/experiments.md). Never run here.
    "countdown": dict(
        TBA_PRIME,
        model="Qwen/Qwen3-4B-Instruct-2507",
        options=dict(dataset="countdown", chat=True),
        loss="tba_ema",
        steps=720,
        eval_every=20,
        constant_staleness=10,
        max_prompt_tokens=512,
        max_response_tokens=3584,
    ),
}
TEST_SEED = 2**31  # the i-th query of a dataset is made from its seed + i


@dataclass
class ReasoningGym(Task):
    """The dataset's own score of the answer that a response has, 0 where it has none.

    This is not an accuracy: a wrong answer may earn 0.01 to 0.05, a partly right one more. If the
    verifier raises, the score is 0. Some verifiers evaluate an answer as Python.
    """

    dataset: str = "spell_backward"
    """Which of its datasets; an unknown name lists them."""
    settings: str = "{}"
    """Settings of the dataset that differ from its defaults, as JSON: {"max_word_len": 4}."""
    train_queries: int = 10_000
    """Queries to train on. Each is made when it is drawn."""
    test_queries: int = 200
    """Queries to test on, of another seed: in a small dataset some may be the same."""
    answer_in: Literal["tag", "last_line", "response"] = "tag"
    """Where the answer stands, and what the prompt says of it: in the last <answer></answer> (tag),
    on the last line that is not empty (last_line), or it is the whole response (response). A small
    model seldom writes tags."""
    chat: bool = False
    """Ask in a chat message, for a model that has a chat template."""

    metric = "score"
    if_unanswered = "--answer_in says where the answer is to stand"
    score_timeout = 10.0  # verifiers of many authors, some of which run a solver
    late_score = 0.0
    keep_special_tokens = ("<answer>", "</answer>")  # some models have these as such

    @cached_property
    def train(self):
        return self.make_dataset(seed=0, size=self.train_queries)

    @cached_property
    def test(self):
        return self.make_dataset(seed=TEST_SEED, size=self.test_queries)

    def make_dataset(self, seed: int, size: int):
        """Make the dataset of a split. Raises UserError."""
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ImportError as error:
            problem = f"needs its library: .venv/bin/pip install -r requirements/gym.txt ({error})"
            raise UserError(f"task 'reasoning_gym' {problem}") from error
        names = sorted(set(DATASETS) - {"composite"})  # which no JSON can describe
        if self.dataset not in names:
            raise UserError(f"--dataset is {self.dataset!r}: it is one of {', '.join(names)}")
        try:
            settings = json.loads(self.settings)
            made = create_dataset(self.dataset, seed=seed, size=size, **settings)
            _ = made[0], range(size)[0]
        except Exception as error:  # asserts, and whatever a dataset raises
            problem = f"--settings {self.settings} and the numbers of queries do not suit"
            kind = type(error).__name__
            raise UserError(f"{problem} --dataset {self.dataset}: {kind}: {error}") from error
        return made

    def prepare(self) -> None:
        if self.train[0] != self.train[0]:  # log Z is of one query
            raise UserError(
                f"--dataset {self.dataset} gives another query each time one is read: use another"
            )

    def queries(self, split: str) -> Sequence[Query]:
        dataset = self.test if split == "test" else self.train

        def make(index: int) -> Query:
            entry = dataset[index]
            text = f"{entry['question']}\n\n{ANSWER_IN[self.answer_in]}\n"
            return Query(index, [{"role": "user", "content": text}] if self.chat else text, entry)

        return LazyQueries(len(dataset), make)

    def load(self) -> None:
        _ = self.test  # slow: not within the time of the first score

    def score(
        self, queries: list[Query], responses: list[str], finished: list[bool]
    ) -> list[float]:
        scores = [0.0] * len(queries)
        for i, (query, response, is_finished) in enumerate(zip(queries, responses, finished)):
            answer = self.extract(response)
            if is_finished and answer is not None:
                with suppress(Exception):  # of a verifier that cannot read the answer
                    scores[i] = float(self.test.score_answer(answer, query.answer))
        return np.nan_to_num(scores).tolist()

    def extract(self, response: str) -> str | None:
        if self.answer_in == "tag":
            from reasoning_gym.utils import extract_answer

            return extract_answer(response)
        lines = response.strip().splitlines()
        return "\n".join(lines if self.answer_in == "response" else lines[-1:]).strip() or None
