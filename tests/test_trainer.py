"""The trainer, part by part: its gradient, schedules, figures, waits, syncs and publishes."""

import itertools
import math
import queue
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_group
from test_loss import make_example, queries, to_inputs

from config import Config
from learner import Learner, effective_share, importance_figures, lr_schedule
from loss import LossInputs, trajectory_balance
from models.architecture import weight_shapes
from models.logprobs import micro_batch_tokens, split_rows
from rollouts import Group, Response, make_tokens
from runtime.memory_trial import try_largest_batch
from runtime.record.metrics import describe
from runtime.responses.evaluation import EvaluationRequests
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable
from trainer import Trainer
from weights import SharedWeights

# Of a run with these bounds a query of full length is small: make_rows() makes longer ones.
SHORT = dict(max_prompt_tokens=8, max_response_tokens=8)


def make_trainer(model, run_dir, kind=Trainer, **settings) -> Trainer:
    """Make a trainer as its process does, without searchers. kind: or LockstepTrainer."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    own = dict(searchers=1, steps=10, responses_per_query=3, samples_per_query=3)
    config = Config(model=str(model), **own, **settings)
    weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
    if config.reference_reset_period:
        weights.reference = SharedWeights(weights.shapes, torch.float32, readers=1, slots=1)
    status = StatusTable(["trainer", "searcher 0"])
    return kind(config, weights, queue.Queue(), status, str(run_dir))


@pytest.fixture
def make(untied_model, tmp_path):
    return partial(make_trainer, untied_model, tmp_path)


def make_rows(queries: int, per_query: int, seed: int = 0) -> list[Response]:
    rng = np.random.default_rng(seed)
    rows = []
    for query in range(queries):
        prompt = rng.integers(0, 256, size=rng.integers(3, 20)).astype(np.int32)
        for _ in range(per_query):
            tokens = make_tokens(rng.integers(0, 256, size=rng.integers(1, 25)))
            tokens["ref_logprob"], tokens["behavior_logprob"] = -5 - rng.random((2, len(tokens)))
            own = dict(prompt=prompt, tokens=tokens, reward=float(rng.integers(0, 2)))
            rows.append(Response(query_id=query, version=0, **own))
    return rows


def gradient(learner: Learner, rows: list[Response]) -> torch.Tensor:
    """Return the gradient that update() hands to the optimizer."""
    gradients = []

    def step():
        gradients.extend(p.grad.flatten().clone() for p in learner.policy.parameters())

    learner.optimizer.step = step
    learner.update(rows)
    return torch.cat(gradients)


def test_gradient_and_metrics_do_not_depend_on_the_micro_batch(make):
    rows = make_rows(queries=4, per_query=3)
    gradients, sizes = [], []
    for tokens in (0, 160, 1000):
        settings = dict(queries_per_batch=4, tokens_per_micro_batch=tokens, beta=1.0)
        learner = make(**settings, **SHORT).learner
        prompts, ids = [row.prompt for row in rows], [row.tokens for row in rows]
        parts = split_rows(prompts, ids, micro_batch_tokens(learner.config), together=3)
        sizes.append([len(part) for part in parts])
        gradients.append(gradient(learner, rows))
        with torch.no_grad():
            loss, metrics = trajectory_balance(learner.loss_inputs(rows))
        expected = {name: float(value) for name, value in {"loss": loss, **metrics}.items()}
        found = learner.accumulate(rows)
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert sizes == [[3] * 4, [6, 6], [12]], "whole queries, as many as fit"
    tolerance = 1e-6 * float(gradients[0].abs().max())
    torch.testing.assert_close(gradients, gradients[:1] * 3, rtol=0, atol=tolerance)


def test_padded_fields_hold_each_row_to_its_end_of_sequence_token_that_is_also_padding(make):
    learner, rows = make(max_response_tokens=100, beta=0.5).learner, make_rows(2, 3)
    eos = rows[0].tokens["token"][-1] = learner.policy.config.eos_token_id
    learner.step = 9
    assert eos == learner.policy.config.pad_token_id
    inputs = learner.loss_inputs(rows)
    assert inputs.mask.sum(1).tolist() == [len(row.tokens) for row in rows]
    for i, row in enumerate(rows):
        length = len(row.tokens)
        assert inputs.logprobs[i, length - 1] != 0
        for name in ("ref_logprob", "behavior_logprob"):
            np.testing.assert_array_equal(getattr(inputs, f"{name}s")[i, :length], row.tokens[name])
    assert inputs.rewards.tolist() == [row.reward for row in rows]
    assert inputs.staleness.tolist() == [9 - row.version for row in rows]
    assert (inputs.group_size, inputs.beta) == (3, 0.5)
    assert inputs.max_response_length == learner.config.max_response_tokens


def test_a_gradient_that_is_not_finite_is_never_applied_and_ten_in_a_row_end_the_run(make):
    trainer = make(queries_per_batch=1)
    before = [p.detach().clone() for p in trainer.learner.policy.parameters()]
    rows = make_rows(1, 3)
    rows[0].reward = float("inf")
    for _ in range(9):
        trainer.learner.update(rows)
    with pytest.raises(FloatingPointError, match="10 steps in a row"):
        trainer.learner.update(rows)
    assert trainer.learner.bad_steps == 10
    torch.testing.assert_close(list(trainer.learner.policy.parameters()), before, rtol=0, atol=0)
    trainer.learner.policy.model.norm.weight.data[3] = float("nan")
    trainer.learner.bad_steps_in_a_row = 9
    with pytest.raises(FloatingPointError, match="as the weight model.norm.weight is NaN or inf"):
        trainer.learner.update(make_rows(1, 3))


DECAYING = dict(warmup_steps=10, stable_steps=50, decay_steps=40)


@pytest.mark.parametrize(
    "kind, settings, expected",
    [
        ("constant", dict(warmup_steps=10), {0: 0.0, 5: 0.5, 10: 1.0, 99: 1.0}),
        ("linear", dict(warmup_steps=0), {0: 1.0, 50: 0.5, 99: 0.01}),
        ("warmup_stable_decay", DECAYING, {5: 0.5, 10: 1.0, 59: 1.0, 80: 0.5, 100: 0.0}),
    ],
)
def test_learning_rate_schedules(kind, settings, expected):
    config = Config(learning_rate=1.0, steps=100, lr_schedule=kind, **settings)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    schedule, rates = lr_schedule(optimizer, config), []
    for _ in range(101):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert {step: round(rates[step], 6) for step in expected} == pytest.approx(expected, abs=1e-6)


def test_a_learner_that_takes_over_a_state_goes_on_with_the_learning_rate_of_that_step(make):
    rows = make_rows(2, 3)
    one, other = (make(warmup_steps=10).learner for _ in range(2))
    for _ in range(3):
        one.update(rows)
    other.load_state(dict(one.state()))
    metrics = [learner.update(rows) for learner in (one, other)]
    assert metrics[0] == metrics[1] and metrics[0]["learning_rate"] > 0


def test_figures_of_fresh_groups_against_numbers_worked_out_by_hand():
    logprobs = dict(ref_logprob=[-1.0, -2.0, -3.0], behavior_logprob=[-0.5, -1.0, -1.5])
    outcome = dict(rewards=np.array([1.0, 0.0]), finished=np.array([True, False]))
    group = make_group(0, 0, [2, 1], [5, 6, 7], logprobs, **outcome)
    figures = dict(reward=0.5, equal_rewards=0.0, kl=1.5, entropy=1.0)
    assert describe([group]) == dict(response_tokens=1.5, finished=0.5) | figures


def log_weights(x: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.logprobs - x.behavior_logprobs).detach(), x.mask


def test_the_effective_share_is_1_in_n_where_one_weight_outweighs_all_however_large_it_is():
    assert effective_share(torch.tensor([400.0] + [-400.0] * 7).double()) == pytest.approx(1 / 8)


def test_importance_figures_do_not_depend_on_the_micro_batch_and_leave_padding_out():
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


def test_staleness_is_split_at_the_step_at_which_a_response_arrived(make):
    trainer = make()
    trainer.learner.step = 10
    rows = make_rows(1, 2)
    for row, version, received in zip(rows, (2, 4), (5, 8)):
        row.version, row.received_step = version, received
    line = trainer.metrics.of(rows, step=10, waited=0.0)
    assert line["staleness_mean"] == 9 - 3
    assert line["staleness_in_flight"] == (3 + 4) / 2
    assert line["staleness_in_buffer"] == (4 + 1) / 2


def test_the_batch_that_is_tried_for_memory_is_as_large_as_one_can_be(make, logits_made):
    """Check that all rows of this batch are different: equal ones would run once."""
    lengths = dict(max_prompt_tokens=20, max_response_tokens=30)
    trainer = make(queries_per_batch=2, tokens_per_micro_batch=1000, **lengths)
    model, widths = trainer.learner.policy, []
    model.get_output_embeddings().forward = None  # no logits but those that are counted
    logits_made.clear()
    model.base_model.register_forward_pre_hook(
        lambda module, arguments, inputs: widths.append(tuple(inputs["input_ids"].shape)),
        with_kwargs=True,
    )
    before = [p.detach().clone() for p in model.parameters()]
    try_largest_batch(trainer.config, trainer.learner, say=print)
    # A small pass for the clock, then the largest: forward, and again in the backward pass.
    made = 2 * (2 * 3 * (2 + 30))
    assert made - 4 * 4 <= sum(logits_made) <= made, "at most four first tokens are another row's"
    assert widths == [(1, 2 * 20 + 6 * 1), (1, 2 * 20 + 6 * 29)]
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


def make_large_group(query: int) -> Group:
    """Make a group of 24 responses, of 40 kB."""
    return make_group(query, 0, [140] * 24, range(24 * 140), prompt=np.zeros(9, np.int32))


class SlowQueue(queue.Queue):
    """Has a group for who asks for the second time, eight in all."""

    num_asked = 0

    def qsize(self) -> int:
        self.num_asked += 1
        if self.num_asked in range(2, 18, 2):
            self.put(make_large_group(self.num_asked))
        return super().qsize()


def test_a_wait_times_out_when_nothing_comes_and_not_while_responses_come(make, monkeypatch):
    trainer = make(searcher_timeout=0.3, queries_per_batch=1, initial_responses=8 * 24)
    trainer.metrics.mismatch_due = 10**9  # no policy sampled these groups
    trainer.status.mark_ready("searcher 0")
    looks = itertools.count()

    def beat() -> None:
        assert next(looks) < 1000, "that a searcher lives is not what is awaited"
        trainer.status.beat("searcher 0")

    missing = "the first responses, 0 of 192: no progress for"
    with monkeypatch.context() as patch, pytest.raises(TimeoutError, match=missing):
        patch.setattr(trainer, "receive", beat)
        trainer.sample()
    clock = SimpleNamespace(monotonic=partial(next, itertools.count(step=0.05)))
    monkeypatch.setattr("runtime.transport.status.time", clock)  # 0.1 s go by with each look
    trainer.rollout_queue = SlowQueue()
    assert trainer.sample() and clock.monotonic() > 2 * 0.3


def test_a_sync_takes_all_that_waits_however_small_the_pipe(make):
    """Send groups of 40 kB through a queue whose pipe, of 64 KB, has room for only one."""
    trainer = make()
    trainer.rollout_queue = torch.multiprocessing.get_context("spawn").Queue(100)
    for query in range(60):
        trainer.rollout_queue.put(make_large_group(query))
    trainer.metrics.mismatch_due = 10**9  # no policy sampled these groups
    trainer.receive()
    assert trainer.buffer.received == 60 * 24


def test_a_publish_without_a_free_slot_is_left_out_and_the_next_sync_brings_what_it_had_to(make):
    trainer, seen, rows = make(sync_period=2, eval_every=2), [], make_rows(1, 3)
    weights, metrics = trainer.weights, trainer.metrics

    def sample() -> list[Response]:
        """Look behind each sync. Slow readers hold every slot but the newest at step 2."""
        seen.append((weights.version, weights.evaluation_version, metrics.skipped_publishes))
        slow = {0, 1, 2} - {int(weights.newest_slot)}
        weights.pins = torch.tensor([*slow] if trainer.step == 1 else [-1])
        return rows if trainer.step < 4 else []

    trainer.sample = sample
    trainer.train()
    assert seen == [(0, -1, 0), (0, -1, 0), (0, -1, 1), (0, -1, 1), (4, 4, 1)]


def test_a_resume_between_a_multiple_of_eval_every_and_the_next_sync_asks_at_that_sync():
    config = Config(sync_period=10, eval_every=25)
    weights = SharedWeights({"a": (1,)}, torch.float32, readers=1)
    for step in (26, 30):
        requests = EvaluationRequests(config, weights, StatusTable(["trainer", "searcher-0"]))
        requests.load_state_dict({"evaluation_due": False, "evaluated": 0}, step)
        assert not requests.is_due(29) and requests.is_due(30)


def test_an_evaluation_that_has_not_arrived_is_asked_for_again_by_a_resumed_run():
    config, status = Config(sync_period=2, eval_every=4), StatusTable(["trainer", "searcher-0"])
    weights = SharedWeights({"a": (1,)}, torch.float32, readers=1)
    requests = EvaluationRequests(config, weights, status)
    requests.arrive(Evaluation(0, {}, 2))
    assert not requests.state_dict(step=4)["evaluation_due"]
    weights.publish(4, [("a", torch.zeros(1))], evaluate=True)
    assert requests.state_dict(step=5)["evaluation_due"], "it is under way"
    requests.arrive(Evaluation(4, {}, 2))
    assert not requests.state_dict(step=5)["evaluation_due"]
