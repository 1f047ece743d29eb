"""The replay buffer: what was found (D_global), and which of it is trained on (section 4.2).

Each query keeps its latest distinct responses. A batch takes a query either from the latest sync
(fresh, nearly on-policy) or from all that was ever seen (replay), and then K of that query's
responses. Every operation touches only the queries it is about, so its cost does not depend on how
many queries the buffer holds.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Of a group and of a row, in a row's order.
TOKEN_ARRAYS = "tokens", "ref_logprobs", "behavior_logprobs", "in_loss", "sampled"


@dataclass
class Group:
    """The S responses to one query, as a searcher sends them.

    Token arrays hold all responses end to end; `lengths` cuts them.
    """

    query_id: int
    version: int  # trainer step of the weights that the group was started with
    last_version: int  # ... and finished with: new weights may be loaded in between
    reference_version: int  # trainer step of the reference policy's weights: 0 until it is reset
    batch: int | None  # lockstep: the trainer step that this group is for
    prompt: np.ndarray  # (P,) int32 token ids
    lengths: np.ndarray  # (S,) int32 tokens per response, end-of-sequence included
    tokens: np.ndarray  # (sum of lengths,) int32
    ref_logprobs: np.ndarray  # (sum of lengths,) float32, reference policy
    behavior_logprobs: np.ndarray  # (sum of lengths,) float32, as vLLM sampled
    rewards: np.ndarray  # (S,) float32
    finished: np.ndarray  # (S,) bool, False where a limit cut the response off
    temperature: float  # that the responses were sampled at
    # (sum of lengths,) bool; None: all of them.
    in_loss: np.ndarray | None = None  # tokens whose log-probabilities the objective sums
    sampled: np.ndarray | None = None  # tokens that the policy chose; an appended end is not one

    def __post_init__(self) -> None:
        everything = np.ones(len(self.tokens), bool)
        self.in_loss = everything if self.in_loss is None else self.in_loss
        self.sampled = everything if self.sampled is None else self.sampled


@dataclass(eq=False, slots=True)
class Row:
    """One response with its prompt: what the buffer keeps and what a batch is made of."""

    query_id: int
    version: int
    reference_version: int
    prompt: np.ndarray  # (P,)
    tokens: np.ndarray  # (T,)
    ref_logprobs: np.ndarray  # (T,)
    behavior_logprobs: np.ndarray  # (T,)
    in_loss: np.ndarray  # (T,) bool, as in Group
    sampled: np.ndarray  # (T,) bool
    reward: float
    received_step: int = 0  # trainer step at which it arrived


def rows_of(group: Group, step: int = 0) -> list[Row]:
    """Cut a group into its S rows. step: at which it arrived."""
    ends = np.cumsum(group.lengths)[:-1]
    arrays = zip(*(np.split(getattr(group, name), ends) for name in TOKEN_ARRAYS))
    same = group.query_id, group.version, group.reference_version, group.prompt
    return [Row(*same, *own, reward, step) for own, reward in zip(arrays, group.rewards.tolist())]


class QueryOrder:
    """Query ids drawn uniformly without replacement, from the start again when all were drawn.

    Adding and drawing cost O(1).
    """

    def __init__(self, ids: list[int] | None = None, drawn: int = 0):
        self.ids = ids or []
        self.drawn = drawn  # ids[:drawn] are out

    def draw(self, rng: np.random.Generator) -> int:
        if self.drawn == len(self.ids):
            self.drawn = 0
        # One step of a Fisher-Yates shuffle.
        ids, i, j = self.ids, self.drawn, int(rng.integers(self.drawn, len(self.ids)))
        ids[i], ids[j] = ids[j], ids[i]
        self.drawn += 1
        return ids[i]

    def remove_last_drawn(self) -> None:
        """Take the last drawn id out for good; the last of all fills its place."""
        self.drawn -= 1
        self.ids[self.drawn] = self.ids[-1]
        self.ids.pop()


# A sampling rule chooses which rows of a query are replayed: (rows, their rewards (N,), count, rng)
# -> `count` indices of rows.
Rule = Callable[[list[Row], np.ndarray, int, np.random.Generator], np.ndarray]


def uniformly(
    rows: list[Row], rewards: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw `count` rows without replacement, unless there are fewer. Costs O(count)."""
    return rng.choice(len(rows), count, replace=len(rows) < count)


def by_reward(inverse_temperature: float) -> Rule:
    """Make the rule that draws by softmax(reward * inverse_temperature) (section 4.2).

    Without replacement, unless there are fewer than `count`. Costs O(rows), about 20 ns for each.
    """

    def rule(
        rows: list[Row], rewards: np.ndarray, count: int, rng: np.random.Generator
    ) -> np.ndarray:
        logits = rewards * inverse_temperature
        if len(rows) >= count:
            # Gumbel top-k: the k largest of logit + noise are a draw without replacement.
            return np.argpartition(-(logits + rng.gumbel(size=len(rows))), count - 1)[:count]
        # The largest of fresh noise each time is a draw with replacement.
        return (logits + rng.gumbel(size=(count, len(rows)))).argmax(axis=1)

    return rule if inverse_temperature else uniformly


class QueryRows:
    """The responses of one query, oldest out first when more than `capacity`. Adding costs O(1)."""

    def __init__(self):
        # Not sorted by age: a new row takes the index of the row that it replaces.
        self.rows: list[Row] = []
        self.rewards = np.empty(8, np.float64)  # rewards[i] is that of rows[i]; grows by doubling
        self.place: OrderedDict[bytes, int] = OrderedDict()  # tokens -> index in rows, oldest first

    def add(self, row: Row, key: bytes, capacity: int) -> None:
        """Add a response; the oldest one leaves when there are more than `capacity`.

        key: row.tokens.tobytes(), computed once for the two pools that a response goes into.
        """
        if key in self.place:  # an exact duplicate: the newest copy stays, and counts as new
            index = self.place.pop(key)
        elif len(self.rows) == capacity:
            _, index = self.place.popitem(last=False)
        else:
            index = len(self.rows)
            self.rows.append(row)
            if index == len(self.rewards):
                self.rewards = np.concatenate([self.rewards, np.empty_like(self.rewards)])
        self.rows[index], self.rewards[index], self.place[key] = row, row.reward, index

    def draw(
        self, count: int, rule: Rule, oldest_version: int, rng: np.random.Generator
    ) -> list[Row]:
        """Draw `count` rows of version `oldest_version` or later; [] if there are none."""
        rows, rewards = self.rows, self.rewards[: len(self.rows)]
        if oldest_version:
            young = [i for i, row in enumerate(rows) if row.version >= oldest_version]
            rows, rewards = [rows[i] for i in young], rewards[young]
        chosen = rule(rows, rewards, count, rng) if rows else []
        if rows and len(chosen) != count:
            raise ValueError(f"the sampling rule chose {len(chosen)} responses instead of {count}")
        return [rows[i] for i in chosen]


class Pool:
    """Responses by query, and the order in which queries are drawn."""

    ARRAYS = ("prompt", *TOKEN_ARRAYS)  # of a row

    def __init__(self):
        self.of_query: dict[int, QueryRows] = {}  # by query id
        self.order = QueryOrder()
        self.num_responses = 0

    def add(self, row: Row, key: bytes, capacity: int) -> None:
        """Add a response to those of its query, as QueryRows.add does."""
        if row.query_id not in self.of_query:
            self.of_query[row.query_id] = QueryRows()
            self.order.ids.append(row.query_id)
        held = self.of_query[row.query_id]
        self.num_responses -= len(held.rows)
        held.add(row, key, capacity)
        self.num_responses += len(held.rows)

    def draw(
        self, count: int, rule: Rule, oldest_version: int, rng: np.random.Generator
    ) -> list[Row]:
        """Draw `count` responses to the next query that has young ones; [] if none has."""
        while self.order.ids:
            query = self.order.draw(rng)
            rows = self.of_query[query].draw(count, rule, oldest_version, rng)
            if rows:
                return rows
            # All are too old and will stay so: the query is removed.
            self.order.remove_last_drawn()
            self.num_responses -= len(self.of_query.pop(query).rows)
        return []

    def state_dict(self) -> dict[str, np.ndarray]:
        """The whole state as plain arrays."""
        queries = [self.of_query[query] for query in self.order.ids]
        rows = [row for query in queries for row in query.rows]
        ages = [index for query in queries for index in query.place.values()]
        state = {
            "drawn": np.array(self.order.drawn),
            "cards": np.array(self.order.ids, np.int64),
            "counts": np.array([len(query.rows) for query in queries], np.int64),
            "ages": np.array(ages, np.int64),
            "versions": np.array([row.version for row in rows], np.int64),
            "reference_versions": np.array([row.reference_version for row in rows], np.int64),
            "rewards": np.array([row.reward for row in rows], np.float64),
            "received_steps": np.array([row.received_step for row in rows], np.int64),
        }
        for name in self.ARRAYS:
            arrays = [getattr(row, name) for row in rows]
            state[f"{name}_lengths"] = np.array([len(array) for array in arrays], np.int64)
            state[name] = np.concatenate(arrays) if arrays else np.empty(0)
        return state

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Go on exactly where the pool that gave `state` was."""
        ends = {name: np.cumsum(state[f"{name}_lengths"])[:-1] for name in self.ARRAYS}
        arrays = list(zip(*(np.split(state[name], ends[name]) for name in self.ARRAYS)))
        names = "versions", "reference_versions", "rewards", "received_steps"
        versions, reference_versions, rewards, steps = (state[name].tolist() for name in names)
        ids, start = state["cards"].tolist(), 0
        for query, count in zip(ids, state["counts"].tolist()):
            held = self.of_query[query] = QueryRows()
            for i in range(start, start + count):
                same = query, versions[i], reference_versions[i]
                held.rows.append(Row(*same, *arrays[i], rewards[i], steps[i]))
            held.rewards = np.array(rewards[start : start + count])
            for index in state["ages"][start : start + count].tolist():  # oldest first
                held.place[held.rows[index].tokens.tobytes()] = index
            start += count
        self.num_responses = start
        self.order = QueryOrder(ids, int(state["drawn"]))


class ReplayBuffer:
    """D_global of the paper.

    capacity_per_query: responses kept per query; of those with the same tokens only the newest.
    rule: draws the responses of a replayed query. seed: of all draws; the same additions and draws
    give the same rows.
    growth_steps: from this trainer step on new responses replace a query's oldest, one for one; of
    a query first seen after it one group is kept. None: queries always grow to their capacity.
    """

    def __init__(
        self, capacity_per_query: int, rule: Rule, seed: int, growth_steps: int | None = None
    ):
        self.capacity_per_query, self.growth_steps = capacity_per_query, growth_steps
        self.rule = rule
        self.rng = np.random.default_rng(seed)
        self.all = Pool()  # every response held
        self.recent = Pool()  # the responses that the latest sync added
        self.recent_step = -1  # trainer step of that sync
        self.received = 0  # responses that were added, duplicates included

    @property
    def responses(self) -> int:
        """Responses held."""
        return self.all.num_responses

    @property
    def queries(self) -> int:
        """Queries with responses held."""
        return len(self.all.of_query)

    def add(self, groups: list[Group], step: int) -> None:
        """Add what one sync brought. Calls with one `step` are one sync.

        A sync that brought nothing leaves the recent set as it was.
        """
        if groups and step != self.recent_step:
            self.recent, self.recent_step = Pool(), step
        for group in groups:
            self.received += len(group.lengths)
            capacity = self.capacity_per_query
            if self.growth_steps is not None and step >= self.growth_steps:
                held = self.all.of_query.get(group.query_id)
                capacity = max(len(held.rows) if held else 0, len(group.lengths))
            for row in rows_of(group, step):
                key = row.tokens.tobytes()
                self.all.add(row, key, capacity)
                self.recent.add(row, key, self.capacity_per_query)

    def sample(
        self,
        queries_per_batch: int,
        responses_per_query: int,
        most_on_policy_prob: float,
        oldest_version: int = 0,
    ) -> list[Row]:
        """Draw B x K rows, those of one query contiguous.

        B times, independently: with probability m draw a query of the latest sync, and K of the
        responses that the sync added to it, uniformly; otherwise draw one of all queries, and K of
        its responses by the rule. Either way queries come without replacement until all were drawn,
        and responses repeat only where there are fewer than K.

        Responses of versions before `oldest_version`, which never goes down from call to call, are
        left out. Returns [] from a buffer that holds nothing, or nothing young enough.
        """
        batch: list[Row] = []
        for _ in range(queries_per_batch):
            rows: list[Row] = []
            if self.rng.random() < most_on_policy_prob:
                rows = self.recent.draw(responses_per_query, uniformly, oldest_version, self.rng)
            if not rows:
                rows = self.all.draw(responses_per_query, self.rule, oldest_version, self.rng)
            if not rows:
                return []
            batch += rows
        return batch

    def state_dict(self) -> dict[str, np.ndarray]:
        """The whole state as plain arrays, fit for np.savez without pickle."""
        state = {
            "rng": np.array(json.dumps(self.rng.bit_generator.state)),
            "recent_step": np.array(self.recent_step),
        }
        for name, pool in ("all", self.all), ("recent", self.recent):
            state |= {f"{name}_{key}": array for key, array in pool.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Go on exactly where the buffer that gave `state` was."""
        self.rng.bit_generator.state = json.loads(str(state["rng"]))
        self.recent_step = int(state["recent_step"])
        self.all, self.recent = Pool(), Pool()
        for name, pool in ("all", self.all), ("recent", self.recent):
            own = {key: array for key, array in state.items() if key.startswith(f"{name}_")}
            pool.load_state_dict({key.removeprefix(f"{name}_"): own[key] for key in own})
