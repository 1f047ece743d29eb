"""The Trainer: steps the optimizer on what the buffer holds and publishes the weights. It waits only while there is not enough to train on.

    every k steps   drain the queues into the buffer, publish the weights
    every step      sample B queries x K responses, loss, backward, AdamW

With --constant_staleness n (and --synchronous, n = 0) there is no buffer: step t trains on the batch of version t - n.
"""

import queue
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import get_scheduler

from buffer import Group, ReplayBuffer, Row, rows_of
from config import Config
from loss import LOSSES, LossInputs, Metrics
from policy import load_policy, load_tokenizer, mismatch, response_logprobs, response_logprobs_under
from processes import Board, device
from report import Report, Timeline, describe
from searcher import Evaluation
from tasks import load_task
from weights import SharedWeights

HEALTH_PERIOD = 10.0  # seconds of waiting between two lines that say for whom
RATE_WINDOW = 10.0  # seconds over which rates and busy shares are taken
MISMATCH_PERIOD = 50  # steps between two measurements of the mismatch with vLLM
BAD_STEPS = 10  # this many steps in a row with a gradient that is not finite end the run


class Trainer:
    def __init__(self, config: Config, weights: SharedWeights, queues: list, board: Board, run_dir: str):
        self.config, self.weights, self.queues, self.board, self.run_dir = config, weights, queues, board, run_dir
        board.beat("trainer")
        self.timeline = Timeline(run_dir, "trainer")
        self.metric = load_task(config.task, **config.task_options()).metric
        self.report = Report(run_dir, config.steps)
        torch.manual_seed(config.seed)
        self.policy = load_policy(config, device())
        # fp32 masters: a step of 1e-5 times a bf16 weight rounds away.
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
        self.lr_schedule = lr_schedule(self.optimizer, config)
        self.buffer = ReplayBuffer(config.capacity_per_query, config.reward_inverse_temperature, config.seed)
        self.batches: dict[int, list[Group]] = {}  # constant staleness: step -> the groups for it that have come
        self.step = 0  # optimizer steps done; the version of the weights
        self.publish_due = self.evaluation_due = self.reset_due = False
        self.evaluated = -1  # the newest version whose evaluation has come
        self.received = 0  # responses
        self.fresh: dict[str, float] = {}  # figures of the groups of the latest sync, as they were generated
        self.skipped_publishes = self.bad_steps = self.bad_steps_in_a_row = 0
        self.mismatch_due = 0  # step from which the mismatch is to be measured again
        self.waited = 0.0  # seconds
        self.rates: deque[tuple[float, float, float, float]] = deque()

    def train(self) -> None:
        config = self.config
        self.board.add("trainer", "ready", 1)
        self.publish()
        if not config.lockstep:
            self.fill_buffer()
        while self.step < config.steps and not self.board.stop:
            if self.step % config.sync_period == 0:
                self.sync()
            elif self.publish_due or self.reset_due:
                self.publish()
            rows = self.next_batch_in_lockstep() if config.lockstep else self.next_batch()
            if self.board.stop:
                break
            with self.timeline.span("step"):
                self.renew_references(rows)
                metrics = self.update(rows)
            self.report.step(metrics | self.figures(rows))
        self.finish()

    def sync(self) -> None:
        """New groups in, new weights out, and nobody waits; only with constant staleness no searcher may miss a version."""
        config = self.config
        self.evaluation_due |= self.step > 0 and config.eval_every > 0 and self.step % config.eval_every < config.sync_period
        self.reset_due |= self.step > 0 and config.reference_reset_period > 0 and self.step % config.reference_reset_period == 0
        self.receive()
        if config.lockstep:
            self.wait(lambda: f"the searchers to take version {self.weights.version}", self.all_searchers_are_up_to_date)
        self.publish()

    def publish(self) -> None:
        if self.reset_due:  # first the reference: whoever sees a new version finds the reference that goes with it
            self.reset_due = not self.weights.publish_reference(self.step, self.policy.named_parameters())
        if self.weights.version == self.step and not self.evaluation_due:
            return
        with self.timeline.span("publish"):
            done = self.weights.publish(self.step, self.policy.named_parameters(), evaluate=self.evaluation_due)
        self.skipped_publishes += not done  # slow readers hold every slot: try again at the next step
        self.publish_due = not done
        self.evaluation_due &= not done

    def receive(self) -> None:
        """Empties the queues: groups into the buffer, evaluations to whoever watches."""
        groups: list[Group] = []
        for waiting in self.queues:
            try:
                while True:
                    item = waiting.get_nowait()
                    if isinstance(item, Evaluation):
                        self.take_evaluation(item)
                    else:
                        groups.append(item)
            except queue.Empty:
                pass
        if self.config.lockstep:
            for group in groups:
                self.batches.setdefault(group.batch, []).append(group)
        elif groups:
            self.buffer.add(groups, self.step)
            self.received += sum(len(group.lengths) for group in groups)
            self.look_at(groups)

    def all_searchers_are_up_to_date(self) -> bool:
        self.receive()  # or the queues fill up meanwhile
        return all(self.board.get(name, "version") == self.weights.version for name in self.board.names[1:])

    def look_at(self, groups: list[Group]) -> None:
        """Figures of groups as they were generated: in the buffer, which drops duplicates, they would be distorted."""
        self.fresh |= describe(groups)
        if self.step >= self.mismatch_due:
            # A group that one version alone sampled whose weights are still in a slot; with constant staleness one for a later step may be.
            newest = reversed(groups + sum(self.batches.values(), []))
            held = self.weights.held()
            if group := next((g for g in newest if g.version == g.last_version and g.version in held), None):
                self.fresh |= {"mismatch": mismatch(group, held[group.version], self.policy, self.config.temperature), "mismatch_version": group.version}
                self.mismatch_due = self.step + MISMATCH_PERIOD

    def fill_buffer(self) -> None:
        wanted = max(1, self.config.initial_responses)  # as generated: the buffer, which drops duplicates, may never hold so many
        self.wait(lambda: f"the first {wanted} responses, {self.received} are here", lambda: self.receive() or self.received >= wanted)

    def next_batch(self) -> list[Row]:
        """B x K rows of the buffer. It waits only if --max_staleness leaves out all that there is."""
        config = self.config

        def sample() -> list[Row]:
            oldest = 0 if config.max_staleness is None else max(0, self.step - config.max_staleness)
            return self.buffer.sample(config.queries_per_batch, config.responses_per_query, config.most_on_policy_prob, oldest)

        rows = sample()
        if not rows:
            # What comes in now may be of an older version still: the searchers need newer weights than the last sync gave them.
            self.wait(lambda: f"responses at most {config.max_staleness} steps old (--max_staleness)",
                      lambda: self.publish() or self.receive() or rows.extend(sample()) or bool(rows))  # fmt: skip
        return rows

    def next_batch_in_lockstep(self) -> list[Row]:
        """The batch that the version of constant_staleness steps ago made for this step; before there is one, version 0 made it."""

        def missing() -> int:
            return self.config.queries_per_batch - len(self.batches.get(self.step, []))

        self.wait(lambda: f"{missing()} more groups for step {self.step}", lambda: self.receive() or not missing())
        if self.board.stop:
            return []
        groups = sorted(self.batches.pop(self.step), key=lambda group: group.query_id)  # whichever came first, the batch is the same
        self.look_at(groups)
        return [row for group in groups for row in rows_of(group)]

    def renew_references(self, rows: list[Row]) -> None:
        """Rows that were scored by an earlier reference policy get their log-probabilities under the present one. They are recomputed when
        they are first drawn, not dropped: a reset leaves nothing to wait for, and what is never drawn costs nothing."""
        old = [row for row in rows if row.reference_version != self.weights.reference_version]
        if not old:
            return
        reference = self.weights.reference_tensors()
        logprobs = response_logprobs_under(reference, self.policy, [r.prompt for r in old], [r.tokens for r in old], self.config.temperature)
        for row, renewed in zip(old, logprobs.cpu().numpy()):
            row.ref_logprobs, row.reference_version = renewed[: len(row.tokens)], self.weights.reference_version

    def update(self, rows: list[Row]) -> Metrics:
        """One optimizer step on B x K rows, a few queries at a time. Each row weighs the same whatever the micro-batch."""
        config = self.config
        beta = beta_at(config, self.step)
        size = config.queries_per_micro_batch * config.responses_per_query
        totals: Metrics = {"loss": 0.0}
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            loss, metrics = LOSSES[config.loss](self.loss_inputs(part, beta))
            (loss * len(part) / len(rows)).backward()
            for name, value in {"loss": loss.detach(), **metrics}.items():
                totals[name] = totals.get(name, 0.0) + value * len(part) / len(rows)
        grad_norm = float(clip_grad_norm_(self.policy.parameters(), config.max_grad_norm or float("inf")))
        learning_rate = self.lr_schedule.get_last_lr()[0]
        if np.isfinite(grad_norm):
            self.optimizer.step()
            self.bad_steps_in_a_row = 0
        else:
            self.bad_steps += 1
            self.bad_steps_in_a_row += 1
            self.report.say(f"step {self.step}: the gradient norm is {grad_norm}: the step is skipped")
            if self.bad_steps_in_a_row == BAD_STEPS:
                raise FloatingPointError(f"{BAD_STEPS} steps in a row had a gradient that is not finite: lower --learning_rate or raise --beta")
        self.optimizer.zero_grad()
        self.lr_schedule.step()
        self.step += 1
        self.board.beat("trainer")
        return {"step": self.step} | {k: float(v) for k, v in totals.items()} | {"grad_norm": grad_norm, "learning_rate": learning_rate, "beta": beta}

    def loss_inputs(self, rows: list[Row], beta: float) -> LossInputs:
        logprobs = response_logprobs(self.policy, [r.prompt for r in rows], [r.tokens for r in rows], self.config.temperature)  # (N, T)

        def padded(arrays: list[np.ndarray]) -> torch.Tensor:
            out = np.zeros(logprobs.shape, np.float32)
            for i, array in enumerate(arrays):
                out[i, : len(array)] = array
            return torch.from_numpy(out).to(logprobs.device)

        return LossInputs(
            logprobs=logprobs,
            ref_logprobs=padded([r.ref_logprobs for r in rows]),
            behavior_logprobs=padded([r.behavior_logprobs for r in rows]),
            mask=padded([np.ones(len(r.tokens)) for r in rows]),  # by length, not by token id: end-of-sequence may equal padding
            rewards=torch.tensor([r.reward for r in rows], device=logprobs.device),
            group_size=self.config.responses_per_query,
            beta=beta,
            max_response_length=self.config.max_response_tokens,
        )

    def figures(self, rows: list[Row]) -> dict:
        """The figures of a step that are not the loss's own."""
        now, board = time.monotonic(), self.board
        self.rates.append((now, self.waited, board.total("busy"), board.total("tokens")))
        while self.rates[0][0] < now - RATE_WINDOW and len(self.rates) > 2:
            self.rates.popleft()
        seconds, waited, searched, tokens = np.subtract(self.rates[-1], self.rates[0]) if len(self.rates) > 1 else (1.0, 0.0, 0.0, 0.0)
        staleness = [self.step - 1 - row.version for row in rows]  # the step that was just made started from version step - 1
        return self.fresh | {
            "staleness_mean": float(np.mean(staleness)),
            "staleness_max": max(staleness),
            "trainer_busy": 1.0 - waited / seconds,
            "searcher_busy": searched / seconds / self.config.searchers,
            "searcher_tokens_per_second": tokens / seconds,
            "queue_depth": sum(waiting.qsize() for waiting in self.queues),
            "buffer_responses": self.buffer.responses,
            "buffer_queries": len(self.buffer.all),
            "long_prompts": int(board.total("long_prompts")),
            "unscored_groups": int(board.total("unscored_groups")),
            "bad_steps": self.bad_steps,
            "skipped_publishes": self.skipped_publishes,
            "seconds": now - self.report.start,
        }

    def wait(self, what: Callable[[], str], ready: Callable[[], bool]) -> None:
        """Until ready() or the run is stopped. Says for whom it waits; raises TimeoutError when it takes longer than searcher_timeout."""
        start = said = time.monotonic()
        with self.timeline.span("wait"):
            while not ready() and not self.board.stop:
                self.board.beat("trainer")
                if time.monotonic() - said > HEALTH_PERIOD:
                    said = time.monotonic()
                    signs = [f"{name} {f'{self.board.silence(name):.0f} s ago' if self.board.get(name, 'ready') else 'is loading'}"
                             for name in self.board.names[1:]]  # fmt: skip
                    self.report.say(f"waiting since {said - start:.0f} s for {what()}; signs of life: {', '.join(signs)}")
                if time.monotonic() - start > self.config.searcher_timeout:
                    raise TimeoutError(f"the trainer waited {time.monotonic() - start:.0f} s (--searcher_timeout) for {what()}")
                time.sleep(0.005)
        self.waited += time.monotonic() - start

    def take_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluated = max(self.evaluated, evaluation.version)
        self.report.write({"step": evaluation.version, self.metric: evaluation.score})
        what = f"base {self.metric}:" if evaluation.version == 0 else f"step {evaluation.version}: {self.metric}"
        self.report.say(f"{what} {evaluation}")
        if evaluation.long_prompts:
            self.report.say(f"{evaluation.long_prompts} test queries were left out: prompt over --max_prompt_tokens {self.config.max_prompt_tokens}")

    def finish(self) -> None:
        """The last weights, published and evaluated if the run came to its end, and saved in any case."""
        if self.step == self.config.steps:
            self.publish_due = self.evaluation_due = True

            def evaluated() -> bool:
                if self.publish_due:
                    self.publish()
                self.receive()
                return self.evaluated >= self.step

            self.wait(lambda: f"the evaluation of version {self.step}", evaluated)
        for setting in ("temperature", "top_p", "top_k"):  # of some base models; without do_sample they are refused on saving
            setattr(self.policy.generation_config, setting, None)
        directory = Path(self.run_dir) / "model"
        self.policy.save_pretrained(directory.with_suffix(".unfinished"))
        load_tokenizer(self.config).save_pretrained(directory.with_suffix(".unfinished"))
        directory.with_suffix(".unfinished").rename(directory)
        if skipped := int(self.board.total("long_prompts")):
            self.report.say(f"{skipped} queries were skipped: prompt over --max_prompt_tokens {self.config.max_prompt_tokens}")
        if unscored := int(self.board.total("unscored_groups")):
            self.report.say(f"{unscored} groups were dropped, they got no scores: see logs/")
        self.timeline.flush()
        self.report.close()


def beta_at(config: Config, step: int) -> float:
    if config.beta_final is None:
        return config.beta
    if config.beta_stop_step is not None and step >= config.beta_stop_step:
        return config.beta_final
    return config.beta + (config.beta_final - config.beta) * min(1.0, step / max(1, config.beta_steps))


def lr_schedule(optimizer: torch.optim.Optimizer, config: Config):
    name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
    if name == "warmup_stable_decay":  # its length is its own: the run may end before the decay does
        extra = {"num_stable_steps": config.stable_steps, "num_decay_steps": config.decay_steps}
        return get_scheduler(name, optimizer, config.warmup_steps, scheduler_specific_kwargs=extra)
    return get_scheduler(name, optimizer, config.warmup_steps, config.steps)


def run(config: Config, weights: SharedWeights, queues: list, board: Board, run_dir: str) -> None:
    """The trainer process."""
    Trainer(config, weights, queues, board, run_dir).train()
