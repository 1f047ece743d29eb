"""Rollouts: the S responses to a query, from the draw of the query to a group for the trainer.

A searcher asks its Workload which query comes next, and has Generation make the responses. The
workload of lockstep and the generation of episodes are subclasses of these, in extras/.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from buffer import Group
from config import Config, extra
from models.tokens import tokens_left_out
from tasks import Query, Task
from weights import SharedWeights

if TYPE_CHECKING:
    from models.engine import Engine


class TokenArrays(NamedTuple):
    """The tokens of a response, as in Group: (T,) each."""

    tokens: np.ndarray
    behavior_logprobs: np.ndarray
    in_loss: np.ndarray
    sampled: np.ndarray


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
    last_version: int = -1  # the newest that sampled a token
    texts: list[str | list[str]] = field(default_factory=list)  # S; of an episode its turns
    finished: list[bool] = field(default_factory=list)  # False: a limit cut it off
    arrays: list[TokenArrays] = field(default_factory=list)  # S
    # One of these is set when it is scored:
    rewards: np.ndarray | None = None  # (S,) float32
    error: Exception | None = None  # why there are no rewards

    def to_group(self, ref_logprobs: np.ndarray, reference_version: int) -> Group:
        """Put it into the arrays that go through the queue. ref_logprobs: of all its tokens."""
        joined = TokenArrays(*map(np.concatenate, zip(*self.arrays)))
        return Group(
            query_id=self.query.id,
            version=self.version,
            last_version=self.last_version,
            reference_version=reference_version,
            batch=self.batch,
            prompt=np.array(self.prompt, np.int32),
            lengths=np.array([len(of_response.tokens) for of_response in self.arrays], np.int32),
            # An environment's tokens are certain: log-probability 0 under both policies.
            ref_logprobs=np.where(joined.in_loss | joined.sampled, ref_logprobs, np.float32(0)),
            rewards=self.rewards,
            finished=np.array(self.finished),
            temperature=self.sampling["temperature"],
            **joined._asdict(),
        )


class Workload:
    """Draws a searcher's queries as soon as there is room, whatever version is in its engine.

    share: the searcher draws queries share, share + config.searchers, … of a shuffled list, in a
    new order each epoch. No other searcher draws them, unless there are fewer queries than
    searchers. cursor: the place in its order where it starts; a restart passes the last one.
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

        With config.search_ahead the search stays at most so many steps, of B groups each, ahead of
        the trainer. It is set where both share a GPU: groups that are never trained on would slow
        the trainer down.
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


def make_workload(config: Config, *arguments: Any) -> Workload:
    """Make the workload of the settings' mode. arguments: of Workload, behind config."""
    if config.lockstep:
        return extra("lockstep").LockstepWorkload(config, *arguments)
    return Workload(config, *arguments)


class Generation:
    """Has the engine generate the responses of rollouts, many at once."""

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, engine: "Engine", task: Task
    ):
        self.config, self.tokenizer, self.engine = config, tokenizer, engine
        # Appended to responses that were cut off, where the task wants that.
        self.final_token = tokenizer.eos_token_id if task.append_eos else None
        pad_is_eos = task.pad_is_eos and tokenizer.pad_token is None
        self.padding_token = tokenizer.eos_token_id if pad_is_eos else None
        self.left_out = tokens_left_out(tokenizer, task.keep_special_tokens)
        self.generating: dict[str, Any] = {}  # rollouts by request

    @property
    def rows(self) -> int:
        """Responses that are not finished, those that wait for room included."""
        return self.engine.rows

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing for step() to do."""
        return not self.engine.rows

    def start(self, rollout: Rollout) -> None:
        """Generate the responses of a rollout, which has its prompt, version and sampling."""
        self.engine.add(rollout.request, rollout.prompt, **rollout.sampling)
        self.generating[rollout.request] = rollout

    def step(self) -> list[Rollout]:
        """Generate one token of every response. Returns the rollouts that finished with it."""
        generated = []
        for output in self.engine.step():
            rollout = self.generating.pop(output.request_id)
            rollout.last_version = newest_version(output)
            for completion in output.outputs:
                text, arrays, has_ended = self.read(completion)
                rollout.texts.append(text)
                rollout.arrays.append(arrays)
                rollout.finished.append(has_ended)
            generated.append(rollout)
        return generated

    def read(self, completion: Any) -> tuple[str, TokenArrays, bool]:
        """Read what vLLM has generated: its text, its arrays, and whether it ended by itself."""
        tokens, has_ended = list(completion.token_ids), completion.finish_reason == "stop"
        text = self.tokenizer.decode([token for token in tokens if token not in self.left_out])
        logprobs = [row[token].logprob for token, row in zip(tokens, completion.logprobs)]
        if self.final_token is not None and completion.finish_reason == "length":
            tokens.append(self.final_token)
            logprobs.append(0.0)  # it was not sampled: nothing else can stand there
        sampled = np.arange(len(tokens)) < len(completion.token_ids)
        in_loss = np.array([token != self.padding_token for token in tokens])
        as_arrays = np.array(tokens, np.int32), np.array(logprobs, np.float32), in_loss, sampled
        return text, TokenArrays(*as_arrays), has_ended


def newest_version(output: Any) -> int:
    """Return the newest version that sampled a token of a request, a vllm.RequestOutput."""
    spans = (span for completion in output.outputs for span in completion.weight_versions)
    return max(int(span.version) for span in spans)


def make_generation(
    config: Config, tokenizer: PreTrainedTokenizerBase, engine: "Engine", scorer: Any
) -> Generation:
    """Make the generation that the task wants. scorer: where an environment replies."""
    if config.max_episode_tokens is None:
        return Generation(config, tokenizer, engine, scorer.task)
    return extra("episodes").Episodes(config, tokenizer, engine, scorer)
