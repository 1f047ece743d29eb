"""Scoring: task.score(), checked."""

import logging
import sys
from collections import deque
from concurrent.futures import Future

import numpy as np

from config import Config, UserError, users_code
from rollouts import Group
from runtime.child import GIVE_UP
from runtime.transport.status import StatusTable
from tasks import Query, Task, load_models

SCORES_WATCHED = 100  # more than half of the latest this many groups without scores end the run


class RewardScorer:
    """add() groups that are to be scored, take() those that have been."""

    def __init__(self, task: Task):
        self.task = task
        self.waiting: list[tuple[Group, list[Future]]] = []  # for worker processes
        self.scored: list[Group] = []

    def add(self, groups: list[Group]) -> None:
        """Score all in one call; if it raises, one by one, so that only the bad query is lost."""
        error = self._score(groups)
        for group in groups if error else ():
            group.error = self._score([group]) if len(groups) > 1 else error
        self.scored += groups

    def _score(self, groups: list[Group]) -> UserError | None:
        """Give groups their rewards. Returns why they have none, if score() fails."""
        queries = [group.query for group in groups for _ in group.texts]
        texts = [text for group in groups for text in group.texts]
        finished = np.concatenate([group.finished for group in groups]).tolist()
        try:
            rewards = score(self.task, queries, texts, finished)
        except UserError as error:
            return error
        ends = np.cumsum([len(group.texts) for group in groups])
        for group, own in zip(groups, np.split(rewards, ends)):
            group.rewards = own

    def reply(self, query: Query, turns: list[str]) -> Future:
        """Ask the environment for its reply, which comes at once: score() runs here, too."""
        future = Future()
        try:
            with users_code("reply()"):
                future.set_result(self.task.reply(query, turns))
        except UserError as error:
            future.set_exception(error)
        return future

    def take(self) -> list[Group]:
        """Return what has been scored since the last call, each with its rewards or its error."""
        scored, self.scored = self.scored, []
        return scored


def make_scorer(config: Config, task: Task) -> RewardScorer:
    """Make the scorer that the task wants: in worker processes where it limits their time."""
    if task.score_timeout is None:
        load_models(task)
        return RewardScorer(task)
    from extras.score_workers import ScoreWorkers

    return ScoreWorkers(config, task)


def score(task: Task, queries: list[Query], texts: list[str], finished: list[bool]) -> np.ndarray:
    """(N,) finite float32 for N responses, each to the query beside it.

    Raises UserError for whatever task.score() raises, and for anything else than N finite numbers.
    """
    with users_code("score()"):
        scores = np.array(task.score(queries, texts, finished), np.float32)
    if scores.shape != (len(texts),) or not np.isfinite(scores).all():
        wanted = f"{len(texts)} finite numbers for as many responses"
        raise UserError(f"score() must give {wanted}, it gave {scores!r}")
    return scores


class FailureLimit:
    """Counts groups without scores, and ends the process when there are too many."""

    def __init__(self, status: StatusTable, name: str):
        self.status, self.name = status, name
        self.failures: deque[bool] = deque(maxlen=SCORES_WATCHED)  # of the latest groups

    def count(self, group: Group) -> None:
        self.failures.append(group.error is not None)
        if error := group.error:
            self.status.add(self.name, "unscored_groups", 1)
            logging.error("query %d is dropped, it got no scores", group.query.id, exc_info=error)
        if (failed := sum(self.failures)) > SCORES_WATCHED / 2:
            of = f"{failed} of the latest {len(self.failures)} groups"
            logging.error("%s got no scores: the run ends", of)
            sys.exit(GIVE_UP)
