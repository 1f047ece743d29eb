"""A Searcher: generates responses with its delayed copy of the policy, scores them, sends them off.

Queries enter vLLM's engine as others leave it: there is no batch to wait for. Newer weights are
loaded between two engine steps, so a response may span several versions, which is fine: trajectory
balance does not ask who sampled it. A free-running searcher waits for the trainer only if its queue
is full, if it is --search_ahead steps ahead, or for the first weights of a resumed run. In lockstep
it is a subclass, in extras/lockstep_searcher.py.
"""

import hashlib
import logging
import math
import queue
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from config import ENGINE_ROWS, Config, users_code
from models.device import compute_dtype, device, lock_pages
from models.engine import Engine, make_generation
from models.logprobs import response_logprobs
from models.policy import load_policy
from models.tokens import encode_prompt, load_tokenizer
from rollouts import Group
from runtime.record.timeline import Timeline
from runtime.responses.evaluation import EvaluationService
from runtime.responses.samples import SampleLog
from runtime.responses.scoring import FailureLimit, make_scorer
from runtime.transport.messages import Evaluation, Notice
from runtime.transport.status import StatusTable
from tasks import Query, load_task
from weights import SharedWeights

POLL_SECONDS = 0.005  # while the queue is full, or there is nothing to generate


class Searcher:
    """One searcher process.

    rank: its number from 0, of its share of the queries and of its pin in `weights`. outgoing: its
    queue, from which the supervisor forwards to the trainer's.
    """

    seeds_requests = False  # vLLM draws for each seeded request by itself, which costs time

    def __init__(
        self,
        config: Config,
        rank: int,
        weights: SharedWeights,
        outgoing: torch.multiprocessing.Queue,
        status: StatusTable,
        run_dir: str,
    ):
        self.config, self.rank, self.name = config, rank, f"searcher {rank}"
        self.weights, self.outgoing, self.status = weights, outgoing, status
        self.timeline = Timeline(run_dir, status, self.name)
        self.task = load_task(config.task, **config.options)
        self.tokenizer = load_tokenizer(config)
        cursor = int(status.get(self.name, "cursor"))
        self.share = QueryShare(config, self.task.queries("train"), rank, cursor)
        # For is_ahead(): groups begun, and the trainer's step when the search began.
        self.num_begun, self.first_step = 0, max(0, weights.version)
        # Seeded by cursor too, so that a restart does not repeat samples.
        seeds = np.random.SeedSequence((config.seed, rank, cursor))
        self.engine = Engine(config, seed=int(seeds.generate_state(1)[0]))
        # The reference policy is here to spare the trainer's memory. Loaded after vLLM, which
        # reserves a share of what is free.
        self.dtype, self.reference = compute_dtype(config), None
        if config.reads_reference:
            self.reference = load_policy(config, device(), linear_dtype=self.dtype)
        self.scorer = make_scorer(config, self.task)
        lock_pages(weights.memories, logging.warning)
        if device().type == "cuda":
            torch.set_num_threads(1)  # all is loaded: more would only spin
        self.failures = FailureLimit(status, self.name)
        # What does not fit into the queue yet: the groups among it are part of D_local.
        self.outbox: deque[Group | Evaluation | Notice] = deque()
        self.samples = SampleLog(run_dir, self.task, self.tokenizer, self.outbox.append)
        test, evaluated = self.task.queries("test"), int(status.get(self.name, "evaluated"))
        self.evaluation = EvaluationService(
            config, self.task, test, self.tokenizer, weights, rank, evaluated
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
            self.add_reference_logprobs(scored)
            self.note(scored)
            self.send(scored)
        self.timeline.flush()

    def begin(self) -> None:
        """Begin with config.model, version 0, and evaluate it before newer weights are loaded.

        In a resumed run config.model is of no use: wait for the trainer's first publish.
        """
        self.status.mark_ready(self.name)
        while self.config.resume and self.weights.version < 0 and not self.status.stop:
            self.status.beat(self.name)
            time.sleep(POLL_SECONDS)
        self.first_step = max(0, self.weights.version)
        # A resumed run may have ended before its first step: then it begins like a new one.
        if not self.config.resume or self.weights.version == 0:
            self.start_evaluation()

    def take_new_weights(self) -> None:
        """Load newer weights, even while responses are being generated.

        Deferred during an evaluation, which is of one version.
        """
        if self.weights.version > self.engine.version and self.may_load():
            with self.timeline.span("load"):
                self.load()
            self.status.set(self.name, "version", self.engine.version)

    def may_load(self) -> bool:
        return not self.evaluation.run

    def load(self) -> None:
        # keep: the slot stays pinned until the evaluation of this version ends.
        with self.weights.read(self.rank, keep=self.evaluation.is_due) as (version, tensors):
            self.engine.load(version, tensors.items())

    def start_queries(self) -> None:
        """Have S responses generated to each of the next queries, while there is room."""
        while self.has_room():
            self.generation.start(self.next_group())
        self.status.set(self.name, "cursor", self.share.cursor)

    def has_room(self) -> bool:
        """Return whether a query may start: the run needs it, engine and scoring have room."""
        if self.status.last_step_done or self.outbox or self.is_ahead():
            return False
        groups_in_engine = ENGINE_ROWS // self.config.samples_per_query + 1
        return self.generation.rows < ENGINE_ROWS and len(self.scorer.waiting) < groups_in_engine

    def is_ahead(self) -> bool:
        """Return whether the search is config.search_ahead steps, of B groups each, ahead.

        Where both share a GPU or cores, groups never trained on would slow the trainer down.
        Once it trains, no more than these are in flight: more would end later, and be older.
        """
        config = self.config
        if config.search_ahead is None:
            return False
        step = max(0, self.weights.version) - self.first_step
        initial = math.ceil(config.initial_responses / config.samples_per_query)
        ahead = config.search_ahead * config.queries_per_batch
        begun = initial + step * config.queries_per_batch + ahead
        most_begun, most = (math.ceil(n / config.searchers) for n in (begun, ahead))  # its part
        return self.num_begun >= most_begun or (step > 0 and len(self.share.in_flight) >= most)

    def next_group(self) -> Group:
        """Draw the next query of the share whose prompt can be used.

        Raises ValueError if the prompts of all queries are empty or too long.
        """
        limit = self.config.max_prompt_tokens
        for _ in self.share.own:
            group = self.draw()
            group.prompt = np.array(encode_prompt(self.tokenizer, group.query.prompt), np.int32)
            if 0 < len(group.prompt) <= limit:
                group.sampling = self.sampling(group)
                return group
            self.status.add(self.name, "long_prompts", group.visit == 0)  # once a query
            self.drop(group)
        raise ValueError(f"no prompt of the task has 1 to --max_prompt_tokens {limit} tokens")

    def draw(self) -> Group:
        self.num_begun += 1
        return self.share.draw()

    def drop(self, group: Group) -> None:
        """Note that a group that was drawn will never come."""
        self.num_begun -= 1
        self.share.end(group)

    def sampling(self, group: Group) -> dict:
        """Return how vLLM samples the responses to a query, as in vllm.SamplingParams."""
        key = f"{self.config.seed}.searcher {self.rank}.{group.request}"
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest())
        sampling = {
            "n": self.config.samples_per_query,
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_response_tokens,
        }
        with users_code("sampling()"):
            sampling |= self.task.sampling(np.random.default_rng(seed))
        return sampling | ({"seed": seed} if self.seeds_requests else {})

    def start_evaluation(self) -> None:
        """Start a requested evaluation; no weights are loaded until it ends."""
        for group in self.evaluation.start_if_due(self.engine.version):
            self.generation.start(group)
        self.status.set(self.name, "evaluating", self.evaluation.run is not None)

    def step_engine(self) -> list[Group]:
        """Generate one token of every response. Returns the groups that ended with it."""
        if self.outbox or self.is_over() or self.generation.is_idle:  # a full queue, or no work
            with self.timeline.span("wait"):
                time.sleep(POLL_SECONDS)
            return []
        with self.timeline.span("eval" if self.evaluation.run else "search"):
            return self.generation.step()

    def is_over(self) -> bool:
        """Return whether nobody needs what the engine would generate.

        At a shutdown new responses would be lost, and saving needs the cores.
        """
        has_ended = self.status.last_step_done and not self.evaluation.run
        return has_ended or self.status.shutdown

    def score(self, generated: list[Group]) -> list[Group]:
        """Hand generated groups to the task's score(). Returns those that have rewards by now.

        Where score() runs in worker processes, these may have been handed over earlier.
        """
        for is_test in (True, False):  # a call for each: ids are unique within a split alone
            groups = [group for group in generated if group.is_for_evaluation == is_test]
            if groups:
                self.status.set(self.name, "scoring", len(groups))
                with self.timeline.span("score"):
                    self.scorer.add(groups)
        scored = []
        for group in self.scorer.take():
            if group.is_for_evaluation:
                self.evaluation.run.record(group)
                continue
            self.failures.count(group)
            if group.error:
                self.drop(group)
            else:
                self.share.end(group)
                scored.append(group)
        self.status.set(self.name, "scoring", len(self.scorer.waiting))
        self.status.set(self.name, "cursor", self.share.cursor)
        return scored

    @torch.no_grad()
    def add_reference_logprobs(self, scored: list[Group]) -> None:
        """Set log pi_ref of all tokens: NaN if the objective reads none, so no model is here."""
        responses = [response for group in scored for response in group.responses()]
        if not responses:
            return
        tokens = [response.tokens["token"] for response in responses]
        with self.timeline.span("reference"):
            if self.reference:
                prompts = [response.prompt for response in responses]
                how = self.config.temperature, self.dtype
                padded = response_logprobs(self.reference, prompts, tokens, *how).cpu().numpy()
            else:
                padded = [np.full(len(own), np.nan, np.float32) for own in tokens]
        for response, logprobs in zip(responses, padded):
            own = response.tokens  # a view of the group's
            # A task may change them, as red-teaming does.
            logprobs = self.task.reference_logprobs(logprobs[: len(own)])
            # An environment's tokens are certain: log-probability 0 under both policies.
            own["ref_logprob"] = np.where(own["in_loss"] | own["sampled"], logprobs, 0)

    def note(self, groups: list[Group]) -> None:
        """Count tokens, and write some responses to samples.jsonl."""
        for group in groups:
            self.status.add(self.name, "tokens", int(group.tokens["sampled"].sum()))
            self.samples.write(group)

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


class QueryShare:
    """The order in which a searcher draws its share of the queries.

    That is queries share, share + config.searchers, … of a shuffled list, in a new order each
    epoch. No other searcher draws them, unless there are fewer queries than searchers. cursor: the
    place in this order where it starts; a restart passes the last one.
    """

    def __init__(self, config: Config, queries: Sequence[Query], share: int, cursor: int):
        self.seeds, self.queries = (config.seed, share), queries
        shuffled = np.random.default_rng(config.seed).permutation(len(queries))
        own = shuffled[share :: config.searchers]
        # Indices of the queries of this share.
        self.own = own if len(queries) >= config.searchers else np.arange(len(queries))
        self.num_drawn = cursor
        self.epoch, self.order = -1, np.array([])
        self.in_flight: set[int] = set()  # indices of groups that are drawn, not yet scored

    @property
    def cursor(self) -> int:
        """The oldest group in flight: a restart resumes there."""
        return min(self.in_flight, default=self.num_drawn)

    def draw(self) -> Group:
        epoch, place = divmod(self.num_drawn, len(self.own))
        if epoch != self.epoch:
            rng = np.random.default_rng((*self.seeds, epoch))
            self.epoch, self.order = epoch, rng.permutation(self.own)
        query = self.queries[self.order[place]]
        name, index = f"{query.id}.{epoch}", self.num_drawn
        self.in_flight.add(index)
        self.num_drawn += 1
        return Group(query_id=query.id, query=query, request=name, index=index, visit=epoch)

    def end(self, group: Group) -> None:
        """Note that a group is scored, or will never be: its prompt is too long, score() failed."""
        self.in_flight.remove(group.index)


def run(config: Config, *arguments: Any) -> None:
    """The searcher process. arguments: of Searcher."""
    if config.lockstep:
        from extras.lockstep_searcher import LockstepSearcher

        searcher = LockstepSearcher(config, *arguments)
    else:
        searcher = Searcher(config, *arguments)
    searcher.search()
    # The run is over: nobody reads what is still in the queue.
    searcher.outgoing.cancel_join_thread()
