"""Rows of your own: a .jsonl file of prompts and answers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b
from typing import Literal

import numpy as np

from config import UserError
from tasks import Messages, Query, Task
from tasks.competition_math import is_correct, last_boxed
from tasks.support.data import is_chat, read_jsonl
from tasks.support.numbers import last_number, read_number

# How to read a row's answer, and whether a response matches it.
MATCHES = {
    "exact": (str.strip, lambda response, gold: response.strip() == gold),
    "number": (
        # Behind "####", as GSM8K has it, where that is there.
        lambda answer: read_number(last_boxed(answer) or answer.rpartition("####")[2]),
        lambda response, gold: last_number(response) == gold,
    ),
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
    """exact: the response is the answer. number: its last number is the answer. regex: the answer
    is an expression that is found in it. math: its last \\boxed{} equals the answer, or the
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
        # Each prompt has a number in [0, 1), so that a row keeps its side when others are added:
        # held out are those below the share, but one at least.
        hashes = [blake2b(text_of(query.prompt).encode()).digest()[:8] for query in queries]
        numbers = np.array([int.from_bytes(of) / 2**64 for of in hashes])
        order = np.argsort(numbers, kind="stable")
        count = min(max(1, int((numbers < self.test_share).sum())), len(queries) - 1)
        return [queries[i] for i in (order[:count] if split == "test" else order[count:])]

    def read(self, file: str) -> list[Query]:
        queries = []
        for place, row in read_jsonl(file):
            names = self.prompt_column, self.answer_column
            prompt, answer = map(row.get, names) if isinstance(row, dict) else (None, None)
            if isinstance(prompt, list):  # the library datasets fills up messages with null
                prompt = list(map(without_null, prompt))
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
                    kind = "is not one number" if self.match == "number" else "is nothing to match"
                    raise ValueError(f"{names[1]!r} {kind}")
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
            return None if number is None else str(Decimal(number.numerator) / number.denominator)
        return last_boxed(response) if self.match == "math" else None


def without_null(message: object) -> object:
    """Leave out of a message what is null in it."""
    is_dict = isinstance(message, dict)
    return {k: v for k, v in message.items() if v is not None} if is_dict else message


def text_of(prompt: str | Messages) -> str:
    """Return the text of a prompt, in a chat or not."""
    return prompt if isinstance(prompt, str) else "\n".join(turn["content"] for turn in prompt)
