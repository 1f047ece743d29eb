"""What the replay buffer keeps, and with which probabilities it hands it out."""

import gc
import itertools
import time
from dataclasses import fields

import numpy as np
import pytest
from conftest import make_group

from buffer import ReplayBuffer, by_reward, uniformly
from rollouts import Group, Response

# The values that chi-square exceeds with probability 0.001, by degrees of freedom.
CRITICAL = {2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 7: 24.32, 9: 27.88, 27: 55.48}


def group(query: int, names: list[int], rewards=None, version: int = 0) -> Group:
    """Make a group with a response of one to three tokens for each name.

    The log-probabilities tell which version it came with.
    """
    lengths = [1 + name % 3 for name in names]
    logprobs = dict(ref_logprob=-1.0 - version, behavior_logprob=-2.0 - version)
    rewards = np.array(rewards or [0.0] * len(names), np.float32)
    return make_group(query, version, lengths, np.repeat(names, lengths), logprobs, rewards=rewards)


def filled(*syncs: list[Group], capacity=100, inverse_temperature=0.0, seed=0) -> ReplayBuffer:
    """Make a buffer to which each sync has added its groups, at steps 0, 2, 4 and so on."""
    buffer = ReplayBuffer(capacity, by_reward(inverse_temperature), seed)
    for i, groups in enumerate(syncs):
        buffer.add(groups, step=2 * i)
    return buffer


def name(row: Response) -> int:
    return int(row.tokens["token"][0])


def names(rows: list[Response]) -> list[int]:
    return sorted(name(row) for row in rows)


def seen(buffer: ReplayBuffer, m: float) -> set[tuple[int, int]]:
    """Draw so often that all that is held, or all that is recent, comes: (query, name)."""
    return {(row.query_id, name(row)) for row in buffer.sample(600, 1, m)}


def draws(buffer: ReplayBuffer, count: int, m: float, **settings) -> list[tuple[int, ...]]:
    """Draw `count` responses to a query, 4000 times."""
    return [tuple(names(buffer.sample(1, count, m, **settings))) for _ in range(4000)]


def drawn_queries(buffer: ReplayBuffer, count: int, m: float, **settings) -> list[int]:
    return [row.query_id for row in buffer.sample(count, 1, m, **settings)]


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


def assert_same_rows(rows: list[Response], expected: list[Response]) -> None:
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected):
        for field in fields(Response):
            value, wanted = getattr(row, field.name), getattr(other, field.name)
            np.testing.assert_array_equal(value, wanted, strict=True)  # of one dtype too


# The three ways to draw responses


@pytest.mark.parametrize("m, inverse_temperature, oldest", [(1.0, 3.0, 4), (0.0, 0.0, 1)])
def test_recent_ones_and_unweighted_replay_are_drawn_uniformly(m, inverse_temperature, oldest):
    """Whatever their rewards are."""
    first = group(0, [1, 2, 3], [5.0, 5.0, 5.0])
    second = group(0, [4, 5, 6, 7, 8], [0.0, 1.0, 2.0, 3.0, 4.0])
    buffer = filled([first], [second], inverse_temperature=inverse_temperature)
    for count in 1, 2:
        outcomes = itertools.combinations(range(oldest, 9), count)
        assert_distribution(draws(buffer, count, m), uniform(outcomes))


def test_replayed_responses_are_drawn_by_the_softmax_of_their_rewards():
    rewards = [0.0, 1.0, 0.5, -1.0]
    p = softmax(rewards, 1.5)
    groups = group(0, [0, 1], rewards[:2]), group(0, [2, 3], rewards[2:])
    buffer = filled(*([one] for one in groups), inverse_temperature=1.5)
    assert_distribution(draws(buffer, 1, 0.0), {(i,): p[i] for i in range(4)})
    # Two without replacement: the second is drawn by the softmax over those that are left.
    probabilities = {
        (i, j): p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        for i, j in itertools.combinations(range(4), 2)
    }
    assert_distribution(draws(buffer, 2, 0.0), probabilities)


def test_of_many_responses_the_best_are_drawn_where_rewards_count_for_all():
    """Few would not do: a partition of few sorts them whole."""
    rewards = np.random.default_rng(0).permutation(1000).tolist()
    buffer = filled([group(0, range(1000), rewards)], capacity=1000, inverse_temperature=1e6)
    for count in 1, 2, 5:
        best = [i for i, reward in enumerate(rewards) if reward >= 1000 - count]
        assert names(buffer.sample(1, count, 0.0)) == best


def test_a_draw_with_replacement_follows_the_softmax_too():
    p, q = softmax([0.0, 1.0], 1.0)
    buffer = filled([group(0, [0, 1], [0.0, 1.0])], inverse_temperature=1.0)
    counts_of_one = [sum(drawn) for drawn in draws(buffer, 3, 0.0)]
    assert_distribution(counts_of_one, {0: p**3, 1: 3 * p**2 * q, 2: 3 * p * q**2, 3: q**3})


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_responses_repeat_only_where_a_query_has_fewer_than_asked_for(m):
    buffer = filled([group(0, [1, 2, 3, 4])])
    for _ in range(50):
        assert names(buffer.sample(1, 4, m)) == [1, 2, 3, 4]
        assert len(set(names(buffer.sample(1, 3, m)))) == 3
    # Five of four are drawn with replacement; they are not "all and one more".
    fives = [names(buffer.sample(1, 5, m)) for _ in range(50)]
    assert {len(five) for five in fives} == {5}
    assert any(len(set(five)) < 4 for five in fives)
    buffer.add([group(0, [5])], step=2)
    assert names(buffer.sample(1, 4, 1.0)) == [5] * 4, "not filled up with older ones"


# Recent or replay


def test_each_query_of_a_batch_is_recent_with_probability_m_independently():
    m = 0.3
    # Replay always finds the old response, whose reward is higher.
    buffer = filled([group(0, [1], [1.0])], [group(0, [2], [0.0])], inverse_temperature=1e4)
    recents = [names(buffer.sample(2, 1, m)).count(2) for _ in range(3000)]
    assert_distribution(recents, {0: (1 - m) ** 2, 1: 2 * m * (1 - m), 2: m**2})
    assert seen(buffer, 1.0) == {(0, 2)}
    assert seen(buffer, 0.0) == {(0, 1)}


# Which query


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_queries_come_without_replacement_until_all_were_drawn_within_a_batch_and_across(m):
    buffer = filled([group(query, [1, 2]) for query in range(5)])
    rounds = [drawn_queries(buffer, 3, m) + drawn_queries(buffer, 2, m) for _ in range(1000)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in rounds)
    for place in 0, 1:
        assert_distribution([order[place] for order in rounds], uniform(range(5)))


def test_a_query_that_arrives_in_mid_round_is_drawn_in_that_round():
    buffer = filled([group(query, [1]) for query in range(3)])
    drawn = drawn_queries(buffer, 2, 0.0)
    buffer.add([group(3, [1])], step=2)
    assert sorted(drawn + drawn_queries(buffer, 2, 0.0)) == [0, 1, 2, 3]


def test_recent_queries_and_replayed_queries_are_drawn_from_decks_of_their_own():
    buffer = filled([group(query, [1]) for query in range(4)])
    pairs = [[drawn_queries(buffer, 1, m)[0] for m in (0.0, 1.0)] for _ in range(4)]
    assert [sorted(deck) for deck in zip(*pairs)] == [[0, 1, 2, 3]] * 2


def test_the_rows_of_a_query_are_contiguous():
    first = [group(query, list(range(1, 2 + query))) for query in range(6)]
    buffer = filled(first, [group(query, [9, 10]) for query in range(3, 6)])
    for _ in range(50):
        rows = buffer.sample(7, 3, 0.5)
        assert len(rows) == 21
        for i in range(0, 21, 3):
            assert len({row.query_id for row in rows[i : i + 3]}) == 1


def test_a_row_carries_what_its_group_said_of_it():
    sent = group(4, [1, 2, 3], [0.1, 0.2, 0.3], version=6)
    buffer = filled([], [], [], [], [sent])
    ends = np.cumsum(sent.lengths)
    for row in buffer.sample(1, 3, 1.0):
        i = name(row) - 1
        part = slice(ends[i] - sent.lengths[i], ends[i])
        same = dict(query_id=4, version=6, prompt=sent.prompt, received_step=8)
        wanted = Response(tokens=sent.tokens[part], reward=float(sent.rewards[i]), **same)
        assert_same_rows([row], [wanted])


def test_an_empty_buffer_gives_nothing():
    assert filled().sample(1, 1, 1.0) == filled([]).sample(1, 1, 0.0) == []


# Staleness


def test_rows_of_versions_before_the_oldest_are_left_out_and_the_rest_are_drawn_as_before():
    rewards = [0.0, 1.0, 2.0, 0.5]
    syncs = [[group(0, [i], [reward], version=i)] for i, reward in enumerate(rewards)]
    buffer = filled(*syncs, inverse_temperature=1.0)
    probabilities = dict(zip([(1,), (2,), (3,)], softmax(rewards[1:], 1.0)))
    assert_distribution(draws(buffer, 1, 0.0, oldest_version=1), probabilities)
    enough = buffer.sample(1, 3, 0.0, oldest_version=1)
    assert names(enough) == [1, 2, 3], "without replacement where there are enough"
    too_few = buffer.sample(1, 50, 0.0, oldest_version=2)
    assert set(names(too_few)) == {2, 3}, "with replacement where there are not"


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_uniform_draws_leave_old_rows_out_too(m):
    buffer = filled([group(0, [1, 2], version=3), group(0, [3, 4, 5], version=7)])
    drawn = draws(buffer, 1, m, oldest_version=5)
    assert_distribution(drawn, uniform([(3,), (4,), (5,)]))


def test_queries_with_old_rows_only_are_passed_over_and_leave():
    buffer = filled(*([group(query, [query], version=query)] for query in range(20)))
    drawn = [drawn_queries(buffer, 1, 0.0, oldest_version=15)[0] for _ in range(5000)]
    assert_distribution(drawn, uniform(range(15, 20)))
    assert buffer.responses == 5 and sorted(buffer.all.of_query) == list(range(15, 20))
    # Each round of the deck is still one of every query that is left, once.
    assert all(sorted(drawn[i : i + 5]) == list(range(15, 20)) for i in range(100, 5000, 5))
    buffer.add([group(3, [3], version=16)], step=40)
    # Query 3 is back with a young row: first in the rest of this round, then in the next.
    again = drawn_queries(buffer, 7, 0.0, oldest_version=15)
    assert again[0] == 3
    assert sorted(again[1:]) == [3, *range(15, 20)]


def test_a_recent_set_that_has_grown_old_gives_way_to_replay_and_at_last_to_nothing():
    slow = group(1, [2], version=2)  # from a slow searcher
    buffer = filled([group(0, [1], version=4)], [slow])
    assert drawn_queries(buffer, 3, 1.0, oldest_version=3) == [0, 0, 0]
    assert buffer.sample(3, 1, 1.0, oldest_version=5) == []
    assert buffer.responses == 0
    buffer.add([group(0, [1], version=8)], step=8)
    assert [row.version for row in buffer.sample(2, 1, 0.5, oldest_version=5)] == [8, 8]


# What is recent, what is kept, and that saving and loading change nothing of it


def saved_and_loaded(buffer: ReplayBuffer, path) -> ReplayBuffer:
    np.savez(path, **buffer.state_dict())
    other = ReplayBuffer(buffer.capacity_per_query, buffer.rule, seed=12345)
    with np.load(path, allow_pickle=False) as state:
        other.load_state_dict(state)
    return other


@pytest.mark.parametrize("is_loaded", [False, True], ids=["as it is", "saved and loaded"])
@pytest.mark.parametrize(
    "capacity, syncs, held, recent",
    [
        (4, [[1, 2, 3], [4, 5]], [2, 3, 4, 5], [4, 5]),
        (4, [[1, 2, 3], [4, 5], [6, 7, 8]], [5, 6, 7, 8], [6, 7, 8]),
        (4, [[1, 2, 3], [4, 5], [6, 7, 8], [9]], [6, 7, 8, 9], [9]),
        # Of a group larger than the capacity the last stay.
        (3, [[1, 2, 3, 4, 5]], [3, 4, 5], [3, 4, 5]),
        # A duplicate counts as new, and is recent again.
        (3, [[1, 2, 3], [1], [4]], [1, 3, 4], [4]),
        (3, [[1, 2, 3], [1], [4], [5]], [1, 4, 5], [5]),
        (3, [[1, 2, 3], [1], [3], [4]], [1, 3, 4], [4]),
        (9, [[1, 2], [1, 3]], [1, 2, 3], [1, 3]),
        # A sync that brought nothing keeps the previous recent set.
        (9, [[1, 2], [3, 4], []], [1, 2, 3, 4], [3, 4]),
        (9, [[1, 2], [3, 4], [], [5]], [1, 2, 3, 4, 5], [5]),
        (9, [[], [1]], [1], [1]),
    ],
)
def test_a_query_keeps_its_latest_responses_and_those_of_the_latest_sync_are_recent(
    capacity, syncs, held, recent, is_loaded, tmp_path
):
    groups = [[group(0, some, version=i)] if some else [] for i, some in enumerate(syncs)]
    buffer = filled(*groups[:-1], capacity=capacity)
    if is_loaded:
        buffer = saved_and_loaded(buffer, tmp_path / "buffer.npz")
    buffer.add(groups[-1], step=2 * len(syncs))
    # As many draws without replacement as there are responses give each of them once.
    assert names(buffer.sample(1, buffer.responses, 0.0)) == held
    rows = buffer.sample(1, len(recent), 1.0)
    assert names(rows) == recent
    assert {row.version for row in rows} == {max(i for i, some in enumerate(syncs) if some)}


def test_recent_and_held_are_of_each_query():
    buffer = filled(
        [group(0, [1, 2]), group(1, [3])],
        [group(0, [4]), group(2, [5])],
        [group(1, [6, 7]), group(2, [8])],
        capacity=2,
    )
    assert seen(buffer, 1.0) == {(1, 6), (1, 7), (2, 8)}
    assert seen(buffer, 0.0) == {(0, 2), (0, 4), (1, 6), (1, 7), (2, 5), (2, 8)}
    assert buffer.responses == 6


def test_all_that_is_added_with_one_step_is_one_sync():
    buffer = filled([group(0, [1, 2])], [group(0, [3]), group(0, [4], version=2)])
    buffer.add([], step=2)
    buffer.add([group(0, [5])], step=2)
    assert seen(buffer, 1.0) == {(0, 3), (0, 4), (0, 5)}


def test_from_its_growth_steps_on_new_responses_replace_the_oldest_one_for_one():
    def held() -> list[int]:
        return names(buffer.sample(1, buffer.responses, 0.0))

    buffer = ReplayBuffer(100, uniformly, seed=0, growth_steps=5)
    for step in range(4):
        buffer.add([group(0, [2 * step, 2 * step + 1])], step)
    assert held() == [0, 1, 2, 3, 4, 5, 6, 7]
    buffer.add([group(0, [20, 21])], step=5)
    buffer.add([group(0, [22, 23])], step=5)
    assert held() == [4, 5, 6, 7, 20, 21, 22, 23]
    buffer.add([group(0, [22, 24])], step=6)
    assert held() == [5, 6, 7, 20, 21, 22, 23, 24], "a duplicate takes no place"
    buffer.add([group(1, [30, 31])], step=7)
    buffer.add([group(1, [32, 33])], step=8)
    assert buffer.responses == 10, "a query that is new then keeps one group"


def test_of_duplicates_the_newest_is_kept_and_its_reward_draws_it():
    buffer = filled([group(0, [1, 2], [1.0, 0.5])], inverse_temperature=1e4)
    buffer.add([group(0, [2], [1.75], version=6)], step=8)
    assert buffer.responses == 2
    rows = {name(row): row for row in buffer.sample(1, 2, 0.0)}
    assert (rows[1].version, rows[1].reward) == (0, 1.0)
    assert (rows[2].version, rows[2].reward) == (6, 1.75)
    assert rows[2].tokens["ref_logprob"].tolist() == [-7.0] * 3
    assert rows[2].tokens["behavior_logprob"].tolist() == [-8.0] * 3
    assert seen(buffer, 0.0) == {(0, 2)}


def test_neither_another_query_nor_a_longer_response_makes_a_duplicate():
    longer = make_group(0, 0, lengths=[4], ids=[1, 1, 1, 1])
    assert filled([group(0, [1]), group(1, [1]), longer]).responses == 3


def test_a_loaded_buffer_goes_on_with_the_same_draws_and_evictions(tmp_path):
    rng = np.random.default_rng(0)

    def sync(step: int) -> list[Group]:
        return [
            group(query, rng.integers(20, size=5).tolist(), rng.normal(size=5).tolist(), step)
            for query in rng.choice(7, size=4, replace=False).tolist()
        ]

    buffer = filled(capacity=8, inverse_temperature=1.0)
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
    np.testing.assert_equal(other.state_dict(), buffer.state_dict())


def test_one_seed_gives_one_sequence_of_draws():
    groups = [group(query, [1, 2, 3]) for query in range(4)]
    drawn, again, other = (filled(groups, seed=seed).sample(20, 2, 0.5) for seed in (1, 1, 2))
    assert_same_rows(drawn, again)
    assert [(r.query_id, name(r)) for r in drawn] != [(r.query_id, name(r)) for r in other]


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


def test_a_million_responses_cost_no_more_per_call_than_100_000(no_garbage_collection):
    def of_size(queries: int) -> ReplayBuffer:
        buffer = filled(capacity=10, inverse_temperature=1.0)
        for start in range(0, queries, 100):
            buffer.add([many(query, 0, 10) for query in range(start, start + 100)], step=start)
        return buffer

    buffers = [of_size(10_000), of_size(100_000)]  # fewer would stay in a processor's cache
    assert [buffer.responses for buffer in buffers] == [100_000, 1_000_000]
    times = np.empty((2, 2, 100))  # of adding and of sampling; by buffer
    for i in range(100):
        groups = [many(query, i + 1, 10) for query in range(20)]
        # In turn, and by the processor's time, so that other work on this machine counts for both.
        for which, buffer in enumerate(buffers):
            start = time.thread_time()
            buffer.add(groups, step=200_000 + i)
            added = time.thread_time()
            buffer.sample(32, 8, 0.5)
            times[:, which, i] = added - start, time.thread_time() - added
    for small, large in np.median(times, axis=2):
        figures = f"{small * 1e6:.0f} us at 100,000 responses, {large * 1e6:.0f} us at 1,000,000"
        assert large < 2 * small, figures
