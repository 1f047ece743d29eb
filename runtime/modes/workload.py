"""What a searcher generates next: its share of the queries, in an order of its own each epoch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from config import Config
from tasks import Query
from weights import SharedWeights


@dataclass(frozen=True)
class Work:
    """A query to generate responses to."""

    query: Query
    visit: int  # how often the query was drawn before
    index: int  # in the order in which this share is drawn, all epochs counted
    batch: int | None = None  # lockstep: the trainer step that the group is for

    @property
    def request(self) -> str:
        """A name that no other work of this searcher has."""
        return f"{self.query.id}.{self.visit}"


class Workload:
    """Free-running search: any query of the share, with any version, as soon as there is room.

    share, num_shares: this searcher draws the queries share, share + num_shares, … of a shuffled
    list, and nobody else does, unless there are fewer queries than shares. cursor: where in its
    order it starts, 0 or the cursor of the searcher that it replaces.
    """

    has_seeds = False  # vLLM draws for each seeded request by itself, which costs time

    def __init__(
        self, queries: Sequence[Query], share: int, num_shares: int, seed: int, cursor: int
    ):
        self.queries, self.share, self.seed = queries, share, seed
        shuffled = np.random.default_rng(seed).permutation(len(queries))
        own = shuffled[share::num_shares]
        self.own = own if len(queries) >= num_shares else np.arange(len(queries))
        self.num_drawn = cursor
        self.epoch, self.order = -1, np.array([])
        self.unfinished: set[int] = set()  # indices of work that was drawn and is not finished

    @property
    def num_queries(self) -> int:
        """The queries of this share."""
        return len(self.own)

    @property
    def cursor(self) -> int:
        """The oldest unfinished work: a restart resumes there."""
        return min(self.unfinished, default=self.num_drawn)

    def draw(self) -> Work | None:
        """Draw the next query of the share. None: nothing may start now."""
        epoch, place = divmod(self.num_drawn, len(self.own))
        if epoch != self.epoch:
            rng = np.random.default_rng((self.seed, self.share, epoch))
            self.epoch, self.order = epoch, rng.permutation(self.own)
        work = Work(self.queries[self.order[place]], visit=epoch, index=self.num_drawn)
        self.unfinished.add(work.index)
        self.num_drawn += 1
        return work

    def finish(self, work: Work) -> None:
        """Note that its responses are generated and scored."""
        self.unfinished.remove(work.index)

    def drop(self, work: Work) -> None:
        """Note that its group will never come: the prompt is too long, or it got no scores."""
        self.finish(work)

    def begin_version(self, version: int) -> None:
        """Note the version now in the engine. Free-running search does not ask for it."""

    def may_load(self) -> bool:
        """Return whether new weights may be loaded now: always, in free-running search."""
        return True


class ThrottledWorkload(Workload):
    """Free-running search that waits when it is --search_ahead steps ahead of the trainer.

    For a searcher on the trainer's own GPU, where what is made and not trained on costs its time. A
    step takes B groups. Counted from this searcher's start.
    """

    def __init__(
        self,
        config: Config,
        queries: Sequence[Query],
        share: int,
        cursor: int,
        weights: SharedWeights,
    ):
        super().__init__(queries, share, config.searchers, config.seed, cursor)
        self.config, self.weights = config, weights
        self.first_step, self.num_started = max(0, weights.version), 0

    def draw(self) -> Work | None:
        if self.num_started >= self.limit():
            return None
        self.num_started += 1
        return super().draw()

    def drop(self, work: Work) -> None:
        super().drop(work)
        self.num_started -= 1

    def limit(self) -> int:
        """Return how many groups may have been started by now: this searcher's part, rounded up."""
        config = self.config
        steps = max(0, self.weights.version) - self.first_step + config.search_ahead
        initial = math.ceil(config.initial_responses / config.samples_per_query)
        return math.ceil((initial + steps * config.queries_per_batch) / config.searchers)
