"""What the replay buffer keeps, and with which probabilities it hands it out."""

import gc
import itertools
import time

import numpy as np
import pytest
from conftest import make_group

from buffer import Group, ReplayBuffer, Row

# The values that chi-square exceeds with probability 0.001, by degrees of freedom.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 7: 24.32, 9: 27.88}


def group(
    query: int, names: list[int], rewards: list[float] | None = None, version: int = 0
) -> Group:
    """Make a group with a response of one to three tokens for each name.

    The log-probabilities tell which version it came with.
    """
    lengths = [1 + name % 3 for name in names]
    tokens = np.repeat(names, lengths)
    fields = dict(
        reference_version=version // 4,
        ref_logprobs=np.full(len(tokens), -1.0 - version, np.float32),
        behavior_logprobs=np.full(len(tokens), -2.0 - version, np.float32),
        rewards=np.array(rewards or [0.0] * len(names), np.float32),
    )
    return make_group(query, version, lengths, tokens, **fields)


def make_buffer(
    capacity: int = 100, inverse_temperature: float = 0.0, seed: int = 0
) -> ReplayBuffer:
    return ReplayBuffer(capacity, inverse_temperature, seed)


def filled(*syncs: list[Group], **settings) -> ReplayBuffer:
    """Make a buffer to which each sync has added its groups, at steps 0, 2, 4 and so on."""
    buffer = make_buffer(**settings)
    for i, groups in enumerate(syncs):
        buffer.add(groups, step=2 * i)
    return buffer


def name(row: Row) -> int:
    return int(row.tokens[0])


def names(rows: list[Row]) -> list[int]:
    return [name(row) for row in rows]


def held(buffer: ReplayBuffer) -> list[int]:
    """Return all that a buffer with one query holds.

    As many draws without replacement as it has responses give each of them once.
    """
    return sorted(names(buffer.sample(1, buffer.responses, most_on_policy_prob=0.0)))


def recent(buffer: ReplayBuffer, count: int) -> list[int]:
    """Draw `count` recent responses of the next query of the latest sync."""
    return sorted(names(buffer.sample(1, count, most_on_policy_prob=1.0)))


def assert_distribution(observed: list, probabilities: dict) -> None:
    """Apply Pearson's chi-square test to the observed outcomes.

    `probabilities` has every outcome; nothing else may have been observed.
    """
    assert sum(probabilities.values()) == pytest.approx(1.0)
    assert set(observed) <= set(probabilities)
    counts = np.array([observed.count(outcome) for outcome in probabilities])
    expected = np.array(list(probabilities.values())) * len(observed)
    # Below 5 the statistic does not follow the chi-square distribution.
    assert expected.min() >= 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < CRITICAL[len(probabilities) - 1], f"observed {counts}, expected {expected}"


def uniform(outcomes) -> dict:
    outcomes = list(outcomes)
    return dict.fromkeys(outcomes, 1 / len(outcomes))


def softmax(rewards: list[float], inverse_temperature: float) -> np.ndarray:
    weights = np.exp(np.array(rewards) * inverse_temperature)
    return weights / weights.sum()


def assert_same_rows(rows: list[Row], expected: list[Row]) -> None:
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected):
        for field in ("query_id", "version", "reference_version", "reward", "received_step"):
            assert getattr(row, field) == getattr(other, field)
        for field in ("prompt", "tokens", "ref_logprobs", "behavior_logprobs"):
            array, wanted = getattr(row, field), getattr(other, field)
            assert array.dtype == wanted.dtype
            np.testing.assert_array_equal(array, wanted)


# The three ways to draw responses


def test_recent_responses_are_drawn_uniformly_whatever_their_reward():
    buffer = make_buffer(inverse_temperature=3.0)
    buffer.add([group(0, [1, 2, 3], [5.0, 5.0, 5.0])], step=0)
    buffer.add([group(0, [4, 5, 6, 7, 8], [0.0, 1.0, 2.0, 3.0, 4.0])], step=2)
    draws = [recent(buffer, 1)[0] for _ in range(3000)]
    assert_distribution(draws, uniform([4, 5, 6, 7, 8]))
    pairs = [tuple(recent(buffer, 2)) for _ in range(3000)]
    assert_distribution(pairs, uniform(itertools.combinations([4, 5, 6, 7, 8], 2)))


def test_replayed_responses_are_drawn_uniformly_at_inverse_temperature_zero():
    buffer = make_buffer(inverse_temperature=0.0)
    buffer.add([group(0, [1, 2], [5.0, 0.0])], step=0)
    buffer.add([group(0, [3, 4, 5], [0.0, 1.0, 2.0])], step=2)
    draws = [names(buffer.sample(1, 1, 0.0))[0] for _ in range(3000)]
    assert_distribution(draws, uniform([1, 2, 3, 4, 5]))
    pairs = [tuple(sorted(names(buffer.sample(1, 2, 0.0)))) for _ in range(3000)]
    assert_distribution(pairs, uniform(itertools.combinations([1, 2, 3, 4, 5], 2)))


def test_replayed_responses_are_drawn_by_the_softmax_of_their_rewards():
    rewards, inverse_temperature = [0.0, 1.0, 0.5, -1.0], 1.5
    p = softmax(rewards, inverse_temperature)
    buffer = make_buffer(inverse_temperature=inverse_temperature)
    buffer.add([group(0, [0, 1], rewards[:2])], step=0)
    buffer.add([group(0, [2, 3], rewards[2:])], step=2)
    draws = [names(buffer.sample(1, 1, 0.0))[0] for _ in range(3000)]
    assert_distribution(draws, dict(enumerate(p)))
    # Two without replacement: the second is drawn by the softmax over those that are left.
    pairs = [tuple(sorted(names(buffer.sample(1, 2, 0.0)))) for _ in range(4000)]
    probabilities = {
        (i, j): p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        for i, j in itertools.combinations(range(4), 2)
    }
    assert_distribution(pairs, probabilities)


def test_a_draw_with_replacement_follows_the_softmax_too():
    rewards = [0.0, 1.0]
    p = softmax(rewards, 1.0)
    buffer = filled([group(0, [0, 1], rewards)], inverse_temperature=1.0)
    counts_of_one = [sum(names(buffer.sample(1, 3, 0.0))) for _ in range(3000)]
    binomial = {0: p[0] ** 3, 1: 3 * p[0] ** 2 * p[1], 2: 3 * p[0] * p[1] ** 2, 3: p[1] ** 3}
    assert_distribution(counts_of_one, binomial)


def test_responses_repeat_only_where_a_query_has_fewer_than_asked_for():
    buffer = filled([group(0, [1, 2, 3, 4])])
    for most_on_policy_prob in (0.0, 1.0):
        for _ in range(50):
            assert sorted(names(buffer.sample(1, 4, most_on_policy_prob))) == [1, 2, 3, 4]
            assert len(set(names(buffer.sample(1, 3, most_on_policy_prob)))) == 3
            assert len(buffer.sample(1, 5, most_on_policy_prob)) == 5
    # Five of four are drawn with replacement; they are not "all and one more".
    assert any(len(set(names(buffer.sample(1, 5, 0.0)))) < 4 for _ in range(50))


def test_recent_responses_repeat_rather_than_be_filled_up_with_older_ones():
    buffer = filled([group(0, [1, 2, 3, 4])], [group(0, [5])])
    assert recent(buffer, 4) == [5, 5, 5, 5]


# Recent or replay


def test_each_query_of_a_batch_is_recent_with_probability_m_independently():
    m = 0.3
    # Replay always finds the old response, whose reward is higher.
    buffer = filled([group(0, [1], [1.0])], [group(0, [2], [0.0])], inverse_temperature=1e4)
    recents = [names(buffer.sample(2, 1, m)).count(2) for _ in range(3000)]
    assert_distribution(recents, {0: (1 - m) ** 2, 1: 2 * m * (1 - m), 2: m**2})


def test_m_of_one_is_always_recent_and_m_of_zero_always_replay():
    buffer = filled([group(0, [1], [1.0])], [group(0, [2], [0.0])], inverse_temperature=1e4)
    assert set(names(buffer.sample(200, 1, 1.0))) == {2}
    assert set(names(buffer.sample(200, 1, 0.0))) == {1}


# Which query


@pytest.mark.parametrize("most_on_policy_prob", [0.0, 1.0])
def test_queries_come_without_replacement_until_all_were_drawn(most_on_policy_prob):
    buffer = filled([group(query, [1, 2]) for query in range(5)])
    first, second = [], []
    for _ in range(1000):
        order = [buffer.sample(1, 1, most_on_policy_prob)[0].query_id for _ in range(5)]
        assert sorted(order) == [0, 1, 2, 3, 4]
        first.append(order[0])
        second.append(order[1])
    assert_distribution(first, uniform(range(5)))
    assert_distribution(second, uniform(range(5)))


def test_a_batch_holds_no_query_twice_while_others_wait():
    buffer = filled([group(query, [1, 2]) for query in range(6)])
    for _ in range(20):
        assert sorted(row.query_id for row in buffer.sample(6, 1, 0.0)) == [0, 1, 2, 3, 4, 5]


def test_a_query_that_arrives_in_mid_round_is_drawn_in_that_round():
    buffer = filled([group(query, [1]) for query in range(3)])
    drawn = [buffer.sample(1, 1, 0.0)[0].query_id for _ in range(2)]
    buffer.add([group(3, [1])], step=2)
    drawn += [buffer.sample(1, 1, 0.0)[0].query_id for _ in range(2)]
    assert sorted(drawn) == [0, 1, 2, 3]


def test_recent_queries_and_replayed_queries_are_drawn_from_decks_of_their_own():
    buffer = filled([group(query, [1]) for query in range(4)])
    replayed, recents = [], []
    for _ in range(4):
        replayed.append(buffer.sample(1, 1, 0.0)[0].query_id)
        recents.append(buffer.sample(1, 1, 1.0)[0].query_id)
    assert sorted(replayed) == sorted(recents) == [0, 1, 2, 3]


def test_the_rows_of_a_query_are_contiguous():
    buffer = make_buffer()
    buffer.add([group(query, list(range(1, 2 + query))) for query in range(6)], step=0)
    buffer.add([group(query, [9, 10]) for query in range(3, 6)], step=2)
    for _ in range(50):
        rows = buffer.sample(7, 3, 0.5)
        assert len(rows) == 21
        for i in range(0, 21, 3):
            assert len({row.query_id for row in rows[i : i + 3]}) == 1


def test_a_row_carries_what_its_group_said_of_it():
    sent = group(4, [1, 2, 3], [0.1, 0.2, 0.3], version=6)
    buffer = make_buffer()
    buffer.add([sent], step=8)
    ends = np.cumsum(sent.lengths)
    for row in buffer.sample(1, 3, 1.0):
        i = name(row) - 1
        part = slice(ends[i] - sent.lengths[i], ends[i])
        wanted = Row(
            query_id=4,
            version=6,
            reference_version=1,
            prompt=sent.prompt,
            tokens=sent.tokens[part],
            ref_logprobs=sent.ref_logprobs[part],
            behavior_logprobs=sent.behavior_logprobs[part],
            in_loss=sent.in_loss[part],
            sampled=sent.sampled[part],
            reward=float(sent.rewards[i]),
            received_step=8,
        )
        assert_same_rows([row], [wanted])


def test_an_empty_buffer_gives_nothing():
    buffer = make_buffer()
    assert buffer.sample(1, 1, 1.0) == []
    buffer.add([], step=0)
    assert buffer.sample(1, 1, 0.0) == []


# Staleness


def test_rows_of_versions_before_the_oldest_are_left_out_and_the_rest_are_drawn_as_before():
    buffer = make_buffer(inverse_temperature=1.0)
    rewards = [0.0, 1.0, 2.0, 0.5]
    for version, reward in enumerate(rewards):
        buffer.add([group(0, [version], [reward], version=version)], step=version)
    drawn = [name(buffer.sample(1, 1, 0.0, oldest_version=1)[0]) for _ in range(3000)]
    assert_distribution(drawn, dict(zip([1, 2, 3], softmax(rewards[1:], 1.0))))
    enough = buffer.sample(1, 3, 0.0, oldest_version=1)
    assert sorted(names(enough)) == [1, 2, 3], "without replacement where there are enough"
    too_few = buffer.sample(1, 50, 0.0, oldest_version=2)
    assert set(names(too_few)) == {2, 3}, "with replacement where there are not"


def test_uniform_draws_leave_old_rows_out_too():
    buffer = make_buffer()
    buffer.add([group(0, [1, 2], version=3), group(0, [3, 4, 5], version=7)], step=7)
    for most_on_policy_prob in 0.0, 1.0:
        draws = [buffer.sample(1, 1, most_on_policy_prob, oldest_version=5) for _ in range(2000)]
        assert_distribution([name(row) for (row,) in draws], uniform([3, 4, 5]))


def test_queries_with_old_rows_only_are_passed_over_and_leave():
    buffer = make_buffer()
    for query in range(20):
        buffer.add([group(query, [query], version=query)], step=query)
    drawn = [buffer.sample(1, 1, 0.0, oldest_version=15)[0].query_id for _ in range(5000)]
    assert_distribution(drawn, uniform(range(15, 20)))
    assert buffer.responses == 5 and sorted(buffer.all) == list(range(15, 20))
    # Each round of the deck is still one of every query that is left, once.
    assert all(sorted(drawn[i : i + 5]) == list(range(15, 20)) for i in range(100, 5000, 5))
    buffer.add([group(3, [3], version=16)], step=20)
    # Query 3 is back with a young row: first in the rest of this round, then in the next.
    again = [row.query_id for row in buffer.sample(7, 1, 0.0, oldest_version=15)]
    assert again[0] == 3
    assert sorted(again[1:]) == [3, *range(15, 20)]


def test_a_recent_set_that_has_grown_old_gives_way_to_replay_and_at_last_to_nothing():
    buffer = make_buffer()
    buffer.add([group(0, [1], version=4)], step=4)
    buffer.add([group(1, [2], version=2)], step=6)  # from a slow searcher
    assert [row.query_id for row in buffer.sample(3, 1, 1.0, oldest_version=3)] == [0, 0, 0]
    assert buffer.sample(3, 1, 1.0, oldest_version=5) == []
    assert buffer.responses == 0
    buffer.add([group(0, [1], version=8)], step=8)
    assert [row.version for row in buffer.sample(2, 1, 0.5, oldest_version=5)] == [8, 8]


# What is recent


def test_only_what_the_latest_sync_added_is_recent():
    buffer = make_buffer()
    buffer.add([group(0, [1, 2]), group(1, [3])], step=0)
    buffer.add([group(0, [4]), group(2, [5])], step=2)
    buffer.add([group(1, [6, 7]), group(2, [8])], step=4)
    seen = {(row.query_id, name(row)) for row in buffer.sample(200, 1, 1.0)}
    assert seen == {(1, 6), (1, 7), (2, 8)}
    seen = {(row.query_id, name(row)) for row in buffer.sample(600, 1, 0.0)}
    assert seen == {(0, 1), (0, 2), (0, 4), (1, 3), (1, 6), (1, 7), (2, 5), (2, 8)}


def test_a_sync_that_brought_nothing_keeps_the_previous_recent_set():
    buffer = filled([group(0, [1, 2])], [group(0, [3, 4])], [])
    assert recent(buffer, 2) == [3, 4]
    buffer.add([group(0, [5])], step=6)
    assert recent(buffer, 1) == [5]


def test_several_additions_with_one_step_are_one_sync():
    buffer = filled([group(0, [1, 2])], [group(0, [3])])
    buffer.add([], step=2)
    buffer.add([group(0, [4])], step=2)
    assert recent(buffer, 2) == [3, 4]


def test_several_groups_of_one_query_in_one_sync_are_all_recent():
    buffer = make_buffer()
    buffer.add([group(0, [1, 2]), group(0, [3], version=2)], step=2)
    assert recent(buffer, 3) == [1, 2, 3]


def test_a_response_that_is_found_again_is_recent_again():
    buffer = filled([group(0, [1, 2])], [group(0, [1, 3], version=2)])
    assert recent(buffer, 2) == [1, 3]
    assert {row.version for row in buffer.sample(1, 2, 1.0)} == {2}


# What is kept


def test_the_oldest_responses_leave_first():
    buffer = filled([group(0, [1, 2, 3])], [group(0, [4, 5])], capacity=4)
    assert held(buffer) == [2, 3, 4, 5]
    buffer.add([group(0, [6, 7, 8])], step=4)
    assert held(buffer) == [5, 6, 7, 8]
    buffer.add([group(0, [9])], step=6)
    assert held(buffer) == [6, 7, 8, 9]


def test_of_a_group_larger_than_the_capacity_the_last_stay():
    buffer = filled([group(0, [1, 2, 3, 4, 5])], capacity=3)
    assert held(buffer) == [3, 4, 5]
    assert recent(buffer, 3) == [3, 4, 5]


def test_the_capacity_is_that_of_each_query():
    buffer = filled([group(0, [1, 2]), group(1, [3, 4])], [group(0, [5])], capacity=2)
    assert buffer.responses == 4
    seen = {(row.query_id, name(row)) for row in buffer.sample(200, 1, 0.0)}
    assert seen == {(0, 2), (0, 5), (1, 3), (1, 4)}


def test_from_its_growth_steps_on_new_responses_replace_the_oldest_one_for_one():
    buffer = ReplayBuffer(100, reward_inverse_temperature=0.0, seed=0, growth_steps=5)
    for step in range(4):
        buffer.add([group(0, [2 * step, 2 * step + 1])], step)
    assert held(buffer) == [0, 1, 2, 3, 4, 5, 6, 7]
    buffer.add([group(0, [20, 21])], step=5)
    buffer.add([group(0, [22, 23])], step=5)
    assert held(buffer) == [4, 5, 6, 7, 20, 21, 22, 23]
    buffer.add([group(0, [22, 24])], step=6)
    assert held(buffer) == [5, 6, 7, 20, 21, 22, 23, 24], "a duplicate takes no place"
    buffer.add([group(1, [30, 31])], step=7)
    buffer.add([group(1, [32, 33])], step=8)
    assert buffer.responses == 10, "a query that is new then keeps one group"


def test_a_duplicate_counts_as_new():
    buffer = filled([group(0, [1, 2, 3])], [group(0, [1])], [group(0, [4])], capacity=3)
    assert held(buffer) == [1, 3, 4]
    buffer.add([group(0, [5])], step=6)
    assert held(buffer) == [1, 4, 5]


def test_of_duplicates_the_newest_is_kept():
    buffer = filled([group(0, [1, 2], [0.0, 0.5], version=0)])
    buffer.add([group(0, [2], [0.75], version=6)], step=8)
    assert buffer.responses == 2
    rows = {name(row): row for row in buffer.sample(1, 2, 0.0)}
    assert (rows[1].version, rows[1].reward) == (0, 0.0)
    assert (rows[2].version, rows[2].reward) == (6, 0.75)
    np.testing.assert_array_equal(rows[2].ref_logprobs, np.full(3, -7.0, np.float32))
    np.testing.assert_array_equal(rows[2].behavior_logprobs, np.full(3, -8.0, np.float32))


def test_the_reward_of_the_newest_duplicate_is_the_one_that_draws_it():
    buffer = filled([group(0, [1, 2], [1.0, 0.0])], [group(0, [2], [2.0])], inverse_temperature=1e4)
    assert set(names(buffer.sample(50, 1, 0.0))) == {2}


def test_the_same_tokens_under_another_query_are_no_duplicate():
    buffer = filled([group(0, [1]), group(1, [1])])
    assert buffer.responses == 2


def test_a_response_that_another_begins_with_is_no_duplicate_of_it():
    buffer = make_buffer()
    short, long = group(0, [1]), group(0, [1])
    long.lengths, long.tokens = np.array([4], np.int32), np.array([1, 1, 1, 1], np.int32)
    long.ref_logprobs = long.behavior_logprobs = np.zeros(4, np.float32)
    long.in_loss = long.sampled = np.ones(4, bool)
    buffer.add([short, long], step=0)
    assert buffer.responses == 2


def test_the_number_of_responses_is_what_is_held():
    buffer = make_buffer(capacity=3)
    assert buffer.responses == 0
    buffer.add([group(0, [1, 2]), group(1, [1])], step=0)
    assert buffer.responses == 3
    buffer.add([group(0, [2, 3, 4])], step=2)
    assert buffer.responses == 4


# Saving and loading


def saved_and_loaded(buffer: ReplayBuffer, path) -> ReplayBuffer:
    np.savez(path, **buffer.state_dict())
    other = make_buffer(buffer.capacity_per_query, buffer.reward_inverse_temperature, seed=12345)
    with np.load(path, allow_pickle=False) as state:
        other.load_state_dict(state)
    return other


def test_a_loaded_buffer_goes_on_with_the_same_draws_and_evictions(tmp_path):
    rng = np.random.default_rng(0)

    def random_group(query: int, step: int) -> Group:
        responses, rewards = rng.integers(20, size=5).tolist(), rng.normal(size=5).tolist()
        return group(query, responses, rewards, version=step)

    def sync(step: int) -> list[Group]:
        queries = rng.choice(7, size=4, replace=False).tolist()
        return [random_group(query, step) for query in queries]

    buffer = make_buffer(capacity=8, inverse_temperature=1.0)
    # Long enough that responses have left and their places were taken again.
    for step in range(0, 20, 2):
        buffer.add(sync(step), step)
        buffer.sample(3, 4, 0.5)
    other = saved_and_loaded(buffer, tmp_path / "buffer.npz")
    assert other.responses == buffer.responses
    # The first addition belongs to the sync that was the latest before saving.
    for step in range(18, 60, 2):
        assert_same_rows(other.sample(5, 4, 0.5), buffer.sample(5, 4, 0.5))
        groups = sync(step)
        buffer.add(groups, step)
        other.add(groups, step)
        assert other.responses == buffer.responses
    states = buffer.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for key in states[0]:
        np.testing.assert_array_equal(states[1][key], states[0][key], err_msg=key)


def test_a_loaded_buffer_evicts_by_age_and_knows_its_duplicates(tmp_path):
    buffer = filled([group(0, [1, 2, 3])], [group(0, [1])], capacity=3)
    other = saved_and_loaded(buffer, tmp_path / "buffer.npz")
    other.add([group(0, [3])], step=4)  # a duplicate: now 2 is the oldest
    other.add([group(0, [4])], step=6)
    assert held(other) == [1, 3, 4]


def test_an_empty_buffer_can_be_saved_and_loaded(tmp_path):
    other = saved_and_loaded(make_buffer(), tmp_path / "buffer.npz")
    assert other.sample(1, 1, 0.0) == []
    other.add([group(0, [1])], step=0)
    assert held(other) == [1]


def test_one_seed_gives_one_sequence_of_draws():
    def draws(seed: int) -> list[Row]:
        buffer = make_buffer(seed=seed)
        buffer.add([group(query, [1, 2, 3]) for query in range(4)], step=0)
        return buffer.sample(20, 2, 0.5)

    assert_same_rows(draws(1), draws(1))
    drawn = {seed: [(row.query_id, name(row)) for row in draws(seed)] for seed in (1, 2)}
    assert drawn[1] != drawn[2]


# Cost


def many(query: int, stamp: int, count: int) -> Group:
    """Make `count` distinct responses of two tokens; another stamp gives no duplicates of them."""
    tokens = np.stack([np.arange(count), np.full(count, stamp)], axis=1).ravel()
    return make_group(query, stamp, np.full(count, 2), tokens)


@pytest.fixture
def no_garbage_collection():
    """Turn the collector off: it goes through every live object, in any call that sets it off."""
    gc.disable()
    yield
    gc.enable()


def test_a_million_responses_cost_no_more_per_call_than_a_thousand(no_garbage_collection):
    def of_size(queries: int) -> ReplayBuffer:
        buffer = make_buffer(capacity=10, inverse_temperature=1.0)
        for start in range(0, queries, 100):
            buffer.add([many(query, 0, 10) for query in range(start, start + 100)], step=start)
        return buffer

    buffers = [of_size(100), of_size(100_000)]
    assert [buffer.responses for buffer in buffers] == [1_000, 1_000_000]
    add_times, sample_times = np.empty((2, 100)), np.empty((2, 100))
    for i in range(100):
        groups = [many(query, i + 1, 10) for query in range(20)]
        # In turn, and by the processor's time, so that other work on this machine counts for both.
        for which, buffer in enumerate(buffers):
            start = time.thread_time()
            buffer.add(groups, step=200_000 + i)
            added = time.thread_time()
            buffer.sample(32, 8, 0.5)
            sampled = time.thread_time()
            add_times[which, i] = added - start
            sample_times[which, i] = sampled - added
    for times in add_times, sample_times:
        small, large = np.median(times, axis=1)
        figures = f"{small * 1e6:.0f} us at 1,000 responses, {large * 1e6:.0f} us at 1,000,000"
        assert large < 2 * small, figures
