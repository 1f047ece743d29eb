"""Many small runs, each the real Trainer in one process: a searcher that generates with transformers stands where the trainer's queue stands.

There is no vLLM to start and no clock to race against: a run takes seconds and comes out the same every time. off_policy.py and ablations.py
are lists of such runs; each is appended to a file as it ends, and a study that was broken off goes on where it was.
"""

import contextlib
import json
import multiprocessing
import os
import queue
import tempfile
import time
from collections import deque
from pathlib import Path

import common  # noqa: F401 (the project's root on sys.path)
import numpy as np
import torch

from buffer import Group
from config import Config, check
from runtime.messages import Evaluation
from models.logprobs import response_logprobs
from models.policy import load_policy, load_tokenizer, weight_shapes
from runtime.board import Board
from runtime.timeline import read_lines
from runtime.scoring import Unscored, score
from runtime.lockstep import batches_of_version
from tasks import find_presets, load_task
from trainer import Trainer
from weights import SharedWeights

SAMPLES = 2000  # responses to held-out queries, by which the trained policy is measured


class InlineSearcher:
    """A searcher and its queue in one: asked for groups, it generates a round of them with the newest weights, in the trainer's own process.

    Constant staleness: a round is what the version owes (runtime/lockstep.py). Otherwise it is `groups_per_sync` groups, for the trainer asks at
    each sync: the weights they are made with are those of the sync before.
    """

    def __init__(self, config: Config, weights: SharedWeights, board: Board, groups_per_sync: int):
        self.config, self.weights, self.board, self.groups_per_sync = (
            config,
            weights,
            board,
            groups_per_sync,
        )
        self.task = load_task(config.task)
        self.tokenizer = load_tokenizer(config)
        self.policy, self.reference = (load_policy(config, torch.device("cpu")) for _ in range(2))
        self.train, self.test = self.task.queries("train"), self.task.queries("test")
        self.order = np.random.default_rng(config.seed).permutation(len(self.train))
        self.started = 0  # queries
        self.version, self.evaluated = -1, -1
        self.round: deque[Group | Evaluation] | None = (
            None  # None: the next question begins a new one
        )

    def get(self, timeout: float) -> Group | Evaluation:
        if self.round is None:
            self.round = deque(self.search())
        if self.round:
            return self.round.popleft()
        self.round = None
        raise queue.Empty

    def qsize(self) -> int:
        return 1_000_000  # more than a round has, which is made when it is asked for

    def search(self) -> list[Group | Evaluation]:
        config, found = self.config, []
        new = self.weights.version > self.version
        if new:
            with self.weights.read(0) as (self.version, tensors):
                self.policy.load_state_dict(
                    tensors, strict=False
                )  # not strict: a tied tensor comes under one name only
            self.board.set("searcher 0", "version", self.version)
        if self.evaluated < self.weights.evaluation_version or self.version == 0 > self.evaluated:
            self.evaluated = self.version
            found.append(
                Evaluation(
                    self.version,
                    self.accuracy(self.policy),
                    len(self.test),
                    long_prompts=0,
                    unscored=0,
                )
            )
        if not config.lockstep:
            first_fill = -(
                -config.initial_responses // config.samples_per_query
            )  # the same whatever k
            return found + self.groups(
                [None] * (self.groups_per_sync if self.started else first_fill)
            )
        if not new:
            return found
        for step in batches_of_version(self.version, config.constant_staleness, config.steps):
            found += self.groups([step] * config.queries_per_batch)
        return found

    def groups(self, batches: list[int | None]) -> list[Group]:
        config = self.config
        queries = [
            self.train[self.order[(self.started + i) % len(self.train)]]
            for i in range(len(batches))
        ]
        self.started += len(batches)
        s = config.samples_per_query
        rows = [query for query in queries for _ in range(s)]
        prompts, responses, texts, finished, rewards = self.generate(
            self.policy, rows, greedy=False
        )
        with torch.no_grad():
            behavior, reference = (
                response_logprobs(m, prompts, responses, config.temperature).numpy()
                for m in (self.policy, self.reference)
            )
        return [
            Group(
                query_id=query.id,
                version=self.version,
                last_version=self.version,
                reference_version=0,
                batch=batch,
                prompt=prompts[i],
                lengths=np.array([len(r) for r in responses[i : i + s]], np.int32),
                tokens=np.concatenate(responses[i : i + s]),
                ref_logprobs=np.concatenate(
                    [reference[j, : len(responses[j])] for j in range(i, i + s)]
                ),
                behavior_logprobs=np.concatenate(
                    [behavior[j, : len(responses[j])] for j in range(i, i + s)]
                ),
                rewards=rewards[i : i + s],
                finished=np.array(finished[i : i + s]),
                temperature=config.temperature,
            )
            for i, query, batch in zip(range(0, len(rows), s), queries, batches)
        ]

    @torch.no_grad()
    def generate(self, policy, queries: list, greedy: bool):
        """One response to each query (their prompts have one length): prompt ids, response ids with the end-of-sequence token, texts, whether
        they were finished or cut off, rewards."""
        ids = torch.tensor(self.tokenizer([query.prompt for query in queries]).input_ids)
        sampling = (
            dict(do_sample=False)
            if greedy
            else dict(do_sample=True, temperature=self.config.temperature, top_k=0)
        )
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
        rewards = score(
            self.task,
            [
                Unscored(None, *row)
                for row in zip(queries, [[t] for t in texts], [[f] for f in finished])
            ],
        )
        return list(ids.numpy().astype(np.int32)), responses, texts, finished, rewards

    def accuracy(self, policy) -> float:
        """Share of held-out queries whose greedy response is right."""
        return float(self.generate(policy, self.test, greedy=True)[-1].mean())

    def measure(self, policy) -> dict[str, float]:
        """What the policy does with held-out queries. reward: mean over SAMPLES samples; kl: to the reference, nats a response; distinct: how
        many different right responses the samples of a query hold."""
        queries = [query for query in self.test for _ in range(SAMPLES // len(self.test))]
        prompts, responses, texts, finished, rewards = self.generate(policy, queries, greedy=False)
        with torch.no_grad():
            ours, reference = (
                response_logprobs(m, prompts, responses, self.config.temperature).sum(1)
                for m in (policy, self.reference)
            )
        right = {
            (query.id, text) for query, text, reward in zip(queries, texts, rewards) if reward == 1
        }
        return {
            "accuracy": self.accuracy(policy),
            "reward": float(rewards.mean()),
            "kl": float((ours - reference).mean()),
            "distinct": len(right) / len(self.test),
        }


def train(settings: dict, groups_per_sync: int = 0) -> dict[str, float]:
    """A run with these settings over the task's preset, from the first step to the last, measured at its end."""
    torch.set_num_threads(1)
    preset = next(iter(find_presets(settings["task"]).values()))
    config = Config(**preset | {"eval_every": 0, "checkpoint_every": 0, "searchers": 1} | settings)
    config.settle()
    check(config)
    config.model = load_task(config.task).base_model()
    with (
        tempfile.TemporaryDirectory() as run_dir,
        contextlib.redirect_stdout(open(os.devnull, "w")),
    ):
        (Path(run_dir) / "logs").mkdir()
        weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
        board = Board(["trainer", "searcher 0"])
        searcher = InlineSearcher(config, weights, board, groups_per_sync)
        trainer = Trainer(config, weights, searcher, board, run_dir)
        trainer.train()
        return searcher.measure(trainer.learner.policy)


def run_all(jobs: list[dict], file: Path, processes: int = 2) -> list[dict]:
    """A finished line per job, with its "result"; a job that is listed twice is run once, and those that `file` already holds, of the same base model,
    are not run again. A job is {"settings", "groups_per_sync"}."""
    file.parent.mkdir(exist_ok=True)
    tasks = {job["settings"]["task"] for job in jobs}
    models = {
        task: Path(load_task(task).base_model()).name for task in tasks
    }  # built once, before several processes want them
    lines = [line for line in read_lines(file) if line["base_model"] in models.values()]
    done = {json.dumps(line["job"], sort_keys=True): line for line in lines}
    keys = {json.dumps(job, sort_keys=True): job for job in jobs}
    missing = [job for key, job in keys.items() if key not in done]
    start = time.monotonic()
    with (
        multiprocessing.get_context("spawn").Pool(
            min(processes, len(os.sched_getaffinity(0)))
        ) as pool,
        open(file, "a") as out,
    ):
        for i, line in enumerate(pool.imap_unordered(_run, missing), 1):
            line["base_model"] = models[line["job"]["settings"]["task"]]
            print(json.dumps(line), file=out, flush=True)
            done[json.dumps(line["job"], sort_keys=True)] = line
            if i % 10 == 0 or i == len(missing):
                print(f"{i} of {len(missing)} runs, {time.monotonic() - start:.0f} s", flush=True)
    return [done[json.dumps(job, sort_keys=True)] for job in jobs]


def _run(job: dict) -> dict:
    start = time.monotonic()
    result = train(**job)
    return {"job": job, "result": result, "seconds": round(time.monotonic() - start, 1)}


def number(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation (of a sample; 0 of a single value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def spread(values: list[float]) -> str:
    mean, deviation = number(values)
    digits = 1 if abs(mean) >= 10 else 3
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"
