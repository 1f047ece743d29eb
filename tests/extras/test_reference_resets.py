"""Resets of the reference policy (--reference_reset_period), in lockstep."""

import numpy as np
import pytest
import torch
from conftest import make_group
from test_trainer import make_trainer

from extras.lockstep import LockstepTrainer
from models.logprobs import response_logprobs


@pytest.fixture
def make(untied_model, tmp_path):
    """A function that makes a trainer. Its searcher has each version as soon as it is published."""

    def make(**settings) -> LockstepTrainer:
        trainer = make_trainer(untied_model, tmp_path, kind=LockstepTrainer, **settings)
        trainer.receive_until = lambda is_done, what: None
        return trainer

    return make


def test_groups_that_an_earlier_reference_scored_are_scored_anew_when_they_are_drawn(make):
    trainer, groups = make(reference_reset_period=2), [make_group(0, 0, [3, 5], range(8))]
    groups.append(make_group(1, 0, [2], [8, 9]))
    policy, rows = trainer.learner.policy, groups[0].responses()
    before = groups[0].tokens.copy()
    trainer.renew(groups)
    assert (groups[0].tokens == before).all(), "no reset so far"

    trainer.learner.step = 2
    prompts, responses = [row.prompt for row in rows], [row.tokens["token"] for row in rows]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
        expected = response_logprobs(policy, prompts, responses, trainer.config.temperature).numpy()
        trainer.publish()
        assert trainer.weights.reference.version == 2
        # The policy changes; its copy that became the reference does not.
        for parameter in policy.parameters():
            parameter.mul_(0.5)
    # A searcher that has the new reference scored this one.
    groups[1].reference_version, groups[1].tokens["ref_logprob"] = 2, 7.0
    trainer.renew(groups)
    assert groups[0].reference_version == 2
    for row, logprobs in zip(rows, expected):
        found = row.tokens["ref_logprob"]
        np.testing.assert_allclose(found, logprobs[: len(found)], rtol=0, atol=1e-5)
    assert groups[1].tokens["ref_logprob"].tolist() == [7.0] * 2


def test_the_reference_is_reset_every_period_between_the_wait_for_searchers_and_the_publish(make):
    trainer, seen, waits = make(reference_reset_period=4), [], []
    weights, publish = trainer.weights, trainer.weights.publish

    def watched(version, *arguments):
        seen.append((version, weights.reference.version))
        return publish(version, *arguments)

    weights.publish = watched
    trainer.receive_until = lambda *_: waits.append((weights.version, weights.reference.version))
    for trainer.learner.step in range(0, 14, 2):
        trainer.publish()
    assert seen == [(0, -1), (2, -1), (4, 4), (6, 4), (8, 8), (10, 8), (12, 12)]
    assert waits == seen[:-1], "it has one slot, which no searcher reads after this wait"


def test_a_run_resumed_at_a_reset_brings_it_and_the_evaluation_of_that_step(make):
    trainer = make(eval_every=4, reference_reset_period=4)
    weights = trainer.weights
    for trainer.learner.step in (4, 6):  # 4: as a resume leaves it
        trainer.publish()
        found = weights.version, weights.evaluation_version, weights.reference.version
        assert found == (trainer.step, 4, 4)


def test_a_short_prompt_stays_impossible_when_the_reference_policy_is_reset(make):
    trainer = make(task="redteam", reference_reset_period=2)
    trainer.weights.reference.publish(2, trainer.learner.weights())
    group = make_group(0, 0, [3, 9, 12], range(24))
    trainer.renew([group])
    sums = [float(row.tokens["ref_logprob"].sum()) for row in group.responses()]
    assert sums[0] == pytest.approx(-500)
    assert all(-300 < value < 0 for value in sums[1:])
