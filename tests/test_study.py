"""The benchmarks' small runs: the real trainer, with a searcher that generates in its process."""

import json
from pathlib import Path

import common
import exact_posterior
import pytest
import staleness
import study

from learner import Learner
from models.hub import identify_weights
from runtime.record.timeline import read_lines
from tasks import load_task

SMALL = dict(
    task="arithmetic",
    seed=3,
    queries_per_batch=4,
    tokens_per_micro_batch=400,
    responses_per_query=4,
    steps=6,
)


@pytest.fixture
def batches(monkeypatch):
    """Record the step of every batch, the versions of its rows, and how far off-policy it is.

    The last is the largest difference between behaviour and current policy, in nats.
    """
    seen, loss_inputs = [], Learner.loss_inputs

    def watched(self, rows, *scales):
        inputs = loss_inputs(self, rows, *scales)
        differences = inputs.logprobs.detach() - inputs.behavior_logprobs
        largest = float(differences[inputs.mask.bool()].abs().max())
        if rows[0].query_id >= 0:
            seen.append((self.step, {row.version for row in rows}, largest))
        return inputs

    monkeypatch.setattr(Learner, "loss_inputs", watched)
    return seen


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_batch_is_exactly_as_stale_as_asked_for_and_without_staleness_on_policy(
    staleness, batches
):
    study.train(SMALL | dict(constant_staleness=staleness))
    expected = [(step, {max(0, step - staleness)}) for step in range(6)]
    assert [(step, versions) for step, versions, _ in batches] == expected
    # The first step changes nothing: its learning rate is 0, the start of the warm-up.
    is_on_policy = [staleness == 0 or step <= 1 for step in range(6)]
    assert [difference < 1e-5 for _, _, difference in batches] == is_on_policy


def test_in_the_buffer_mode_responses_come_with_the_weights_of_the_sync_before(batches):
    settings = SMALL | dict(
        samples_per_query=4, most_on_policy_prob=1.0, sync_period=2, initial_responses=8
    )
    study.train(settings, groups_per_sync=4)
    assert [versions for _, versions, _ in batches] == [{0}, {0}, {0}, {0}, {2}, {2}]


def test_a_run_comes_out_the_same_every_time_and_is_measured_on_held_out_queries():
    settings = SMALL | dict(constant_staleness=1)
    results = [study.train(settings) for _ in range(2)]
    assert results[0] == results[1] and results[0] != study.train(settings | dict(seed=4))
    assert results[0].keys() == {"accuracy", "reward", "kl", "distinct", "history"}
    assert len(results[0]["history"]["ess_responses"]) == settings["steps"]
    assert 0.2 < results[0]["reward"] < 0.7, "a few steps from the base model"
    assert 0 < results[0]["distinct"] <= 1, "one right answer a query"


def test_a_study_runs_only_what_is_missing_and_refuses_results_of_another_base_model(tmp_path):
    settings = SMALL | dict(constant_staleness=0, steps=1)
    jobs = [{"settings": settings | dict(seed=seed)} for seed in range(2)]
    file = tmp_path / "study.jsonl"
    model = identify_weights(load_task("arithmetic").base_model())
    kept = {"job": jobs[0], "result": "already here", "base_model": model}
    file.write_text(json.dumps(kept) + "\n")
    lines = study.run_all([jobs[1], *jobs], file, processes=1)
    assert [line["job"] for line in lines] == [jobs[1], *jobs]
    assert lines[1]["result"] == "already here" and lines[2]["result"]["reward"] > 0
    assert [line["base_model"] for line in read_lines(file)] == [model, model]
    file.write_text(json.dumps(kept | {"base_model": "another"}) + "\n")
    with pytest.raises(SystemExit, match=f"with base model another, and here it is {model}: they"):
        study.run_all([{"base": "arithmetic"}], file)


def test_spread_is_the_mean_and_the_standard_deviation_of_a_sample():
    assert study.spread([1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    assert study.spread([1e-5, 3e-5]) == "2.0e-05 ± 1.4e-05"
    assert common.table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


class FakeRuns:
    """In the place of study.run_all: the reward of a run is a function of its learning rate."""

    def __init__(self, rewards: dict[float, float]):
        self.rewards, self.rates = rewards, []

    def __call__(self, jobs: list[dict], file: Path, run) -> list[dict]:
        lines = []
        for job in jobs:
            settings = job.get("settings", {})
            rate = settings.get("learning_rate")
            self.rates.append((rate, settings.get("seed")))
            lines.append({"job": job, "result": {"reward": self.rewards.get(rate, 0.4)}})
        return lines


def study_of(rewards: dict[float, float]) -> tuple[staleness.Study, staleness.Cell, FakeRuns]:
    """A study of one cell, searched and measured. The base model's reward is 0.4."""
    runs, cell = FakeRuns(rewards), staleness.Cell("arithmetic", "tb", "stale", 8)
    made = staleness.Study(Path("unused"), 10, (0, 1, 2), do=runs)
    made.measure_base(["arithmetic"])
    made.search([cell], {"arithmetic": (1e-4, 3e-4, 1e-3)})
    made.measure([cell])
    return made, cell, runs


def test_a_cell_is_measured_at_the_best_rate_of_the_search_with_other_seeds():
    made, cell, runs = study_of({1e-4: 0.5, 3e-4: 0.9, 1e-3: 0.6})
    assert made.best(cell) == 3e-4 and len(made.tried[cell]) == 3
    assert runs.rates[-3:] == [(3e-4, 0), (3e-4, 1), (3e-4, 2)]
    assert {seed for _, seed in runs.rates[1:-3]} == {staleness.SEARCH_SEED}
    assert made.values(cell, "reward") == [0.9, 0.9, 0.9]


@pytest.mark.parametrize("best, beyond", [(1e-4, 3e-5), (1e-3, 3e-3)])
def test_where_the_best_rate_lies_at_an_edge_the_next_one_is_tried_once(best, beyond):
    made, cell, _ = study_of({best: 0.8, beyond: 0.9})
    assert sorted(made.tried[cell]) == sorted([1e-4, 3e-4, 1e-3, beyond])
    assert made.best(cell) == beyond


def test_where_no_rate_beats_the_base_model_the_cell_says_so_and_no_more_is_run():
    made, cell, runs = study_of({1e-4: 0.3, 3e-4: 0.39, 1e-3: float("nan")})
    assert made.best(cell) is None and len(runs.rates) == 1 + 3
    assert made.shown(cell, "reward") == "no rate beats the base model"


def test_a_collapse_is_a_reward_that_falls_below_half_of_what_it_was():
    rising, falling = [0.4] * 10 + [0.9] * 20, [0.4, 0.9] * 7 + [0.5] * 8 + [0.1] * 8
    assert not staleness.has_collapsed(rising) and staleness.has_collapsed(falling)
    history = {"received": [100, 200, 300], "reward": [0.5, 0.91, 0.95]}
    assert staleness.responses_until(history, 0.9) == 200
    assert staleness.responses_until(history, 0.99) == float("inf")


def test_the_effective_sample_size_that_foretells_is_that_of_the_base_models_responses():
    """A run that falls, and one of the same task and rate that does not, with staleness 20."""
    falling, rising = [0.4, 0.9] * 7 + [0.1] * 16, [0.4] * 10 + [0.9] * 20
    lines = [
        {
            "job": {
                "settings": {"task": "addends", "learning_rate": 1e-3, "constant_staleness": 20}
            },
            "result": {
                "history": {"step": range(5, 305, 10), "reward": reward, "ess_responses": ess}
            },
        }
        for reward, ess in [(falling, [0.2] * 2 + [0.9] * 28), (rising, [0.8] * 2 + [0.1] * 28)]
    ]
    cells = [staleness.Cell("addends", "tb", "stale", age) for age in (0, 20)]
    *_, row = staleness.collapse_table(cells, lines).splitlines()
    assert row == "| 20 | 1 | 1 | 0.200 | 0.800 | 1.00 | 1.00 |"


def test_the_language_on_fresh_data_starts_at_its_reference_and_ends_at_pi_star():
    """staleness.py's runs of exact_posterior.py."""
    fresh = exact_posterior.train("tb", 0.03, seed=0, staleness=0, steps=600)
    stale = exact_posterior.train("tb", 0.03, seed=0, staleness=8, steps=600)
    assert fresh["kl_reference"][0] == pytest.approx(0, abs=1e-9) and fresh["kl"][0] > 0.05
    assert fresh["kl"][-1] < 1e-3 and stale["kl"][-1] < 1e-3
    assert fresh["ess"] == pytest.approx([1.0] * len(fresh["ess"]))
    assert min(stale["ess"]) < 0.999
