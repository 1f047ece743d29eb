"""Measure what it costs to add to the replay buffer and to sample from it.

The buffer holds 1,000 to 1,000,000 responses of 512 tokens.

    python benchmarks/buffer_ops.py             # a minute, 9 GB of memory at 1,000,000
    python benchmarks/buffer_ops.py --quick     # up to 100,000

add       one group of 24 responses, for a query that is full (four groups), so that as many leave
sample    7 queries x 20 responses, half of the queries from the latest sync (of two groups)
copy      the bytes of one group copied once

Medians of 500 calls.
Writes benchmarks/results/buffer_ops.md; with --quick benchmarks/results/quick/.
"""

import sys
import time

import numpy as np
from common import arguments, save, table

from buffer import Group, ReplayBuffer

RESPONSES, TOKENS, QUERIES, PROMPT = 24, 512, 7, 70
CALLS = 500
GROUPS = 4  # a query holds
SIZES = (1_000, 10_000, 100_000, 1_000_000)  # responses


def group(query: int, rng: np.random.Generator) -> Group:
    """Make a group of random tokens and rewards."""
    size = RESPONSES * TOKENS
    return Group(
        query_id=query,
        version=0,
        last_version=0,
        reference_version=0,
        batch=None,
        prompt=np.zeros(PROMPT, np.int32),
        lengths=np.full(RESPONSES, TOKENS, np.int32),
        tokens=rng.integers(0, 32_000, size, dtype=np.int32),
        ref_logprobs=np.zeros(size, np.float32),
        behavior_logprobs=np.zeros(size, np.float32),
        rewards=rng.integers(0, 2, RESPONSES).astype(np.float32),
        finished=np.ones(RESPONSES, bool),
        temperature=1.0,
    )


def main() -> None:
    quick = arguments(__doc__).quick
    rng = np.random.default_rng(0)
    buffer, lines, step = ReplayBuffer(GROUPS * RESPONSES, 0.0, seed=0), [], 0
    first = None
    for size in SIZES[:3] if quick else SIZES:
        for query in range(len(buffer.all), size // (GROUPS * RESPONSES)):
            buffer.add([group(query, rng) for _ in range(GROUPS)], step)
        times = np.empty((3, CALLS))
        for i in range(CALLS):
            found = [group(int(rng.integers(len(buffer.all))), rng) for _ in range(2)]
            step += 1
            start = time.perf_counter()
            buffer.add(found, step)
            added = time.perf_counter()
            rows = buffer.sample(QUERIES, 20, 0.5)
            sampled = time.perf_counter()
            for array in found[0].tokens, found[0].ref_logprobs, found[0].behavior_logprobs:
                array.copy()
            times[:, i] = (added - start) / 2, sampled - added, time.perf_counter() - sampled
            assert len(rows) == QUERIES * 20
        medians = np.median(times, axis=1) * 1000
        first = medians if first is None else first
        milliseconds = [f"{value:.3f}" for value in medians]
        ratios = [f"{value:.2f}" for value in medians[:2] / first[:2]]
        lines.append([f"{buffer.responses:,}", *milliseconds, *ratios])
    header = [
        "responses held",
        "add a group, ms",
        "sample, ms",
        "copy of a group's bytes, ms",
        "add, times the first",
        "sample, times the first",
    ]
    save(
        "buffer_ops",
        quick,
        f"A group: {RESPONSES} responses of {TOKENS} tokens. A sample: {QUERIES} x 20 responses.",
        table(header, lines),
    )


if __name__ == "__main__":
    sys.exit(main())
