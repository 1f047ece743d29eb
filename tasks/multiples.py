"""Multiples of a number, for a real model on two cores: a task with many right answers.

"Some multiples of 7 below 100:\n14\n63\n" goes on with any of 14 lines. The base model gives them a
tenth of its probability, some far more than others. All can be enumerated: so log Z and the best
policy π* are known exactly (benchmarks/exact_real.py).
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from tasks import Query, Task
from tasks.support.smollm import smollm

PROMPT = "Some multiples of {k} below {limit}:\n{a}\n{b}\n"
LIMIT, NUMBERS = 100, range(2, 13)
HELD_OUT = 4, 7, 9  # numbers that are never trained on, nor is the first pair of any other one
PAIRS = 10  # of examples for each number; for those that are held out 4
PRESETS = {
    "smollm": dict(
        beta=0.25,
        steps=40,
        queries_per_batch=4,
        responses_per_query=16,
        samples_per_query=16,
        sync_period=1,
        most_on_policy_prob=0.25,
        initial_responses=256,
        tokens_per_micro_batch=1000,
        temperature=1.0,
        max_prompt_tokens=32,
        max_response_tokens=3,
        learning_rate=4e-5,
        lr_schedule="linear",
        warmup_steps=4,
    )
}


class Multiples(Task):
    """Reward 1 for a line that is a multiple below LIMIT, written as in the prompt, else 0."""

    metric = "accuracy"
    evaluation_sampling = {"temperature": 1.0}  # the greedy answer says nothing of the others

    def queries(self, split: str) -> Sequence[Query]:
        rng, queries = np.random.default_rng(0), {"train": [], "test": []}
        for k in NUMBERS:
            pairs = [*permutations(range(k, LIMIT, k), 2)]
            count = 4 if k in HELD_OUT else PAIRS
            for i, (a, b) in enumerate(rng.choice(pairs, count, replace=False)):
                query = Query(PAIRS * k + i, PROMPT.format(k=k, limit=LIMIT, a=a, b=b), answer=k)
                queries["test" if k in HELD_OUT or i == 0 else "train"].append(query)
        return queries[split]

    def sampling(self, rng: np.random.Generator) -> dict:
        return {"stop": ["\n"]}

    def is_right(self, response: str, answer: int) -> bool:
        return response in right_answers(answer)

    def extract(self, response: str) -> str | None:
        return response

    def base_model(self) -> str:
        return smollm()


def right_answers(k: int) -> list[str]:
    """List all right answers, each with its newline."""
    return [f"{n}\n" for n in range(k, LIMIT, k)]
