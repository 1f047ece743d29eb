"""The Trainer: learns from what the batch source gives, and publishes the weights.

What a batch does to the policy is learner.py. Batches come from the buffer
(runtime/modes/replay.py), and then the trainer waits only while there is not enough to train on; or
each is made for its step (runtime/modes/lockstep.py: --constant_staleness, --synchronous).
"""

import queue

import numpy as np
import torch
import torch.multiprocessing

from buffer import Group, Row
from config import Config
from learner import Learner
from loss import Metrics
from models.hub import identify_weights
from models.sharding import OneProcess
from runtime.checkpoints import checkpoint
from runtime.checkpoints.writer import CheckpointWriter
from runtime.modes.lockstep import LockstepBatches
from runtime.modes.reference import ReferenceResets
from runtime.modes.replay import ReplayBatches
from runtime.planning.memory_trial import try_largest_batch
from runtime.processes.waiting import Waits
from runtime.record.health import Health
from runtime.record.report import Rates, Report
from runtime.record.timeline import Timeline
from runtime.responses.evaluation_requests import EvaluationRequests
from runtime.transport.board import Board
from runtime.transport.locked_pages import lock_pages_for_gpu
from runtime.transport.messages import Evaluation
from tasks import load_task
from weights import SharedWeights


class Trainer:
    """The trainer process.

    rollout_queue: of groups, evaluations and notices. resume: directory of a checkpoint to go
    on from. ranks: of the trainer's processes, this one the first.
    """

    def __init__(
        self,
        config: Config,
        weights: SharedWeights,
        rollout_queue: torch.multiprocessing.Queue,
        board: Board,
        run_dir: str,
        resume: str | None = None,
        ranks: OneProcess | None = None,
    ):
        self.config, self.weights, self.rollout_queue = config, weights, rollout_queue
        self.board, self.run_dir = board, run_dir
        board.beat("trainer")
        self.timeline = Timeline(run_dir, "trainer")
        self.metric = load_task(config.task, **config.options).metric
        self.report = Report(run_dir, config, board)
        self.base_model = identify_weights(config.model)
        self.learner = Learner(config, self.report.say, ranks)
        lock_pages_for_gpu(weights, self.report.say)
        try_largest_batch(config, self.learner, self.report.say)
        self.batches = LockstepBatches(config, board) if config.lockstep else ReplayBatches(config)
        self.evaluations = EvaluationRequests(config, weights)
        self.resets = ReferenceResets(config, weights, self.learner)
        self.health = Health(weights, self.learner)
        self.waits = Waits(
            config, board, self.report, self.timeline, is_interruptible=not self.batches.is_exact
        )
        self.rates = Rates(board)
        self.checkpoints = CheckpointWriter(run_dir, self.waits, self.report.say)
        self.skipped_publishes = 0
        self.noted_step = -1
        if resume:
            self.load_checkpoint(resume)

    @property
    def step(self) -> int:
        """Optimizer steps done; the version of the weights."""
        return self.learner.step

    def train(self) -> None:
        """Learn off-policy without pause; sync with the searchers every k steps (section 4.1)."""
        self.begin()
        while self.step < self.config.steps and not self.board.end:
            if self.step % self.config.sync_period == 0:
                self.sync()
            rows = self.next_batch()
            if not rows:  # the run is to end
                break
            with self.timeline.span("step"):
                self.resets.renew(rows)
                metrics = self.learner.update(rows)
            self.record(metrics, rows)
            self.save_checkpoint_if_due()
        self.finish()

    def begin(self) -> None:
        """Publish the weights: a resumed run's searchers wait for that."""
        self.board.loaded("trainer")
        self.publish()

    def note_due(self) -> None:
        """Note, once at each sync, whether an evaluation or a reference reset is due."""
        if self.step % self.config.sync_period == 0 and self.noted_step != self.step:
            self.noted_step = self.step
            self.evaluations.update(self.step)
            self.resets.update(self.step)

    def sync(self) -> None:
        """Receive what the searchers found, then publish the weights. Only lockstep waits here."""
        with self.timeline.span("receive"):
            self.receive()
        self.skipped_publishes += not self.publish()

    def receive(self) -> None:
        """Drain the rollout queue: groups to the batch source, the rest to whoever watches."""
        groups: list[Group] = []
        try:
            # Use qsize(): the feeder thread may hold items while the pipe is empty.
            for _ in range(self.rollout_queue.qsize()):
                item = self.rollout_queue.get(timeout=1.0)
                if isinstance(item, Group):
                    groups.append(item)
                elif isinstance(item, Evaluation):
                    self.record_evaluation(item)
                else:
                    self.report.say(item.text)
        except queue.Empty:
            pass
        self.batches.add(groups, self.step)
        self.health.observe(self.batches, self.step)

    def publish(self) -> bool:
        """Publish the weights of this step, if that is still to do.

        Returns False if slow readers hold every slot. The next sync publishes newer weights; an
        evaluation and a reference reset stay due until then.
        """
        if self.weights.version == self.step:
            return True
        self.note_due()
        self.wait_for_searchers()
        # First the reference: whoever sees a new version finds the reference that goes with it.
        self.resets.publish(self.step)
        with self.timeline.span("publish"):
            weights = self.learner.weights()
            done = self.weights.publish(self.step, weights, evaluate=self.evaluations.is_due)
        self.evaluations.is_due &= not done
        return done

    def wait_for_searchers(self) -> None:
        """Where each version makes a batch, wait until all searchers have taken the newest one."""

        def receive_until_taken() -> bool:
            self.receive()  # or the queues fill up meanwhile
            return self.batches.is_taken(self.weights.version)

        if self.batches.is_exact:
            what = f"the searchers to take version {self.weights.version}"
            self.waits.until_worked(receive_until_taken, what)

    def next_batch(self) -> list[Row]:
        """The next B x K rows. Waits while there are too few; [] if the run is to end meanwhile."""
        with self.timeline.span("sample"):
            rows = self.batches.next(self.step)

        def try_again() -> bool:
            nonlocal rows
            # What arrives now may be too old still (--max_staleness): the searchers need newer
            # weights than the last sync gave them.
            self.publish()
            self.receive()
            rows = self.batches.next(self.step)
            return bool(rows)

        if not rows:
            self.waits.until(try_again, lambda: self.batches.awaited(self.step))
        self.health.observe(self.batches, self.step)
        return rows

    def record(self, metrics: Metrics, rows: list[Row]) -> None:
        """Write the line of a step that was just made, from these rows."""
        self.board.beat("trainer")
        board, version = self.board, self.step - 1  # of the weights that the step started from
        staleness = version - np.array([row.version for row in rows])
        in_buffer = version - np.array([row.received_step for row in rows])
        figures = {
            "staleness_mean": float(staleness.mean()),
            "staleness_max": int(staleness.max()),
            "staleness_in_flight": float((staleness - in_buffer).mean()),
            "staleness_in_buffer": float(in_buffer.mean()),
            **self.rates.measure(self.waits.seconds),
            "queue_depth": self.rollout_queue.qsize(),
            **self.batches.figures(),
            "long_prompts": int(board.total("long_prompts")),
            "unscored_groups": int(board.total("unscored_groups")),
            "bad_steps": self.learner.bad_steps,
            "searcher_restarts": int(board.total("restarts")),
            "skipped_publishes": self.skipped_publishes,
            "seconds": self.report.seconds,
        }
        self.report.step(metrics | self.health.figures | figures)

    def record_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.arrived(evaluation)
        # Not before: a searcher that dies with it unsent is replaced by one that repeats it.
        self.board.set(self.board.searchers[0], "evaluated", evaluation.version)
        self.report.metrics.write(evaluation.line(self.metric, self.base_model))
        what = f"step {evaluation.version}: {self.metric}"
        if evaluation.version == 0:
            what = f"base {self.metric}:"
        self.report.say(f"{what} {evaluation}")

    def save_checkpoint_if_due(self) -> None:
        self.checkpoints.collect()
        period = self.config.checkpoint_every
        if period and self.step % period == 0:
            self.save_checkpoint()

    def save_checkpoint(self, is_last: bool = False) -> None:
        """Save all that a resumed run needs. Of a copy, while the training goes on, if it does."""
        self.checkpoints.wait()
        self.wait_until_settled()
        tensors = {"learner": self.learner.state()}
        if self.weights.reference_version:
            tensors["reference"] = self.weights.reference_tensors().items()
        rng = {"rng": torch.get_rng_state().numpy()}
        arrays = {"buffer": self.batches.state_dict(), "torch": rng}
        state = {
            "step": self.step,
            "base_model": self.base_model,
            "received": self.batches.received,
            "skipped_publishes": self.skipped_publishes,
            **self.health.state_dict(),
            **self.evaluations.state_dict(),
            **self.resets.state_dict(),
            "board": self.board.state_dict(),
        }
        is_kept = is_last and self.learner.ranks.size == 1  # what is gathered is gone with its copy
        with self.timeline.span("checkpoint"):
            self.checkpoints.begin(self.step, tensors, arrays, state, is_kept)
        self.board.beat("trainer")

    def wait_until_settled(self) -> None:
        """Receive what belongs to a checkpoint; where that is to be exact, wait for all of it."""

        def receive_until_settled() -> bool:
            self.receive()
            return self.batches.is_settled(self.step) and not self.evaluations.is_pending

        if self.batches.is_exact:
            what = "the searchers to finish what a checkpoint is to hold"
            self.waits.until_worked(receive_until_settled, what)
        else:
            self.receive()

    def load_checkpoint(self, directory: str) -> None:
        """Go on where the run was when save_checkpoint wrote this."""
        state = checkpoint.load_state(directory)
        self.learner.load_state(checkpoint.load_tensors(directory, "learner"))
        if state["reference_version"]:
            reference = checkpoint.load_tensors(directory, "reference")
            self.weights.publish_reference(state["reference_version"], reference.items())
        self.batches.load_state_dict(checkpoint.load_arrays(directory, "buffer"))
        self.batches.received = state["received"]
        for part in (self.health, self.evaluations, self.resets):
            part.load_state_dict(state)
        self.skipped_publishes = state["skipped_publishes"]
        rng = checkpoint.load_arrays(directory, "torch")["rng"]
        torch.set_rng_state(torch.from_numpy(rng))
        self.checkpoints.written_step = self.step

    def finish(self) -> None:
        """Save a checkpoint and the model. At the last step the searchers stop to search."""
        self.board.last_step_done = self.step == self.config.steps
        # Where checkpoints are exact, step 0 needs none: version 0 makes all batches anew.
        is_needed = self.step > 0 or not self.batches.is_exact
        try:  # first the model: it is not lost where a wait for a checkpoint fails
            self.checkpoints.save_model(self.learner.save_model)
        finally:
            self.checkpoints.wait()
            if self.step != self.checkpoints.written_step and is_needed:
                self.save_checkpoint(is_last=True)
                self.checkpoints.wait()
        self.wait_for_evaluation()
        self.board.stop = True
        if skipped := int(self.board.total("long_prompts")):
            why = f"over --max_prompt_tokens {self.config.max_prompt_tokens}, empty or not Unicode"
            self.report.say(f"{skipped} queries were skipped: prompt {why}")
        if unscored := int(self.board.total("unscored_groups")):
            self.report.say(f"{unscored} groups were dropped, they got no scores: see logs/")
        self.timeline.flush()
        self.report.close()

    def wait_for_evaluation(self) -> None:
        """Wait for an evaluation that was asked for: of the base model, in a short run.

        The last version is evaluated from the saved model (runtime/responses/final_evaluation.py).
        """

        def receive_until_evaluated() -> bool:
            self.receive()
            return not self.evaluations.is_pending

        if self.step == self.config.steps:
            self.waits.until_worked(receive_until_evaluated, "the evaluation that it asked for")


def run(
    config: Config,
    weights: SharedWeights,
    rollout_queue: torch.multiprocessing.Queue,
    board: Board,
    run_dir: str,
    resume: str | None,
    ranks: OneProcess | None = None,
) -> None:
    """The trainer process."""
    with board.note_failure("trainer"):
        Trainer(config, weights, rollout_queue, board, run_dir, resume, ranks).train()
