"""Scoring: task.score(), checked. A task that sets score_timeout is scored in worker processes, so that a response on which its score() takes for
ever, or crashes, costs no more than its query.
"""

import multiprocessing
import signal
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
from pebble import ProcessPool

import processes
from config import Config
from tasks import Query, Task, load_task

WORKERS = 2  # processes per searcher


@dataclass
class Unscored:
    """Responses to one query."""

    owner: object  # to whom the scores are of interest
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
            # Workers are forked from a server that has imported all this: one that was killed is replaced at once.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            self.pool = ProcessPool(
                WORKERS, context=context, initializer=_begin, initargs=(config.task, config.options)
            )
        self.waiting: list[tuple[Unscored, Future]] = []  # for a worker
        self.scored: list[tuple[Unscored, np.ndarray | Exception]] = []

    def add(self, groups: list[Unscored]) -> None:
        if self.pool:
            for group in groups:
                alone = replace(
                    group, owner=None
                )  # a worker need not have what the owner is made of
                self.waiting.append(
                    (
                        group,
                        self.pool.schedule(_score, args=(alone,), timeout=self.task.score_timeout),
                    )
                )
            return
        try:  # one call for all
            flat = score(self.task, groups)
            self.scored += zip(
                groups, np.split(flat, np.cumsum([len(group.texts) for group in groups])[:-1])
            )
        except Exception as error:
            if len(groups) == 1:
                self.scored.append((groups[0], error))
            else:  # again one by one, so that a bad query takes no other with it
                for group in groups:
                    self.add([group])

    def take(self) -> list[tuple[Unscored, np.ndarray | Exception]]:
        """What has been scored since the last call: each with its (S,) rewards, or with why it has none."""
        scored, waiting, self.scored, self.waiting = self.scored, self.waiting, [], []
        for group, future in waiting:
            if future.done():  # asked once: another thread completes it
                scored.append((group, future.exception() or future.result()))
            else:
                self.waiting.append((group, future))
        return scored


def score(task: Task, groups: list[Unscored]) -> np.ndarray:
    """(N,) finite float32, N responses in all. Raises whatever task.score() raises, and ValueError for anything else than N finite numbers."""
    queries = [group.query for group in groups for _ in group.texts]
    texts, finished = (
        sum((group.texts for group in groups), []),
        sum((group.finished for group in groups), []),
    )
    scores = np.array(task.score(queries, texts, finished), np.float32)
    if scores.shape != (len(texts),) or not np.isfinite(scores).all():
        raise ValueError(
            f"score() must give {len(texts)} finite numbers for as many responses, it gave {scores!r}"
        )
    return scores


def _begin(task: str, options: dict) -> None:
    """A worker's start."""
    global _task
    processes.die_with_parent()
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, processes.SIGNALS
    )  # which the searcher has blocked: SIGTERM is how a worker is stopped
    _task = load_task(task, **options)
    _task.load()


def _score(group: Unscored) -> np.ndarray:
    return score(_task, [group])
