"""Scoring: task.score(), checked."""

import logging
import sys
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from config import Config, extra
from runtime.child import GIVE_UP
from runtime.transport.status import StatusTable
from tasks import Query, Task

if TYPE_CHECKING:  # score workers import this file
    from rollouts import Rollout

SCORES_WATCHED = 100  # more than half of the latest this many groups without scores end the run


class RewardScorer:
    """add() rollouts that are to be scored, take() those that have been."""

    def __init__(self, task: Task):
        self.task = task
        self.waiting: list[tuple[Rollout, list[Future]]] = []  # for worker processes
        self.scored: list[Rollout] = []

    def add(self, rollouts: list["Rollout"]) -> None:
        """Score all in one call; if it raises, one by one, so that only the bad query is lost."""
        error = self._score(rollouts)
        for rollout in rollouts if error else ():
            rollout.error = self._score([rollout]) if len(rollouts) > 1 else error
        self.scored += rollouts

    def _score(self, rollouts: list["Rollout"]) -> Exception | None:
        """Give rollouts their rewards. Returns what score() raises, if it does."""
        queries = [rollout.query for rollout in rollouts for _ in rollout.texts]
        texts = [text for rollout in rollouts for text in rollout.texts]
        finished = [is_finished for rollout in rollouts for is_finished in rollout.finished]
        try:
            rewards = iter(score(self.task, queries, texts, finished))
        except Exception as error:
            return error
        for rollout in rollouts:
            rollout.rewards = np.array([next(rewards) for _ in rollout.texts])

    def reply(self, query: Query, turns: list[str]) -> Future:
        """Ask the environment for its reply, which comes at once: score() runs here, too."""
        future = Future()
        try:
            future.set_result(self.task.reply(query, turns))
        except Exception as error:
            future.set_exception(error)
        return future

    def take(self) -> list["Rollout"]:
        """Return what has been scored since the last call, each with its rewards or its error."""
        scored, self.scored = self.scored, []
        return scored

    def close(self) -> None:
        """End worker processes: here are none."""


def make_scorer(config: Config, task: Task) -> RewardScorer:
    """Make the scorer that the task wants: in worker processes where it limits their time."""
    if task.score_timeout is None:
        task.load()
        return RewardScorer(task)
    return extra("score_workers").ScoreWorkers(config, task)


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
    """Counts groups without scores, and ends the process when there are too many."""

    def __init__(self, status: StatusTable, name: str):
        self.status, self.name = status, name
        self.failures: deque[bool] = deque(maxlen=SCORES_WATCHED)  # of the latest groups

    def count(self, rollout: "Rollout") -> None:
        """Count a rollout that was scored.

        It has an error if score() or reply() raised, took too long, or gave something else.
        """
        self.failures.append(rollout.error is not None)
        if rollout.error is None:
            return
        self.status.add(self.name, "unscored_groups", 1)
        query_id = rollout.query.id
        logging.error("query %d is dropped, it got no scores", query_id, exc_info=rollout.error)
        failed, watched = sum(self.failures), len(self.failures)
        if failed > SCORES_WATCHED / 2:
            logging.error("%d of the latest %d groups got no scores: the run ends", failed, watched)
            sys.exit(GIVE_UP)
