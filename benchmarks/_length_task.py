"""A task that rewards the counting model of common.py for responses of 200 tokens.

The reward of a response is 1 at that length, and less the further its length is from it.
"""

from tasks import Query, Task

WANTED = 200  # tokens, end-of-sequence included


class Length(Task):
    metric = "reward"

    def queries(self, split: str) -> list[Query]:
        count = 100 if split == "train" else 4
        return [Query(id=i, prompt=f"Count, starting with {i}.", answer=None) for i in range(count)]

    def score(
        self, queries: list[Query], responses: list[str], finished: list[bool]
    ) -> list[float]:
        return [1.0 - abs(response.count("⟨") + 1 - WANTED) / WANTED for response in responses]
