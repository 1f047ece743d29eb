"""A Searcher: generates responses with its delayed copy of the policy, scores them, sends them off.

Queries enter vLLM's engine as others leave it: there is no batch to wait for. Between two engine
steps the searcher looks for newer weights and loads them while responses are being generated. A
response may so span several versions, which is fine: trajectory balance does not ask who sampled
it. A free-running searcher waits for the trainer only if its queue is full, if it shares the
trainer's GPU, or for the first weights of a resumed run.
"""

import hashlib
import logging
import queue
import time
from collections import deque
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from buffer import Group
from config import ENGINE_ROWS, Config
from models.device import device, lock_pages
from models.engine import Engine
from models.tokens import encode_prompt, load_tokenizer
from rollouts import Rollout, make_generation, make_workload
from runtime.record.timeline import Timeline
from runtime.reference import Reference
from runtime.responses.evaluation import EvaluationService
from runtime.responses.samples import SampleLog
from runtime.responses.scoring import FailureLimit, make_scorer
from runtime.transport.messages import Evaluation, Notice
from runtime.transport.status import StatusTable
from tasks import load_task
from weights import SharedWeights

POLL_SECONDS = 0.005  # while the queue is full, or there is nothing to generate


class Searcher:
    """One searcher process.

    share: which of the config.searchers shares of the queries it works on; pin: its pin in
    `weights`; name: of its row in the status table; outgoing: its queue, from which the supervisor
    forwards to the trainer's.
    """

    def __init__(
        self,
        config: Config,
        share: int,
        pin: int,
        name: str,
        weights: SharedWeights,
        outgoing: torch.multiprocessing.Queue,
        status: StatusTable,
        run_dir: str,
    ):
        self.config, self.pin, self.name = config, pin, name
        self.weights, self.outgoing, self.status = weights, outgoing, status
        self.timeline = Timeline(run_dir, status, name)
        self.task = load_task(config.task, **config.options)
        self.tokenizer = load_tokenizer(config)
        cursor = int(status.get(name, "cursor"))
        queries = self.task.queries("train")
        self.workload = make_workload(config, queries, share, cursor, weights)
        # Seeded by cursor too, so that a restart does not repeat samples.
        seeds = np.random.SeedSequence((config.seed, share, cursor))
        self.engine = Engine(config, seed=int(seeds.generate_state(1)[0]))
        # The reference policy is here to spare the trainer's memory. Loaded after vLLM, which
        # reserves a share of what is free.
        self.reference = Reference(config, weights, pin)
        self.scorer = make_scorer(config, self.task)
        lock_pages(weights.memories, logging.warning)
        if device().type == "cuda":
            torch.set_num_threads(1)  # all is loaded: more would only spin
        self.failures = FailureLimit(status, name)
        # What does not fit into the queue yet: the groups among it are part of D_local.
        self.outbox: deque[Group | Evaluation | Notice] = deque()
        self.samples = SampleLog(run_dir, self.task, self.tokenizer, self.outbox.append)
        evaluated = int(status.get(name, "evaluated"))
        self.evaluation = EvaluationService(
            config, self.task, self.tokenizer, weights, pin, evaluated, is_enabled=share == 0
        )
        self.generation = make_generation(config, self.tokenizer, self.engine, self.scorer)

    def search(self) -> None:
        """Explore with a delayed copy of the policy until the run ends (section 4.1)."""
        self.begin()
        while not self.status.stop:
            self.status.beat(self.name)
            self.take_new_weights()
            self.start_queries()
            self.start_evaluation()
            generated = self.step_engine()
            scored = self.score(generated)
            groups = self.add_reference_logprobs(scored)
            self.send(groups)
        self.timeline.flush()

    def begin(self) -> None:
        """Begin with config.model, version 0, and evaluate it before newer weights are loaded.

        In a resumed run config.model is of no use: wait for the trainer's first publish.
        """
        self.status.mark_ready(self.name)
        while self.config.resume and self.weights.version < 0 and not self.status.stop:
            self.status.beat(self.name)
            time.sleep(POLL_SECONDS)
        # A resumed run may have ended before its first step: then it begins like a new one.
        if not self.config.resume or self.weights.version == 0:
            self.workload.begin_version(0)
            self.start_evaluation()

    def take_new_weights(self) -> None:
        """Load newer weights, even while responses are being generated.

        Deferred during an evaluation and, in lockstep, while work is in flight.
        """
        is_newer = self.weights.version > self.engine.version
        if not is_newer or self.evaluation.run or not self.workload.may_load():
            return
        with self.timeline.span("load"):
            # The trainer publishes a reset before its version: they are taken in that order.
            self.reference.take_reset()
            # keep: the slot stays pinned until the evaluation of this version ends.
            with self.weights.read(self.pin, keep=self.evaluation.is_due) as (version, tensors):
                self.engine.load(version, tensors.items())
        self.status.set(self.name, "version", version)
        self.workload.begin_version(version)

    def start_queries(self) -> None:
        """Draw queries and have S responses to each generated, while there is room."""
        num_skipped = 0  # in a row
        while self.has_room():
            rollout = self.workload.draw()
            if rollout is None:
                break
            rollout.prompt = encode_prompt(self.tokenizer, rollout.query.prompt)
            if not 0 < len(rollout.prompt) <= self.config.max_prompt_tokens:
                num_skipped += 1
                self.skip(rollout, num_skipped)
                continue
            num_skipped = 0
            rollout.version, rollout.sampling = self.engine.version, self.sampling(rollout)
            self.generation.start(rollout)
        self.status.set(self.name, "cursor", self.workload.cursor)

    def start_evaluation(self) -> None:
        """Start a requested evaluation; no weights are loaded until it ends."""
        for rollout in self.evaluation.start_if_due(self.engine.version):
            self.generation.start(rollout)

    def has_room(self) -> bool:
        """Return whether a query may start: the run needs it, engine and scoring have room."""
        if self.status.last_step_done or self.outbox:
            return False
        groups_in_engine = ENGINE_ROWS // self.config.samples_per_query + 1
        return self.generation.rows < ENGINE_ROWS and len(self.scorer.waiting) < groups_in_engine

    def skip(self, rollout: Rollout, num_skipped: int) -> None:
        """Drop a query whose prompt is empty or too long. Raises ValueError if all of them are."""
        self.workload.drop(rollout)
        self.status.add(self.name, "long_prompts", rollout.visit == 0)  # once a query
        if num_skipped == len(self.workload.own):
            limit = self.config.max_prompt_tokens
            raise ValueError(f"no prompt of the task has 1 to --max_prompt_tokens {limit} tokens")

    def sampling(self, rollout: Rollout) -> dict:
        """Return how vLLM samples the responses to a query, as in vllm.SamplingParams."""
        key = f"{self.config.seed}.searcher {self.workload.share}.{rollout.request}"
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest())
        sampling = {
            "n": self.config.samples_per_query,
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_response_tokens,
        }
        sampling |= self.task.sampling(np.random.default_rng(seed))
        return sampling | ({"seed": seed} if self.workload.has_seeds else {})

    def step_engine(self) -> list[Rollout]:
        """Generate one token of every response. Returns the rollouts that finished with it."""
        is_over = self.status.last_step_done and not self.evaluation.run
        # At a shutdown new responses would be lost, and saving needs the cores. In lockstep the
        # trainer waits for the rest of its batch.
        is_over |= self.status.shutdown and not self.config.lockstep
        if self.outbox or is_over or self.generation.is_idle:  # a full queue, or no work
            with self.timeline.span("wait"):
                time.sleep(POLL_SECONDS)
            return []
        with self.timeline.span("eval" if self.evaluation.run else "search"):
            return self.generation.step()

    def score(self, generated: list[Rollout]) -> list[Rollout]:
        """Hand generated rollouts to the task's score(). Returns those that have rewards by now.

        Where score() runs in worker processes, it may be some that were handed over earlier.
        """
        for is_test in (True, False):  # a call for each: ids are unique within a split alone
            rollouts = [rollout for rollout in generated if rollout.is_for_evaluation == is_test]
            if rollouts:
                with self.timeline.span("score"):
                    self.scorer.add(rollouts)
        scored = []
        for rollout in self.scorer.take():
            if rollout.is_for_evaluation:
                self.evaluation.run.record(rollout)
                continue
            self.failures.count(rollout)
            if rollout.error:
                self.workload.drop(rollout)
            else:
                self.workload.complete(rollout)
                scored.append(rollout)
        self.status.set(self.name, "cursor", self.workload.cursor)
        return scored

    def add_reference_logprobs(self, scored: list[Rollout]) -> list[Group]:
        """Compute log pi_ref of all tokens, and make the groups for the trainer."""
        if not scored:
            return []
        prompts = [np.array(rollout.prompt, np.int32) for rollout in scored for _ in rollout.texts]
        responses = [arrays.tokens for rollout in scored for arrays in rollout.arrays]
        with self.timeline.span("reference"):
            logprobs = iter(self.reference.logprobs(prompts, responses))
        groups = []
        for rollout in scored:
            # A task may change them, as red-teaming does.
            ref_logprobs = [self.task.reference_logprobs(next(logprobs)) for _ in rollout.texts]
            group = rollout.to_group(np.concatenate(ref_logprobs), self.reference.version)
            groups.append(group)
            self.status.add(self.name, "tokens", int(group.sampled.sum()))
            self.samples.write(rollout, group)
        return groups

    def send(self, groups: list[Group]) -> None:
        """Send groups and evaluations to the trainer, as far as the queue has room.

        D_local is what waits here and in the queue until Trainer.receive().
        """
        self.outbox.extend(groups)
        self.outbox.extend(self.evaluation.collect())
        while self.outbox:
            try:
                self.outgoing.put_nowait(self.outbox[0])
            except queue.Full:
                return
            self.outbox.popleft()


def run(*arguments: Any) -> None:
    """The searcher process. arguments: of Searcher."""
    searcher = Searcher(*arguments)
    searcher.search()
    searcher.scorer.close()
    # The run is over: nobody reads what is still in the queue.
    searcher.outgoing.cancel_join_thread()
