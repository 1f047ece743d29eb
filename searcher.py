"""A Searcher: generates responses with its delayed copy of the policy, scores them, sends them off.

Queries enter vLLM's engine as others leave it: there is no batch to wait for. Between two engine
steps the searcher looks for newer weights and loads them while responses are being generated. A
response may so span several versions, which is fine: trajectory balance does not ask who sampled
it. A free-running searcher waits for the trainer only if its queue is full.
"""

import hashlib
import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch.multiprocessing

from buffer import Group
from config import Config
from models.engine import ENGINE_ROWS, Engine, completion_arrays
from models.policy import encode_prompt, load_tokenizer
from runtime.modes.lockstep import LockstepWorkload
from runtime.modes.reference import load_reference
from runtime.modes.workload import ThrottledWorkload, Work, Workload
from runtime.record.timeline import WorkTimeline
from runtime.responses.evaluation import EvaluationRun, EvaluationService
from runtime.responses.samples import SampleLog
from runtime.responses.scoring import FailureLimit, Responses, Scorer, decode
from runtime.transport.board import Board
from runtime.transport.messages import Evaluation, Notice
from tasks import Query, load_task
from weights import SharedWeights

POLL_SECONDS = 0.005  # while the queue is full, or there is nothing to generate


@dataclass
class Rollout:
    """The S responses to a query, while they are generated and scored."""

    work: Work
    prompt: list[int]  # token ids
    version: int  # of the weights in the engine when it was started
    temperature: float  # at which its responses are sampled
    last_version: int = -1  # of the weights when it was finished
    responses: list = field(default_factory=list)  # S of vLLM's completions, when it is finished
    # Of each its token ids, its behaviour log-probabilities, and whether its end was appended.
    arrays: list[tuple[np.ndarray, np.ndarray, bool]] = field(default_factory=list)


class Searcher:
    """One searcher process.

    share: which of the config.searchers shares of the queries it works on; pin: its pin in
    `weights`; row: its row on the board; rollout_queue: to the trainer.
    """

    def __init__(
        self,
        config: Config,
        share: int,
        pin: int,
        row: str,
        weights: SharedWeights,
        rollout_queue: torch.multiprocessing.Queue,
        board: Board,
        run_dir: str,
    ):
        self.config, self.pin, self.row = config, pin, row
        self.weights, self.rollout_queue, self.board = weights, rollout_queue, board
        self.timeline = WorkTimeline(run_dir, board, row)
        self.task = load_task(config.task, **config.options)
        self.tokenizer = load_tokenizer(config)
        # Appended to responses that were cut off, where the task wants that.
        self.final_token = self.tokenizer.eos_token_id if self.task.append_eos else None
        cursor = int(board.get(row, "cursor"))
        self.workload = make_workload(config, self.task.queries("train"), share, cursor, weights)
        # Seeded by cursor too, so that a restart does not repeat samples.
        seeds = np.random.SeedSequence((config.seed, share, cursor))
        self.engine = Engine(config, seed=int(seeds.generate_state(1)[0]))
        self.version = 0  # of the weights in the engine: config.model is the trainer's version 0
        # Kept here to spare the trainer's memory. Loaded after vLLM, which reserves a share of what
        # is free.
        self.reference = load_reference(config, weights, pin)
        self.scorer = Scorer(config, self.task)
        self.failures = FailureLimit(board, row)
        # The part of D_local that does not fit into the queue yet.
        self.outbox: deque[Group | Evaluation | Notice] = deque()
        self.samples = SampleLog(run_dir, self.task, self.tokenizer, self.outbox.append)
        begin = partial(
            EvaluationRun,
            self.engine,
            self.scorer,
            self.task.queries("test"),
            self.tokenizer,
            config,
        )
        self.evaluation = EvaluationService(begin, weights, pin, board, row, share == 0)
        self.rollouts: dict[str, Rollout] = {}  # in the engine, by request

    def search(self) -> None:
        """Explore with a delayed copy of the policy until the run ends (section 4.1)."""
        self.begin()
        while not self.board.stop:
            self.board.beat(self.row)
            self.take_new_weights()
            self.start_queries()
            self.evaluation.start_if_due(self.version)
            finished = self.step_engine()
            scored = self.score(finished)
            groups = self.add_reference_logprobs(scored)
            self.send(groups)
        self.timeline.flush()

    def begin(self) -> None:
        """Begin with config.model, version 0, and evaluate it before newer weights are loaded.

        In a resumed run config.model is of no use: wait for the trainer's first publish.
        """
        self.board.loaded(self.row)
        while self.config.resume and self.weights.version < 0 and not self.board.stop:
            self.board.beat(self.row)
            time.sleep(POLL_SECONDS)
        if not self.config.resume or self.weights.version == 0:
            self.workload.begin_version(0)
            self.evaluation.start_if_due(0)

    def take_new_weights(self) -> None:
        """Load newer weights, even while responses are being generated.

        Deferred during an evaluation and, in lockstep, while work is in flight.
        """
        is_newer = self.weights.version > self.version
        if not is_newer or self.evaluation.is_running or not self.workload.may_load():
            return
        with self.timeline.work("load"):
            self.reference.update()  # before the version that it may have come with
            # For an evaluation the version stays in its slot.
            with self.weights.read(self.pin, keep=self.evaluation.is_due) as (version, tensors):
                self.engine.load(tensors.items())
        self.version = version
        self.board.set(self.row, "version", version)
        self.workload.begin_version(version)

    def start_queries(self) -> None:
        """Draw queries and have S responses to each generated, while there is room."""
        num_skipped = 0  # in a row
        while self.has_room():
            work = self.workload.draw()
            if work is None:
                break
            prompt = encode_prompt(self.tokenizer, work.query.prompt)
            if not 0 < len(prompt) <= self.config.max_prompt_tokens:
                num_skipped += 1
                self.skip(work, num_skipped)
                continue
            num_skipped = 0
            sampling = self.sampling(work)
            self.engine.add(work.request, prompt, self.version, **sampling)
            rollout = Rollout(work, prompt, self.version, sampling["temperature"])
            self.rollouts[work.request] = rollout
        self.board.set(self.row, "cursor", self.workload.cursor)

    def has_room(self) -> bool:
        """Return whether a query may start: the run needs it, engine and scoring have room."""
        if self.board.last_step_done or self.outbox:
            return False
        groups_in_engine = ENGINE_ROWS // self.config.samples_per_query + 1
        return self.engine.rows < ENGINE_ROWS and len(self.scorer.waiting) < groups_in_engine

    def skip(self, work: Work, num_skipped: int) -> None:
        """Drop a query whose prompt is too long, or has no tokens. Raises ValueError for all."""
        self.workload.drop(work)
        self.board.add(self.row, "long_prompts", work.visit == 0)
        if num_skipped == self.workload.num_queries:
            limit = self.config.max_prompt_tokens
            raise ValueError(f"no prompt of the task has 1 to --max_prompt_tokens {limit} tokens")

    def sampling(self, work: Work) -> dict:
        """How vLLM samples the responses to a query, as in vllm.SamplingParams."""
        key = f"{self.config.seed}.searcher {self.workload.share}.{work.request}"
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
        is_over = self.board.last_step_done and not self.evaluation.is_running
        if self.outbox or is_over or not self.engine.is_running:  # a full queue, or no work
            with self.timeline.span("wait"):
                time.sleep(POLL_SECONDS)
            return []
        with self.timeline.work("eval" if self.evaluation.is_running else "search"):
            outputs = self.engine.step()
        if self.evaluation.is_running:
            with self.timeline.work("score"):
                self.evaluation.finish(outputs)
        finished = []
        for output in outputs:
            if rollout := self.rollouts.pop(output.request_id, None):
                rollout.last_version, rollout.responses = self.version, output.outputs
                rollout.arrays = [completion_arrays(r, self.final_token) for r in output.outputs]
                finished.append(rollout)
        return finished

    def score(self, rollouts: list[Rollout]) -> list[tuple[Responses, np.ndarray]]:
        """Hand finished responses to the task's score(). Returns what has been scored by now.

        Each group comes with its (S,) rewards. Where score() runs in worker processes, it may be a
        group that was handed over earlier.
        """
        if rollouts:
            with self.timeline.work("score"):
                self.scorer.add([self.to_score(rollout) for rollout in rollouts])
        scored = []
        for group, rewards in self.scorer.take():
            if isinstance(group.sender, EvaluationRun):
                group.sender.record(group, rewards)
            elif isinstance(rewards, Exception):
                self.workload.drop(group.sender.work)
                self.failures.count_failed(group, rewards)
            else:
                self.workload.finish(group.sender.work)
                self.failures.count_scored()
                scored.append((group, rewards))
        self.board.set(self.row, "cursor", self.workload.cursor)
        return scored

    def to_score(self, rollout: Rollout) -> Responses:
        """Turn the tokens of a rollout into the texts that score() reads."""
        texts, finished = decode(self.tokenizer, rollout.responses)
        return Responses(rollout, rollout.work.query, texts, finished)

    def add_reference_logprobs(self, scored: list[tuple[Responses, np.ndarray]]) -> list[Group]:
        """Compute log pi_ref of all tokens in one pass, and make the groups for the trainer."""
        if not scored:
            return []
        prompts, responses = [], []
        for group, _ in scored:
            for tokens, _, _ in group.sender.arrays:
                prompts.append(np.array(group.sender.prompt, np.int32))
                responses.append(tokens)
        with self.timeline.work("reference"):
            logprobs = iter(self.reference.logprobs(prompts, responses))
        groups = []
        for group, rewards in scored:
            ref_logprobs = np.concatenate([next(logprobs) for _ in group.texts])
            self.board.add(self.row, "tokens", len(ref_logprobs))
            groups.append(make_group(group, rewards, ref_logprobs, self.reference.version))
            self.samples.write(group, groups[-1])
        return groups

    def send(self, groups: list[Group]) -> None:
        """Send groups and evaluations to the trainer, as far as the queue has room."""
        self.outbox.extend(groups)
        self.outbox.extend(self.evaluation.collect())
        while self.outbox:
            try:
                self.rollout_queue.put_nowait(self.outbox[0])
            except queue.Full:
                return
            self.outbox.popleft()


def make_workload(
    config: Config, queries: Sequence[Query], share: int, cursor: int, weights: SharedWeights
) -> Workload:
    """What a searcher generates: free-running, throttled, or in lockstep with the trainer."""
    if config.lockstep:
        return LockstepWorkload(config, queries, share, config.searchers, cursor)
    if config.search_ahead is not None:
        return ThrottledWorkload(config, queries, share, cursor, weights)
    return Workload(queries, share, config.searchers, config.seed, cursor)


def make_group(
    group: Responses, rewards: np.ndarray, ref_logprobs: np.ndarray, reference_version: int
) -> Group:
    """Put a rollout into the arrays that go through the queue. ref_logprobs: of all its tokens."""
    rollout = group.sender
    tokens, behavior_logprobs, appended = zip(*rollout.arrays)
    return Group(
        query_id=rollout.work.query.id,
        version=rollout.version,
        last_version=rollout.last_version,
        reference_version=reference_version,
        batch=rollout.work.batch,
        prompt=np.array(rollout.prompt, np.int32),
        lengths=np.array([len(ids) for ids in tokens], np.int32),
        tokens=np.concatenate(tokens),
        ref_logprobs=ref_logprobs,
        behavior_logprobs=np.concatenate(behavior_logprobs),
        rewards=rewards,
        finished=np.array(group.finished),
        temperature=rollout.temperature,
        appended=np.array(appended),
    )


def run(
    config: Config,
    share: int,
    pin: int,
    row: str,
    weights: SharedWeights,
    rollout_queue: torch.multiprocessing.Queue,
    board: Board,
    run_dir: str,
) -> None:
    """The searcher process."""
    searcher = Searcher(config, share, pin, row, weights, rollout_queue, board, run_dir)
    searcher.search()
    searcher.scorer.close()
    rollout_queue.cancel_join_thread()  # the run is over: nobody reads what is still in the queue
