"""Metrics of the final evaluation: the task's own, and of several samples to each test query.

Those are pass@k, and how many different answers there are: diversity is what trajectory balance is
for, and one greedy response cannot show it.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from config import UserError, users_code
from runtime.responses.evaluation import mean_and_interval
from tasks import Query, Task


def evaluate(
    task: Task, queries: list[Query], texts: list, finished: list[bool], scores: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the metrics of N responses, by name: (N,), or (N, N) of pairs.

    Raises UserError for whatever task.evaluate() raises, and for anything else.
    """
    with users_code("evaluate()"):
        metrics, count = task.evaluate(queries, texts, finished, scores), len(texts)
        if not isinstance(metrics, dict):
            raise TypeError(f"it must give metrics by name, it gave {metrics!r:.100}")
        metrics = {name: np.asarray(value, np.float64) for name, value in metrics.items()}
    for name, value in metrics.items():
        if value.shape not in ((count,), (count, count)):
            raise UserError(
                f"evaluate() must give {count} values of {name!r} for as many responses, or "
                f"{count} x {count} of their pairs: it gave an array of shape {value.shape}"
            )
    return metrics


def over_queries(
    ids: Sequence[int], scores: np.ndarray, answers: Sequence[str | None]
) -> dict[str, tuple[float, float, float]]:
    """Return what N responses, several to a query, say together, each with its 95 % interval.

    That is pass@k for k = 1, 2, 4, … and the most that a query has, where scores are 0 or 1; and
    distinct_answers, how many a query has, where the task finds any.
    """
    queries, query_of_response = np.unique(ids, return_inverse=True)
    counts, right = np.bincount(query_of_response), np.bincount(query_of_response, scores)
    values: dict[str, dict[int, float]] = {}
    if np.isin(scores, (0, 1)).all():
        most = int(counts.max())
        for k in sorted({most, *(2**i for i in range(most.bit_length()))}):
            rows = zip(queries.tolist(), counts.tolist(), right.astype(int).tolist())
            values[f"pass@{k}"] = {id: pass_at(k, n, c) for id, n, c in rows if n >= k}
    # A user's extract() may return a list: its repr can be held in a set.
    if found := {(i, repr(answer)) for i, answer in zip(ids, answers) if answer is not None}:
        different = Counter(i for i, _ in found)
        values["distinct_answers"] = {id: different[id] for id in queries.tolist()}
    return {
        name: mean_and_interval(np.array([*of.values()], float), [*of])
        for name, of in values.items()
    }


def pass_at(k: int, samples: int, right: int) -> float:
    """Estimate the probability that one of k samples is right, without bias (arXiv 2107.03374)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
