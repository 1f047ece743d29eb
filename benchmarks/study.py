"""Make many small runs, each the real Trainer in one process.

A searcher that generates with transformers stands where the trainer's queue stands. There is no
vLLM to start and no clock to race against: a run takes seconds and comes out the same every time.
staleness.py is a list of such runs. Each is appended to a file as it ends, and a study that was
interrupted continues where it was. The task is addends. Its base model is addends/, so that runs
begin alike on every machine: a recipe gives another model on another processor.
"""

import contextlib
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from common import processor

from config import Config, settle
from extras.lockstep import LockstepTrainer, batches_of_version
from launch.files import read_lines
from launch.settings import check
from models.architecture import weight_shapes
from models.hub import identify_weights
from models.logprobs import response_logprobs
from models.policy import load_policy
from models.tokens import load_tokenizer
from rollouts import Group, make_tokens
from runtime.responses.scoring import score
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable
from tasks import Query, load_task
from tasks.addends import PRESETS
from trainer import Trainer
from weights import SharedWeights

MODEL = str(Path(__file__).parent / "addends")
SAMPLES = 2000  # responses by which the trained policy is measured


class InlineSearcher:
    """A searcher and its queue in one, in the trainer's own process.

    Asked for groups, it generates a round of them with the newest weights. In lockstep a round is
    what the version owes (extras/lockstep.py); with `ages` it owes as many groups to the batches of
    each of these staleness steps. Otherwise it is `groups_per_sync` groups, for the trainer asks at
    each sync: the weights they are made with are those of the sync before.
    """

    def __init__(
        self,
        config: Config,
        weights: SharedWeights,
        status: StatusTable,
        groups_per_sync: int,
        ages: Sequence[int] = (),
    ):
        self.config, self.weights, self.status = config, weights, status
        self.groups_per_sync, self.ages = groups_per_sync, ages or [config.constant_staleness]
        self.task = load_task(config.task)
        self.tokenizer = load_tokenizer(config)
        self.policy, self.reference = (load_policy(config, torch.device("cpu")) for _ in range(2))
        self.train, self.test = map(self.task.queries, ("train", "test"))
        self.order = np.random.default_rng(config.seed).permutation(len(self.train))
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
                found += self.groups([None] * first_fill)
            return found + self.groups([None] * self.groups_per_sync)
        if not is_newer:
            return found
        for age in self.ages:
            aged = replace(config, constant_staleness=age)
            for step in batches_of_version(self.version, aged):
                found += self.groups([step] * (config.queries_per_batch // len(self.ages)))
        return found

    def groups(self, batches: list[int | None]) -> list[Group]:
        """Generate a group for each of `batches`, the trainer step that it is for."""
        config, size = self.config, self.config.samples_per_query
        numbers = range(self.started, self.started + len(batches))
        queries = [self.train[self.order[number % len(self.train)]] for number in numbers]
        self.started += len(batches)
        rows = [query for query in queries for _ in range(size)]
        prompts, responses, behavior, texts, finished, rewards = self.generate(self.policy, rows)
        reference = self.reference_logprobs(prompts, responses)
        tokens = [
            make_tokens(ids, ref_logprob=ref[: len(ids)], behavior_logprob=own[: len(ids)])
            for ids, ref, own in zip(responses, reference, behavior)
        ]
        groups = []
        for i, query, batch in zip(range(0, len(rows), size), queries, batches):
            own = slice(i, i + size)
            group = Group(query_id=query.id, prompt=prompts[i], version=self.version, batch=batch)
            group.last_version, group.temperature = self.version, config.temperature
            group.end(texts[own], tokens[own], finished[own])
            group.rewards = rewards[own]
            groups.append(group)
        return groups

    @torch.no_grad()
    def reference_logprobs(self, prompts, responses) -> np.ndarray:
        reference, temperature = self.reference, self.config.temperature
        return response_logprobs(reference, prompts, responses, temperature).numpy()

    @torch.no_grad()
    def generate(
        self, policy: torch.nn.Module, queries: list[Query], greedy: bool = False
    ) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray, list[str], list[bool], np.ndarray]:
        """Generate one response to each query. Their prompts have one length.

        Returns prompt ids, response ids with the end-of-sequence token, log-probabilities of these,
        (N, T), 0 as padding; texts, whether they were finished or cut off, rewards.
        """
        temperature = self.config.temperature
        ids = torch.tensor(self.tokenizer([query.prompt for query in queries]).input_ids)
        sampling = dict(do_sample=False)
        if not greedy:
            sampling = dict(do_sample=True, temperature=temperature, top_k=0)
        made = policy.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.config.max_response_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            **sampling,
        )
        out = made.sequences[:, ids.shape[1] :]  # (N, T)
        logprobs = (torch.stack(made.logits, dim=1) / temperature).log_softmax(-1)
        logprobs = logprobs.gather(2, out[..., None])[..., 0]
        ended = (out == self.tokenizer.eos_token_id).int()
        finished = ended.any(1)
        lengths = torch.where(finished, ended.argmax(1) + 1, out.shape[1])
        logprobs = torch.where(torch.arange(out.shape[1]) < lengths[:, None], logprobs, 0.0)
        responses = [row[:n].astype(np.int32) for row, n in zip(out.numpy(), lengths.tolist())]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        rewards = score(self.task, queries, texts, finished.tolist())
        prompts = list(ids.numpy().astype(np.int32))
        return prompts, responses, logprobs.numpy(), texts, finished.tolist(), rewards

    def evaluate(self) -> Evaluation:
        """Evaluate the policy on the held-out queries, by greedy responses."""
        accuracy = float(self.generate(self.policy, self.test, greedy=True)[-1].mean())
        metrics = {self.task.metric: (accuracy, np.nan, np.nan)}
        return Evaluation(self.version, metrics, len(self.test))

    def measure(self, policy: torch.nn.Module, split: str = "test") -> dict[str, float]:
        """Measure what the policy does with the queries of a split, by some SAMPLES of it.

        reward: their mean; kl: to the reference, nats a response; distinct: right responses of a
        query that differ.
        """
        own = self.test if split == "test" else self.train
        queries = [query for query in own for _ in range(max(1, SAMPLES // len(own)))]
        prompts, responses, ours, texts, _, rewards = self.generate(policy, queries)
        kl = ours.sum(1) - self.reference_logprobs(prompts, responses).sum(1)
        rows = zip(queries, texts, rewards)
        right = {(query.id, text) for query, text, reward in rows if reward == 1}
        return {
            "reward": float(rewards.mean()),
            "kl": float(kl.mean()),
            "distinct": len(right) / len(own),
        }


def train(settings: dict, groups_per_sync: int = 0, ages: Sequence[int] = ()) -> dict:
    """Make a run with these settings over the task's preset, and measure its policy at the end.

    ages: of the groups in each batch, in place of the constant staleness.
    Returns what measure() says of the test queries, and "trained", of those that were trained on.
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
        searcher = InlineSearcher(config, weights, status, groups_per_sync, ages)
        kind = LockstepTrainer if config.lockstep else Trainer
        trainer = kind(config, weights, searcher, status, run_dir)
        trainer.train()
        policy = trainer.learner.policy
        return searcher.measure(policy) | {"trained": searcher.measure(policy, "train")}


def small_config(settings: dict) -> Config:
    """The settings over the preset of addends, with the shipped base model."""
    quiet = {"eval_every": 0, "checkpoint_every": 0, "searchers": 1, "model": MODEL}
    return settle(Config(**PRESETS["demo"] | quiet | settings))


def run_all(jobs: list[dict], file: Path, processes: int = 2) -> list[dict]:
    """Run jobs, the arguments of train(**job). Returns a line per job, with its "result".

    A job that is listed twice is run once. Those that `file` already holds are not run again. Ends
    the process where they began with another base model.
    """
    file.parent.mkdir(exist_ok=True)
    model, done = identify_weights(MODEL), recorded(file)
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
        for i, line in enumerate(pool.imap_unordered(_run, missing), 1):
            line["base_model"] = model
            print(json.dumps(line), file=out, flush=True)
            done[key_of(line["job"])] = line
            if i % 10 == 0 or i == len(missing):
                print(f"{i} of {len(missing)} runs, {time.monotonic() - start:.0f} s", flush=True)
    return [done[key_of(job)] for job in jobs]


def recorded(file: Path) -> dict[str, dict]:
    """The lines of a file, by key_of() their jobs."""
    return {key_of(line["job"]): line for line in read_lines(file)}


def key_of(job: dict) -> str:
    """Name a job. Runs are recorded with the settings that they had: a micro-batch decides none."""
    settings = {name: v for name, v in job["settings"].items() if "micro_batch" not in name}
    return json.dumps(job | {"settings": settings}, sort_keys=True)


def _run(job: dict) -> dict:
    start = time.monotonic()
    line = {"job": job, "result": train(**job), "processor": processor()}
    return line | {"seconds": round(time.monotonic() - start, 1)}


def number(values: list[float]) -> tuple[float, float]:
    """Compute mean and standard deviation (of a sample; 0 of a single value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def spread(values: list[float]) -> str:
    """Write mean ± standard deviation."""
    mean, deviation = number(values)
    return f"{mean:.3f} ± {deviation:.3f}"
