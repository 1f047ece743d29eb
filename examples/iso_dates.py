"""A task of your own with a regular expression for a reward: write a date the ISO way.

"7 March 2021 = " wants "2021-03-07".

    python tba.py examples/iso_dates.py --model Qwen/Qwen2.5-0.5B
"""

import re
from collections.abc import Sequence
from datetime import date, timedelta

from tasks import Query, Task

SHOTS = "1 May 2019 = 2019-05-01\n23 December 2004 = 2004-12-23\n"
ISO = re.compile(r"\s*(\d{4}-\d{2}-\d{2})\b")
PRESETS = {"short": dict(max_response_tokens=16)}


class IsoDates(Task):
    """1 for the right date, 0.2 for any date in the right form, else 0."""

    metric = "reward"

    def queries(self, split: str) -> Sequence[Query]:
        # Every day of fifty years; every tenth is for testing.
        days = [date(1980, 1, 1) + timedelta(days=i) for i in range(50 * 365)]
        chosen = [day for i, day in enumerate(days) if (i % 10 == 0) == (split == "test")]
        return [
            Query(
                id=day.toordinal(),
                prompt=f"{SHOTS}{day.day} {day:%B %Y} = ",
                answer=day.isoformat(),
            )
            for day in chosen
        ]

    def score(
        self, queries: list[Query], responses: list[str], finished: list[bool]
    ) -> list[float]:
        return [
            0.0 if (found := self.extract(r)) is None else 1.0 if found == q.answer else 0.2
            for q, r in zip(queries, responses)
        ]

    def extract(self, response: str) -> str | None:
        match = ISO.match(response)
        return match[1] if match else None
