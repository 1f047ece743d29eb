"""The figures that say how far a batch is from on-policy, and runs without a reference policy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import FOREVER, Run, flags
from test_objectives import make_example, queries, to_inputs
from test_plan import plan_on
from test_trainer import make_rows, make_trainer
from transformers import LlamaConfig

from config import Config
from extras.objectives import WITHOUT_REFERENCE
from launch.places import find_places, resolve
from models.importance import effective_share, importance_figures, log_weights
from runtime.reference import Reference


def test_the_effective_share_is_1_in_n_where_one_weight_outweighs_all_however_large_it_is():
    assert effective_share(torch.tensor([400.0] + [-400.0] * 7).double()) == pytest.approx(1 / 8)


def test_figures_do_not_depend_on_the_micro_batch_and_leave_padding_out():
    example = make_example("mixed")
    figures = importance_figures([log_weights(to_inputs(example, filler=math.nan))])
    parts = [to_inputs(query, width=8) for query in queries(example)]
    assert figures == pytest.approx(importance_figures([log_weights(part) for part in parts]))
    log_w = [sum(row.policy) - sum(row.behavior) for row in example]
    w = np.exp(log_w)
    assert figures["ess_responses"] == pytest.approx(w.sum() ** 2 / (w**2).sum() / len(w))
    assert figures["log_w_5"] == pytest.approx(np.quantile(log_w, 0.05))
    assert figures["log_w_95"] == pytest.approx(np.quantile(log_w, 0.95))
    fresh = log_weights(to_inputs([replace(row, behavior=row.policy) for row in example]))
    on_policy = dict(ess_responses=1.0, ess_tokens=1.0, log_w_5=0.0, log_w_95=0.0)
    assert importance_figures([fresh]) == on_policy


def test_a_step_has_the_figures_of_its_own_batch_in_one_pass_or_two(untied_model, tmp_path):
    same = dict(learning_rate=0.0)  # the weights stay as they are
    learner = make_trainer(untied_model, tmp_path, **same).learner
    alone = make_trainer(untied_model, tmp_path / "alone", low_memory="on", **same).learner
    learner.update(make_rows(4, 3, seed=0))
    found, expected = (each.update(make_rows(4, 3, seed=1)) for each in (learner, alone))
    for name in ("ess_responses", "ess_tokens", "log_w_5", "log_w_95"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3)


def test_staleness_is_split_at_the_step_at_which_a_response_arrived(untied_model, tmp_path):
    trainer = make_trainer(untied_model, tmp_path)
    trainer.learner.step = 10
    rows = make_rows(1, 2)
    for row, version, received in zip(rows, (2, 4), (5, 8)):
        row.version, row.received_step = version, received
    line = trainer.metrics.of(rows, waited=0.0)
    assert line["staleness_mean"] == 9 - 3
    assert line["staleness_in_flight"] == (3 + 4) / 2
    assert line["staleness_in_buffer"] == (4 + 1) / 2


def test_where_no_reference_is_read_none_is_loaded_reset_or_planned_for(tmp_path, untied_model):
    config = Config(model=str(untied_model), loss="kimi_k2", reference_reset_period=50)
    none = Reference(config, weights=None, pin=0)
    assert none.model is None
    scored = none.logprobs([], [np.arange(3), np.arange(5)])
    assert [np.isnan(row).sum() for row in scored] == [3, 5], "a reader would show"
    assert Reference(replace(config, loss="tb"), None, 0).model is not None
    assert resolve(config, find_places(config, [])).reference_reset_period == 0
    kept = resolve(replace(config, loss="tba_prime"), find_places(config, []))
    assert kept.reference_reset_period == 50
    LlamaConfig(hidden_size=1024, num_hidden_layers=2).save_pretrained(tmp_path)
    tb, kimi = (plan_on("2x20", model=str(tmp_path), loss=loss)[0] for loss in ("tb", "kimi_k2"))
    gone = {need.purpose for need in tb.needs} - {need.purpose for need in kimi.needs}
    assert gone == {"reference policy", "reference policy's largest forward pass"}


@pytest.mark.runs
@pytest.mark.parametrize("loss", sorted(WITHOUT_REFERENCE))
def test_a_run_without_a_reference_policy_learns_and_has_no_kl(loss, tmp_path, record_property):
    settings = flags(loss=loss, learning_rate=2e-4)
    with Run(tmp_path / "run", "arithmetic", *settings, *FOREVER) as run:
        run.is_at(240)
    lines = run.steps()
    assert not any("kl" in line for line in lines)
    assert all(math.isfinite(line[name]) for line in lines for name in ("loss", "grad_norm"))
    assert all(0 < line["ess_responses"] <= 1 for line in lines)
    record_property("reward after 240 steps", found := np.mean([x["reward"] for x in lines[-30:]]))
    assert found > 0.6, "of the base model's samples 0.45 are right"
