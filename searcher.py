"""A Searcher: generates responses with its delayed copy of the policy, scores them, sends them off. It never waits for the trainer.

Queries enter vLLM's engine as others leave it: there is no batch to wait for. Between two engine steps the searcher looks for newer
weights and takes them in mid-stream. A response may so span two versions, which is fine: trajectory balance does not ask who sampled it.
"""

import hashlib
import json
import queue
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from buffer import Group
from config import Config
from engine import ENGINE_ROWS, Engine
from policy import load_policy, load_tokenizer, response_logprobs
from processes import GIVE_UP, Board, device
from report import Timeline
from tasks import Query, Task, load_task
from weights import WRITING, SharedWeights

SAMPLES_PERIOD = 1.0  # seconds between two groups of this searcher in samples.jsonl
SAMPLES_PER_GROUP = 4
SCORES_WATCHED = 100  # more than half of the latest this many groups without scores end the run


@dataclass
class Evaluation:
    """The mean score of the greedy responses to all test queries."""

    version: int
    score: float
    queries: int
    long_prompts: int  # test queries left out, their prompt exceeds the limit

    def __str__(self) -> str:
        return f"{self.score:.2f} ({self.score:.4f} on {self.queries} test queries, greedy)"


@dataclass
class Running:
    """A query in the engine."""

    query: Query
    prompt: list[int]  # token ids
    version: int  # of the weights when it was added
    batch: int | None  # constant staleness: the trainer step that it is for
    index: int  # in the order in which this searcher takes its queries


class Searcher:
    def __init__(self, config: Config, rank: int, weights: SharedWeights, groups, board: Board, run_dir: str):
        self.config, self.rank, self.weights, self.groups, self.board = config, rank, weights, groups, board
        self.name = f"searcher {rank}"
        self.timeline = Timeline(run_dir, self.name)
        self.samples = open(f"{run_dir}/samples.jsonl", "ab", buffering=0)  # one write a group: searchers share the file
        self.sampled_at = -SAMPLES_PERIOD  # when a group last went to samples.jsonl
        self.task = load_task(config.task, **config.task_options())
        self.queries = self.task.queries("train")
        self.share = np.random.default_rng(config.seed).permutation(len(self.queries))[rank :: config.searchers]  # nobody else works on these
        self.test_queries = self.task.queries("test")
        self.tokenizer = load_tokenizer(config)
        self.engine = Engine(config)
        # On this device, so that the trainer holds no second model.
        self.reference = load_policy(config, device())
        self.version = 0  # of the weights in the engine: config.model is the trainer's version 0
        self.evaluated = -1  # the newest version that an evaluation was started for
        self.evaluation: EvaluationRun | None = None
        self.running: dict[str, Running] = {}
        self.started = int(board.get(self.name, "cursor"))  # queries drawn so far, also by those who were this searcher before
        self.epoch, self.order = -1, np.array([])
        self.reference_version = 0
        self.owed: deque[int] = deque()  # constant staleness: for each query that this version has still to start, the trainer step it is for
        self.outbox: deque[Group | Evaluation] = deque()
        self.unscored = deque(maxlen=SCORES_WATCHED)  # True where a group got no scores

    def search(self) -> None:
        self.board.set(self.name, "ready", 1)
        while self.config.resume and self.weights.version < 0 and not self.board.stop:
            self.board.beat(self.name)
            time.sleep(0.005)
        if self.weights.version <= 0:
            self.begin_version()
        while not self.board.stop:
            self.board.beat(self.name)
            self.send()
            self.take_new_weights()
            if not self.outbox:  # a full queue is the one thing that a searcher waits for
                self.start_queries()
            if self.outbox or not self.engine.running:
                with self.timeline.span("wait"):
                    time.sleep(0.005)
                continue
            with self.work("eval" if self.evaluation else "search"):
                outputs = self.engine.step()
            finished = [o for o in outputs if o.request_id in self.running]
            if finished:
                self.finish_groups(finished)
            if self.evaluation and (result := self.evaluation.take(outputs)):
                self.outbox.append(result)
                self.evaluation = None
        self.timeline.flush()

    def take_new_weights(self) -> None:
        """With responses in mid-stream, unless staleness is to be constant; but not with an evaluation: that is of one version."""
        if self.weights.version == self.version or self.evaluation or self.config.lockstep and (self.owed or self.running):
            return
        self.take_new_reference()  # before the version that it may have come with
        with self.work("load"), self.weights.read(self.rank) as (version, tensors):
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
        if config.lockstep:  # version 0 works for the first steps too, that no earlier version can work for
            batches = range(config.constant_staleness + 1) if self.version == 0 else [self.version + config.constant_staleness]
            share = len(range(self.rank, config.queries_per_batch, config.searchers))
            self.owed.extend(batch for batch in batches for _ in range(share) if batch < config.steps)
        due = self.version == 0 or self.evaluated < self.weights.evaluation_version <= self.version
        if self.rank == 0 and due:
            self.evaluated = self.version
            self.evaluation = EvaluationRun(self.engine, self.task, self.test_queries, self.tokenizer, self.config, self.version)

    def start_queries(self) -> None:
        """Keeps as many groups in the engine as it takes to fill its rows; with constant staleness only those that this version owes."""
        skipped = 0  # in a row
        while len(self.running) * self.config.samples_per_query < ENGINE_ROWS and (self.owed or not self.config.lockstep):
            query, visit = self.next_query()
            prompt = self.tokenizer(query.prompt).input_ids
            if len(prompt) > self.config.max_prompt_tokens:
                self.board.add(self.name, "long_prompts", visit == 0)
                skipped += 1
                if skipped == len(self.share):
                    raise ValueError(f"no prompt of the task is within --max_prompt_tokens {self.config.max_prompt_tokens}")
                continue
            skipped = 0
            request = f"{query.id}.{visit}"
            seed = None  # vLLM draws for each seeded request by itself, which costs time: only where a run is to be repeatable
            if self.config.lockstep:
                seed = int.from_bytes(hashlib.blake2b(f"{self.config.seed}.{request}".encode(), digest_size=4).digest())
            self.engine.add(request, prompt, self.version, n=self.config.samples_per_query, temperature=self.config.temperature,
                            max_tokens=self.config.max_response_tokens, seed=seed)  # fmt: skip
            batch = self.owed.popleft() if self.config.lockstep else None
            self.running[request] = Running(query, prompt, self.version, batch, self.started - 1)
        self.mark_cursor()

    def next_query(self) -> tuple[Query, int]:
        """The next query of this searcher's share, and how often it was visited before. Each epoch has an order of its own."""
        epoch, index = divmod(self.started, len(self.share))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng((self.config.seed, self.rank, epoch)).permutation(self.share)
        self.started += 1
        return self.queries[self.order[index]], epoch

    def mark_cursor(self) -> None:
        """So that whoever takes this searcher's place begins with what is in the engine now."""
        self.board.set(self.name, "cursor", min((run.index for run in self.running.values()), default=self.started))

    def finish_groups(self, outputs: list) -> None:
        """Scores what the engine finished in one step, adds reference log-probabilities, and puts the groups in the outbox."""
        finished = [(self.running.pop(output.request_id), output.outputs) for output in outputs]
        with self.work("score"):
            texts = [self.tokenizer.batch_decode([c.token_ids for c in candidates], skip_special_tokens=True) for _, candidates in finished]
            done = [[c.finish_reason == "stop" for c in candidates] for _, candidates in finished]
            rewards = self.rewards([run.query for run, _ in finished], texts, done)
        if self.config.lockstep:  # the batch needs another query in the place of a dropped one
            self.owed.extendleft(run.batch for (run, _), r in zip(finished, rewards) if r is None)
        scored = [(*f, text, d, r) for f, text, d, r in zip(finished, texts, done, rewards) if r is not None]
        self.mark_cursor()
        if not scored:
            return
        prompts = [np.array(run.prompt, np.int32) for run, candidates, *_ in scored for _ in candidates]
        responses = [np.array(c.token_ids, np.int32) for _, candidates, *_ in scored for c in candidates]
        with self.work("reference"), torch.no_grad():
            padded = response_logprobs(self.reference, prompts, responses, self.config.temperature).cpu().numpy()  # (rows, T)
        references = iter([row[: len(response)] for row, response in zip(padded, responses)])
        for run, candidates, text, d, r in scored:
            self.write_samples(run, text, d, r)
            self.board.add(self.name, "tokens", sum(len(c.token_ids) for c in candidates))
            self.outbox.append(Group(
                query_id=run.query.id,
                version=run.version,
                last_version=self.version,
                reference_version=self.reference_version,
                batch=run.batch,
                prompt=np.array(run.prompt, np.int32),
                lengths=np.array([len(c.token_ids) for c in candidates], np.int32),
                tokens=np.concatenate([c.token_ids for c in candidates]).astype(np.int32),
                ref_logprobs=np.concatenate([next(references) for _ in candidates]),
                behavior_logprobs=np.array([lp[t].logprob for c in candidates for t, lp in zip(c.token_ids, c.logprobs)], np.float32),
                rewards=r,
                finished=np.array(d),
            ))  # fmt: skip

    def rewards(self, queries: list[Query], texts: list[list[str]], done: list[list[bool]]) -> list[np.ndarray | None]:
        """Per group its (S,) rewards; None for one that is dropped: score() raised, or gave something other than S finite numbers."""
        counts = [len(group) for group in texts]
        try:  # one call for all
            flat = score(self.task, np.repeat(np.array(queries, object), counts).tolist(), sum(texts, []), sum(done, []))
            self.unscored.extend([False] * len(queries))
            return np.split(flat, np.cumsum(counts)[:-1])
        except Exception as error:
            if len(queries) > 1:  # again one by one, so that a bad query takes no other with it
                return [self.rewards([q], [t], [d])[0] for q, t, d in zip(queries, texts, done)]
            self.board.add(self.name, "unscored_groups", 1)
            self.unscored.append(True)
            print(f"query {queries[0].id} is dropped, it got no scores:", file=sys.stderr)
            traceback.print_exc()
            if sum(self.unscored) > SCORES_WATCHED / 2:
                print(f"{sum(self.unscored)} of the latest {len(self.unscored)} groups got no scores: the run ends", file=sys.stderr)
                sys.exit(GIVE_UP)
            return [None]

    def write_samples(self, run: Running, texts: list[str], done: list[bool], rewards: np.ndarray) -> None:
        if time.monotonic() - self.sampled_at < SAMPLES_PERIOD:
            return
        self.sampled_at = time.monotonic()
        lines = [
            {"version": run.version, "query_id": run.query.id, "prompt": run.query.prompt, "answer": str(run.query.answer),
             "response": text, "extracted": self.task.extract(text), "reward": reward, "finished": finished}
            for text, finished, reward in list(zip(texts, done, rewards.tolist()))[:SAMPLES_PER_GROUP]
        ]  # fmt: skip
        self.samples.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())

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


class EvaluationRun:
    """Greedy responses to all test queries, generated in the engine beside whatever else runs there."""

    def __init__(self, engine: Engine, task: Task, queries: Sequence[Query], tokenizer, config: Config, version: int):
        self.task, self.tokenizer, self.version = task, tokenizer, version
        prompts = [tokenizer(query.prompt).input_ids for query in queries]
        self.queries = {f"evaluation.{query.id}": query for query, p in zip(queries, prompts) if len(p) <= config.max_prompt_tokens}
        if not self.queries:
            raise ValueError(f"no test prompt of the task is within --max_prompt_tokens {config.max_prompt_tokens}")
        self.long_prompts = len(queries) - len(self.queries)
        self.outputs = {}  # request id -> the finished response
        for query, prompt in zip(queries, prompts):
            if f"evaluation.{query.id}" in self.queries:
                engine.add(f"evaluation.{query.id}", prompt, version, temperature=0.0, max_tokens=config.max_response_tokens)

    def take(self, outputs: list) -> Evaluation | None:
        """Collects its own among the engine's outputs; the result, once all are there."""
        self.outputs |= {o.request_id: o.outputs[0] for o in outputs if o.request_id in self.queries}
        if len(self.outputs) < len(self.queries):
            return None
        responses = [self.outputs[request] for request in self.queries]
        texts = self.tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True)
        scores = score(self.task, list(self.queries.values()), texts, [r.finish_reason == "stop" for r in responses])
        return Evaluation(self.version, float(scores.mean()), len(scores), self.long_prompts)


def score(task: Task, queries: list[Query], responses: list[str], finished: list[bool]) -> np.ndarray:
    """task.score, checked: (N,) finite float32. Raises whatever score() raises, and ValueError for anything else than N finite numbers."""
    scores = np.array(task.score(queries, responses, finished), np.float32)
    if scores.shape != (len(responses),) or not np.isfinite(scores).all():
        raise ValueError(f"score() must give {len(responses)} finite numbers for as many responses, it gave {scores!r}")
    return scores


def run(config: Config, rank: int, weights: SharedWeights, groups, board: Board, run_dir: str) -> None:
    """The searcher process."""
    Searcher(config, rank, weights, groups, board, run_dir).search()
    groups.cancel_join_thread()  # the run is over: nobody reads what is still in the queue


def evaluate_saved(config: Config, connection) -> None:
    """A process of its own: loads the model at config.model afresh and sends its Evaluation through `connection`."""
    engine = Engine(config)
    task = load_task(config.task, **config.task_options())
    evaluation = EvaluationRun(engine, task, task.queries("test"), load_tokenizer(config), config, config.steps)
    result = None
    while result is None:
        result = evaluation.take(engine.step())
    connection.send(result)
