"""Make many small runs, each the real Trainer in one process.

A searcher that generates with transformers stands where the trainer's queue stands. There is no
vLLM to start and no clock to race against: a run takes seconds and comes out the same every time.
staleness.py and ablations.py are lists of such runs. Each is appended to a file as
it ends, and a study that was interrupted continues where it was.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common  # noqa: F401 (the project's root on sys.path)
import numpy as np
import torch

from buffer import Group
from config import Config, settle
from models.hub import identify_weights
from models.logprobs import response_logprobs
from models.policy import load_policy, load_tokenizer, weight_shapes
from runtime.check_settings import check
from runtime.modes.lockstep import batches_of_version
from runtime.record.timeline import read_lines
from runtime.responses.scoring import score
from runtime.transport.board import Board
from runtime.transport.messages import Evaluation
from tasks import Query, find_presets, load_task
from trainer import Trainer
from weights import SharedWeights

SAMPLES = 2000  # responses to held-out queries, by which the trained policy is measured
POINTS = 30  # of a run's history that are kept
HISTORY = ("step", "reward", "ess_responses", "ess_tokens", "log_w_5", "received")


class InlineSearcher:
    """A searcher and its queue in one, in the trainer's own process.

    Asked for groups, it generates a round of them with the newest weights. In lockstep a round is
    what the version owes (runtime/modes/lockstep.py). Otherwise it is `groups_per_sync` groups, for
    the trainer asks at each sync: the weights they are made with are those of the sync before.
    """

    def __init__(self, config: Config, weights: SharedWeights, board: Board, groups_per_sync: int):
        self.config, self.weights, self.board = config, weights, board
        self.groups_per_sync = groups_per_sync
        self.task = load_task(config.task)
        self.tokenizer = load_tokenizer(config)
        self.policy, self.reference = (load_policy(config, torch.device("cpu")) for _ in range(2))
        self.train, self.test = self.task.queries("train"), self.task.queries("test")
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
            self.board.set("searcher 0", "version", self.version)
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
        for step in batches_of_version(self.version, config.constant_staleness, config.steps):
            found += self.groups([step] * config.queries_per_batch)
        return found

    def groups(self, batches: list[int | None]) -> list[Group]:
        """Generate a group for each of `batches`, the trainer step that it is for."""
        config, size = self.config, self.config.samples_per_query
        numbers = range(self.started, self.started + len(batches))
        queries = [self.train[self.order[number % len(self.train)]] for number in numbers]
        self.started += len(batches)
        rows = [query for query in queries for _ in range(size)]
        prompts, responses, texts, finished, rewards = self.generate(
            self.policy, rows, greedy=False
        )
        with torch.no_grad():
            behavior, reference = (
                response_logprobs(model, prompts, responses, config.temperature).numpy()
                for model in (self.policy, self.reference)
            )
        lengths = [len(response) for response in responses]
        groups = []
        for i, query, batch in zip(range(0, len(rows), size), queries, batches):
            own = range(i, i + size)
            group = Group(
                query_id=query.id,
                version=self.version,
                last_version=self.version,
                reference_version=0,
                batch=batch,
                prompt=prompts[i],
                lengths=np.array(lengths[i : i + size], np.int32),
                tokens=np.concatenate(responses[i : i + size]),
                ref_logprobs=np.concatenate([reference[j, : lengths[j]] for j in own]),
                behavior_logprobs=np.concatenate([behavior[j, : lengths[j]] for j in own]),
                rewards=rewards[i : i + size],
                finished=np.array(finished[i : i + size]),
                temperature=config.temperature,
            )
            groups.append(group)
        return groups

    @torch.no_grad()
    def generate(
        self, policy: torch.nn.Module, queries: list[Query], greedy: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray], list[str], list[bool], np.ndarray]:
        """Generate one response to each query. Their prompts have one length.

        Returns prompt ids, response ids with the end-of-sequence token, texts, whether they were
        finished or cut off, rewards.
        """
        ids = torch.tensor(self.tokenizer([query.prompt for query in queries]).input_ids)
        sampling = dict(do_sample=False)
        if not greedy:
            sampling = dict(do_sample=True, temperature=self.config.temperature, top_k=0)
        out = policy.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.config.max_response_tokens,
            **sampling,
        )
        out = out[:, ids.shape[1] :]
        ended = (out == self.tokenizer.eos_token_id).int()
        finished = ended.any(1).tolist()
        lengths = torch.where(ended.any(1), ended.argmax(1) + 1, out.shape[1]).tolist()
        responses = [row[:length].astype(np.int32) for row, length in zip(out.numpy(), lengths)]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        rewards = score(self.task, queries, texts, finished)
        return list(ids.numpy().astype(np.int32)), responses, texts, finished, rewards

    def evaluate(self) -> Evaluation:
        """Evaluate the policy on the held-out queries."""
        accuracy = self.accuracy(self.policy)
        return Evaluation(self.version, accuracy, len(self.test), long_prompts=0, unscored=0)

    def accuracy(self, policy: torch.nn.Module) -> float:
        """Measure the share of held-out queries whose greedy response is right."""
        return float(self.generate(policy, self.test, greedy=True)[-1].mean())

    def measure(self, policy: torch.nn.Module) -> dict[str, float]:
        """Measure what the policy does with held-out queries.

        reward: mean over SAMPLES samples; kl: to the reference, nats a response; distinct: how many
        different right responses the samples of a query hold.
        """
        queries = [query for query in self.test for _ in range(SAMPLES // len(self.test))]
        prompts, responses, texts, finished, rewards = self.generate(policy, queries, greedy=False)
        with torch.no_grad():
            ours, reference = (
                response_logprobs(model, prompts, responses, self.config.temperature).sum(1)
                for model in (policy, self.reference)
            )
        rows = zip(queries, texts, rewards)
        right = {(query.id, text) for query, text, reward in rows if reward == 1}
        return {
            "accuracy": self.accuracy(policy),
            "reward": float(rewards.mean()),
            "kl": float((ours - reference).mean()),
            "distinct": len(right) / len(self.test),
        }


def train(settings: dict, groups_per_sync: int = 0) -> dict[str, float]:
    """Make a run with these settings over the task's preset, and measure its policy at the end."""
    torch.set_num_threads(1)
    preset = next(iter(find_presets(settings["task"]).values()))
    quiet = {"eval_every": 0, "checkpoint_every": 0, "searchers": 1}
    config = settle(Config(**preset | quiet | settings))
    check(config)
    config = dataclasses.replace(config, model=load_task(config.task).base_model())
    with (
        tempfile.TemporaryDirectory() as run_dir,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        (Path(run_dir) / "logs").mkdir()
        weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
        board = Board(["trainer", "searcher 0"])
        searcher = InlineSearcher(config, weights, board, groups_per_sync)
        trainer = Trainer(config, weights, searcher, board, run_dir)
        trainer.train()
        lines = read_lines(Path(run_dir) / "metrics.jsonl")
        return searcher.measure(trainer.learner.policy) | {"history": thinned(lines)}


def thinned(lines: list[dict]) -> dict[str, list[float]]:
    """Keep some POINTS of a run's metrics: means over as many stretches of its steps."""
    steps = [line for line in lines if "loss" in line]
    stretches = np.array_split(np.arange(len(steps)), min(POINTS, len(steps)))
    return {
        name: [
            float(f"{np.mean([steps[i].get(name) for i in stretch], dtype=float):.4g}")
            for stretch in stretches
        ]
        for name in HISTORY
    }


def base_model(task: str) -> dict[str, float]:
    """Measure the policy that the runs of a task begin with."""
    torch.set_num_threads(1)
    preset = next(iter(find_presets(task).values()))
    config = settle(Config(**preset | {"task": task}))
    config = dataclasses.replace(config, model=load_task(task).base_model())
    weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
    searcher = InlineSearcher(config, weights, Board(["trainer", "searcher 0"]), 0)
    return searcher.measure(searcher.policy)


def run_all(
    jobs: list[dict], file: Path, processes: int = 2, run: Callable[..., dict] = train
) -> list[dict]:
    """Run jobs, the arguments of run(**job). Returns a line per job, with its "result".

    A job that is listed twice is run once. Those that `file` already holds are not run again. Ends
    the process where they began with other base models than this machine makes.
    """
    file.parent.mkdir(exist_ok=True)
    # Made here once, before several processes want them.
    models = {
        task: identify_weights(load_task(task).base_model()) for task in map(_task, jobs) if task
    }
    lines = read_lines(file)
    for line in lines:
        if (task := _task(line["job"])) in models and line["base_model"] != models[task]:
            sys.exit(
                f"{file} has results of {task} with base model {line['base_model']}, and here it "
                f"is {models[task]}: they make no mean together, put that file aside"
            )
    done = {_key(line["job"]): line for line in lines}
    missing = [job for key, job in {_key(job): job for job in jobs}.items() if key not in done]
    start = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    num_processes = min(processes, len(os.sched_getaffinity(0)))
    with spawn.Pool(num_processes) as pool, open(file, "a") as out:
        for i, line in enumerate(pool.imap_unordered(partial(_run, run), missing), 1):
            line["base_model"] = models.get(_task(line["job"]))
            print(json.dumps(line), file=out, flush=True)
            done[_key(line["job"])] = line
            if i % 10 == 0 or i == len(missing):
                print(f"{i} of {len(missing)} runs, {time.monotonic() - start:.0f} s", flush=True)
    return [done[_key(job)] for job in jobs]


def _task(job: dict) -> str | None:
    """Return the task whose base model a job begins with."""
    return job.get("settings", {}).get("task") or job.get("base")


def _key(job: dict) -> str:
    """Name a job. Runs are recorded with the settings that they had: a micro-batch decides none."""
    settings = {name: v for name, v in job.get("settings", {}).items() if "micro_batch" not in name}
    return json.dumps(job | {"settings": settings}, sort_keys=True)


def _run(run: Callable[..., dict], job: dict) -> dict:
    start = time.monotonic()
    result = run(**job)
    return {"job": job, "result": result, "seconds": round(time.monotonic() - start, 1)}


def number(values: list[float]) -> tuple[float, float]:
    """Compute mean and standard deviation (of a sample; 0 of a single value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def spread(values: list[float]) -> str:
    """Write mean ± standard deviation."""
    mean, deviation = number(values)
    form = ".1e" if 0 < abs(mean) < 1e-3 else ".1f" if abs(mean) >= 10 else ".3f"
    return f"{mean:{form}} ± {deviation:{form}}"
