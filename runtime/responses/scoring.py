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

import numpy as np
from pebble import ProcessExpired, ProcessPool

from config import Config
from runtime.modes.free_running import Rollout
from runtime.processes import children
from runtime.transport.board import Board
from tasks import Query, Task, load_task

WORKERS = 2  # processes per searcher
LATE = TimeoutError, ProcessExpired, MemoryError  # too long, or its worker died, or nearly
SCORES_WATCHED = 100  # more than half of the latest this many groups without scores end the run


class RewardScorer:
    """add() rollouts that are to be scored, take() those that have been."""

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
        self.waiting: list[tuple[Rollout, list[Future]]] = []
        self.scored: list[Rollout] = []

    def add(self, rollouts: list[Rollout]) -> None:
        if self.pool:
            for rollout in rollouts:
                seconds = self.task.score_timeout
                futures = [
                    self.pool.schedule(_score, args=(rollout.query, *response), timeout=seconds)
                    for response in zip(rollout.texts, rollout.finished)
                ]
                self.waiting.append((rollout, futures))
            return
        queries = [rollout.query for rollout in rollouts for _ in rollout.texts]
        texts = [text for rollout in rollouts for text in rollout.texts]
        finished = [is_finished for rollout in rollouts for is_finished in rollout.finished]
        try:  # one call for all
            rewards = iter(score(self.task, queries, texts, finished))
            for rollout in rollouts:
                rollout.rewards = np.array([next(rewards) for _ in rollout.texts])
        except Exception as error:
            if len(rollouts) > 1:  # again one by one, so that a bad query takes no other with it
                for rollout in rollouts:
                    self.add([rollout])
                return
            rollouts[0].error = error
        self.scored += rollouts

    def reply(self, query: Query, turns: list[str]) -> Future:
        """Ask the environment for its reply, where score() runs, with the same limit of time."""
        if self.pool:
            limit = self.task.score_timeout
            return self.pool.schedule(_reply, args=(query, turns), timeout=limit)
        future = Future()
        try:
            future.set_result(self.task.reply(query, turns))
        except Exception as error:
            future.set_exception(error)
        return future

    def take(self) -> list[Rollout]:
        """Return what has been scored since the last call, each with its rewards or its error."""
        scored, waiting, self.scored, self.waiting = self.scored, self.waiting, [], []
        for rollout, futures in waiting:
            if all(future.done() for future in futures):  # once: another thread completes them
                self._reward(rollout, futures)
                scored.append(rollout)
            else:
                self.waiting.append((rollout, futures))
        return scored

    def _reward(self, rollout: Rollout, futures: list[Future]) -> None:
        """Give a rollout its rewards, or the error of the first response without one."""
        rewards = []
        for future in futures:
            error = future.exception()
            if isinstance(error, LATE) and self.task.late_score is not None:
                logging.warning("late score of a response to query %d: %r", rollout.query.id, error)
                rewards.append(self.task.late_score)
            elif error:
                rollout.error = error
                return
            else:
                rewards.append(future.result())
        rollout.rewards = np.array(rewards, np.float32)

    def close(self) -> None:
        """End the worker processes. Their locks go with this process, unless it is killed."""
        if self.pool:
            self.pool.stop()
            self.pool.join()


def score(task: Task, queries: list[Query], texts: list[str], finished: list[bool]) -> np.ndarray:
    """(N,) finite float32 for N responses, each to the query beside it.

    Raises whatever task.score() raises, and ValueError for anything else than N finite numbers.
    """
    scores = np.array(task.score(queries, texts, finished), np.float32)
    if scores.shape != (len(texts),) or not np.isfinite(scores).all():
        raise ValueError(
            f"score() must give {len(texts)} finite numbers for as many responses, "
            f"it gave {scores!r}"
        )
    return scores


class FailureLimit:
    """Counts groups without scores on the board, and ends the process when there are too many."""

    def __init__(self, board: Board, name: str):
        self.board, self.name = board, name
        self.failures: deque[bool] = deque(maxlen=SCORES_WATCHED)  # of the latest groups

    def count(self, rollout: Rollout) -> None:
        """Count a rollout that was scored.

        It has an error if score() or reply() raised, took too long, or gave something else.
        """
        self.failures.append(rollout.error is not None)
        if rollout.error is None:
            return
        self.board.add(self.name, "unscored_groups", 1)
        query_id = rollout.query.id
        logging.error("query %d is dropped, it got no scores", query_id, exc_info=rollout.error)
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
    return float(score(_task, [query], [text], [finished])[0])


def _reply(query: Query, turns: list[str]) -> str | None:
    return _task.reply(query, turns)
