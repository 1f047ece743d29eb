"""Scoring in worker processes, for a task that sets score_timeout.

If score() hangs or crashes, its query is dropped; with late_score only that response is affected.
"""

import logging
import multiprocessing.util
import signal
from concurrent.futures import Future

import numpy as np
from pebble import ProcessExpired, ProcessPool

from config import Config, UserError, users_code
from rollouts import Group
from runtime.child import die_with_parent
from runtime.responses.scoring import RewardScorer, score
from tasks import Query, Task, load_models, load_task

WORKERS = 2  # processes per searcher
LATE = TimeoutError, ProcessExpired, MemoryError  # too long, or its worker died, or nearly


class ScoreWorkers(RewardScorer):
    """Has each response scored by one of a few processes, each within its limit of time."""

    def __init__(self, config: Config, task: Task):
        super().__init__(task)
        # Forked from a server that has imported all this: a killed one is replaced at once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        arguments = config.task, config.options
        self.pool = ProcessPool(WORKERS, context=context, initializer=_begin, initargs=arguments)
        # However this process ends: it would wait for its workers for ever.
        multiprocessing.util.Finalize(None, self.close, exitpriority=0)

    def add(self, groups: list[Group]) -> None:
        for group in groups:
            responses = zip(group.texts, group.finished.tolist())
            futures = [self._schedule(_score, group.query, *each) for each in responses]
            self.waiting.append((group, futures))

    def _schedule(self, function, *arguments) -> Future:
        return self.pool.schedule(function, args=arguments, timeout=self.task.score_timeout)

    def reply(self, query: Query, turns: list[str]) -> Future:
        return self._schedule(_reply, query, turns)

    def take(self) -> list[Group]:
        scored, waiting, self.waiting = super().take(), self.waiting, []
        for group, futures in waiting:
            if all(future.done() for future in futures):  # once: another thread completes them
                self._reward(group, futures)
                scored.append(group)
            else:
                self.waiting.append((group, futures))
        return scored

    def _reward(self, group: Group, futures: list[Future]) -> None:
        """Give a group its rewards, or the error of the first response without one."""
        rewards = []
        for future in futures:
            error = future.exception()
            if isinstance(error, LATE) and self.task.late_score is not None:
                logging.warning("late score of a response to query %d: %r", group.query.id, error)
                rewards.append(self.task.late_score)
            elif error:
                group.error = error
                return
            else:
                rewards.append(future.result())
        group.rewards = np.array(rewards, np.float32)

    def close(self) -> None:
        """End the worker processes. Their locks go with this process, unless it is killed."""
        self.pool.stop()
        self.pool.join()


def _begin(task: str, options: dict) -> None:
    """Start a worker. Where load() fails it says so for each response: pebble would only end it."""
    global _task, _failure
    die_with_parent()
    # The searcher has these blocked; SIGTERM is how a worker is stopped.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _task = _failure = None
    try:
        _task = load_task(task, **options)
        load_models(_task)
    except UserError as error:
        _failure = error


def _loaded() -> Task:
    """Return the task. Raises what its load() raised."""
    if _failure:
        raise _failure
    return _task


def _score(query: Query, text: str, finished: bool) -> float:
    task = _loaded()
    try:
        return float(score(task, [query], [text], [finished])[0])
    except UserError as error:
        if isinstance(error.__cause__, LATE):
            raise TimeoutError(str(error)) from error
        raise


def _reply(query: Query, turns: list[str]) -> str | None:
    task = _loaded()
    with users_code("reply()"):
        return task.reply(query, turns)
