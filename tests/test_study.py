"""The benchmarks' small runs: the real trainer, with a searcher that generates in its process."""

import json
from pathlib import Path

import common
import pytest
import study

from learner import Learner
from tasks import load_task

SMALL = dict(
    task="arithmetic",
    seed=3,
    queries_per_batch=4,
    queries_per_micro_batch=4,
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
    assert results[0].keys() == {"accuracy", "reward", "kl", "distinct"}
    assert 0.2 < results[0]["reward"] < 0.7, "a few steps from the base model"
    assert 0 < results[0]["distinct"] <= 1, "one right answer a query"


def test_a_study_that_was_broken_off_runs_only_what_is_missing_or_of_another_base_model(tmp_path):
    settings = SMALL | dict(constant_staleness=0, steps=1)
    jobs = [{"settings": settings | dict(seed=seed)} for seed in range(2)]
    file = tmp_path / "study.jsonl"
    model = Path(load_task("arithmetic").base_model()).name
    kept = [
        {"job": job, "result": "already here", "base_model": base}
        for job, base in zip(jobs, (model, "another"))
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    lines = study.run_all([jobs[1], *jobs], file, processes=1)
    assert [line["job"] for line in lines] == [jobs[1], *jobs]
    lines = lines[1:]
    assert lines[0]["result"] == "already here" and lines[1]["result"]["reward"] > 0
    assert len(file.read_text().splitlines()) == 3 and lines[1]["base_model"] == model


def test_spread_is_the_mean_and_the_standard_deviation_of_a_sample():
    assert study.spread([1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    assert common.table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
