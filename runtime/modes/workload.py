"""What a searcher works on: rollouts of its share of the queries, each epoch in another order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from buffer import Group
from config import Config
from tasks import Query
from weights import SharedWeights


@dataclass(eq=False)
class Rollout:
    """The S responses to a query, from its draw until they are a group for the trainer."""

    query: Query
    request: str  # its name in the engine, which no other there has
    index: int = 0  # in the order in which a share is drawn, all epochs counted
    visit: int = 0  # how often the query was drawn before
    batch: int | None = None  # lockstep: the trainer step that the group is for
    is_for_evaluation: bool = False
    # From the start of the generation:
    prompt: list[int] = field(default_factory=list)  # token ids
    version: int = -1  # of the weights in the engine
    sampling: dict = field(default_factory=dict)  # as in vllm.SamplingParams
    # From its end:
    last_version: int = -1  # of the weights in the engine
    texts: list[str] = field(default_factory=list)  # S of them
    finished: list[bool] = field(default_factory=list)  # False: cut off by the length limit
    # Of each response its token ids, its behaviour log-probabilities, whether its end was appended.
    arrays: list[tuple[np.ndarray, np.ndarray, bool]] = field(default_factory=list)
    # When it is scored it has one of these:
    rewards: np.ndarray | None = None  # (S,) float32
    error: Exception | None = None  # why there are no rewards

    def to_group(self, ref_logprobs: np.ndarray, reference_version: int) -> Group:
        """Put it into the arrays that go through the queue. ref_logprobs: of all its tokens."""
        tokens, behavior_logprobs, appended = zip(*self.arrays)
        return Group(
            query_id=self.query.id,
            version=self.version,
            last_version=self.last_version,
            reference_version=reference_version,
            batch=self.batch,
            prompt=np.array(self.prompt, np.int32),
            lengths=np.array([len(ids) for ids in tokens], np.int32),
            tokens=np.concatenate(tokens),
            ref_logprobs=ref_logprobs,
            behavior_logprobs=np.concatenate(behavior_logprobs),
            rewards=self.rewards,
            finished=np.array(self.finished),
            temperature=self.sampling["temperature"],
            appended=np.array(appended),
        )


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
        self.unfinished: set[int] = set()  # indices of rollouts that are drawn, not finished

    @property
    def num_queries(self) -> int:
        """The queries of this share."""
        return len(self.own)

    @property
    def cursor(self) -> int:
        """The oldest unfinished rollout: a restart resumes there."""
        return min(self.unfinished, default=self.num_drawn)

    def draw(self) -> Rollout | None:
        """Draw the next query of the share. None: nothing may start now."""
        epoch, place = divmod(self.num_drawn, len(self.own))
        if epoch != self.epoch:
            rng = np.random.default_rng((self.seed, self.share, epoch))
            self.epoch, self.order = epoch, rng.permutation(self.own)
        query = self.queries[self.order[place]]
        rollout = Rollout(query, f"{query.id}.{epoch}", index=self.num_drawn, visit=epoch)
        self.unfinished.add(rollout.index)
        self.num_drawn += 1
        return rollout

    def finish(self, rollout: Rollout) -> None:
        """Note that its responses are generated and scored."""
        self.unfinished.remove(rollout.index)

    def drop(self, rollout: Rollout) -> None:
        """Note that its group will never come: the prompt is too long, or it got no scores."""
        self.finish(rollout)

    def begin_version(self, version: int) -> None:
        """Note the version now in the engine. Free-running search does not ask for it."""

    def may_load(self) -> bool:
        """Return whether new weights may be loaded now: always, in free-running search."""
        return True


class ThrottledWorkload(Workload):
    """Free-running search that waits when it is config.search_ahead steps ahead of the trainer.

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

    def draw(self) -> Rollout | None:
        if self.num_started >= self.limit():
            return None
        self.num_started += 1
        return super().draw()

    def drop(self, rollout: Rollout) -> None:
        super().drop(rollout)
        self.num_started -= 1

    def limit(self) -> int:
        """Return how many groups may have been started by now: this searcher's part, rounded up."""
        config = self.config
        steps = max(0, self.weights.version) - self.first_step + config.search_ahead
        initial = math.ceil(config.initial_responses / config.samples_per_query)
        return math.ceil((initial + steps * config.queries_per_batch) / config.searchers)
