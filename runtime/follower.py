"""A process of the trainer other than its first (--trainer_processes)."""

from config import Config
from learner import Learner
from models.sharding import Rank
from runtime.planning.memory_trial import try_largest_batch
from runtime.transport.board import Board


def run(config: Config, ranks: Rank, board: Board, row: str) -> None:
    """Repeat what rank 0 calls on its learner."""
    with board.note_failure(row):
        learner = Learner(config, print, ranks)
        try_largest_batch(config, learner, print)
        board.loaded(row)
        ranks.follow(learner, beat=lambda: board.beat(row))
