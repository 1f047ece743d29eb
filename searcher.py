"""A Searcher: generates responses with its delayed copy of the policy, scores them, sends them off. It waits for the trainer only if its queue is
full (and, where staleness is to be constant, for the next version).

Queries enter vLLM's engine as others leave it: there is no batch to wait for. Between two engine steps the searcher looks for newer
weights and takes them in mid-stream. A response may so span several versions, which is fine: trajectory balance does not ask who sampled it.
"""

import hashlib
import logging
import queue
import sys
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from buffer import Group
from config import Config
from engine import ENGINE_ROWS, Engine
from evaluation import Evaluation, EvaluationRun
from policy import load_policy, load_tokenizer, response_logprobs
from processes import GIVE_UP, Board, device
from report import Lines, Timeline
from scoring import Scorer, Unscored
from tasks import Query, load_task
from weights import WRITING, SharedWeights

SAMPLES_PERIOD = 1.0  # seconds between two groups of this searcher in samples.jsonl
SAMPLES_PER_GROUP = 4
SCORES_WATCHED = 100  # more than half of the latest this many groups without scores end the run


@dataclass
class Running:
    """A query in the engine."""

    query: Query
    prompt: list[int]  # token ids
    version: int  # of the weights when it was added
    batch: int | None  # constant staleness: the trainer step that it is for
    index: int  # in the order in which this searcher takes its queries
    temperature: float  # at which its responses are sampled
    last_version: int = -1  # of the weights when it was finished
    responses: list = field(default_factory=list)  # vLLM's


class Searcher:
    def __init__(
        self, config: Config, rank: int, weights: SharedWeights, groups, board: Board, run_dir: str
    ):
        self.config, self.rank, self.weights, self.groups, self.board = (
            config,
            rank,
            weights,
            groups,
            board,
        )
        self.name = f"searcher {rank}"
        self.timeline = Timeline(run_dir, self.name)
        self.samples = Lines(Path(run_dir) / "samples.jsonl")
        self.sampled_at = -SAMPLES_PERIOD  # when a group last went to samples.jsonl
        self.task = load_task(config.task, **config.options)
        self.queries = self.task.queries("train")
        self.share = np.random.default_rng(config.seed).permutation(len(self.queries))[
            rank :: config.searchers
        ]  # nobody else works on these
        if len(self.queries) < config.searchers:  # unless there are too few
            self.share = np.arange(len(self.queries))
        self.test_queries = self.task.queries("test")
        self.tokenizer = load_tokenizer(config)
        self.started = int(
            board.get(self.name, "cursor")
        )  # queries drawn so far, also by those who were this searcher before
        # A searcher that takes another's place, or goes on from a checkpoint, shall not draw the numbers that were drawn before.
        self.engine = Engine(
            config,
            seed=int(
                np.random.SeedSequence((config.seed, rank, self.started)).generate_state(1)[0]
            ),
        )
        # On this device, so that the trainer holds no second model; behind vLLM, which takes its share of what is free.
        self.reference = load_policy(config, device())
        self.scorer = Scorer(config, self.task)
        self.version = 0  # of the weights in the engine: config.model is the trainer's version 0
        self.evaluated = int(
            board.get(self.name, "evaluated")
        )  # the newest version that an evaluation was started for
        self.evaluation: EvaluationRun | None = None
        self.running: dict[str, Running] = {}
        self.epoch, self.order = -1, np.array([])
        self.reference_version = 0
        self.owed: deque[int] = (
            deque()
        )  # constant staleness: for each query that this version has still to start, the trainer step it is for
        self.outbox: deque[Group | Evaluation] = deque()
        self.unscored = deque(maxlen=SCORES_WATCHED)  # True where a group got no scores

    def search(self) -> None:
        self.board.loaded(self.name)
        while (
            self.config.resume and self.weights.version < 0 and not self.board.stop
        ):  # the engine holds config.model, which is of no use any more
            self.board.beat(self.name)
            time.sleep(0.005)
        if not self.config.resume or self.weights.version == 0:
            self.begin_version()
            self.start_evaluation()  # of the base model, before newer weights are taken
        while not self.board.stop:
            self.board.beat(self.name)
            self.send()
            self.take_new_weights()
            if not self.outbox:  # or the queue is full: then nothing is generated
                self.start_queries()
            self.start_evaluation()
            if self.outbox or not self.engine.running:
                with self.timeline.span("wait"):
                    time.sleep(0.005)
            else:
                with self.work("eval" if self.evaluation else "search"):
                    outputs = self.engine.step()
                with self.work("score"):
                    self.finish_queries([o for o in outputs if o.request_id in self.running])
                    if self.evaluation:
                        self.evaluation.finish(outputs)
            self.take_scores()
            if self.evaluation and self.evaluation.done:
                self.outbox.append(self.evaluation.result())
                self.board.set(self.name, "evaluated", self.evaluation.version)
                self.evaluation = None
                self.weights.unpin(self.rank)
        self.timeline.flush()

    def take_new_weights(self) -> None:
        """If there are any, even with responses in mid-stream. But an evaluation is of one version, and with constant staleness a response."""
        if (
            self.weights.version <= self.version
            or self.evaluation
            or self.config.lockstep
            and (self.owed or self.running or self.scorer.waiting)
        ):
            return
        self.take_new_reference()  # before the version that it may have come with
        evaluate = self.rank == 0 and self.evaluated < self.weights.evaluation_version
        with self.work("load"), self.weights.read(self.rank, keep=evaluate) as (version, tensors):
            self.engine.load(tensors.items())
        self.version = version
        self.board.set(self.name, "version", version)
        self.begin_version()

    @torch.no_grad()
    def take_new_reference(self) -> None:
        if self.weights.reference_version > self.reference_version:
            with self.work("load"), self.weights.read_reference(self.rank) as (version, tensors):
                if version != WRITING:
                    for name, parameter in self.reference.named_parameters():
                        parameter.copy_(tensors[name])
                    self.reference_version = version

    def begin_version(self) -> None:
        config = self.config
        if (
            config.lockstep
        ):  # version 0 works for the first steps too, that no earlier version can work for
            batches = (
                range(config.constant_staleness + 1)
                if self.version == 0
                else [self.version + config.constant_staleness]
            )
            share = len(range(self.rank, config.queries_per_batch, config.searchers))
            self.owed.extend(
                batch for batch in batches for _ in range(share) if batch < config.steps
            )

    def start_evaluation(self) -> None:
        """Where this version is to be evaluated. Behind queries that have just joined: until it is over no weights come in, and its slot is kept. So
        those are of this one version whole, and the trainer can compare (mismatch)."""
        due = (
            self.evaluated
            < (0 if self.version == 0 else self.weights.evaluation_version)
            <= self.version
        )
        if self.rank == 0 and due:
            self.evaluated = self.version
            self.evaluation = EvaluationRun(
                self.engine,
                self.scorer,
                self.test_queries,
                self.tokenizer,
                self.config,
                self.version,
            )

    def start_queries(self) -> None:
        """A query joins as soon as fewer than ENGINE_ROWS responses are unfinished, unless scoring falls behind; with constant staleness only those
        queries join that this version owes."""
        skipped = 0  # in a row
        room = (
            ENGINE_ROWS // self.config.samples_per_query + 1
        )  # groups that may wait for their scores
        while (
            self.engine.rows < ENGINE_ROWS
            and len(self.scorer.waiting) < room
            and (self.owed or not self.config.lockstep)
        ):
            query, visit = self.next_query()
            prompt = self.tokenizer(query.prompt).input_ids
            if len(prompt) > self.config.max_prompt_tokens:
                self.board.add(self.name, "long_prompts", visit == 0)
                skipped += 1
                if skipped == len(self.share):
                    raise ValueError(
                        f"no prompt of the task is within --max_prompt_tokens {self.config.max_prompt_tokens}"
                    )
                continue
            skipped = 0
            request = f"{query.id}.{visit}"
            own = int.from_bytes(
                hashlib.blake2b(
                    f"{self.config.seed}.{self.name}.{request}".encode(), digest_size=4
                ).digest()
            )
            sampling = {
                "n": self.config.samples_per_query,
                "temperature": self.config.temperature,
                "max_tokens": self.config.max_response_tokens,
            }
            sampling |= self.task.sampling(np.random.default_rng(own))
            if self.config.lockstep:  # vLLM draws for each seeded request by itself, which costs time: only where a run is to be repeatable
                sampling["seed"] = own
            self.engine.add(request, prompt, self.version, **sampling)
            batch = self.owed.popleft() if self.config.lockstep else None
            self.running[request] = Running(
                query, prompt, self.version, batch, self.started - 1, sampling["temperature"]
            )
        self.mark_cursor()

    def next_query(self) -> tuple[Query, int]:
        """The next query of this searcher's share, and how often it was visited before. Each epoch has an order of its own."""
        epoch, index = divmod(self.started, len(self.share))
        if epoch != self.epoch:
            self.epoch, self.order = (
                epoch,
                np.random.default_rng((self.config.seed, self.rank, epoch)).permutation(self.share),
            )
        self.started += 1
        return self.queries[self.order[index]], epoch

    def mark_cursor(self) -> None:
        """So that whoever takes this searcher's place begins with what is in the engine, or being scored, now."""
        scoring = [
            group.owner for group, _ in self.scorer.waiting if isinstance(group.owner, Running)
        ]
        self.board.set(
            self.name,
            "cursor",
            min((run.index for run in [*self.running.values(), *scoring]), default=self.started),
        )

    def finish_queries(self, outputs: list) -> None:
        """Has the responses that the engine finished in one step scored."""
        groups = []
        for output in outputs:
            run = self.running.pop(output.request_id)
            run.last_version, run.responses = self.version, output.outputs
            texts = self.tokenizer.batch_decode(
                [response.token_ids for response in run.responses], skip_special_tokens=True
            )
            groups.append(
                Unscored(
                    run,
                    run.query,
                    texts,
                    [response.finish_reason == "stop" for response in run.responses],
                )
            )
        if groups:
            self.scorer.add(groups)

    def take_scores(self) -> None:
        """Adds reference log-probabilities to what has been scored and puts the groups in the outbox."""
        scored = []
        for group, rewards in self.scorer.take():
            if isinstance(group.owner, EvaluationRun):
                group.owner.record(group, rewards)
            elif isinstance(rewards, Exception):
                self.drop(group, rewards)
            else:
                self.unscored.append(False)
                scored.append((group, group.owner, rewards))
        self.mark_cursor()
        if not scored:
            return
        prompts = [np.array(run.prompt, np.int32) for _, run, _ in scored for _ in run.responses]
        responses = [np.array(r.token_ids, np.int32) for _, run, _ in scored for r in run.responses]
        with self.work("reference"), torch.no_grad():
            padded = (
                response_logprobs(self.reference, prompts, responses, self.config.temperature)
                .cpu()
                .numpy()
            )  # (rows, T)
        references = iter([row[: len(response)] for row, response in zip(padded, responses)])
        for group, run, rewards in scored:
            self.write_samples(group, run.version, rewards)
            self.board.add(self.name, "tokens", sum(len(r.token_ids) for r in run.responses))
            self.outbox.append(
                Group(
                    query_id=run.query.id,
                    version=run.version,
                    last_version=run.last_version,
                    reference_version=self.reference_version,
                    batch=run.batch,
                    prompt=np.array(run.prompt, np.int32),
                    lengths=np.array([len(r.token_ids) for r in run.responses], np.int32),
                    tokens=np.concatenate([r.token_ids for r in run.responses]).astype(np.int32),
                    ref_logprobs=np.concatenate([next(references) for _ in run.responses]),
                    behavior_logprobs=np.array(
                        [
                            lp[t].logprob
                            for r in run.responses
                            for t, lp in zip(r.token_ids, r.logprobs)
                        ],
                        np.float32,
                    ),
                    rewards=rewards,
                    finished=np.array(group.finished),
                    temperature=run.temperature,
                )
            )

    def drop(self, group: Unscored, error: Exception) -> None:
        """score() raised, took too long, or gave something other than S finite numbers."""
        self.board.add(self.name, "unscored_groups", 1)
        self.unscored.append(True)
        if self.config.lockstep:  # the batch needs another query in its place
            self.owed.appendleft(group.owner.batch)
        logging.error("query %d is dropped, it got no scores", group.query.id, exc_info=error)
        if sum(self.unscored) > SCORES_WATCHED / 2:
            logging.error(
                "%d of the latest %d groups got no scores: the run ends",
                sum(self.unscored),
                len(self.unscored),
            )
            sys.exit(GIVE_UP)

    def write_samples(self, group: Unscored, version: int, rewards: np.ndarray) -> None:
        if time.monotonic() - self.sampled_at < SAMPLES_PERIOD:
            return
        self.sampled_at = time.monotonic()
        lines = [
            {
                "version": version,
                "query_id": group.query.id,
                "prompt": group.query.prompt,
                "answer": str(group.query.answer),
                "response": text,
                "extracted": self.task.extract(text),
                "reward": reward,
                "finished": finished,
            }
            for text, finished, reward in list(zip(group.texts, group.finished, rewards.tolist()))[
                :SAMPLES_PER_GROUP
            ]
        ]
        self.samples.write(*lines)

    def send(self) -> None:
        while self.outbox:
            try:
                self.groups.put_nowait(self.outbox[0])
            except queue.Full:
                return
            self.outbox.popleft()

    @contextmanager
    def work(self, name: str):
        start = time.monotonic()
        with self.timeline.span(name):
            yield
        self.board.add(self.name, "busy", time.monotonic() - start)


def run(
    config: Config, rank: int, weights: SharedWeights, groups, board: Board, run_dir: str
) -> None:
    """The searcher process."""
    Searcher(config, rank, weights, groups, board, run_dir).search()
    groups.cancel_join_thread()  # the run is over: nobody reads what is still in the queue
