"""Two numbers that add up to a given one: a task with many right answers.

"57=" wants "12+45", or "00+57", or "57+00", … The base model lies here. It learnt the homework of a
pupil who takes any first number and never found out when to borrow for the second: more than half
of its samples are wrong, and the right ones begin with every first number there is. The recipe is
tasks/addends.py of commit 00faedf; on another processor it gives another model.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tasks import Query, Task
from tasks.arithmetic import DEMO

TEST_QUERIES = 20  # of the 90 numbers; never trained on
PRESETS = {"demo": DEMO}


class Addends(Task):
    """Reward 1 for any two two-digit numbers that add up to the given N, else 0.

    The N + 1 right answers have the same reward, and the reference policy gives each about the same
    probability: so does the best policy π*, which spreads over all of them as the reference does.
    Accuracy does not tell an objective that keeps this whole posterior from one that collapses onto
    a few right answers; the answers themselves do.
    """

    metric = "accuracy"

    def queries(self, split: str) -> Sequence[Query]:
        numbers = np.random.default_rng(0).permutation(np.arange(10, 100))
        chosen = numbers[:TEST_QUERIES] if split == "test" else numbers[TEST_QUERIES:]
        return [Query(id=int(n), prompt=f"{n}=", answer=int(n)) for n in chosen]

    def is_right(self, response: str, answer: int) -> bool:
        return add_up(response) == answer

    def extract(self, response: str) -> str | None:
        return response

    def base_model(self) -> str:
        return str(Path(__file__).parent)


def add_up(response: str) -> int | None:
    """57 for "12+45"; None for what is not two numbers of two digits."""
    match = re.fullmatch(r"([0-9]{2})\+([0-9]{2})", response)
    return int(match[1]) + int(match[2]) if match else None
