"""The replay buffer: what the searchers found (D_global), and which of it the trainer trains on (section 4.2).

Each query keeps its latest distinct responses. A batch takes a query either from the latest sync (fresh, nearly on-policy) or from
all that was ever seen (replay), and then K of that query's responses. Every operation touches only the queries it is about, so its
cost does not depend on how many queries the buffer holds.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass, fields

import numpy as np


@dataclass
class Group:
    """The S responses to one query, as a searcher sends them. Token arrays hold all responses end to end, `lengths` cuts them."""

    query_id: int
    version: int  # trainer step of the weights that the group was started with
    last_version: int  # ... and finished with: a searcher takes new weights in mid-stream
    reference_version: (
        int  # trainer step of the weights that are the reference policy: 0 until it is reset
    )
    batch: int | None  # constant staleness: the trainer step that this group is for
    prompt: np.ndarray  # (P,) int32 token ids
    lengths: np.ndarray  # (S,) int32 tokens per response, end-of-sequence included
    tokens: np.ndarray  # (sum of lengths,) int32
    ref_logprobs: np.ndarray  # (sum of lengths,) float32, reference policy
    behavior_logprobs: (
        np.ndarray
    )  # (sum of lengths,) float32, the policy that sampled, as vLLM reported it
    rewards: np.ndarray  # (S,) float32
    finished: np.ndarray  # (S,) bool, False where the response was cut off at the length limit
    temperature: float  # that the responses were sampled at


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
    reward: float


def rows_of(group: Group) -> list[Row]:
    ends = np.cumsum(group.lengths).tolist()
    rows = []
    for start, end, reward in zip([0, *ends], ends, group.rewards.tolist()):
        rows.append(
            Row(
                group.query_id,
                group.version,
                group.reference_version,
                group.prompt,
                group.tokens[start:end],
                group.ref_logprobs[start:end],
                group.behavior_logprobs[start:end],
                reward,
            )
        )
    return rows


def arrays_of(groups: list[Group]) -> dict[str, np.ndarray]:
    """Plain arrays, fit for np.savez without pickle; for groups that are meant for a batch."""
    return {
        f"{i}.{field.name}": np.asarray(getattr(group, field.name))
        for i, group in enumerate(groups)
        for field in fields(Group)
    }


def groups_of(arrays: dict[str, np.ndarray]) -> list[Group]:
    """The groups that gave these arrays_of()."""
    columns = [
        [arrays[f"{i}.{field.name}"] for field in fields(Group)]
        for i in range(len(arrays) // len(fields(Group)))
    ]
    return [Group(*(value if value.ndim else value.item() for value in row)) for row in columns]


class Deck:
    """Query ids drawn uniformly without replacement, from the start again when all were drawn. Adding and drawing cost O(1)."""

    def __init__(self, cards: list[int] | None = None, drawn: int = 0):
        self.cards = cards or []
        self.drawn = drawn  # cards[:drawn] are out

    def draw(self, rng: np.random.Generator) -> int:
        if self.drawn == len(self.cards):
            self.drawn = 0
        i, j = self.drawn, int(rng.integers(self.drawn, len(self.cards)))
        self.cards[i], self.cards[j] = (
            self.cards[j],
            self.cards[i],
        )  # one step of a Fisher-Yates shuffle
        self.drawn += 1
        return self.cards[i]

    def remove_last_drawn(self) -> None:
        self.drawn -= 1
        self.cards[self.drawn] = self.cards[-1]
        self.cards.pop()


class Shelf:
    """The responses of one query, oldest out first when more than `capacity`. Adding costs O(1)."""

    def __init__(self):
        self.rows: list[
            Row
        ] = []  # in no order of age: a newcomer takes the place of the one that leaves
        self.rewards = np.empty(8, np.float64)  # rewards[i] is that of rows[i]; grows by doubling
        self.place: OrderedDict[bytes, int] = OrderedDict()  # tokens -> index in rows, oldest first

    def add(self, row: Row, key: bytes, capacity: int) -> None:
        """key: what row.tokens.tobytes() gives; made and hashed once, for a response goes on two shelves."""
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
        self, count: int, inverse_temperature: float, oldest_version: int, rng: np.random.Generator
    ) -> list[Row]:
        """`count` rows by softmax(reward * inverse_temperature): without replacement, unless there are fewer than `count`. Rows of versions
        before `oldest_version` are left out; [] if that leaves none.

        Costs O(count) for a uniform draw (inverse_temperature 0) from all versions, and else O(responses of this query), about 20 ns for each.
        """
        rows, rewards = self.rows, self.rewards
        if oldest_version:
            young = [i for i, row in enumerate(rows) if row.version >= oldest_version]
            rows, rewards = [rows[i] for i in young], rewards[young]
        held = len(rows)
        if not held:
            return []
        if inverse_temperature == 0:
            chosen = rng.choice(held, count, replace=held < count)
        elif (
            held >= count
        ):  # Gumbel top-k: the k largest of logit + noise are a draw without replacement
            noisy = rewards[:held] * inverse_temperature + rng.gumbel(size=held)
            chosen = np.argpartition(-noisy, count - 1)[:count]
        else:  # the largest of fresh noise each time is a draw with replacement
            chosen = (rewards[:held] * inverse_temperature + rng.gumbel(size=(count, held))).argmax(
                axis=1
            )
        return [rows[i] for i in chosen]


class ReplayBuffer:
    """D_global of the paper.

    capacity_per_query: responses kept per query.
    reward_inverse_temperature: a replayed query's responses are drawn by softmax(reward * this); 0 draws uniformly.
    seed: of all draws; the same additions and draws give the same rows.
    Of the responses to one query with the same tokens only the newest is kept.
    """

    def __init__(self, capacity_per_query: int, reward_inverse_temperature: float, seed: int):
        self.capacity_per_query = capacity_per_query
        self.reward_inverse_temperature = reward_inverse_temperature
        self.rng = np.random.default_rng(seed)
        self.all: dict[int, Shelf] = {}  # query id -> every response held
        self.all_deck = Deck()
        self.recent: dict[int, Shelf] = {}  # query id -> the responses that the latest sync added
        self.recent_deck = Deck()
        self.recent_step = -1  # trainer step of that sync
        self.responses = 0  # held in `all`

    def add(self, groups: list[Group], step: int) -> None:
        """Takes what one sync brought. Calls with one `step` are one sync; a sync that brought nothing leaves the recent set as it was."""
        if groups and step != self.recent_step:
            self.recent, self.recent_deck, self.recent_step = {}, Deck(), step
        for group in groups:
            for shelves, deck in (self.all, self.all_deck), (self.recent, self.recent_deck):
                if group.query_id not in shelves:
                    shelves[group.query_id] = Shelf()
                    deck.cards.append(group.query_id)
            shelf, recent = self.all[group.query_id], self.recent[group.query_id]
            self.responses -= len(shelf.rows)
            for row in rows_of(group):
                key = row.tokens.tobytes()
                shelf.add(row, key, self.capacity_per_query)
                recent.add(row, key, self.capacity_per_query)
            self.responses += len(shelf.rows)

    def sample(
        self,
        queries_per_batch: int,
        responses_per_query: int,
        most_on_policy_prob: float,
        oldest_version: int = 0,
    ) -> list[Row]:
        """B x K rows, those of one query contiguous; [] from a buffer that holds nothing, or nothing young enough.

        Each of the B queries is, independently, with probability m one of the latest sync, with K of the responses which that sync
        added to it, drawn uniformly; otherwise one of all queries, with K of its responses drawn by reward. Either way the queries come
        without replacement until all have been drawn, and responses repeat only where there are fewer than K.
        Responses of versions before `oldest_version`, which never goes down from call to call, are left out.
        """
        batch = []
        for _ in range(queries_per_batch):
            recent = self.rng.random() < most_on_policy_prob
            rows = (
                self._draw(self.recent, self.recent_deck, responses_per_query, 0.0, oldest_version)
                if recent
                else []
            )
            rows = rows or self._draw(
                self.all,
                self.all_deck,
                responses_per_query,
                self.reward_inverse_temperature,
                oldest_version,
            )
            if not rows:
                return []
            batch += rows
        return batch

    def _draw(
        self,
        shelves: dict[int, Shelf],
        deck: Deck,
        count: int,
        inverse_temperature: float,
        oldest_version: int,
    ) -> list[Row]:
        """`count` responses to the next query of the deck that has young ones."""
        while deck.cards:
            query = deck.draw(self.rng)
            if rows := shelves[query].draw(count, inverse_temperature, oldest_version, self.rng):
                return rows
            # All are too old, and will be: the query leaves, so that each is looked at in vain once.
            deck.remove_last_drawn()
            left = shelves.pop(query)
            self.responses -= len(left.rows) if shelves is self.all else 0
        return []

    def state_dict(self) -> dict[str, np.ndarray]:
        """The whole state as plain arrays, fit for np.savez without pickle."""
        state = {
            "rng": np.array(json.dumps(self.rng.bit_generator.state)),
            "recent_step": np.array(self.recent_step),
            "all_drawn": np.array(self.all_deck.drawn),
            "recent_drawn": np.array(self.recent_deck.drawn),
        }
        for name, shelves, deck in (
            ("all", self.all, self.all_deck),
            ("recent", self.recent, self.recent_deck),
        ):
            rows = [row for query in deck.cards for row in shelves[query].rows]
            state |= {
                f"{name}_cards": np.array(deck.cards, np.int64),
                f"{name}_counts": np.array(
                    [len(shelves[query].rows) for query in deck.cards], np.int64
                ),
                f"{name}_ages": np.array(
                    [i for query in deck.cards for i in shelves[query].place.values()], np.int64
                ),
                f"{name}_versions": np.array([row.version for row in rows], np.int64),
                f"{name}_reference_versions": np.array(
                    [row.reference_version for row in rows], np.int64
                ),
                f"{name}_rewards": np.array([row.reward for row in rows], np.float64),
            }
            for field in ("prompt", "tokens", "ref_logprobs", "behavior_logprobs"):
                arrays = [getattr(row, field) for row in rows]
                state[f"{name}_{field}_lengths"] = np.array(
                    [len(array) for array in arrays], np.int64
                )
                state[f"{name}_{field}"] = np.concatenate(arrays) if arrays else np.empty(0)
        return state

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Goes on exactly where the buffer that gave `state` was."""
        self.rng.bit_generator.state = json.loads(str(state["rng"]))
        self.recent_step = int(state["recent_step"])
        for name in ("all", "recent"):
            columns = {
                field: np.split(
                    state[f"{name}_{field}"], np.cumsum(state[f"{name}_{field}_lengths"])[:-1]
                )
                for field in ("prompt", "tokens", "ref_logprobs", "behavior_logprobs")
            }
            cards, shelves, start = state[f"{name}_cards"].tolist(), {}, 0
            for query, count in zip(cards, state[f"{name}_counts"].tolist()):
                shelf = shelves[query] = Shelf()
                rows = [
                    Row(
                        query,
                        int(state[f"{name}_versions"][i]),
                        int(state[f"{name}_reference_versions"][i]),
                        columns["prompt"][i],
                        columns["tokens"][i],
                        columns["ref_logprobs"][i],
                        columns["behavior_logprobs"][i],
                        float(state[f"{name}_rewards"][i]),
                    )
                    for i in range(start, start + count)
                ]
                for row in rows:
                    shelf.add(row, row.tokens.tobytes(), count)
                # add() filled rows in the saved order; now the order of age as well, so that the same rows leave first.
                keys = list(shelf.place)
                for index in state[f"{name}_ages"][start : start + count].tolist():
                    shelf.place.move_to_end(keys[index])
                start += count
            setattr(self, name, shelves)
            setattr(self, f"{name}_deck", Deck(cards, int(state[f"{name}_drawn"])))
        self.responses = sum(len(shelf.rows) for shelf in self.all.values())
