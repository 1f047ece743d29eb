"""The benchmarks' small runs: the real trainer, with a searcher that generates in its process."""

import json
from pathlib import Path

import common
import numpy as np
import pytest
import staleness
import study

from extras.lockstep import LockstepTrainer
from launch.files import read_lines
from learner import Learner
from models.hub import identify_weights

SIZES = dict(queries_per_batch=4, tokens_per_micro_batch=400, responses_per_query=4)
SMALL = dict(task="addends", seed=3, steps=6) | SIZES


@pytest.fixture
def batches(monkeypatch):
    """Of every batch: its rows' versions, the largest |current - behaviour| in nats."""
    seen, loss_inputs = [], Learner.loss_inputs

    def watched(self, rows):
        inputs = loss_inputs(self, rows)
        differences = inputs.logprobs.detach() - inputs.behavior_logprobs
        largest = float(differences[inputs.mask.bool()].abs().max())
        if rows[0].query_id >= 0:
            seen.append(({row.version for row in rows}, largest))
        return inputs

    monkeypatch.setattr(Learner, "loss_inputs", watched)
    return seen


@pytest.mark.parametrize("age", [0, 2])
def test_a_batch_is_exactly_as_stale_as_asked_for_and_without_staleness_on_policy(age, batches):
    study.train(SMALL | dict(constant_staleness=age))
    assert [versions for versions, _ in batches] == [{max(0, step - age)} for step in range(6)]
    # The first step changes nothing: its learning rate is 0, the start of the warm-up.
    is_on_policy = [age == 0 or step <= 1 for step in range(6)]
    assert [difference < 1e-5 for _, difference in batches] == is_on_policy


def test_a_batch_of_several_ages_has_as_many_groups_of_each(batches):
    study.train(SMALL | dict(constant_staleness=1), ages=(1, 2, 3, 4))
    assert [versions for versions, _ in batches][-2:] == [{0, 1, 2, 3}, {1, 2, 3, 4}]


def test_within_groups_each_has_as_many_rows_of_every_age(monkeypatch):
    drawn, draw = [], LockstepTrainer.draw

    def watched(self):
        drawn.append(draw(self))
        return drawn[-1]

    monkeypatch.setattr(LockstepTrainer, "draw", watched)
    study.train(SMALL | dict(constant_staleness=1), ages=(1, 4), within=True)
    for step, rows in enumerate(filter(None, drawn)):
        groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
        assert all(len({row.query_id for row in group}) == 1 for group in groups)
        versions = sorted([max(0, step - 1), max(0, step - 4)] * 2)
        assert [sorted(row.version for row in group) for group in groups] == [versions] * 4
    with pytest.raises(ValueError, match="3 ages do not divide"):
        study.train(SMALL | dict(constant_staleness=1), ages=(1, 2, 3))


def test_a_run_comes_out_the_same_every_time_and_is_measured_on_held_out_queries():
    settings = SMALL | dict(constant_staleness=1)
    first, second = (study.train(settings) for _ in range(2))
    assert first == second and first != study.train(settings | dict(seed=4))
    assert 0.2 < first["reward"] < 0.7, "a few steps from the base model"
    assert first["distinct"] > 2, "several right answers a query"


def test_a_study_runs_only_what_is_missing_and_refuses_results_of_another_base_model(tmp_path):
    settings = SMALL | dict(constant_staleness=0, steps=1)
    old, new = ({"settings": settings | dict(seed=seed)} for seed in range(2))
    file = tmp_path / "study.jsonl"
    model = identify_weights(study.MODEL)
    kept = {"job": old, "result": "already here", "base_model": model}
    file.write_text(json.dumps(kept) + "\n")
    lines = study.run_all([new, old, new], file, processes=1)
    assert [line["job"] for line in lines] == [new, old, new]
    assert lines[1] == kept and lines[2]["result"]["reward"] > 0
    (_, made) = read_lines(file)
    assert (made["base_model"], made["processor"]) == (model, common.processor())
    file.write_text(json.dumps(kept | {"base_model": "another"}) + "\n")
    with pytest.raises(SystemExit, match=f"with base model another, and here it is {model}: they"):
        study.run_all([old], file)


class FakeRuns:
    """In the place of study.run_all: what a run comes to is a function of its settings."""

    def __init__(self, reward):
        self.reward, self.made = reward, []

    def __call__(self, jobs: list[dict], file: Path) -> list[dict]:
        self.made += [(file.name, job["settings"]) for job in jobs]
        return [dict(job=job, result=self.result(job["settings"])) for job in jobs]

    def result(self, settings: dict) -> dict:
        found = dict(reward=self.reward(settings), kl=settings["beta"], distinct=3.0)
        return found | dict(trained=found)


def study_of(reward, objectives=("tb",), ages=(8,)) -> staleness.Study:
    made = staleness.Study(Path("a.jsonl"), objectives, ages, do=FakeRuns(reward))
    made.make()
    return made


CELL = staleness.Cell("tb", 8)


def test_a_setting_is_chosen_by_three_seeds_and_measured_with_three_others():
    def reward(settings):  # the largest rate has the best seed and the worst mean
        lucky = settings["learning_rate"] == 4e-3 and settings["seed"] == 101
        return 0.9 if lucky else {2.5e-4: 0.3, 1e-3: 0.5, 4e-3: 0.1}[settings["learning_rate"]]

    made = study_of(reward)
    # KL is beta here: the smallest is the best at every price.
    assert {made.choice(CELL, price) for price in staleness.PRICES} == {(1e-3, 0.03, 200)}
    seeds = [settings["seed"] for _, settings in made.do.made]
    assert seeds == [100] * 9 + [101] * 9 + [102] * 9 + [0, 1, 2]
    shares = dict.fromkeys(("test", "train"), np.ones(2) / 2)
    first, *_ = staleness.tables({"a processor": made, "another": made}, shares)
    assert first.splitlines()[-2:] == [
        f"| `tb` | {name} | 0.499 ± 0.000 |" for name in ("a processor", "another")
    ]
    row = staleness.choices_table(made).splitlines()[-1]
    assert row == "| `tb` | 8 | 0.3 | 0.001 | no | 0.03 | 200 | 0.491 ± 0.000 | 0.491 ± 0.000 |"


def test_without_a_reference_steps_are_varied_in_the_place_of_beta_and_no_nan_is_chosen():
    settings = staleness.settings_of("topr")
    assert {s.beta for s in settings} == {0.1} and {s.steps for s in settings} == {50, 100, 200}
    made = study_of(lambda s: float("nan") if s["steps"] == 200 else 0.4, objectives=("topr",))
    assert made.choice(staleness.Cell("topr", 8), 0.1).steps < 200


def test_the_best_there_is_is_the_reference_tempered():
    """Beside a search over all that move probability to the right answers alone."""
    shares, price = np.array([0.2, 0.6]), 0.3
    rewards = np.linspace(1e-6, 1 - 1e-6, 200_001)
    for share in shares:
        kl = rewards * np.log(rewards / share) + (1 - rewards) * np.log((1 - rewards) / (1 - share))
        best = (rewards - price * kl).argmax()
        found = staleness.optimum(np.array([share]), price)
        np.testing.assert_allclose(found, (rewards[best], kl[best]), atol=1e-4)
    each = [staleness.optimum(shares[[i]], price) for i in range(2)]
    np.testing.assert_allclose(staleness.optimum(shares, price), np.mean(each, axis=0))


def test_the_shipped_model_is_the_one_on_record_and_its_right_answers_are_counted():
    files = common.RESULTS.glob("staleness.*.jsonl")
    results = [line for file in files for line in read_lines(file)]
    shipped = identify_weights(study.MODEL)
    assert {line["base_model"] for line in results} == {shipped}
    shares = staleness.right_shares("test")
    fresh = study.train(SMALL | dict(constant_staleness=0, steps=1))
    assert len(shares) == 20 and fresh["reward"] == pytest.approx(shares.mean(), abs=0.04)


def test_the_tables_of_the_page_are_those_of_the_runs_on_record():
    studies = staleness.on_record(common.RESULTS)
    shares = {split: staleness.right_shares(split) for split in ("test", "train")}
    found = staleness.tables(studies, shares) + [*map(staleness.choices_table, studies.values())]
    page = (common.RESULTS / "staleness.md").read_text()
    assert all(table in page for table in found)
