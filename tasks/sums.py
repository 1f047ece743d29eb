"""Sums, for a real chat model on two cores.

"What is 8 + 6? Answer with a number only." SmolLM2-135M-Instruct gets a quarter right: it talks of
how to add, or adds wrong.
"""

from collections.abc import Sequence

import numpy as np

from tasks import Query, Task
from tasks.support.numbers import last_number, plain
from tasks.support.smollm import smollm

SYSTEM = "You are a calculator."  # or the template would put a longer one there
# 33 tokens and more: the first 32 fill a block of vLLM's cache, which the responses share.
PROMPT = "What is {a} + {b}? Answer with a number only."
LARGEST = 15  # of a number that is added
TEST_QUERIES = 75  # of the 225 sums; never trained on
# The gradient is not clipped to 1: its norm is 30 if a batch says little and 800 if it says much.
COMMON = dict(
    beta=0.1,
    steps=50,
    queries_per_batch=8,
    responses_per_query=8,
    tokens_per_micro_batch=700,
    checkpoint_every=0,
    temperature=0.9,
    max_prompt_tokens=64,
    max_response_tokens=12,
    learning_rate=1.2e-5,
    lr_schedule="warmup_stable_decay",
    warmup_steps=5,
    stable_steps=15,
    decay_steps=30,
)
PRESETS = {
    # As in the paper: with a replay buffer, and the trainer waits for nobody. The searcher has no
    # more than a batch in flight: else what it finds would be a step older.
    "smollm_replay": COMMON
    | dict(sync_period=1, samples_per_query=8, initial_responses=64, search_ahead=1)
    | dict(steps=60, decay_steps=40, max_grad_norm=200.0),  # the norm has outliers of 1,800
    # One version makes each batch, which is trained on one step later: both cores are busy, and no
    # response is older.
    "smollm": COMMON | dict(constant_staleness=1),
}


class Sums(Task):
    """Reward 1 if a response ends with the right number, else 0."""

    metric = "accuracy"

    def queries(self, split: str) -> Sequence[Query]:
        queries = []
        for i in np.random.default_rng(0).permutation(LARGEST**2).tolist():
            a, b = i // LARGEST + 1, i % LARGEST + 1
            messages = {"system": SYSTEM, "user": PROMPT.format(a=a, b=b)}
            prompt = [{"role": role, "content": text} for role, text in messages.items()]
            queries.append(Query(i, prompt, answer=str(a + b)))
        return queries[:TEST_QUERIES] if split == "test" else queries[TEST_QUERIES:]

    def extract(self, response: str) -> str | None:
        return plain(last_number(response))

    def base_model(self) -> str:
        return smollm()
