"""Free-running: searchers generate what comes next, the trainer draws from the buffer.

A searcher asks Workload what to generate, the trainer asks ReplayBatches what to train on (section
4.2). Neither waits for the other. Rollout is what both modes generate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from buffer import Group, ReplayBuffer, Row, by_reward
from config import Config
from tasks import Query
from weights import SharedWeights


@dataclass(eq=False)
class Rollout:
    """The S responses to a query, from its draw until they are a group for the trainer.

    The first fields are set at the draw; the others at the times that the comments say.
    """

    query: Query
    request: str  # its name in the engine, which no other there has
    index: int = 0  # in the order in which a share is drawn, all epochs counted
    visit: int = 0  # how often the query was drawn before
    batch: int | None = None  # lockstep: the trainer step that the group is for
    is_for_evaluation: bool = False
    # Set when the generation starts:
    prompt: list[int] = field(default_factory=list)  # token ids
    version: int = -1  # of the weights in the engine
    sampling: dict = field(default_factory=dict)  # as in vllm.SamplingParams
    # Set when it ends:
    last_version: int = -1  # of the weights in the engine
    texts: list[str | list[str]] = field(default_factory=list)  # S; of an episode its turns
    finished: list[bool] = field(default_factory=list)  # False: a limit cut it off
    # Of each response its tokens, behavior_logprobs, in_loss and sampled, as in Group.
    arrays: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    # One of these is set when it is scored:
    rewards: np.ndarray | None = None  # (S,) float32
    error: Exception | None = None  # why there are no rewards

    def to_group(self, ref_logprobs: np.ndarray, reference_version: int) -> Group:
        """Put it into the arrays that go through the queue. ref_logprobs: of all its tokens."""
        tokens, behavior_logprobs, in_loss, sampled = map(np.concatenate, zip(*self.arrays))
        return Group(
            query_id=self.query.id,
            version=self.version,
            last_version=self.last_version,
            reference_version=reference_version,
            batch=self.batch,
            prompt=np.array(self.prompt, np.int32),
            lengths=np.array([len(ids) for ids, *_ in self.arrays], np.int32),
            tokens=tokens,
            # Of what an environment said: as certain for both policies.
            ref_logprobs=np.where(in_loss | sampled, ref_logprobs, np.float32(0)),
            behavior_logprobs=behavior_logprobs,
            rewards=self.rewards,
            finished=np.array(self.finished),
            temperature=self.sampling["temperature"],
            in_loss=in_loss,
            sampled=sampled,
        )


class Workload:
    """Draws any query of a searcher's share, with any version, as soon as there is room.

    share: this searcher draws the queries share, share + config.searchers, … of a shuffled list,
    each epoch in another order, and nobody else does, unless there are fewer queries than
    searchers. cursor: where in its order it starts, 0 or the cursor of the searcher that it
    replaces.
    """

    has_seeds = False  # vLLM draws for each seeded request by itself, which costs time

    def __init__(
        self,
        config: Config,
        queries: Sequence[Query],
        share: int,
        cursor: int,
        weights: SharedWeights,
    ):
        self.config, self.queries, self.share, self.weights = config, queries, share, weights
        shuffled = np.random.default_rng(config.seed).permutation(len(queries))
        own = shuffled[share :: config.searchers]
        # Indices of the queries of this share.
        self.own = own if len(queries) >= config.searchers else np.arange(len(queries))
        self.num_drawn = cursor
        self.epoch, self.order = -1, np.array([])
        self.in_flight: set[int] = set()  # indices of rollouts that are drawn, not yet scored
        # Of this searcher: the trainer step at its start, and how many groups it has begun since.
        self.first_step, self.num_begun = max(0, weights.version), 0

    @property
    def cursor(self) -> int:
        """The oldest rollout in flight: a restart resumes there."""
        return min(self.in_flight, default=self.num_drawn)

    def may_draw(self) -> bool:
        """Return whether a query may start now.

        config.search_ahead: steps that the search may be ahead of the trainer; a step takes B
        groups. For a searcher on the trainer's own GPU, where what is made and not trained on costs
        the trainer's time.
        """
        config = self.config
        if config.search_ahead is None:
            return True
        steps = max(0, self.weights.version) - self.first_step + config.search_ahead
        initial = math.ceil(config.initial_responses / config.samples_per_query)
        groups = initial + steps * config.queries_per_batch
        return self.num_begun < math.ceil(groups / config.searchers)  # this searcher's part

    def draw(self) -> Rollout | None:
        """Draw the next query of the share. None: nothing may start now."""
        if not self.may_draw():
            return None
        epoch, place = divmod(self.num_drawn, len(self.own))
        if epoch != self.epoch:
            rng = np.random.default_rng((self.config.seed, self.share, epoch))
            self.epoch, self.order = epoch, rng.permutation(self.own)
        query = self.queries[self.order[place]]
        rollout = Rollout(query, f"{query.id}.{epoch}", index=self.num_drawn, visit=epoch)
        self.in_flight.add(rollout.index)
        self.num_drawn += 1
        self.num_begun += 1
        return rollout

    def complete(self, rollout: Rollout) -> None:
        """Note that its responses are generated and scored."""
        self.in_flight.remove(rollout.index)

    def drop(self, rollout: Rollout) -> None:
        """Note that its group will never come: the prompt is too long, or it got no scores."""
        self.in_flight.remove(rollout.index)
        self.num_begun -= 1

    def begin_version(self, version: int) -> None:
        """Note the version now in the engine. Free-running search does not ask for it."""

    def may_load(self) -> bool:
        """Return whether new weights may be loaded now: always, in free-running search."""
        return True


class ReplayBatches:
    """Draws B queries x K responses from the buffer, once the initial responses have arrived."""

    is_exact = False  # a run that was killed and resumed goes on, but otherwise than it would have

    def __init__(self, config: Config):
        self.config = config
        self.buffer = ReplayBuffer(
            config.capacity_per_query,
            by_reward(config.reward_inverse_temperature),
            config.seed,
            config.buffer_growth_steps,
        )
        self.received = 0  # responses, duplicates included
        self.wanted = max(1, config.initial_responses)  # before the first batch
        self.unobserved: list[Group] = []  # groups whose figures are not in the metrics yet

    def add(self, groups: list[Group], step: int) -> None:
        """Put what arrived at this step into the buffer."""
        if groups:
            self.buffer.add(groups, step)
            self.received += sum(len(group.lengths) for group in groups)
            self.unobserved = groups

    def next(self, step: int) -> list[Row]:
        """Return the batch of this step, or [] if the buffer holds too little that is young."""
        config = self.config
        if self.received < self.wanted:
            return []
        oldest = 0 if config.max_staleness is None else max(0, step - config.max_staleness)
        return self.buffer.sample(
            config.queries_per_batch,
            config.responses_per_query,
            config.most_on_policy_prob,
            oldest,
        )

    def awaited(self, step: int) -> str:
        """Say what next() lacks."""
        if self.received < self.wanted:
            return f"the first {self.wanted} responses, {self.received} are here"
        return f"responses at most {self.config.max_staleness} steps old (--max_staleness)"

    def waiting(self) -> list[Group]:
        """Return the groups for later steps: none, all are in the buffer."""
        return []

    def is_taken(self, newest_version: int) -> bool:
        """Return whether the searchers have taken this version: nobody waits for that."""
        return True

    def is_settled(self, step: int, is_evaluation_pending: bool) -> bool:
        """Return whether a checkpoint is exact now: it need not be."""
        return True

    def figures(self) -> dict[str, int]:
        return {
            "received": self.received,
            "buffer_responses": self.buffer.responses,
            "buffer_queries": len(self.buffer.all),
        }

    def state_dict(self) -> dict[str, np.ndarray]:
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.buffer.load_state_dict(state)
