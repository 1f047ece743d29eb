"""Rows of your own: a .jsonl file of prompts and answers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from config import UserError
from tasks import Query, Task, is_chat
from tasks.competition_math import is_correct, last_boxed
from tasks.gsm8k import last_number
from tasks.support.data import read_jsonl

# What is compared with, of a row's answer, and whether a response has it.
MATCHES = {
    "exact": (str, lambda response, gold: response.strip() == gold),
    "number": (last_number, lambda response, gold: last_number(response) == gold),
    "regex": (re.compile, lambda response, gold: gold.search(response) is not None),
    "math": (lambda answer: last_boxed(answer) or answer, is_correct),
}


@dataclass
class JsonLines(Task):
    """Reward 1 if the answer of a finished response is the row's, by --match, else 0."""

    data: str = ""
    """A file with a JSON object a line: a prompt (a text, or messages of a chat) and an answer."""
    test_data: str = ""
    """Such a file to test on. Empty: a share of --data, which is not trained on."""
    test_share: float = 0.1
    """That share; a row at least."""
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
        # An expression, or an algebra, may take for ever.
        self.score_timeout = 5.0 if self.match in ("regex", "math") else None

    def queries(self, split: str) -> Sequence[Query]:
        if not self.data:
            raise UserError("task 'jsonl' reads your rows: give --data, a .jsonl file")
        queries = self.read(self.test_data if self.test_data and split == "test" else self.data)
        if self.test_data:
            return queries
        order = np.random.default_rng(0).permutation(len(queries))
        count = max(1, round(self.test_share * len(queries)))
        return [queries[i] for i in (order[:count] if split == "test" else order[count:])]

    def read(self, file: str) -> list[Query]:
        queries = []
        for place, row in read_jsonl(file):
            columns = self.prompt_column, self.answer_column
            prompt, answer = map(row.get, columns) if isinstance(row, dict) else (None, None)
            if self.chat and isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            try:
                if not (isinstance(prompt, str) and prompt.strip() or is_chat(prompt)):
                    raise ValueError(f"{columns[0]!r} is neither a text nor messages")
                if isinstance(answer, bool) or not isinstance(answer, str | int | float):
                    raise ValueError(f"{columns[1]!r} is neither a text nor a number")
                gold = MATCHES[self.match][0](str(answer).strip())
                if gold is None or gold == "":
                    raise ValueError(f"--match {self.match} finds nothing in {columns[1]!r}")
            except (ValueError, re.error) as error:
                flags = "(--prompt_column, --answer_column)"
                raise UserError(f"{place}: {error} {flags}: {row!r:.80}") from error
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
