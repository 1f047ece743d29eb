"""examples/one_file.py: its gradient is the learner's, and it learns the demo's sums."""

import re

import pytest
import torch
from conftest import python
from test_trainer import SHORT, gradient, make_rows
from transformers import AutoModelForCausalLM

from config import Config
from examples import one_file
from learner import Learner

GROUP_SIZE, BETA = 3, 0.3


def test_on_the_same_rows_its_gradient_is_that_of_the_learner(untied_model):
    rows = make_rows(queries=4, per_query=GROUP_SIZE)
    settings = dict(responses_per_query=GROUP_SIZE, queries_per_batch=4, temperature=1.0)
    learner = Learner(Config(model=str(untied_model), beta=BETA, **settings, **SHORT), print)
    learner.policy.double()
    learner.dtype = torch.float64
    expected = gradient(learner, rows)

    model = AutoModelForCausalLM.from_pretrained(untied_model).double()
    same = []
    for row in rows:
        ids, log_ref = row.tokens["token"].tolist(), float(row.tokens["ref_logprob"].sum())
        same.append(one_file.Row(row.prompt.tolist(), ids, log_ref, row.reward, 0))
    log_pi = one_file.log_probs(model, same)
    one_file.trajectory_balance(log_pi, same, GROUP_SIZE, BETA).backward()
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.runs
@pytest.mark.long
@pytest.mark.parametrize("stale", [0, 20])
def test_it_learns_the_demos_sums_with_fresh_and_with_stale_weights(stale, record_property):
    done = python("examples/one_file.py", "--stale", stale)
    accuracy = float(re.search(r"final accuracy: ([\d.]+)$", done.stdout.strip())[1])
    record_property("final accuracy", accuracy)
    assert accuracy >= 0.95
