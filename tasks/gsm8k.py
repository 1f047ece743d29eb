"""GSM8K: grade-school word problems, 7,473 to train on and 1,319 to test (https://arxiv.org/abs/2110.14168)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from config import UserError
from tasks import Query, Task
from tasks._data import read_rows

PROMPT = "[MATH TASK] Problem:\n{question}\n\nSolution:\n"
# A minus is a sign only if it touches the number and nothing that it could be subtracted from: the last number of "12-5", "x-5" and "12 - 5" is 5.
# A comma belongs to a number only before three digits, a period only before a digit.
NUMBER = re.compile(
    r"(?:(?<![\w)%])([-−]))?\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
)


@dataclass
class GSM8K(Task):
    """Reward 1 if the last number of a finished response equals the gold number, else 0.

    The official TBA code grades an unfinished response by its last number too; here it is wrong, since nothing shows that it ended there.
    """

    data_dir: str = ""
    """Directory with train.jsonl and test.jsonl as the dataset's authors publish them. Empty: openai/gsm8k from the hub."""

    metric = "accuracy"

    def queries(self, split: str) -> Sequence[Query]:
        queries = []
        for place, row in read_rows(
            self.data_dir, split, ("question", "answer"), hub=("openai/gsm8k", "main", split)
        ):
            gold = last_number(row["answer"].partition("####")[2])
            if gold is None:
                raise UserError(f"{place}: the answer has no number behind '####'")
            queries.append(
                Query(id=len(queries), prompt=PROMPT.format(question=row["question"]), answer=gold)
            )
        return queries

    def score(
        self, queries: list[Query], responses: list[str], finished: list[bool]
    ) -> list[float]:
        return [
            float(done and last_number(response) == query.answer)
            for query, response, done in zip(queries, responses, finished)
        ]

    def extract(self, response: str) -> str | None:
        number = last_number(response)
        return None if number is None else str(number)


def last_number(text: str) -> Decimal | None:
    """The last number in a text: "so $1,234.50." is 1234.50, "-5%" is -5, "3 - 2 = 1." is 1."""
    matches = NUMBER.findall(text)
    if not matches:
        return None
    sign, digits = matches[-1]
    return Decimal(("-" if sign else "") + digits.replace(",", ""))
