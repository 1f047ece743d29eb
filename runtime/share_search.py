"""A searcher process whose work is the shares of the queries that its node deals to it (--ray)."""

import dataclasses

import torch.multiprocessing

from config import Config
from runtime.node import NodeBoard
from runtime.shares import SharesWorkload
from searcher import Searcher
from weights import SharedWeights


def run(
    config: Config,
    rank: int,
    pin: int,
    row: str,
    weights: SharedWeights,
    rollout_queue: torch.multiprocessing.Queue,
    board: NodeBoard,
    run_dir: str,
) -> None:
    """Search as searcher.run does, with that work. rank: which searcher of the node it is."""
    # Other nodes have a searcher of this rank too: its samples have a seed of their own.
    own = dataclasses.replace(config, seed=board.seed)
    searcher = Searcher(own, rank, pin, row, weights, rollout_queue, board, run_dir)
    queries = searcher.task.queries("train")
    searcher.workload = SharesWorkload(queries, board.shares, rank, config.seed)
    searcher.search()
    searcher.scorer.close()
    rollout_queue.cancel_join_thread()
