"""Resets of the reference policy (--reference_reset_period)."""

from functools import partial

import numpy as np
import pytest
import torch
from test_pinned import play_trainer
from test_runs import train_until_ctrl_c
from test_trainer import make_rows, make_trainer

from buffer import TOKEN_ARRAYS
from models.logprobs import response_logprobs


@pytest.fixture
def make(untied_model, tmp_path):
    return partial(make_trainer, untied_model, tmp_path)


def test_rows_that_an_earlier_reference_scored_are_scored_anew_when_they_are_drawn(make):
    trainer = make(reference_reset_period=2)
    policy, rows = trainer.learner.policy, make_rows(2, 3)
    before = [row.ref_logprobs for row in rows]
    trainer.resets.renew(rows)
    for row, logprobs in zip(rows, before):
        assert row.ref_logprobs is logprobs, "no reset so far"

    trainer.learner.step = 2
    prompts, responses = [row.prompt for row in rows], [row.tokens for row in rows]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
        expected = response_logprobs(policy, prompts, responses, trainer.config.temperature).numpy()
        trainer.sync()
        assert trainer.weights.reference_version == 2
        # The policy changes; its copy that became the reference does not.
        for parameter in policy.parameters():
            parameter.mul_(0.5)
    # A searcher that has the new reference scored this one.
    rows[5].reference_version, rows[5].ref_logprobs = 2, np.float32([7.0])
    trainer.resets.renew(rows)
    for row, logprobs in list(zip(rows, expected))[:5]:
        assert row.reference_version == 2
        np.testing.assert_allclose(row.ref_logprobs, logprobs[: len(row.tokens)], rtol=0, atol=1e-5)
        assert row.ref_logprobs.dtype == np.float32
    assert rows[5].ref_logprobs.tolist() == [7.0]


def test_a_trainer_that_resets_does_what_it_did_when_recorded(untied_model, tmp_path, monkeypatch):
    record = play_trainer(untied_model, tmp_path, monkeypatch, reference_reset_period=8)
    record.compare("trainer_with_resets.txt")


@pytest.mark.runs
def test_an_asynchronous_run_with_resets_trains_until_ctrl_c_and_ends_soon(tmp_path):
    train_until_ctrl_c(tmp_path, reference_reset_period=10)


def test_the_reference_is_reset_every_period_and_before_the_version_that_goes_with_it(make):
    trainer, seen = make(sync_period=2, reference_reset_period=4), []
    publish = trainer.weights.publish

    def watched(version, *arguments):
        seen.append((version, trainer.weights.reference_version))
        return publish(version, *arguments)

    trainer.weights.publish = watched
    for trainer.learner.step in range(0, 14, 2):
        trainer.sync()
    assert seen == [(0, 0), (2, 0), (4, 4), (6, 4), (8, 8), (10, 8), (12, 12)]


def test_a_reset_that_a_reader_delays_comes_with_the_next_publish(make):
    trainer = make(sync_period=2, reference_reset_period=2)
    trainer.learner.step = 2
    with trainer.weights.read_reference(0):
        trainer.sync()
        assert (trainer.weights.reference_version, trainer.resets.is_due(trainer.step)) == (0, True)
    trainer.learner.step = 3
    trainer.publish()
    assert (trainer.weights.reference_version, trainer.resets.is_due(trainer.step)) == (3, False)


def test_a_run_resumed_at_a_sync_brings_the_reset_and_the_evaluation_of_that_sync(make):
    trainer = make(sync_period=2, eval_every=4, reference_reset_period=4)
    trainer.learner.step = 4  # as a resume leaves it
    trainer.publish()
    trainer.sync()
    weights = trainer.weights
    assert (weights.version, weights.evaluation_version, weights.reference_version) == (4, 4, 4)
    trainer.learner.step = 6
    trainer.sync()
    assert (weights.version, weights.evaluation_version, weights.reference_version) == (6, 4, 4)


def test_a_short_prompt_stays_impossible_when_the_reference_policy_is_reset(untied_model, tmp_path):
    trainer = make_trainer(untied_model, tmp_path / "run", task="redteam", reference_reset_period=2)
    trainer.weights.publish_reference(2, trainer.learner.weights())
    rows = make_rows(queries=1, per_query=3)
    for array in TOKEN_ARRAYS:
        setattr(rows[0], array, getattr(rows[0], array)[:3])
    trainer.resets.renew(rows)
    sums = [float(row.ref_logprobs.sum()) for row in rows]
    assert sums[0] == pytest.approx(-500) and min(map(len, (r.tokens for r in rows[1:]))) >= 5
    assert all(-300 < value < 0 for value in sums[1:])
