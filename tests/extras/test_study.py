"""The benchmarks' small runs: the real trainer, with a searcher that generates in its process."""

import json
import os
from pathlib import Path

import common
import numpy as np
import pytest
import staleness
import study

from launch.files import read_lines
from learner import Learner
from models.hub import identify_weights
from tasks import load_task

SIZES = dict(queries_per_batch=4, tokens_per_micro_batch=400, responses_per_query=4)
SMALL = dict(task="arithmetic", seed=3, steps=6) | SIZES


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


def test_in_the_buffer_mode_responses_come_with_the_weights_of_the_sync_before(batches):
    mode = dict(samples_per_query=4, most_on_policy_prob=1.0, sync_period=2, initial_responses=8)
    study.train(SMALL | mode, groups_per_sync=4)
    assert [versions for versions, _ in batches] == [{0}, {0}, {0}, {0}, {2}, {2}]


def test_a_run_comes_out_the_same_every_time_and_is_measured_on_held_out_queries():
    settings = SMALL | dict(constant_staleness=1)
    first, second = (study.train(settings) for _ in range(2))
    assert first == second and first != study.train(settings | dict(seed=4))
    assert 0.2 < first["reward"] < 0.7, "a few steps from the base model"
    assert 0 < first["distinct"] <= 1, "one right answer a query"


def test_a_study_runs_only_what_is_missing_and_refuses_results_of_another_base_model(tmp_path):
    settings = SMALL | dict(constant_staleness=0, steps=1)
    old, new = ({"settings": settings | dict(seed=seed)} for seed in range(2))
    file = tmp_path / "study.jsonl"
    model = identify_weights(load_task("arithmetic").base_model())
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


def test_spread_is_the_mean_and_the_standard_deviation_of_a_sample():
    assert study.spread([1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    assert study.spread([1e-5, 3e-5]) == "2.0e-05 ± 1.4e-05"


class FakeRuns:
    """In the place of study.run_all: what a run comes to is a function of its settings."""

    def __init__(self, reward, **figures):
        self.reward, self.figures, self.made = reward, figures, []

    def __call__(self, jobs: list[dict], file: Path) -> list[dict]:
        self.made += [(file.name, job["settings"]) for job in jobs]
        return [dict(job=job, result=self.result(job["settings"])) for job in jobs]

    def result(self, settings: dict) -> dict:
        found = dict(reward=self.reward(settings), kl=settings["beta"], distinct=3.0)
        return found | dict(trained=found, grad_norm=20.0, clipped=0.75) | self.figures


def study_of(reward, objectives=("tb",), ages=(8,), **figures) -> staleness.Study:
    made = staleness.Study(Path("a.jsonl"), objectives, ages, do=FakeRuns(reward, **figures))
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


def test_replay_draws_from_the_buffer_as_many_as_are_new():
    replay = staleness.job(staleness.Cell("tb", "replay"), staleness.Setting(1e-3, 0.1, 200), 0)
    assert replay["groups_per_sync"] == replay["settings"]["queries_per_batch"]
    assert "constant_staleness" not in replay["settings"]


def test_an_age_that_was_not_run_on_a_processor_says_so_and_half_an_objective_is_left_out():
    made, other = study_of(lambda _: 0.5), staleness.Study(Path("b.jsonl"), ("tb", "dppo"))
    runs = FakeRuns(lambda _: 0.5)
    other.do = lambda jobs, file: [
        None if job["settings"]["loss"] == "dppo" and job["settings"]["seed"] == 2 else line
        for job, line in zip(jobs, runs(jobs, file))
    ]
    other.make()
    shares = dict.fromkeys(("test", "train"), np.ones(2) / 2)
    first, *_ = staleness.tables({"one": made, "another": other}, shares)
    *_, one, another = first.splitlines()
    assert one == "| `tb` | one | not run | 0.499 ± 0.000 |" + " not run |" * 3
    assert another == "| `tb` | another |" + " 0.499 ± 0.000 |" * 5


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
    shipped = identify_weights(study.base_model("addends"))
    assert {line["base_model"] for line in results} == {shipped}
    shares = staleness.right_shares("test")
    fresh = study.train(SMALL | dict(task="addends", constant_staleness=0, steps=1))
    assert len(shares) == 20 and fresh["reward"] == pytest.approx(shares.mean(), abs=0.04)


def test_what_staleness_costs_is_told_by_lag_rate_and_product():
    def reward(settings):  # falls with the product alone
        return 0.9 - 5 * settings["constant_staleness"] * settings["learning_rate"]

    row = staleness.lag_table(study_of(reward, ages=staleness.STALE)).splitlines()[-1]
    name, *lost, by_lag, by_rate, by_product, by_both = row.strip("| ").split(" | ")
    assert lost == ["0.01", "0.04", "0.04", "0.16", "0.16", "0.64"]
    assert by_product == by_both == "1.00" and float(by_lag) < float(by_rate) < 0.9


def test_how_well_a_fall_below_the_base_model_is_foretold_is_the_share_of_pairs_that_are_ordered():
    fallen = np.array([True, True, False, False, False])
    assert staleness.foretold(np.array([5.0, 1, 3, 2, 1]), fallen).startswith("0.58 (")
    assert staleness.foretold(np.array([5.0, 0, 3, 2, 1]), fallen, list("abaab")).startswith("0.67")
    assert staleness.foretold(np.arange(5.0), np.zeros(5, bool)) == "no such pair"
    history = {"step": [3, 10, 17], "ess_responses": [0.9, 0.5, 0.1]}
    assert staleness.early_ess(history, 8) == 0.9 and staleness.early_ess(history, 32) == 0.5
    history = {"step": [3, 9], "ess_responses": [0.5, 0.5], "log_w_5": [-4.0, -1.0]}
    made = study_of(lambda s: 0.5 - 100 * s["learning_rate"], ages=(8, 32), history=history)
    row = staleness.ess_table(made, base_reward=0.42).splitlines()[-1].split(" | ")
    assert row[1:3] == ["36 of 54", "-4.0"]
    assert row[3].startswith("0.50") and row[4].startswith("1.00")


def test_the_row_without_clipping_is_made_without_clipping():
    made = study_of(lambda s: 0.5 if "max_grad_norm" in s else 0.7)
    row = staleness.clipping_table(made).splitlines()[-1]
    assert row == "| `tb` | 20 | 0.75 | 0.697 ± 0.000 | 0.497 ± 0.000 |"
    assert [s["max_grad_norm"] for _, s in made.do.made[-3:]] == [None] * 3
    made.do = lambda jobs, file: [None] * len(jobs)  # of another processor, and not on record
    assert staleness.clipping_table(made).splitlines()[-1].endswith("| 0.697 ± 0.000 | not run |")
    assert staleness.rounding_table(made, 0.42).count(" | 0 |") == 3


def test_the_penalty_of_tba_ema_is_shown_from_next_to_none_at_every_seed():
    made = study_of(lambda s: 0.5 + (s["beta"] > 0.01) * s["seed"] / 10, objectives=("tba_ema",))
    *_, last = staleness.surrogate_table(made).splitlines()
    shown = [f"0.50 0.60 0.70 at {beta:.2f}" for beta in staleness.PRICES]
    assert last == " | ".join(["| mixed", "0.001", "0.50 0.50 0.50 at 0.00", *shown]) + " |"


def test_a_tenth_is_made_again_with_another_rounding_in_a_file_of_its_own():
    made = study_of(lambda settings: 0.1 if settings["learning_rate"] == 4e-3 else 0.5)
    kept, used = dict(os.environ), set()

    def reward(settings):
        used.add(os.environ["ATEN_CPU_CAPABILITY"])
        return 0.5 + 0.2 * np.sqrt(2)

    made.do.reward = reward
    *_, searched, fallen = staleness.rounding_table(made, 0.42).splitlines()
    assert searched == "| of the search | 2 |" + " 0.200 | 0.000 |" * 3
    assert fallen == "| that end below the base model | 1 |" + " 0.483 | 0.000 |" * 3
    assert {name for name, _ in made.do.made[-3:]} == {"a.rounded.jsonl"}
    assert used == {"avx2"} and os.environ == kept


def test_a_cell_on_record_is_made_again_at_its_settings_and_another_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["staleness.py", "--cell", "tb 9"])
    with pytest.raises(SystemExit, match="--cell 'tb 9' is none of tb 0, tb 8, tb 32, tb mixed"):
        staleness.main()
    fake = FakeRuns(lambda settings: 0.25)
    monkeypatch.setattr(staleness, "run_all", fake)
    monkeypatch.setattr("sys.argv", ["staleness.py", "--cell", "tb 8"])
    staleness.main()
    lines = capsys.readouterr().out.splitlines()
    studies = [s for s in staleness.on_record(common.RESULTS).values() if CELL in s.cells]
    found = [(recorded, price) for recorded in studies for price in staleness.PRICES]
    assert len(lines) == len(found) >= 3 and len(fake.made) == 3 * len(found)
    for line, (recorded, price) in zip(lines, found):
        shown = staleness.shown_worth(recorded.measured(CELL, price), price)
        assert f"price {price:g}: {shown} on record (" in line
