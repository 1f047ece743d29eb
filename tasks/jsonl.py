"""Rows of your own: a .jsonl file of prompts and answers."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b
from typing import Literal

import numpy as np

from config import UserError
from tasks import Query, Task
from tasks.competition_math import is_correct, last_boxed
from tasks.support.data import chat_fault, read_jsonl
from tasks.support.numbers import last_number, plain, read_number


@dataclass
class JsonLines(Task):
    """Reward 1 if the answer of a finished response is the row's, by --match, else 0."""

    data: str = ""
    """A file with a JSON object a line: a prompt (a text, or messages of a chat) and an answer."""
    test_data: str = ""
    """Such a file to test on. Empty: a share of --data, which is not trained on."""
    test_share: float = 0.1
    """That share of the prompts, between 0 and 1; one at least."""
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
        # Each prompt has a number in [0, 1): its rows keep their side when others are added. Held
        # out are those below the share, but one prompt at least.
        texts = [
            prompt if isinstance(prompt, str) else "\n".join(turn["content"] for turn in prompt)
            for prompt in (query.prompt for query in queries)
        ]
        digests = [blake2b(text.encode()).digest()[:8] for text in texts]
        numbers = np.array([int.from_bytes(digest) / 2**64 for digest in digests])
        prompts = np.unique(numbers)
        if not 0 < self.test_share < 1 or len(prompts) < 2:
            rows = f"--test_share {self.test_share} of {len(prompts)} different prompts"
            raise UserError(f"{rows} leaves nothing to train or to test on: or give --test_data")
        below = np.searchsorted(prompts, self.test_share)
        is_test = numbers < prompts[np.clip(below, 1, len(prompts) - 1)]
        order = np.argsort(numbers, kind="stable")
        return [queries[i] for i in order if is_test[i] == (split == "test")]

    def read(self, file: str) -> list[Query]:
        queries = []
        columns = {"--prompt_column": self.prompt_column, "--answer_column": self.answer_column}
        for place, row in read_jsonl(file):
            found = row if isinstance(row, dict) else {}
            missing = [f"{name!r} ({flag})" for flag, name in columns.items() if name not in found]
            try:
                if missing:
                    raise ValueError(f"it lacks {' and '.join(missing)}")
                prompt, answer = (row[name] for name in columns.values())
                if self.chat and isinstance(prompt, str):
                    prompt = [{"role": "user", "content": prompt}]
                if isinstance(prompt, str):
                    fault = None if prompt.strip() else "it is empty"
                else:
                    fault = chat_fault(prompt)
                if fault:
                    raise ValueError(f"{self.prompt_column!r}: {fault}")
                queries.append(Query(len(queries), prompt, self.read_answer(answer)))
            except (ValueError, OverflowError, RecursionError, re.error) as error:
                raise UserError(f"{place}, --match {self.match}: {error}: {row!r:.80}") from error
        return queries

    def read_answer(self, answer: object) -> str:
        """Return what a row's answer wants. Raises ValueError, re.error and the like."""
        name = repr(self.answer_column)
        is_plain = isinstance(answer, str | int | float) and not isinstance(answer, bool)
        if not is_plain or answer in (math.inf, -math.inf):  # 1e999
            raise ValueError(f"{name} is neither a text nor a number")
        if not isinstance(answer, str):
            answer = format(Decimal(str(answer)), "f")  # 1e-7 has no 7
        if self.match == "number":  # behind "####", as GSM8K has it, where that is there
            number = read_number(last_boxed(answer) or answer.rpartition("####")[2])
            if number is None:
                raise ValueError(f"{name} is not one number")
            return plain(number)
        if not answer.strip():
            raise ValueError(f"{name} is nothing to match")
        if self.match == "regex":
            return re.compile(answer).pattern
        boxed = last_boxed(answer) if self.match == "math" else None
        return boxed or answer.strip()

    def load(self) -> None:
        if self.match == "math":  # the first call takes longer than a score may
            is_correct(r"\boxed{\frac{1}{2}}", "0.5")

    def is_right(self, response: str, answer: str) -> bool:
        if self.match == "regex":
            return re.search(answer, response) is not None
        if self.match == "math":
            return is_correct(response, answer)
        return super().is_right(response, answer)

    def extract(self, response: str) -> str | None:
        if self.match == "number":
            return plain(last_number(response))
        return last_boxed(response) if self.match == "math" else response.strip() or None
