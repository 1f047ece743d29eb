"""Make many small runs, each the real Trainer in one process.

A searcher that generates with transformers stands where the trainer's queue stands. There is no
vLLM to start and no clock to race against: a run comes out the same every time. staleness.py is a
list of such runs, of seconds each, exact_real.py one of minutes. A run is appended to a file as it
ends, and a study that was interrupted continues where it was. The base model of addends is
addends/, so that runs begin alike on every machine: a recipe gives another model on another
processor.
"""

import contextlib
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import processor
from transformers import DynamicCache

from config import Config, settle
from extras.lockstep import LockstepTrainer, batches_of_version
from launch.command_line import find_presets
from launch.files import read_lines
from launch.settings import check
from models.architecture import weight_shapes
from models.hub import identify_weights
from models.logprobs import response_logprobs
from models.policy import load_policy
from models.tokens import load_tokenizer
from rollouts import Group, Response, make_tokens
from runtime.responses.scoring import score
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable
from tasks import Query, load_task
from trainer import Trainer
from weights import SharedWeights

Rows = list[np.ndarray]  # of token ids
MODEL = str(Path(__file__).parent / "addends")  # with its task beside it
ADDENDS = str(Path(MODEL, "task.py"))
SAMPLES = 2000  # responses by which the trained policy is measured


class InlineSearcher:
    """A searcher and its queue in one, in the trainer's own process.

    Asked for groups, it generates a round of them with the newest weights. In lockstep a round is
    what the version owes (extras/lockstep.py); with `ages` it owes as many groups to the batches of
    each of these staleness steps, or, `within` groups, as many responses to each group. Otherwise
    it is `groups_per_sync` groups, for the trainer asks at each sync: the weights they are made
    with are those of the sync before.
    """

    def __init__(
        self,
        config: Config,
        weights: SharedWeights,
        status: StatusTable,
        groups_per_sync: int = 0,
        ages: Sequence[int] = (),
        within: bool = False,
    ):
        self.config, self.weights, self.status = config, weights, status
        self.groups_per_sync, self.ages = groups_per_sync, ages or [config.constant_staleness]
        self.within = within
        if (config.samples_per_query if within else config.queries_per_batch) % len(self.ages):
            raise ValueError(f"{len(self.ages)} ages do not divide queries or responses of a batch")
        self.parts: dict[int, list[list[Group]]] = defaultdict(list)  # of groups, by trainer step
        self.task = load_task(config.task)
        self.tokenizer = load_tokenizer(config)
        self.policy, self.reference = (load_policy(config, torch.device("cpu")) for _ in range(2))
        self.train, self.test = map(self.task.queries, ("train", "test"))
        stops = self.task.sampling(np.random.default_rng(0)).get("stop", ())
        stops = (self.tokenizer(stop, add_special_tokens=False).input_ids for stop in stops)
        # Tokens that end a response. A stop string of several tokens: ValueError.
        self.ends = torch.tensor([self.tokenizer.eos_token_id, *(token for (token,) in stops)])
        self.order = np.random.default_rng(config.seed).permutation(len(self.train))
        self.known: dict[tuple[bytes, bytes], np.ndarray] = {}  # log pi_ref of rows
        self.curve = []  # for subclasses that measure as they go
        self.started = 0  # queries
        self.version, self.evaluated = -1, -1
        # What is left of a round. None: the next question begins a new one.
        self.round: deque[Group | Evaluation] | None = None

    def get(self, timeout: float) -> Group | Evaluation:
        """Return the next of the round. Raises queue.Empty once at the end of each round."""
        if self.round is None:
            self.round = deque(self.search())
        if self.round:
            return self.round.popleft()
        self.round = None
        raise queue.Empty

    def qsize(self) -> int:
        """Promise more than a round has: it is made only when it is asked for."""
        return 1_000_000

    def search(self) -> list[Group | Evaluation]:
        """Make a round with the newest weights: an evaluation if one is due, and groups."""
        config, found = self.config, []
        is_newer = self.weights.version > self.version
        if is_newer:
            with self.weights.read(0) as (self.version, tensors):
                # Not strict: a tied tensor is published under one of its names only.
                self.policy.load_state_dict(tensors, strict=False)
            self.status.set("searcher 0", "version", self.version)
        is_base_model = self.version == 0 and self.evaluated < 0
        if self.evaluated < self.weights.evaluation_version or is_base_model:
            self.evaluated = self.version
            found.append(self.evaluate())
        if not config.lockstep:
            if not self.started:  # the first fill is the same whatever k; rounded up
                first_fill = -(-config.initial_responses // config.samples_per_query)
                found += self.groups([None] * first_fill, config.samples_per_query)
            return found + self.groups([None] * self.groups_per_sync, config.samples_per_query)
        if not is_newer:
            return found
        count, size = config.queries_per_batch // len(self.ages), config.samples_per_query
        if self.within:
            count, size = config.queries_per_batch, size // len(self.ages)
        for i, age in enumerate(self.ages):
            aged = replace(config, constant_staleness=age)
            for step in batches_of_version(self.version, aged):
                self.started = step * config.queries_per_batch
                if not self.within:  # ages take turns: none has queries of its own
                    self.started += (i + self.started // len(self.train)) % len(self.ages) * count
                    found += self.groups([step] * count, size)
                    continue
                self.parts[step].append(self.groups([step] * count, size))
                if len(self.parts[step]) == len(self.ages):
                    found += map(join, zip(*self.parts.pop(step)))
        return found

    def groups(self, batches: list[int | None], size: int) -> list[Group]:
        """Generate `size` responses for each of `batches`, the trainer step that they are for."""
        numbers = range(self.started, self.started + len(batches))
        queries = [self.train[self.order[number % len(self.train)]] for number in numbers]
        self.started += len(batches)
        made = self.generate(self.policy, queries, size)
        prompts, responses, behavior, texts, finished, rewards = made
        reference = self.reference_logprobs(prompts, responses)
        tokens = [
            make_tokens(ids, ref_logprob=ref[: len(ids)], behavior_logprob=own[: len(ids)])
            for ids, ref, own in zip(responses, reference, behavior)
        ]
        groups = []
        for i, query, batch in zip(range(0, len(texts), size), queries, batches):
            own = slice(i, i + size)
            group = Group(query_id=query.id, prompt=prompts[i], version=self.version, batch=batch)
            group.last_version, group.temperature = self.version, self.config.temperature
            group.end(texts[own], tokens[own], finished[own])
            group.rewards = rewards[own]
            groups.append(group)
        return groups

    @torch.no_grad()
    def reference_logprobs(self, prompts: Rows, responses: Rows) -> np.ndarray:
        """Return log pi_ref of each token, (N, T), 0 as padding. Each row is computed once."""
        rows = [*zip(prompts, responses)]
        keys = [(prompt.tobytes(), response.tobytes()) for prompt, response in rows]
        if new := {key: row for key, row in zip(keys, rows) if key not in self.known}:
            found = response_logprobs(self.reference, *zip(*new.values()), self.config.temperature)
            self.known |= zip(new, found.numpy())
        padded = np.zeros((len(rows), max(map(len, responses))), np.float32)
        for own, key, response in zip(padded, keys, responses):
            own[: len(response)] = self.known[key][: len(response)]
        return padded

    @torch.no_grad()
    def generate(
        self, policy: torch.nn.Module, queries: list[Query], copies: int = 1, greedy: bool = False
    ) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray, list[str], list[bool], np.ndarray]:
        """Generate `copies` responses to each query, those of one query contiguous.

        Returns prompt ids, response ids with the token that ends them, log-probabilities of these,
        (N, T), 0 as padding; texts, whether they were finished or cut off, rewards.
        """
        encoded = self.tokenizer([query.prompt for query in queries]).input_ids
        longest = max(map(len, encoded))
        padding = [longest - len(prompt) for prompt in encoded]  # on the left
        ids = torch.tensor([[0] * n + prompt for n, prompt in zip(padding, encoded)])
        mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).int()
        places, cache, tokens, logprobs = (mask.cumsum(1) - 1).clamp(min=0), DynamicCache(), [], []
        ended = torch.zeros(len(queries) * copies, 1, dtype=torch.bool)
        lengths = torch.zeros_like(ended, dtype=torch.int)
        while not ended.all() and len(tokens) < self.config.max_response_tokens:
            where = dict(attention_mask=mask, position_ids=places, past_key_values=cache)
            logits = policy(ids, logits_to_keep=1, **where).logits
            if not tokens:  # a prompt is computed once, whatever the number of its responses
                cache.batch_repeat_interleave(copies)
                whole = logits, mask, places
                logits, mask, places = (part.repeat_interleave(copies, 0) for part in whole)
            log_p = (logits[:, -1] / self.config.temperature).log_softmax(-1)
            ids = log_p.argmax(1, True) if greedy else torch.multinomial(log_p.exp(), 1)
            tokens.append(ids)
            logprobs.append(torch.where(ended, 0.0, log_p.gather(1, ids)))
            lengths += ~ended
            ended = ended | torch.isin(ids, self.ends)
            mask, places = F.pad(mask, (0, 1), value=1), places[:, -1:] + 1
        out, finished = torch.cat(tokens, 1).int().numpy(), ended[:, 0].tolist()
        responses = [row[:n] for row, n in zip(out, lengths[:, 0].tolist())]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        rows = [query for query in queries for _ in range(copies)]
        rewards = score(self.task, rows, texts, finished)
        prompts = [np.array(prompt, np.int32) for prompt in encoded for _ in range(copies)]
        return prompts, responses, torch.cat(logprobs, 1).numpy(), texts, finished, rewards

    def evaluate(self) -> Evaluation:
        """Evaluate the policy on the held-out queries, by greedy responses."""
        accuracy = float(self.generate(self.policy, self.test, greedy=True)[-1].mean())
        metrics = {self.task.metric: (accuracy, np.nan, np.nan)}
        return Evaluation(self.version, metrics, len(self.test))

    def result(self, policy: torch.nn.Module) -> dict:
        """Measure the policy at the end of a run, on test queries and on those trained on."""
        return self.measure(policy) | {"trained": self.measure(policy, "train")}

    def measure(self, policy: torch.nn.Module, split: str = "test") -> dict[str, float]:
        """Measure what the policy does with the queries of a split, by some SAMPLES of it.

        reward: their mean; kl: to the reference, nats a response; distinct: right responses of a
        query that differ.
        """
        own = self.test if split == "test" else self.train
        copies = max(1, SAMPLES // len(own))
        prompts, responses, ours, texts, _, rewards = self.generate(policy, own, copies)
        kl = ours.sum(1) - self.reference_logprobs(prompts, responses).sum(1)
        right = {(i // copies, texts[i]) for i in np.flatnonzero(rewards == 1)}
        return {
            "reward": float(rewards.mean()),
            "kl": float(kl.mean()),
            "distinct": len(right) / len(own),
        }


@dataclass(eq=False, kw_only=True)
class MixedGroup(Group):
    """A group whose responses are of several versions, those of its parts."""

    parts: tuple[Group, ...]

    def responses(self, step: int = 0) -> list[Response]:
        return [response for part in self.parts for response in part.responses(step)]


def join(parts: tuple[Group, ...]) -> MixedGroup:
    """Join groups of one query."""
    first, names = parts[0], ("lengths", "finished", "rewards", "tokens")
    fields = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    fields |= dict(query_id=first.query_id, prompt=first.prompt, batch=first.batch)
    return MixedGroup(**fields, parts=parts, version=-1)  # never compared with vLLM


def train(settings: dict, searcher: type[InlineSearcher] = InlineSearcher, **schedule: Any) -> dict:
    """Make a run with these settings over the task's first preset. Returns searcher.result().

    schedule: of the searcher's arguments.
    """
    torch.set_num_threads(1)
    config = small_config(settings)
    check(config)
    with (
        tempfile.TemporaryDirectory() as run_dir,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        (Path(run_dir) / "logs").mkdir()
        weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
        status = StatusTable(["trainer", "searcher 0"])
        inline = searcher(config, weights, status, **schedule)
        kind = LockstepTrainer if config.lockstep else Trainer
        trainer = kind(config, weights, inline, status, run_dir)
        trainer.train()
        return inline.result(trainer.learner.policy)


def small_config(settings: dict) -> Config:
    """The settings over the task's first preset. "addends" is the task that lies here."""
    task = ADDENDS if settings["task"] == "addends" else settings["task"]
    preset = next(iter(find_presets(task).values()))
    quiet = {"eval_every": 0, "checkpoint_every": 0, "searchers": 1}
    model = {"model": load_task(task).base_model()}
    return settle(Config(**preset | quiet | model | settings | {"task": task}))


def run_all(jobs: list[dict], file: Path, processes: int = 2, do: Callable = train) -> list[dict]:
    """Run jobs, the arguments of do(**job). Returns a line per job, with its "result".

    A job that is listed twice is run once. Those that `file` already holds are not run again. Ends
    the process where they began with another base model.
    """
    file.parent.mkdir(exist_ok=True)
    model, done = identify_weights(small_config(jobs[0]["settings"]).model), recorded(file)
    if others := {line["base_model"] for line in done.values()} - {model}:
        sys.exit(
            f"{file} has results with base model {', '.join(others)}, and here it is {model}: they "
            "make no mean together, put that file aside"
        )
    missing = [job for key, job in {key_of(job): job for job in jobs}.items() if key not in done]
    start = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    num_processes = min(processes, len(os.sched_getaffinity(0)))
    with spawn.Pool(num_processes) as pool, open(file, "a") as out:
        for i, line in enumerate(pool.imap_unordered(partial(_run, do), missing), 1):
            line["base_model"] = model
            print(json.dumps(line), file=out, flush=True)
            done[key_of(line["job"])] = line
            if i % 10 == 0 or i == len(missing):
                print(f"{i} of {len(missing)} runs, {time.monotonic() - start:.0f} s", flush=True)
    return [done[key_of(job)] for job in jobs]


def run_cells(
    job: Callable[..., dict], file: Path, do: Callable, cells: Sequence[tuple]
) -> dict[tuple, list[dict]]:
    """Run job(*cell) for each cell. Returns the results by cell without its last part, the seed."""
    found = defaultdict(list)
    for cell, line in zip(cells, run_all([job(*cell) for cell in cells], file, do=do)):
        found[cell[:-1]].append(line["result"])
    return found


def recorded(file: Path) -> dict[str, dict]:
    """The lines of a file, by key_of() their jobs."""
    return {key_of(line["job"]): line for line in read_lines(file)}


def key_of(job: dict) -> str:
    """Name a job. Runs are recorded with the settings that they had: a micro-batch decides none."""
    settings = {name: v for name, v in job["settings"].items() if "micro_batch" not in name}
    return json.dumps(job | {"settings": settings}, sort_keys=True)


def _run(do: Callable, job: dict) -> dict:
    start = time.monotonic()
    line = {"job": job, "result": do(**job), "processor": processor()}
    return line | {"seconds": round(time.monotonic() - start, 1)}


def number(values: list[float]) -> tuple[float, float]:
    """Compute mean and standard deviation (of a sample; 0 of a single value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def spread(values: list[float]) -> str:
    """Write mean ± standard deviation."""
    mean, deviation = number(values)
    return f"{mean:.3f} ± {deviation:.3f}"
