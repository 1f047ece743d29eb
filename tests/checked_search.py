"""A searcher without a model: its groups carry checksums, and it checks the weights it reads.

For tests of what is torn or lost on the way. Weights of version v are v in every number.
"""

import sys
import time
import zlib

import numpy as np

from rollouts import Group, make_tokens
from runtime.child import GIVE_UP
from tasks import load_task

SECONDS = 0.01  # a group
RESPONSES, TOKENS = 24, 500


def run(config, rank, weights, outgoing, status, run_dir) -> None:
    """Send groups of random tokens; group.prompt holds what the test looks at."""
    from searcher import QueryShare  # in this process alone: it imports vLLM

    name, queries = f"searcher {rank}", load_task(config.task).queries("train")
    share = QueryShare(config, queries, rank, int(status.get(name, "cursor")))
    rng, version, were_whole = np.random.default_rng(), -1, True
    status.mark_ready(name)
    while not status.stop:
        status.beat(name)
        if weights.version > version:
            with weights.read(rank) as (version, tensors):
                were_whole &= all(bool((tensor == version).all()) for tensor in tensors.values())
            status.set(name, "version", version)
        if version >= 0:
            group, ids = share.draw(), rng.integers(0, 1000, RESPONSES * TOKENS)
            tokens = make_tokens(ids, ref_logprob=ids, behavior_logprob=ids)
            facts = [config.seed >> 1, group.visit, were_whole, checksum(tokens)]
            outgoing.put(make_group(group.query_id, version, facts, tokens))
            share.end(group)
            status.set(name, "cursor", share.cursor)
            status.add(name, "tokens", len(tokens))
        time.sleep(SECONDS)
    outgoing.cancel_join_thread()


def give_up(*_) -> None:
    """Fail as a searcher that would fail again."""
    sys.exit(GIVE_UP)


def checksum(tokens: np.ndarray) -> int:
    return zlib.crc32(tokens.tobytes()) >> 1


def make_group(query: int, version: int, facts: list[int], tokens: np.ndarray) -> Group:
    own = dict(last_version=version, temperature=1.0, lengths=np.full(RESPONSES, TOKENS, np.int32))
    outcome = dict(rewards=np.zeros(RESPONSES, np.float32), finished=np.ones(RESPONSES, bool))
    where = dict(query_id=query, prompt=np.array(facts, np.int32), version=version)
    return Group(tokens=tokens, **where, **own, **outcome)
