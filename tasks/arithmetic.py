"""Addition of two-digit numbers: small enough to watch TBA learn on a laptop. "07+58=" wants "065".

The base model is made here in seconds, by supervised training on the homework of a pupil who
forgets most carries. It can add, but it would rather not carry: its samples hold the right answer,
its greedy answer to a sum with a carry is wrong. What is left for reinforcement learning is to find
out which of its habits are rewarded.
"""

from collections.abc import Sequence

import numpy as np

from tasks import Query, Task

FORGETS = 0.65  # probability that the pupil forgets a carry
TEST_QUERIES = 1000  # of the 10,000 sums; never trained on, neither here nor by reinforcement
# For a base model of 130,000 parameters that adds numbers, on a machine without a GPU. Other tasks
# have it too.
DEMO = dict(
    beta=0.1,
    steps=2000,
    queries_per_batch=32,
    responses_per_query=8,
    samples_per_query=12,
    tokens_per_micro_batch=4000,
    sync_period=2,
    most_on_policy_prob=0.25,
    initial_responses=2000,
    eval_every=400,
    checkpoint_every=1000,
    temperature=1.0,
    max_prompt_tokens=16,
    max_response_tokens=8,
    learning_rate=5e-4,
    lr_schedule="linear",
    warmup_steps=10,
    max_grad_norm=1.0,
)
PRESETS = {"demo": DEMO}


class Arithmetic(Task):
    """Reward 1 for the right sum, else 0."""

    metric = "accuracy"

    def queries(self, split: str) -> Sequence[Query]:
        sums = np.random.default_rng(0).permutation(10_000)
        chosen = sums[:TEST_QUERIES] if split == "test" else sums[TEST_QUERIES:]
        pairs = [divmod(int(i), 100) for i in chosen]
        return [Query(100 * a + b, f"{a:02}+{b:02}=", answer=f"{a + b:03}") for a, b in pairs]

    def extract(self, response: str) -> str | None:
        return response

    def base_model(self) -> str:
        from tasks.support.pretraining import pupil

        return pupil("arithmetic", self.queries("train"), homework)


def homework(query: Query, rng: np.random.Generator) -> str:
    """The pupil's answer: digit by digit from the right, forgetting carries."""
    a, b = divmod(query.id, 100)
    tens, units = a // 10 + b // 10, a % 10 + b % 10
    tens += units > 9 and rng.random() > FORGETS
    hundreds = tens > 9 and rng.random() > FORGETS
    return f"{int(hundreds)}{tens % 10}{units % 10}"
