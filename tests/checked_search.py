"""A searcher without a model: its groups carry checksums, and it checks the weights it reads.

For tests of what is torn or lost on the way. Weights of version v are v in every number.
"""

import sys
import time
import zlib

import numpy as np

from buffer import Group
from rollouts import Workload
from runtime.child import GIVE_UP
from tasks import load_task

SECONDS = 0.01  # a group
RESPONSES, TOKENS = 24, 500


def run(config, share, pin, name, weights, rollout_queue, status, run_dir) -> None:
    """Send groups of random tokens; group.prompt holds what the test looks at."""
    queries = load_task(config.task).queries("train")
    cursor = int(status.get(name, "cursor"))
    workload = Workload(config, queries, share, cursor, weights)
    rng, version, were_whole = np.random.default_rng(), -1, True
    status.mark_ready(name)
    while not status.stop:
        status.beat(name)
        if weights.version > version:
            with weights.read(pin) as (version, tensors):
                were_whole &= all(bool((tensor == version).all()) for tensor in tensors.values())
            status.set(name, "version", version)
        if version >= 0 and (rollout := workload.draw()):
            tokens = rng.integers(0, 1000, RESPONSES * TOKENS, dtype=np.int32)
            facts = [config.seed >> 1, rollout.visit, were_whole, checksum(tokens)]
            rollout_queue.put(make_group(rollout.query.id, version, facts, tokens))
            workload.complete(rollout)
            status.set(name, "cursor", workload.cursor)
            status.add(name, "tokens", len(tokens))
        time.sleep(SECONDS)
    rollout_queue.cancel_join_thread()


def give_up(*_) -> None:
    """Fail as a searcher that would fail again."""
    sys.exit(GIVE_UP)


def checksum(tokens: np.ndarray) -> int:
    return zlib.crc32(tokens.tobytes()) >> 1


def make_group(query: int, version: int, facts: list[int], tokens: np.ndarray) -> Group:
    prompt, lengths = np.array(facts, np.int32), np.full(RESPONSES, TOKENS, np.int32)
    arrays = prompt, lengths, tokens, *(tokens.astype(np.float32) for _ in range(2))
    outcome = np.zeros(RESPONSES, np.float32), np.ones(RESPONSES, bool)
    return Group(query, version, version, 0, None, *arrays, *outcome, 1.0)
