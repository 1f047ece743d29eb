"""The Trainer: learns from what the batch source gives, and publishes the weights.

What a batch does to the policy is learner.py. Batches come from the buffer
(runtime/modes/free_running.py), and then the trainer waits only while there is not enough to train
on; or each is made for its step (runtime/modes/lockstep.py: --constant_staleness, --synchronous).
"""

import queue
from collections.abc import Callable
from contextlib import suppress

import torch.multiprocessing

from buffer import Group, Row
from config import Config
from learner import Learner
from models.hub import identify_weights
from models.sharding import OneProcess
from runtime.checkpoints.run_state import RunState
from runtime.checkpoints.writer import CheckpointWriter
from runtime.modes.free_running import ReplayBatches
from runtime.modes.lockstep import LockstepBatches
from runtime.modes.reference import ReferenceResets
from runtime.planning.memory_trial import try_largest_batch
from runtime.processes.waiting import Waits
from runtime.record.metrics import StepMetrics
from runtime.record.report import Report
from runtime.record.timeline import Timeline
from runtime.responses.evaluation import EvaluationRequests
from runtime.transport.board import Board
from runtime.transport.locked_pages import lock_pages
from runtime.transport.messages import Evaluation
from tasks import load_task
from weights import SharedWeights


class Trainer:
    """The trainer process.

    rollout_queue: of groups, evaluations and notices. resume: directory of a checkpoint to go
    on from. ranks: the trainer's processes, of which this is the first (models/sharding.py).
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
        self.board = board
        board.beat("trainer")
        self.timeline = Timeline(run_dir, board, "trainer")
        metric = load_task(config.task, **config.options).metric
        base_model = identify_weights(config.model)
        self.report = Report(run_dir, config, board, metric, base_model)
        self.learner = Learner(config, self.report.say, ranks)
        lock_pages(weights, self.report.say)
        try_largest_batch(config, self.learner, self.report.say)
        self.batches = LockstepBatches(config, board) if config.lockstep else ReplayBatches(config)
        self.resets = ReferenceResets(config, weights, self.learner)
        self.evaluations = EvaluationRequests(config, weights, board)
        self.waits = Waits(config, board, self.report, self.timeline, not self.batches.is_exact)
        self.metrics = StepMetrics(self.learner, weights, self.batches, rollout_queue, board)
        self.checkpoints = CheckpointWriter(run_dir, self.waits, self.report.say)
        parts = self.learner, weights, self.batches, board, self.metrics, self.evaluations
        self.state = RunState(*parts, base_model)
        if resume:
            self.state.load(resume)
            self.checkpoints.written_step = self.step

    @property
    def step(self) -> int:
        """Batches trained on; the version of the weights."""
        return self.learner.step

    def train(self) -> None:
        """Learn off-policy; sync with the searchers every k steps, seldom wait (section 4.1)."""
        self.board.loaded("trainer")
        self.publish()  # version 0, or what a resumed run's searchers wait for
        # board.end: shut down, with a checkpoint.
        while self.step < self.config.steps and not self.board.end:
            if self.step % self.config.sync_period == 0:
                self.sync()
            rows = self.next_batch()
            if not rows:  # the run is to end
                break
            self.metrics.first_look(self.report.say)  # before the first step alone
            with self.timeline.span("step"):
                self.resets.renew(rows)  # after a reset: log pi_ref under the new reference
                metrics = self.learner.update(rows)
            self.report.step(metrics | self.metrics.of(rows, self.waits.seconds))
            self.board.beat("trainer")
            self.save_checkpoint_if_due()
        self.finish()

    def sync(self) -> None:
        """Receive, then publish. In the paper both sides stop for it; here only lockstep waits."""
        with self.timeline.span("receive"):
            self.receive()
        if not self.publish():
            self.metrics.skipped_publishes += 1

    def receive(self) -> None:
        """Drain the rollout queue: groups to `batches`, the rest to who watches the run."""
        groups: list[Group] = []
        with suppress(queue.Empty):
            # qsize() counts what the sender's thread still holds: hence the timeout.
            for _ in range(self.rollout_queue.qsize()):
                item = self.rollout_queue.get(timeout=1.0)
                if isinstance(item, Group):
                    groups.append(item)
                elif isinstance(item, Evaluation):
                    self.evaluations.arrive(item)
                    self.report.evaluation(item)  # to the terminal and metrics.jsonl
                else:
                    self.report.say(item.text)
        self.batches.add(groups, self.step)
        self.metrics.observe()  # of what arrived: rewards, lengths, KL; now and then the mismatch

    def receive_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Receive until is_done(). Any work of the searchers is progress towards `what`."""

        def awaited() -> str:
            return f"{what}; they worked {self.board.total('busy'):.0f} s so far"

        for _ in self.waits.until(is_done, awaited):
            self.receive()  # or the queues fill up meanwhile

    def publish(self) -> bool:
        """Copy the weights of this step into shared memory, where searchers look for them.

        Returns False if slow readers hold both copies but the newest. The next sync publishes newer
        weights; an evaluation stays due until then.
        """
        newest = self.weights.version
        if newest == self.step:
            return True
        # In lockstep each version makes a batch, so none may be passed over.
        what = f"the searchers to take version {newest}"
        self.receive_until(lambda: self.batches.is_taken(newest), what)
        # First the reference: who finds a new version takes the reset first, if it could be made.
        self.resets.publish_if_due(self.step)
        is_asked = self.evaluations.is_due(self.step)
        with self.timeline.span("publish"):
            return self.weights.publish(self.step, self.learner.weights(), is_asked)

    def next_batch(self) -> list[Row]:
        """The next B x K rows. Waits while there are too few; [] if the run is to end meanwhile."""
        with self.timeline.span("sample"):
            rows = self.batches.next(self.step)
        wait = self.waits.until(lambda: bool(rows), lambda: self.batches.awaited(self.step))
        for _ in wait:
            # Until there are rows, drawn anew below. What arrives may be too old still
            # (--max_staleness): searchers then need newer weights than the last sync gave them.
            self.publish()
            self.receive()
            rows = self.batches.next(self.step)
        self.metrics.observe()  # of lockstep's rows; the buffer's were observed when they arrived
        return rows

    def save_checkpoint_if_due(self) -> None:
        self.checkpoints.note_written()  # the one before, if it has been
        period = self.config.checkpoint_every
        if period and self.step % period == 0:
            self.save_checkpoint()

    def save_checkpoint(self, is_last: bool = False) -> None:
        """Save all that a resumed run needs. A copy is written while the training goes on."""
        self.checkpoints.wait()
        self.receive()  # a resumed searcher goes on after what it has sent
        self.receive_until(
            lambda: self.batches.is_settled(self.step, self.evaluations.is_pending),
            "the searchers to finish what a checkpoint is to hold",
        )
        is_kept = is_last and self.learner.ranks.size == 1  # gathered tensors do not stay: a copy
        with self.timeline.span("checkpoint"):
            self.checkpoints.begin(self.step, *self.state.collect(), is_kept)
        self.board.beat("trainer")

    def finish(self) -> None:
        """Save the model and a checkpoint. At the last step the searchers stop searching."""
        self.board.last_step_done = self.step == self.config.steps
        try:  # first the model: it is not lost where a wait for a checkpoint fails
            self.checkpoints.save_model(self.learner.save_model)
        finally:
            self.checkpoints.wait()
            self.checkpoints.hurry()
            # Where checkpoints are exact, step 0 needs none: version 0 makes all batches anew.
            is_needed = self.step > 0 or not self.batches.is_exact
            if self.step != self.checkpoints.written_step and is_needed:
                self.save_checkpoint(is_last=True)
                self.checkpoints.wait()
        if self.board.last_step_done:
            # One that has not ended. The last version's own is made from the saved model
            # (runtime/responses/final_evaluation.py).
            self.receive()
            self.receive_until(lambda: not self.evaluations.is_pending, "the evaluation asked for")
        self.board.stop = True
        self.timeline.flush()
        self.report.close()


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
