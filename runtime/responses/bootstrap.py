"""Means and their 95 % intervals, by the bootstrap over test queries."""

import numpy as np

RESAMPLES = 1000


def mean_of(values: np.ndarray) -> float:
    """Mean of (N,) values, or of (N, N) over the pairs of two different rows."""
    return float(weighted_means(values, np.ones((1, len(values))))[0])


def interval(
    values: np.ndarray, query_ids: list[int] | None = None, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """95 % percentile bootstrap over the queries. query_ids: of the N rows; None: a query each."""
    ids = range(len(values)) if query_ids is None else query_ids
    queries, query_of_row = np.unique(ids, return_inverse=True)
    shares = np.full(len(queries), 1 / len(queries))
    # How often each query is drawn: (resamples, queries); each of its rows as often.
    drawn = np.random.default_rng(0).multinomial(len(queries), shares, size=resamples)
    counts = drawn[:, query_of_row]
    return tuple(np.quantile(weighted_means(values, counts), [0.025, 0.975]).tolist())


def weighted_means(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(R,) means for R samples of the N rows, in which row i occurs counts[r, i] times.

    values: (N,), or (N, N) for pairs; a row is no pair with a copy of itself.
    """
    if values.ndim == 1:
        return counts @ values / counts.sum(axis=1)
    pairs = values - np.diag(np.diag(values))
    num_pairs = counts.sum(axis=1) ** 2 - (counts**2).sum(axis=1)
    return np.einsum("ri,ri->r", counts @ pairs, counts) / num_pairs
