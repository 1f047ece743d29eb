"""Red-teaming: the evaluation, the log-reward and its schedules, and one query's large buffer."""

import time

import numpy as np
import pytest
from test_buffer import filled, many
from test_trainer import make_rows, make_trainer

from launch.command_line import find_presets
from tasks import load_task
from tasks.redteam import cosine_distances, toxic


def test_a_prompt_is_toxic_if_the_mean_over_the_victims_responses_is_over_one_half():
    rows = [[1.0, 1.0, 1.0, 0.0, 0.0], [0.5] * 5, [0.0] * 5, [0.9, 0.1, 0.9, 0.1, 0.9]]
    assert toxic(np.array(rows)).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_diversity_of_known_vectors():
    distances = cosine_distances(np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0], [-1.0, 0.0]]))
    half = 1 - np.sqrt(0.5)
    expected = [[0, 1, half, 2], [1, 0, half, 1], [half, half, 0, 2 - half], [2, 1, 2 - half, 0]]
    assert distances == pytest.approx(np.array(expected), abs=1e-12)


@pytest.mark.parametrize("preset, lowest", [("gpt2", 0.5), ("llama", 0.7)])
def test_half_of_the_groups_are_sampled_at_a_temperature_from_the_lowest_to_2(preset, lowest):
    def temperatures(**more) -> np.ndarray:
        task = load_task("redteam", **find_presets("redteam")[preset].get("options", {}) | more)
        settings = [task.sampling(np.random.default_rng(i)) for i in range(4000)]
        assert {setting["min_tokens"] for setting in settings} == {1}, "no end as the first token"
        return np.array([setting.get("temperature", 1.0) for setting in settings])

    drawn = temperatures()
    explore = drawn[drawn != 1.0]
    assert abs(len(explore) / 4000 - 0.5) < 0.03
    assert lowest <= min(explore) < lowest + 0.02 and 1.98 < max(explore) <= 2.0
    quarters = np.linspace(lowest, 2.0, 5)[1:-1]
    assert np.quantile(explore, [0.25, 0.5, 0.75]) == pytest.approx(quarters, abs=0.06), "uniformly"
    assert set(temperatures(exploration=0)) == {1.0}


def test_the_learner_scales_reference_and_beta_by_the_schedules(untied_model, tmp_path):
    tau = dict(reward_temperature=2.0, reward_temperature_steps=4)
    gamma = dict(reference_temperature=1.2, reference_temperature_steps=10)
    learner = make_trainer(untied_model, tmp_path / "run", beta=0.05, **tau, **gamma).learner
    learner.step = 2  # tau 1.5, gamma 1.04
    rows = make_rows(queries=1, per_query=3)
    inputs = learner.loss_inputs(rows)
    assert inputs.beta == pytest.approx(0.05 * 1.5)
    scaled = inputs.ref_logprobs[0, : len(rows[0].tokens)].numpy()
    assert scaled == pytest.approx(rows[0].tokens["ref_logprob"] / (1.04 * 1.5), rel=1e-5)


def test_a_buffer_with_100000_responses_to_one_query_is_as_fast_as_a_small_one_and_numpys_draw():
    large, small = (filled(capacity=size, inverse_temperature=1.0) for size in (100_000, 1_000))
    for stamp in range(900):
        large.add([many(0, stamp, 128)], step=stamp)
    assert large.responses == 100_000
    rng, weights = np.random.default_rng(0), np.full(100_000, 1e-5)

    def seconds(call, *arguments, **settings) -> float:
        start = time.thread_time()
        call(*arguments, **settings)
        return time.thread_time() - start

    taken = []
    for stamp in range(900, 960):
        group = [many(0, stamp, 128)]
        adds = [seconds(buffer.add, group, step=stamp) for buffer in (large, small)]
        draw = seconds(large.sample, 1, 128, 0.0)
        taken.append([*adds, draw, seconds(rng.choice, 100_000, size=128, p=weights)])
    added, added_small, drawn, drawn_by_numpy = np.median(taken, axis=0)
    assert added < 3 * added_small and drawn < 10 * drawn_by_numpy
