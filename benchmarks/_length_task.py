"""A reward for the counting model of common.py: 1 for a response of 200 tokens, less the further it is from that."""

from tasks import Query, Task

WANTED = 200


class Length(Task):
    metric = "reward"

    def queries(self, split: str) -> list[Query]:
        return [
            Query(id=i, prompt=f"Count, starting with {i}.", answer=None)
            for i in range(100 if split == "train" else 4)
        ]

    def score(
        self, queries: list[Query], responses: list[str], finished: list[bool]
    ) -> list[float]:
        return [1.0 - abs(response.count("⟨") + 1 - WANTED) / WANTED for response in responses]
