"""The asynchronous side, action by action.

A searcher runs against a scripted trainer, and a trainer against a scripted searcher. tests/pinned/
holds what each of the two does (loads, adds, sends, publishes, samples, saves), in order. A change
of that order is a change of behaviour. To record it anew, delete the file: the test writes it, and
fails once. Lengths, rewards and draws come from seeds alone, so that every machine gives the same.
"""

import queue
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_group

from buffer import ReplayBuffer
from config import Config
from learner import Learner
from models.architecture import weight_shapes
from models.engine import Engine
from models.policy import load_policy
from rollouts import Group
from runtime.checkpoints.writer import CheckpointWriter
from runtime.record.report import Report
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable
from searcher import Searcher
from trainer import Trainer
from weights import SharedWeights

PINNED = Path(__file__).parent / "pinned"

# Lengths and rewards that do not depend on the sampled tokens.
TASK = """
from tasks import Query, Task

class Pinned(Task):
    evaluation_sampling = {"temperature": 0.0, "min_tokens": 4, "max_tokens": 4}

    def queries(self, split):
        lengths = [50 if i % 13 == 5 else 3 + i % 9 for i in range(40 if split == "train" else 6)]
        queries = [Query(i, "x" * length, i) for i, length in enumerate(lengths)]
        # Of those that are too long, one is empty instead, and one half of an emoji.
        empty = 18 if split == "train" else 5
        queries[empty] = Query(empty, "", 0)
        return [Query(31, "\\ud83d", 0) if query.id == 31 else query for query in queries]

    def sampling(self, rng):
        length = int(rng.integers(3, 10))
        return {"min_tokens": length, "max_tokens": length}

    def score(self, queries, responses, finished):
        if queries[0].id == 11:
            raise ValueError("no score for an 11")
        return [float((query.id + i) % 3) for i, query in enumerate(queries)]
"""


class Record:
    """The actions, one a line; repetitions of the last line are left out."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.lines = monkeypatch, []

    def __call__(self, line: str) -> None:
        if self.lines[-1:] != [line]:
            self.lines.append(line)

    def watch(self, owner: type, method: str, describe) -> None:
        """Record describe(result, self, *arguments), if anything, after each call of the method."""
        original = getattr(owner, method)

        def watched(*arguments, **keywords):
            result = original(*arguments, **keywords)
            if line := describe(result, *arguments, **keywords):
                self(line)
            return result

        self.monkeypatch.setattr(owner, method, watched)

    def compare(self, name: str) -> None:
        path, text = PINNED / name, "\n".join(self.lines) + "\n"
        if not path.exists():
            path.write_text(text)
            pytest.fail(f"{path} was not there: it is written, look at it")
        assert text.splitlines() == path.read_text().splitlines()


class ScriptedQueue:
    """A queue that records what the searcher sends. While `refusals` lasts, it is full."""

    def __init__(self, record: Record):
        self.record, self.refusals = record, 0

    def put_nowait(self, item) -> None:
        if self.refusals:
            self.refusals -= 1
            self.record("refused")
            raise queue.Full
        if isinstance(item, Evaluation):
            what = f"evaluation of version {item.version} on {item.queries} queries"
            self.record(f"send {what}, {item.unscored} unscored, {item.metrics['score'][0]:.4f}")
            return
        lengths, rewards = sorted(set(item.lengths.tolist())), item.rewards[:4].tolist()
        logprobs = [item.tokens[name] for name in ("ref_logprob", "behavior_logprob")]
        of_reference, of_vllm = (np.isfinite(values).sum() for values in logprobs)
        self.record(
            f"send query {item.query_id}: versions {item.version} to {item.last_version}, "
            f"reference {item.reference_version}, batch {item.batch}, prompt {len(item.prompt)}, "
            f"lengths {lengths} x {len(item.lengths)}, rewards {rewards}, "
            f"{of_reference} and {of_vllm} log-probabilities, temperature {item.temperature}"
        )


def test_a_searcher_does_what_it_did_when_this_was_recorded(untied_model, tmp_path, monkeypatch):
    (tmp_path / "pinned.py").write_text(TASK)
    (tmp_path / "logs").mkdir()
    sizes = dict(samples_per_query=64, responses_per_query=4)
    lengths = dict(max_prompt_tokens=20, max_response_tokens=10)
    own = dict(task=str(tmp_path / "pinned.py"), model=str(untied_model), temperature=0.9)
    config = Config(**own, **sizes, **lengths, searchers=1)
    weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
    status, record = StatusTable(["trainer", "searcher 0"]), Record(monkeypatch)
    found, original, steps, seen = ScriptedQueue(record), Engine.step, 0, {}
    tensors = dict(load_policy(config, torch.device("cpu")).named_parameters()).items()
    columns = ("cursor", "version", "evaluated", "unscored_groups", "long_prompts")

    def script(self) -> list:
        """Play the trainer's part, timed by the searcher's engine steps."""
        nonlocal steps
        steps += 1
        for version in {10: [2], 20: [4], 22: [6], 40: [8], 60: [10, 12]}.get(steps, []):
            assert weights.publish(version, tensors, evaluate=version == 4)
            record(f"  the trainer publishes version {version}")
        if steps == 50:
            found.refusals = 10
        status.stop = steps == 80
        outputs = original(self)
        record(f"step {steps}, pins {weights.pins.tolist()}, rows {self.rows}")
        return outputs

    def added(result, self, request, prompt, **sampling) -> str:
        settings = sorted(sampling.items())
        return f"add {request}, prompt {len(prompt)}, version {self.version}, {settings}"

    def written(result, self, name: str, column: str, value: float) -> str | None:
        if column not in columns or seen.get(column, 0.0) == value:
            return None
        seen[column] = value
        return f"status: {column} {value:g}"

    monkeypatch.setattr(Engine, "step", script)
    record.watch(Engine, "add", added)
    record.watch(Engine, "load", lambda *_: f"load version {weights.version}")
    record.watch(StatusTable, "set", written)
    Searcher(config, 0, weights, found, status, str(tmp_path)).search()
    record.compare("searcher.txt")


class ScriptedSearcher:
    """The trainer's queue: a script fills it with two groups a step, and with late evaluations."""

    # Trainer steps at which nothing comes until the trainer has asked five times.
    SILENT = range(14, 23)

    def __init__(self, weights: SharedWeights):
        self.weights, self.rng = weights, np.random.default_rng(0)
        self.waiting: list = []
        self.step, self.asked, self.groups, self.evaluated = -1, 0, 0, -1

    def qsize(self) -> int:
        step = self.trainer.step
        self.asked = self.asked + 1 if step == self.step else 1
        if step != self.step and step in (5, 6, 7):  # at step 6 slow readers hold every slot
            others = {0, 1, 2} - {int(self.weights.newest_slot)}
            self.weights.pins[:] = torch.tensor([-1, -1] if step == 7 else sorted(others))
        new = step != self.step or step == 0 and self.asked <= 4
        if new and step not in self.SILENT or self.asked == 5 and self.step in self.SILENT:
            self.waiting += [self.draw_group() for _ in range(2)]
        if self.evaluated < self.weights.evaluation_version < step:
            self.evaluated = self.weights.evaluation_version
            self.waiting.append(Evaluation(self.evaluated, {"accuracy": (0.5, 0.2, 0.8)}, 6))
        self.step = step
        return len(self.waiting)

    def draw_group(self) -> Group:
        query, rng = self.groups * 7 % 11, self.rng
        self.groups += 1
        lengths = rng.integers(1, 6, size=4).astype(np.int32)
        total = int(lengths.sum())
        ids = rng.integers(0, 256, size=total)
        names = "ref_logprob", "behavior_logprob"
        logprobs = {name: rng.normal(-5, 1, size=total) for name in names}
        rewards = rng.integers(0, 2, size=4).astype(np.float32)
        own = dict(rewards=rewards, prompt=np.full(3, 65 + query, np.int32))
        return make_group(query, max(0, self.weights.version), lengths, ids, logprobs, **own)

    def get(self, timeout: float):
        return self.waiting.pop(0)


def test_a_trainer_does_what_it_did_when_this_was_recorded(untied_model, tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    sizes = dict(queries_per_batch=2, responses_per_query=3, samples_per_query=4, searchers=1)
    periods = dict(sync_period=2, eval_every=6, checkpoint_every=10)
    draws = dict(max_staleness=6, most_on_policy_prob=0.5, reward_inverse_temperature=1.0)
    own = dict(task="arithmetic", model=str(untied_model), steps=24, initial_responses=24)
    config = Config(**own, **sizes, **periods, **draws)
    weights = SharedWeights(weight_shapes(config), torch.float32, readers=2)
    status, record = StatusTable(["trainer", "searcher 0"]), Record(monkeypatch)
    status.mark_ready("searcher 0")
    found = ScriptedSearcher(weights)
    shown = "step reward staleness_mean staleness_max received buffer_responses".split()
    shown += "buffer_queries skipped_publishes mismatch_version learning_rate".split()

    def identify(rows) -> str:
        return f"queries {[r.query_id for r in rows]} of versions {[r.version for r in rows]}"

    def published(done, self, version, tensors, evaluate=False) -> str:
        outcome = "done" if done else "no free slot"
        return f"publish version {version}, evaluate {evaluate}: {outcome}"

    def added(result, self, groups, step) -> str | None:
        return f"buffer: add {identify(groups)} at step {step}" if groups else None

    def updated(metrics, self, rows) -> str:
        return f"update {len(rows)} rows"

    def said(result, self, text) -> str | None:
        return f"say {text!r}" if "accuracy" in text else None  # the others have seconds in them

    def saved(result, self, step, tensors, arrays, state, may_alias) -> str:
        due, reference = state["evaluation_due"], state["reference_version"]
        own = f"evaluation_due {due}, received {state['received']}, reference {reference}"
        return f"checkpoint at step {step}: {own}"

    found.trainer = Trainer(config, weights, found, status, str(tmp_path))
    record.watch(SharedWeights, "publish", published)
    record.watch(ReplayBuffer, "add", added)
    record.watch(ReplayBuffer, "sample", lambda rows, _, *how: f"sample {how}: {identify(rows)}")
    record.watch(Learner, "update", updated)
    record.watch(Report, "say", said)
    record.watch(Report, "step", lambda _, __, line: f"record { {n: line.get(n) for n in shown} }")
    record.watch(CheckpointWriter, "begin", saved)
    record.watch(Learner, "save_model", lambda *_: "save the model")
    found.trainer.train()
    record.compare("trainer.txt")
