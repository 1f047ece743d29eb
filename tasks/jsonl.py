"""Rows of your own: a .jsonl file of prompts and answers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

import numpy as np

from config import UserError
from tasks import Query, Task, is_chat
from tasks.competition_math import is_correct, last_boxed
from tasks.gsm8k import last_number
from tasks.support.data import read_jsonl

# How to read a row's answer, and whether a response matches it.
MATCHES = {
    "exact": (str.strip, lambda response, gold: response.strip() == gold),
    "number": (last_number, lambda response, gold: last_number(response) == gold),
    "regex": (re.compile, lambda response, gold: gold.search(response) is not None),
    "math": (lambda answer: last_boxed(answer) or answer.strip(), is_correct),
}


@dataclass
class JsonLines(Task):
    """Reward 1 if the answer of a finished response is the row's, by --match, else 0."""

    data: str = ""
    """A file with a JSON object a line: a prompt (a text, or messages of a chat) and an answer."""
    test_data: str = ""
    """Such a file to test on. Empty: a share of --data, which is not trained on."""
    test_share: float = 0.1
    """That share, between 0 and 1; a row at least."""
    prompt_column: str = "prompt"
    """The name of the prompt in a row."""
    answer_column: str = "answer"
    """The name of the answer, a text or a number."""
    chat: bool = False
    """Put prompts that are texts through the model's chat template, as a user's message."""
    match: Literal["exact", "number", "regex", "math"] = "exact"
    """exact: the response is the answer. number: its last number is the answer's last. regex: the
    answer is an expression that is found in it. math: its last \\boxed{} equals the answer, or the
    answer's own, also by symbolic equivalence."""

    metric = "accuracy"
    late_score = 0.0

    def __post_init__(self):
        # A regular expression or symbolic algebra may take forever.
        self.score_timeout = 5.0 if self.match in ("regex", "math") else None

    def queries(self, split: str) -> Sequence[Query]:
        if not self.data:
            raise UserError("task 'jsonl' reads your rows: give --data, a .jsonl file")
        queries = self.read(self.test_data if self.test_data and split == "test" else self.data)
        if self.test_data:
            return queries
        if not 0 < self.test_share < 1 or len(queries) < 2:
            rows = f"--test_share {self.test_share} of {len(queries)} rows"
            raise UserError(f"{rows} leaves nothing to train or to test on: or give --test_data")
        order = np.random.default_rng(0).permutation(len(queries))
        count = min(max(1, round(self.test_share * len(queries))), len(queries) - 1)
        return [queries[i] for i in (order[:count] if split == "test" else order[count:])]

    def read(self, file: str) -> list[Query]:
        queries = []
        for place, row in read_jsonl(file):
            names = self.prompt_column, self.answer_column
            prompt, answer = map(row.get, names) if isinstance(row, dict) else (None, None)
            if self.chat and isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            try:
                if prompt is None or answer is None:
                    raise ValueError(f"it lacks {names} (--prompt_column, --answer_column)")
                if not (isinstance(prompt, str) and prompt.strip() or is_chat(prompt)):
                    raise ValueError(f"{names[0]!r} is empty, or neither a text nor messages")
                if isinstance(answer, bool) or not isinstance(answer, str | int | float):
                    raise ValueError(f"{names[1]!r} is neither a text nor a number")
                if not isinstance(answer, str):
                    answer = format(Decimal(str(answer)), "f")  # 1e-7 has no 7
                gold = MATCHES[self.match][0](answer) if answer.strip() else None
                if gold is None:
                    raise ValueError(f"nothing to compare with in {names[1]!r}")
            except (ValueError, OverflowError, RecursionError, re.error) as error:
                raise UserError(f"{place}, --match {self.match}: {error}: {row!r:.80}") from error
            queries.append(Query(len(queries), prompt, gold))
        return queries

    def load(self) -> None:
        if self.match == "math":  # the first call takes longer than a score may
            is_correct(r"\boxed{\frac{1}{2}}", "0.5")

    def score(
        self, queries: list[Query], responses: list[str], finished: list[bool]
    ) -> list[float]:
        return [
            float(is_finished and MATCHES[self.match][1](response, query.answer))
            for query, response, is_finished in zip(queries, responses, finished)
        ]

    def extract(self, response: str) -> str | None:
        if self.match == "number":
            number = last_number(response)
            return None if number is None else str(number)
        return last_boxed(response) if self.match == "math" else None
