"""Means and their 95 % intervals, by the bootstrap over test queries."""

import numpy as np

RESAMPLES = 1000


def mean_of(values: np.ndarray) -> float:
    """Mean of (N,) values, or of (N, N) over the pairs of two different rows."""
    return float(weighted_means(values, np.ones((1, len(values))))[0])


def interval(
    values: np.ndarray, rows_per_query: int = 1, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """95 % percentile bootstrap over the queries; the N rows of one query are contiguous."""
    queries = len(values) // rows_per_query
    shares = np.full(queries, 1 / queries)
    # How often each query is drawn: (resamples, queries); each of its rows as often.
    drawn = np.random.default_rng(0).multinomial(queries, shares, size=resamples)
    counts = drawn.repeat(rows_per_query, axis=1)
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
