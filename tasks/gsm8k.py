"""GSM8K: grade-school word problems, 7,473 to train on and 1,319 to test (https://arxiv.org/abs/2110.14168)."""

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

from config import UserError
from tasks import Query, Task

PROMPT = "[MATH TASK] Problem:\n{question}\n\nSolution:\n"
# A minus is a sign only if it touches the number and nothing that it could be subtracted from: the last number of "12-5", "x-5" and "12 - 5" is 5.
# A comma belongs to a number only before three digits, a period only before a digit.
NUMBER = re.compile(r"(?:(?<![\w)%])([-−]))?\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)")


class GSM8K(Task):
    """Reward 1 if the last number of a finished response equals the gold number, else 0.

    The official TBA code grades an unfinished response by its last number too; here it is wrong, since nothing shows that it ended there.
    """

    metric = "accuracy"

    def __init__(self, data_dir: str = ""):
        self.data_dir = data_dir

    def queries(self, split: str) -> Sequence[Query]:
        if self.data_dir:
            source = Path(self.data_dir) / f"{split}.jsonl"
            rows = read_jsonl(source)
        else:
            import datasets  # only here: it is slow to import, and not needed with --data_dir

            source = f"openai/gsm8k {split}"
            try:
                rows = list(enumerate(datasets.load_dataset("openai/gsm8k", "main", split=split), start=1))
            except Exception as error:  # the many ways of having no network
                raise UserError(f"{source} could not be loaded from the hub ({type(error).__name__}): give --data_dir with "
                                "train.jsonl and test.jsonl") from error
        queries = []
        for number, row in rows:
            for column in ("question", "answer"):
                if not isinstance(row, dict) or not isinstance(row.get(column), str):
                    raise UserError(f"{source} line {number} has no {column!r}: each line must be {{\"question\": …, \"answer\": …}}")
            gold = last_number(row["answer"].partition("####")[2])
            if gold is None:
                raise UserError(f"{source} line {number}: the answer has no number behind '####'")
            queries.append(Query(id=number, prompt=PROMPT.format(question=row["question"]), answer=gold))
        return queries

    def score(self, queries: list[Query], responses: list[str], finished: list[bool]) -> list[float]:
        return [float(done and last_number(response) == query.answer) for query, response, done in zip(queries, responses, finished)]

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


def read_jsonl(path: Path) -> list[tuple[int, dict]]:
    """Line number and content of each line that is not blank. Raises UserError."""
    if not path.is_file():
        raise UserError(f"data file {path} does not exist: --data_dir must hold train.jsonl and test.jsonl")
    rows, number = [], 0
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append((number, json.loads(line)))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8
        raise UserError(f"{path} line {number} is not JSON: {error}") from error
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror}") from error
    if not rows:
        raise UserError(f"data file {path} is empty")
    return rows
