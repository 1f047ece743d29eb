"""Scoring: task.score(), checked.

A task that sets score_timeout is scored in worker processes, so that a response on which its
score() hangs, or crashes, costs no more than its query, and with late_score only itself.
"""

import logging
import multiprocessing
import signal
import sys
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from pebble import ProcessExpired, ProcessPool
from transformers import PreTrainedTokenizerBase

from config import Config
from runtime.processes import children
from runtime.transport.board import Board
from tasks import Query, Task, load_task

WORKERS = 2  # processes per searcher
LATE = TimeoutError, ProcessExpired, MemoryError  # too long, or its worker died, or nearly
SCORES_WATCHED = 100  # more than half of the latest this many groups without scores end the run


@dataclass
class Responses:
    """S responses to one query, for score(). sender: whatever their sender knows them by."""

    sender: object
    query: Query
    texts: list[str]
    finished: list[bool]


class Scorer:
    """add() what is to be scored, take() what has been."""

    def __init__(self, config: Config, task: Task):
        self.task = task
        self.pool = None
        if task.score_timeout is None:
            task.load()
        else:
            # Workers are forked from a server that has imported all this: a killed one is replaced
            # at once.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            arguments = config.task, config.options
            self.pool = ProcessPool(
                WORKERS, context=context, initializer=_begin, initargs=arguments
            )
        # For workers, a job for each response.
        self.waiting: list[tuple[Responses, list[Future]]] = []
        self.scored: list[tuple[Responses, np.ndarray | Exception]] = []

    def add(self, groups: list[Responses]) -> None:
        if self.pool:
            for group in groups:
                seconds = self.task.score_timeout
                futures = [
                    self.pool.schedule(_score, args=(group.query, *response), timeout=seconds)
                    for response in zip(group.texts, group.finished)
                ]
                self.waiting.append((group, futures))
            return
        try:  # one call for all
            flat = score(self.task, groups)
            ends = np.cumsum([len(group.texts) for group in groups])
            self.scored += zip(groups, np.split(flat, ends[:-1]))
        except Exception as error:
            if len(groups) == 1:
                self.scored.append((groups[0], error))
            else:  # again one by one, so that a bad query takes no other with it
                for group in groups:
                    self.add([group])

    def take(self) -> list[tuple[Responses, np.ndarray | Exception]]:
        """What has been scored since the last call: each with its (S,) rewards, or its error."""
        scored, waiting, self.scored, self.waiting = self.scored, self.waiting, [], []
        for group, futures in waiting:
            if all(future.done() for future in futures):  # once: another thread completes them
                scored.append((group, self._rewards(group, futures)))
            else:
                self.waiting.append((group, futures))
        return scored

    def _rewards(self, group: Responses, futures: list[Future]) -> np.ndarray | Exception:
        """Return the (S,) rewards of a group, or the error of the first response without one."""
        rewards = []
        for future in futures:
            error = future.exception()
            if isinstance(error, LATE) and self.task.late_score is not None:
                logging.warning("late score of a response to query %d: %r", group.query.id, error)
                rewards.append(self.task.late_score)
            elif error:
                return error
            else:
                rewards.append(future.result())
        return np.array(rewards, np.float32)

    def close(self) -> None:
        """End the worker processes. Their locks go with this process, unless it is killed."""
        if self.pool:
            self.pool.stop()
            self.pool.join()


def decode(tokenizer: PreTrainedTokenizerBase, completions: list) -> tuple[list[str], list[bool]]:
    """Return the texts of vLLM's completions, and whether each ended by itself."""
    tokens = [completion.token_ids for completion in completions]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts, [completion.finish_reason == "stop" for completion in completions]


def score(task: Task, groups: list[Responses]) -> np.ndarray:
    """(N,) finite float32, N responses in all.

    Raises whatever task.score() raises, and ValueError for anything else than N finite numbers.
    """
    queries = [group.query for group in groups for _ in group.texts]
    texts = [text for group in groups for text in group.texts]
    finished = [done for group in groups for done in group.finished]
    scores = np.array(task.score(queries, texts, finished), np.float32)
    if scores.shape != (len(texts),) or not np.isfinite(scores).all():
        raise ValueError(
            f"score() must give {len(texts)} finite numbers for as many responses, "
            f"it gave {scores!r}"
        )
    return scores


class FailureLimit:
    """Counts groups without scores on the board, and ends the process when there are too many."""

    def __init__(self, board: Board, row: str):
        self.board, self.row = board, row
        self.failures: deque[bool] = deque(maxlen=SCORES_WATCHED)  # of the latest groups

    def count_scored(self) -> None:
        self.failures.append(False)

    def count_failed(self, group: Responses, error: Exception) -> None:
        """score() raised, took too long, or gave something other than S finite numbers."""
        self.board.add(self.row, "unscored_groups", 1)
        self.failures.append(True)
        logging.error("query %d is dropped, it got no scores", group.query.id, exc_info=error)
        failed, watched = sum(self.failures), len(self.failures)
        if failed > SCORES_WATCHED / 2:
            logging.error("%d of the latest %d groups got no scores: the run ends", failed, watched)
            sys.exit(children.GIVE_UP)


def _begin(task: str, options: dict) -> None:
    """Start a worker."""
    global _task
    children.die_with_parent()
    # The searcher has these blocked; SIGTERM is how a worker is stopped.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _task = load_task(task, **options)
    _task.load()


def _score(query: Query, text: str, finished: bool) -> float:
    return float(score(_task, [Responses(None, query, [text], [finished])])[0])
