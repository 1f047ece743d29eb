"""A policy taught by a pupil who makes mistakes: the base model of the tasks about numbers.

What is left for reinforcement learning is to find out which of its habits are rewarded.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tasks import Query
from tasks.support.cache import cached

CHARACTERS = "0123456789+="


def pupil(
    name: str,
    queries: Sequence[Query],
    homework: Callable[[Query, np.random.Generator], str],
    steps: int = 400,
    tokens: Sequence[str] = CHARACTERS,
) -> str:
    """Return the directory of a model that answers these queries as the pupil does.

    name: of the task; homework: the pupil's answer to a query; steps: of supervised training;
    tokens: that prompts and answers consist of; one that others begin with comes after them.
    """

    def examples(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        chosen = [queries[i] for i in rng.integers(len(queries), size=count)]
        return [(query.prompt, homework(query, rng)) for query in chosen]

    def build(directory: Path) -> None:
        # Not at the top: slow to import, and needed once.
        from tasks.support.pretraining import train_policy, word_tokenizer

        tokenizer = word_tokenizer(tokens, phrases=tokens)
        train_policy(examples, tokenizer, directory, steps, batch=256)

    lesson = examples(1000, np.random.default_rng(0))
    return str(cached(name, repr((lesson, steps)), build))
