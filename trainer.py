"""The Trainer: learns from batches drawn from the replay buffer, and publishes the weights.

What a batch does to the policy is learner.py. In lockstep (--constant_staleness, --synchronous)
each batch is made for its step, and the trainer is a subclass, in extras/lockstep.py.

Differences from the paper or its released code:
- at a sync all stop and wait; here searchers go on, and load new weights between two tokens;
- the age of a sample counts from the sync that sent it; here from the weights that began it;
- if the padding token is end-of-sequence, every sum leaves it out; here only with --pad_is_eos;
- an unfinished response is graded by its last number; here it is wrong (tasks/gsm8k.py);
- weights and moments are in bf16; here in fp32, but for presets that reproduce such a run;
- the learning rate is stepped before the update; here after it.
"""

import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.multiprocessing

from buffer import ReplayBuffer, by_reward
from config import Config
from learner import make_learner
from loss import Metrics
from models.device import lock_pages
from rollouts import Group, Response
from runtime.checkpoints.checkpoint import RunState
from runtime.checkpoints.writer import CheckpointWriter
from runtime.memory_trial import try_largest_batch
from runtime.record.metrics import StepMetrics, describe
from runtime.record.report import Report
from runtime.record.timeline import Timeline
from runtime.responses.evaluation import EvaluationRequests
from runtime.transport.status import StatusTable
from runtime.waiting import Wait, Waits
from weights import SharedWeights


class Trainer:
    """The trainer process.

    rollout_queue: of groups and evaluations. resume: directory of a checkpoint to go on from. rank:
    of extras/sharding.py, where the trainer has several processes.
    """

    is_exact = False  # True: a killed and resumed run gives the numbers of an unbroken one

    def __init__(
        self,
        config: Config,
        weights: SharedWeights,
        rollout_queue: torch.multiprocessing.Queue,
        status: StatusTable,
        run_dir: str,
        resume: str | None = None,
        rank: Any = None,
    ):
        self.config, self.weights, self.rollout_queue = config, weights, rollout_queue
        self.status = status
        status.beat("trainer")
        self.timeline = Timeline(run_dir, status, "trainer")
        self.report = Report(run_dir, config, status)
        self.learner = make_learner(config, self.report.say, rank)
        lock_pages(weights.memories, self.report.say)
        try_largest_batch(config, self.learner, self.report.say)
        self.buffer = self.make_buffer()
        self.evaluations = EvaluationRequests(config, weights, status)
        self.waits = Waits(config, status, self.report, self.timeline, not self.is_exact)
        self.metrics = StepMetrics(weights, self.buffer, rollout_queue, status)
        self.checkpoints = CheckpointWriter(run_dir, self.waits, self.report.say)
        parts = self.learner, weights, self.buffer, status, self.metrics, self.evaluations
        self.state = RunState(*parts)
        if resume:
            self.state.load(resume)
            self.checkpoints.written_step = self.step

    def make_buffer(self) -> ReplayBuffer:
        """Make D_global, which draws a query's replayed responses by their rewards."""
        config = self.config
        rule = by_reward(config.reward_inverse_temperature)
        growth_steps = config.buffer_growth_steps
        return ReplayBuffer(config.capacity_per_query, rule, config.seed, growth_steps)

    @property
    def step(self) -> int:
        """Batches trained on; the version of the weights."""
        return self.learner.step

    def train(self) -> None:
        """Learn off-policy; sync with the searchers every k steps, seldom wait (section 4.1)."""
        self.status.mark_ready("trainer")
        self.publish()  # version 0, or what a resumed run's searchers wait for
        while self.step < self.config.steps and not self.status.shutdown:
            if self.step % self.config.sync_period == 0:
                with self.timeline.span("receive"):
                    self.receive()
                if not self.publish():
                    self.metrics.skipped_publishes += 1
            rows = self.sample()
            if not rows:  # the run is to end
                break
            with self.timeline.span("step"):
                metrics = self.learner.update(rows)
            self.log(metrics, rows)
            self.save_checkpoint_if_due()
        self.finish()

    def receive(self) -> None:
        """Drain the rollout queue: groups go to the buffer, evaluations to the report."""
        groups: list[Group] = []
        with suppress(queue.Empty):
            # qsize() counts what the sender's thread still holds: hence the timeout.
            for _ in range(self.rollout_queue.qsize()):
                item = self.rollout_queue.get(timeout=1.0)
                if isinstance(item, Group):
                    groups.append(item)
                else:
                    self.evaluations.arrive(item)
                    self.report.evaluation(item)  # to the terminal and metrics.jsonl
        if groups:
            self.add(groups)

    def add(self, groups: list[Group]) -> None:
        """Put what has arrived into the buffer, as one sync."""
        self.buffer.add(groups, self.step)
        self.metrics.figures |= describe(groups)  # as generated: the buffer drops duplicates
        self.measure_mismatch_if_due(groups)

    def measure_mismatch_if_due(self, groups: list[Group]) -> None:
        """Compare vLLM's log-probabilities with the policy's under the same weights."""
        if group := self.metrics.find_to_compare(groups, self.step):
            sampled_by = self.weights.held()[group.version]
            rows, temperature = group.responses(), group.temperature
            logprobs = self.learner.logprobs_under(sampled_by, rows, temperature)
            self.metrics.compare(group, logprobs, self.step)

    def receive_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Receive until is_done(). Any work of the searchers is progress towards `what`."""
        wait = Wait(self.waits)
        while not is_done() and wait.goes_on(what, progress=self.status.total("busy")):
            self.receive()  # or the queues fill up meanwhile

    def publish(self) -> bool:
        """Copy the weights of this step into shared memory, where searchers look for them.

        Returns False if slow readers hold both copies but the newest. The next sync publishes newer
        weights; an evaluation stays due until then.
        """
        if self.weights.version == self.step:
            return True
        is_asked = self.evaluations.is_due(self.step)
        with self.timeline.span("publish"):
            return self.weights.publish(self.step, self.learner.weights(), is_asked)

    def sample(self) -> list[Response]:
        """Take the next B x K rows. Waits while there are too few; [] if the run is to end."""
        with self.timeline.span("sample"):
            rows = self.draw()
        wait = Wait(self.waits)
        while not rows and wait.goes_on(self.awaited()):
            # With --max_staleness searchers may need newer weights than the last sync's before they
            # can send anything young enough.
            self.publish()
            self.receive()
            rows = self.draw()
        return rows

    def draw(self) -> list[Response]:
        """Draw B x K rows from the buffer (section 4.2); [] while it holds too little."""
        config = self.config
        if self.buffer.received < config.initial_responses:
            return []
        limit = config.max_staleness
        oldest_version = 0 if limit is None else max(0, self.step - limit)
        return self.buffer.sample(
            config.queries_per_batch,
            config.responses_per_query,
            config.most_on_policy_prob,
            oldest_version,
        )

    def awaited(self) -> str:
        wanted = max(1, self.config.initial_responses)
        if self.buffer.received < wanted:
            return f"the first responses, {self.buffer.received} of {wanted}"
        return f"responses at most {self.config.max_staleness} steps old (--max_staleness)"

    def log(self, metrics: Metrics, rows: list[Response]) -> None:
        self.report.step(metrics | self.metrics.of(rows, self.step, self.waits.seconds))
        self.status.beat("trainer")

    def save_checkpoint_if_due(self) -> None:
        self.checkpoints.note_written()  # the one before, if it has been
        period = self.config.checkpoint_every
        if period and self.step % period == 0:
            self.save_checkpoint()

    def save_checkpoint(self, is_last: bool = False) -> None:
        """Save all that a resumed run needs. A copy is written while the training goes on."""
        self.checkpoints.wait()
        self.prepare_checkpoint()
        # Tensors that are gathered from several processes are temporary: they are copied.
        may_alias = is_last and self.config.trainer_processes == 1
        with self.timeline.span("checkpoint"):
            self.checkpoints.begin(self.step, *self.state.collect(), may_alias)
        self.status.beat("trainer")

    def prepare_checkpoint(self) -> None:
        """Drain the queue before a checkpoint: a resumed searcher does not repeat what it sent."""
        self.receive()

    def finish(self) -> None:
        """Save the model and a checkpoint. At the last step the searchers stop searching."""
        self.status.last_step_done = self.step == self.config.steps
        try:  # the model first: a wait for a checkpoint that fails must not lose it
            self.checkpoints.save_model(self.learner.save_model)
        finally:
            self.checkpoints.wait()
            self.checkpoints.start_thread(niceness=-20)  # the run ends, and waits for it
            # In lockstep step 0 needs no checkpoint: version 0 makes its batches again.
            is_needed = self.step > 0 or not self.is_exact
            if self.step != self.checkpoints.written_step and is_needed:
                self.save_checkpoint(is_last=True)
                self.checkpoints.wait()
        if self.status.last_step_done:
            # An evaluation may still run. The final one is of the saved model (launch/evaluate.py).
            self.receive()
            self.receive_until(lambda: not self.evaluations.is_pending, "the evaluation asked for")
        self.status.stop = True
        self.timeline.flush()
        self.report.close()


def run(
    config: Config,
    weights: SharedWeights,
    rollout_queue: torch.multiprocessing.Queue,
    status: StatusTable,
    *arguments: Any,
) -> None:
    """The trainer process. arguments: of Trainer."""
    with status.note_failure("trainer"):
        if config.lockstep:
            from extras.lockstep import LockstepTrainer

            trainer = LockstepTrainer(config, weights, rollout_queue, status, *arguments)
        else:
            trainer = Trainer(config, weights, rollout_queue, status, *arguments)
        trainer.train()
