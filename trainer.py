"""The Trainer: trains on what the buffer holds and publishes the weights. It waits only while there is not enough to train on.

    every k steps   empty the queue into the buffer, publish the weights
    every step      sample B queries x K responses, one optimizer step on them (learner.py)

With --constant_staleness n (and --synchronous, n = 0) there is no buffer: step t trains on the batch of version t - n.
"""

import queue
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import checkpoint
from buffer import Group, ReplayBuffer, Row, arrays_of, groups_of, rows_of
from config import Config
from evaluation import Evaluation
from learner import Learner
from policy import mismatch
from processes import Board
from report import Report, Timeline, describe
from tasks import load_task
from weights import SharedWeights

HEALTH_PERIOD = 10.0  # seconds of waiting between two lines that say for whom
RATE_WINDOW = 10.0  # seconds over which rates and busy shares are taken
MISMATCH_PERIOD = 50  # steps between two measurements of the mismatch with vLLM
RESUMED = (
    "received",
    "fresh",
    "evaluated",
    "evaluation_due",
    "reset_due",
    "skipped_publishes",
    "mismatch_due",
)  # plain values in a checkpoint


class Trainer:
    """found: the queue with what the searchers find. resume: directory of a checkpoint to go on from."""

    def __init__(
        self,
        config: Config,
        weights: SharedWeights,
        found,
        board: Board,
        run_dir: str,
        resume: str | None = None,
    ):
        self.config, self.weights, self.found, self.board, self.run_dir = (
            config,
            weights,
            found,
            board,
            run_dir,
        )
        board.beat("trainer")
        self.timeline = Timeline(run_dir, "trainer")
        self.metric = load_task(config.task, **config.options).metric
        self.report = Report(run_dir, config.steps)
        self.learner = Learner(config, self.report.say)
        self.learner.try_largest_batch()
        self.buffer = ReplayBuffer(
            config.capacity_per_query, config.reward_inverse_temperature, config.seed
        )
        self.batches: dict[
            int, list[Group]
        ] = {}  # constant staleness: step -> the groups for it that have come
        self.received = 0  # responses
        self.publish_due = self.evaluation_due = self.reset_due = False
        self.evaluated = -1  # the newest version whose evaluation has come
        self.checkpointed = -1  # the step of the latest checkpoint
        self.fresh: dict[
            str, float
        ] = {}  # figures of the groups of the latest sync, as they were generated
        self.skipped_publishes = 0
        self.mismatch_due = 0  # step from which the mismatch is to be measured again
        self.waited = 0.0  # seconds
        self.rates: deque[tuple[float, float, float, float]] = deque()
        if resume:
            self.load_checkpoint(resume)

    @property
    def step(self) -> int:
        """Optimizer steps done; the version of the weights."""
        return self.learner.step

    def train(self) -> None:
        config = self.config
        self.board.loaded("trainer")
        self.evaluation_due |= self.step == config.steps  # resumed at its end
        self.publish()
        if not config.lockstep:
            self.fill_buffer()
        while self.step < config.steps and not self.board.end:
            if self.step % config.sync_period == 0:
                self.sync()
            elif self.publish_due or self.reset_due:
                self.publish()
            rows = self.next_batch_in_lockstep() if config.lockstep else self.next_batch()
            if not rows:  # told to end while it waited
                break
            with self.timeline.span("step"):
                self.learner.renew_references(
                    rows, self.weights.reference_version, self.weights.reference_tensors
                )
                metrics = self.learner.update(rows)
            self.board.beat("trainer")
            self.report.step(metrics | self.figures(rows))
            if config.checkpoint_every and self.step % config.checkpoint_every == 0:
                self.save_checkpoint()
        self.finish()

    def sync(self) -> None:
        """New groups in, new weights out, and nobody waits; only with constant staleness no searcher may miss a version."""
        config = self.config
        self.evaluation_due |= (
            self.step > 0
            and config.eval_every > 0
            and self.step % config.eval_every < config.sync_period
        )
        self.reset_due |= (
            self.step > 0
            and config.reference_reset_period > 0
            and self.step % config.reference_reset_period == 0
        )
        with self.timeline.span("receive"):
            self.receive()
        if config.lockstep:
            self.wait(
                lambda: f"the searchers to take version {self.weights.version}",
                self.all_searchers_are_up_to_date,
            )
        self.publish()

    def publish(self) -> None:
        if (
            self.reset_due
        ):  # first the reference: whoever sees a new version finds the reference that goes with it
            self.reset_due = not self.weights.publish_reference(
                self.step, self.learner.policy.named_parameters()
            )
        if self.weights.version == self.step and not self.evaluation_due:
            return
        with self.timeline.span("publish"):
            done = self.weights.publish(
                self.step, self.learner.policy.named_parameters(), evaluate=self.evaluation_due
            )
        self.skipped_publishes += (
            not done
        )  # slow readers hold every slot: try again at the next step
        self.publish_due = not done
        self.evaluation_due &= not done

    def receive(self) -> None:
        """Empties the queue: groups into the buffer, evaluations and lines for the user to whoever watches."""
        groups: list[Group] = []
        try:
            # By count: much of what waits is behind the queue's pipe, which holds 64 KB, two groups of GSM8K. An empty pipe is no empty queue.
            for _ in range(self.found.qsize()):
                item = self.found.get(timeout=1.0)
                if isinstance(item, Group):
                    groups.append(item)
                elif isinstance(item, Evaluation):
                    self.take_evaluation(item)
                else:
                    self.report.say(item)
        except queue.Empty:
            pass
        self.take_groups(groups)

    def take_groups(self, groups: list[Group]) -> None:
        if self.config.lockstep:
            for group in groups:
                self.batches.setdefault(group.batch, []).append(group)
        elif groups:
            self.buffer.add(groups, self.step)
            self.received += sum(len(group.lengths) for group in groups)
            self.look_at(groups)

    def all_searchers_are_up_to_date(self) -> bool:
        self.receive()  # or the queues fill up meanwhile
        return all(
            self.board.get(name, "version") == self.weights.version for name in self.board.names[1:]
        )

    def look_at(self, groups: list[Group]) -> None:
        """Figures of groups as they were generated: in the buffer, which drops duplicates, they would be distorted."""
        self.fresh |= describe(groups)
        if self.step >= self.mismatch_due:
            # A group that one version alone sampled whose weights are still held; with constant staleness one for a later step may be.
            newest = reversed(groups + sum(self.batches.values(), []))
            held = self.weights.held()
            if group := next(
                (g for g in newest if g.version == g.last_version and g.version in held), None
            ):
                self.fresh["mismatch"] = mismatch(group, held[group.version], self.learner.policy)
                self.fresh["mismatch_version"] = group.version
                self.mismatch_due = self.step + MISMATCH_PERIOD

    def fill_buffer(self) -> None:
        wanted = max(
            1, self.config.initial_responses
        )  # as generated: the buffer, which drops duplicates, may never hold so many
        self.wait(
            lambda: f"the first {wanted} responses, {self.received} are here",
            lambda: self.receive() or self.received >= wanted,
        )

    def next_batch(self) -> list[Row]:
        """B x K rows of the buffer. It waits only if --max_staleness leaves out all that there is."""
        config = self.config

        def sample() -> list[Row]:
            oldest = 0 if config.max_staleness is None else max(0, self.step - config.max_staleness)
            return self.buffer.sample(
                config.queries_per_batch,
                config.responses_per_query,
                config.most_on_policy_prob,
                oldest,
            )

        with self.timeline.span("sample"):
            rows = sample()
        if not rows:
            # What comes in now may be of an older version still: the searchers need newer weights than the last sync gave them.
            self.wait(
                lambda: f"responses at most {config.max_staleness} steps old (--max_staleness)",
                lambda: self.publish() or self.receive() or rows.extend(sample()) or bool(rows),
            )
        return rows

    def next_batch_in_lockstep(self) -> list[Row]:
        """The batch that the version of constant_staleness steps ago made for this step; before there is one, version 0 made it."""

        def missing() -> int:
            return self.config.queries_per_batch - len(self.batches.get(self.step, []))

        self.wait(
            lambda: f"{missing()} more groups for step {self.step}",
            lambda: self.receive() or missing() <= 0,
        )
        groups = sorted(
            self.batches.pop(self.step), key=lambda group: group.query_id
        )  # whichever came first, the batch is the same
        self.look_at(groups)
        return [row for group in groups for row in rows_of(group)]

    def figures(self, rows: list[Row]) -> dict:
        """The figures of a step that are not the loss's own."""
        now, board = time.monotonic(), self.board
        self.rates.append((now, self.waited, board.total("busy"), board.total("tokens")))
        while self.rates[0][0] < now - RATE_WINDOW and len(self.rates) > 2:
            self.rates.popleft()
        seconds, waited, searched, tokens = (
            np.subtract(self.rates[-1], self.rates[0])
            if len(self.rates) > 1
            else (1.0, 0.0, 0.0, 0.0)
        )
        staleness = (
            self.step - 1 - np.array([row.version for row in rows])
        )  # the step that was just made started from version step - 1
        return self.fresh | {
            "staleness_mean": float(staleness.mean()),
            "staleness_max": int(staleness.max()),
            "trainer_busy": 1.0 - waited / seconds,
            "searcher_busy": searched / seconds / self.config.searchers,
            "searcher_tokens_per_second": tokens / seconds,
            "queue_depth": self.found.qsize(),
            "received": self.received,
            "buffer_responses": self.buffer.responses,
            "buffer_queries": len(self.buffer.all),
            "long_prompts": int(board.total("long_prompts")),
            "unscored_groups": int(board.total("unscored_groups")),
            "bad_steps": self.learner.bad_steps,
            "searcher_restarts": int(board.total("restarts")),
            "skipped_publishes": self.skipped_publishes,
            "seconds": now - self.report.start,
        }

    def wait(self, what: Callable[[], str], ready: Callable[[], bool]) -> None:
        """Until ready() or the run is to end; in lockstep until ready() even so, for only between two batches can it be resumed as if nothing
        had happened. Says for whom it waits; raises TimeoutError when it takes longer than searcher_timeout, in which no searcher was loading."""
        start = said = ready_since = time.monotonic()
        with self.timeline.span("wait"):
            while not ready() and (self.config.lockstep or not self.board.end):
                self.board.beat("trainer")
                if time.monotonic() - said > HEALTH_PERIOD:
                    said = time.monotonic()
                    signs = [
                        f"{name} {f'{self.board.silence(name):.0f} s ago' if self.board.get(name, 'ready') else 'is loading'}"
                        for name in self.board.names[1:]
                    ]
                    self.report.say(
                        f"waiting since {said - start:.0f} s for {what()}; signs of life: {', '.join(signs)}"
                    )
                if not all(self.board.get(name, "ready") for name in self.board.names[1:]):
                    ready_since = time.monotonic()
                if time.monotonic() - ready_since > self.config.searcher_timeout:
                    raise TimeoutError(
                        f"the trainer waited {time.monotonic() - start:.0f} s (--searcher_timeout) for {what()}"
                    )
                time.sleep(0.005)
        self.waited += time.monotonic() - start

    def take_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluated = max(self.evaluated, evaluation.version)
        self.report.metrics.write({"step": evaluation.version, self.metric: evaluation.score})
        what = (
            f"base {self.metric}:"
            if evaluation.version == 0
            else f"step {evaluation.version}: {self.metric}"
        )
        self.report.say(f"{what} {evaluation}")

    def save_checkpoint(self) -> None:
        if self.config.lockstep:  # what the searchers owe so far belongs to it: a run that goes on begins with the next version
            last = min(self.step + self.config.constant_staleness, self.config.steps)
            self.wait(
                lambda: "the searchers to finish what a checkpoint is to hold",
                lambda: (
                    self.receive()
                    or (
                        all(
                            len(self.batches.get(step, [])) == self.config.queries_per_batch
                            for step in range(self.step, last)
                        )
                        and self.evaluated >= self.weights.evaluation_version
                    )
                ),
            )
        else:
            self.receive()
        tensors = {"learner": self.learner.state_dict()}
        if self.weights.reference_version:
            tensors["reference"] = {
                name: tensor.clone() for name, tensor in self.weights.reference_tensors().items()
            }
        rng = {"rng": torch.get_rng_state().numpy()}
        arrays = {
            "buffer": self.buffer.state_dict(),
            "batches": arrays_of(sum(self.batches.values(), [])),
            "torch": rng,
        }
        state = {name: getattr(self, name) for name in RESUMED} | {
            "step": self.step,
            "evaluation_due": self.evaluation_due
            or self.weights.evaluation_version > self.evaluated,
            "reference_version": self.weights.reference_version,
            "board": self.board.state_dict(),
        }
        with self.timeline.span("checkpoint"):
            try:
                checkpoint.save(self.run_dir, self.step, tensors, arrays, state)
                self.checkpointed = self.step
            except OSError as error:
                self.report.say(
                    f"step {self.step}: no checkpoint was written, the one before stays: {error}"
                )
        self.board.beat("trainer")

    def load_checkpoint(self, directory: str) -> None:
        """Where the run was when save_checkpoint wrote this. The weights are published before a searcher asks for them: it waits for that."""
        state = checkpoint.load_state(directory)
        for name in RESUMED:
            setattr(self, name, state[name])
        self.learner.load_state_dict(checkpoint.load_tensors(directory, "learner"))
        if state["reference_version"]:
            self.weights.publish_reference(
                state["reference_version"], checkpoint.load_tensors(directory, "reference").items()
            )
        self.buffer.load_state_dict(checkpoint.load_arrays(directory, "buffer"))
        self.take_groups(groups_of(checkpoint.load_arrays(directory, "batches")))
        torch.set_rng_state(torch.from_numpy(checkpoint.load_arrays(directory, "torch")["rng"]))
        self.checkpointed = self.step

    def finish(self) -> None:
        """The last weights, published and evaluated if the run came to its end, and saved in any case."""
        if self.step != self.checkpointed and not (
            self.config.lockstep and self.step == 0
        ):  # there version 0 makes all batches anew
            self.save_checkpoint()
        if self.step == self.config.steps:
            self.publish_due = self.evaluation_due = True

            def evaluated() -> bool:
                if self.publish_due:
                    self.publish()
                self.receive()
                return self.evaluated >= self.step or self.board.end

            self.wait(lambda: f"the evaluation of version {self.step}", evaluated)
        self.learner.save_model(Path(self.run_dir) / "model")
        if skipped := int(self.board.total("long_prompts")):
            self.report.say(
                f"{skipped} queries were skipped: prompt over --max_prompt_tokens {self.config.max_prompt_tokens}"
            )
        if unscored := int(self.board.total("unscored_groups")):
            self.report.say(f"{unscored} groups were dropped, they got no scores: see logs/")
        self.timeline.flush()
        self.report.close()


def run(
    config: Config, weights: SharedWeights, found, board: Board, run_dir: str, resume: str | None
) -> None:
    """The trainer process."""
    Trainer(config, weights, found, board, run_dir, resume).train()
