"""The replay buffer: what was found (D_global), and which of it is trained on (section 4.2).

Each query keeps its latest distinct responses. A batch takes a query either from the latest sync
(fresh, nearly on-policy) or from all that was ever seen (replay), and then K of that query's
responses. Every operation touches only the queries it is about, so its cost does not depend on how
many queries the buffer holds.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

import numpy as np

from rollouts import Group, Response, join_tokens

Rng = np.random.Generator


class QueryOrder:
    """Query ids drawn uniformly without replacement, from the start again when all were drawn.

    Adding and drawing cost O(1).
    """

    def __init__(self, ids: list[int] | None = None, drawn: int = 0):
        self.ids = ids or []
        self.drawn = drawn  # ids[:drawn] are out

    def draw(self, rng: Rng) -> int:
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
Rule = Callable[[list[Response], np.ndarray, int, Rng], np.ndarray]


def uniformly(rows: list[Response], rewards: np.ndarray, count: int, rng: Rng) -> np.ndarray:
    """Draw `count` rows without replacement, unless there are fewer. Costs O(count)."""
    return rng.choice(len(rows), count, replace=len(rows) < count)


def by_reward(inverse_temperature: float) -> Rule:
    """Make the rule that draws by softmax(reward * inverse_temperature) (section 4.2).

    Without replacement, unless there are fewer than `count`. Costs O(rows), about 20 ns for each.
    """

    def rule(rows: list[Response], rewards: np.ndarray, count: int, rng: Rng) -> np.ndarray:
        logits = rewards * inverse_temperature
        if len(rows) >= count:
            # Gumbel top-k: the k largest of logit + noise are a draw without replacement.
            return np.argpartition(-(logits + rng.gumbel(size=len(rows))), count - 1)[:count]
        # The largest of fresh noise each time is a draw with replacement.
        return (logits + rng.gumbel(size=(count, len(rows)))).argmax(axis=1)

    return rule if inverse_temperature else uniformly


def key_of(row: Response) -> bytes:
    """Return what exact duplicates, of the same tokens, have in common."""
    return row.tokens["token"].tobytes()


class QueryRows:
    """The responses of one query, oldest out first when more than `capacity`. Adding costs O(1)."""

    def __init__(self):
        # Not sorted by age: a new row takes the index of the row that it replaces.
        self.rows: list[Response] = []
        self.rewards = np.empty(8, np.float64)  # rewards[i] is that of rows[i]; grows by doubling
        self.place: OrderedDict[bytes, int] = OrderedDict()  # tokens -> index in rows, oldest first

    def add(self, row: Response, key: bytes, capacity: int) -> None:
        """Add a response; the oldest one leaves when there are more than `capacity`.

        key: of key_of(), computed once for the two pools that a response goes into.
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

    def draw(self, count: int, rule: Rule, oldest_version: int, rng: Rng) -> list[Response]:
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

    def __init__(self):
        self.of_query: dict[int, QueryRows] = {}  # by query id
        self.order = QueryOrder()
        self.num_responses = 0

    def add(self, row: Response, key: bytes, capacity: int) -> None:
        if row.query_id not in self.of_query:
            self.of_query[row.query_id] = QueryRows()
            self.order.ids.append(row.query_id)
        held = self.of_query[row.query_id]
        self.num_responses -= len(held.rows)
        held.add(row, key, capacity)
        self.num_responses += len(held.rows)

    def draw(self, count: int, rule: Rule, oldest_version: int, rng: Rng) -> list[Response]:
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
        held = [self.of_query[query] for query in self.order.ids]
        rows = [row for query in held for row in query.rows]
        return {
            "drawn": np.array(self.order.drawn),
            "queries": np.array(self.order.ids, np.int64),
            "counts": np.array([len(query.rows) for query in held], np.int64),
            "ages": np.array([i for query in held for i in query.place.values()], np.int64),
            "versions": np.array([row.version for row in rows], np.int64),
            "rewards": np.array([row.reward for row in rows], np.float64),
            "received_steps": np.array([row.received_step for row in rows], np.int64),
            "prompt_lengths": np.array([len(row.prompt) for row in rows], np.int64),
            "prompts": np.concatenate([np.empty(0, np.int32), *(row.prompt for row in rows)]),
            "lengths": np.array([len(row.tokens) for row in rows], np.int64),
            "tokens": join_tokens([row.tokens for row in rows]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Go on exactly where the pool that gave `state` was."""
        prompts = np.split(state["prompts"], np.cumsum(state["prompt_lengths"])[:-1])
        tokens = np.split(state["tokens"], np.cumsum(state["lengths"])[:-1])
        facts = (state[name].tolist() for name in ("versions", "rewards", "received_steps"))
        rows = iter(zip(prompts, tokens, *facts))
        ages = iter(state["ages"].tolist())
        self.order = QueryOrder(state["queries"].tolist(), int(state["drawn"]))
        for query, count in zip(self.order.ids, state["counts"].tolist()):
            held = self.of_query[query] = QueryRows()
            for prompt, own, version, reward, step in islice(rows, count):
                facts = dict(version=version, reward=reward, received_step=step)
                held.rows.append(Response(query_id=query, prompt=prompt, tokens=own, **facts))
            held.rewards = np.array([row.reward for row in held.rows])
            for index in islice(ages, count):  # oldest first
                held.place[key_of(held.rows[index])] = index
            self.num_responses += count


class ReplayBuffer:
    """D_global of the paper.

    capacity_per_query: responses kept per query; of those with the same tokens only the newest.
    rule: draws the responses of a replayed query. seed: of all draws; the same additions and draws
    give the same rows.
    growth_steps: from this trainer step on a query grows no more: a new response replaces its
    oldest, and of a query first seen later one group is kept. None: queries always grow to their
    capacity.
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
            for row in group.responses(step):
                key = key_of(row)
                self.all.add(row, key, capacity)
                self.recent.add(row, key, self.capacity_per_query)

    def sample(
        self,
        queries_per_batch: int,
        responses_per_query: int,
        most_on_policy_prob: float,
        oldest_version: int = 0,
    ) -> list[Response]:
        """Draw B x K rows, those of one query contiguous.

        B times, independently: with probability m draw a query of the latest sync, and K of the
        responses that the sync added to it, uniformly; otherwise draw one of all queries, and K of
        its responses by the rule. Either way queries come without replacement until all were drawn,
        and responses repeat only where there are fewer than K.

        Responses of versions before `oldest_version`, which never goes down from call to call, are
        left out. Returns [] from a buffer that holds nothing, or nothing young enough.
        """
        batch: list[Response] = []
        for _ in range(queries_per_batch):
            rows: list[Response] = []
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
