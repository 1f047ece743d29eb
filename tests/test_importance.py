"""The figures that say how far a batch is from on-policy, and runs without a reference policy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_loss import make_example, queries, to_inputs
from test_trainer import make_rows, make_trainer

from learner import effective_share, importance_figures
from loss import LossInputs


def log_weights(x: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.logprobs - x.behavior_logprobs).detach(), x.mask


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


def test_staleness_is_split_at_the_step_at_which_a_response_arrived(untied_model, tmp_path):
    trainer = make_trainer(untied_model, tmp_path)
    trainer.learner.step = 10
    rows = make_rows(1, 2)
    for row, version, received in zip(rows, (2, 4), (5, 8)):
        row.version, row.received_step = version, received
    line = trainer.metrics.of(rows, step=10, waited=0.0)
    assert line["staleness_mean"] == 9 - 3
    assert line["staleness_in_flight"] == (3 + 4) / 2
    assert line["staleness_in_buffer"] == (4 + 1) / 2
