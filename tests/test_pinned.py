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

from buffer import Group, ReplayBuffer
from config import Config
from learner import Learner
from models.engine import Engine
from models.policy import load_policy, weight_shapes
from runtime.checkpoints.writer import CheckpointWriter
from runtime.record.report import Report
from runtime.transport.board import Board
from runtime.transport.messages import Evaluation, Notice
from searcher import Searcher
from trainer import Trainer
from weights import SharedWeights

PINNED = Path(__file__).parent / "pinned"

TASK = '''
from tasks import Query, Task

class Pinned(Task):
    """Lengths and rewards that do not depend on the sampled tokens."""

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
'''


class Record:
    """The actions, one a line; repetitions of the last line are left out."""

    def __init__(self):
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        if not self.lines or self.lines[-1] != line:
            self.lines.append(line)

    def compare(self, name: str) -> None:
        path, text = PINNED / name, "\n".join(self.lines) + "\n"
        if not path.exists():
            path.write_text(text)
            pytest.fail(f"{path} was not there: it is written, look at it")
        assert text.splitlines() == path.read_text().splitlines()


def watch(monkeypatch, owner: type, method: str, line) -> None:
    """Call line(result, self, *arguments) after each call of owner.method."""
    original = getattr(owner, method)

    def watched(self, *arguments, **keywords):
        result = original(self, *arguments, **keywords)
        line(result, self, *arguments, **keywords)
        return result

    monkeypatch.setattr(owner, method, watched)


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
            self.record(f"send {what}, {item.unscored} unscored, {item.score:.4f}")
            return
        lengths, rewards = sorted(set(item.lengths.tolist())), item.rewards[:4].tolist()
        self.record(
            f"send query {item.query_id}: versions {item.version} to {item.last_version}, "
            f"reference {item.reference_version}, batch {item.batch}, prompt {len(item.prompt)}, "
            f"lengths {lengths} x {len(item.lengths)}, rewards {rewards}, "
            f"{len(item.ref_logprobs)} and {len(item.behavior_logprobs)} log-probabilities, "
            f"temperature {item.temperature}"
        )


def test_a_searcher_does_what_it_did_when_this_was_recorded(untied_model, tmp_path, monkeypatch):
    (tmp_path / "pinned.py").write_text(TASK)
    (tmp_path / "logs").mkdir()
    sizes = dict(samples_per_query=64, responses_per_query=4, reference_reset_period=8)
    lengths = dict(max_prompt_tokens=20, max_response_tokens=10)
    own = dict(task=str(tmp_path / "pinned.py"), model=str(untied_model), temperature=0.9)
    config = Config(**own, **sizes, **lengths, searchers=1)
    weights = SharedWeights(weight_shapes(config), torch.float32, readers=1, reference=True)
    board, record = Board(["trainer", "searcher 0"]), Record()
    found = ScriptedQueue(record)
    tensors = dict(load_policy(config, torch.device("cpu")).named_parameters()).items()
    steps = 0

    def script(self) -> list:
        """Play the trainer's part, timed by the searcher's engine steps."""
        nonlocal steps
        steps += 1
        for version in {10: [2], 20: [4], 22: [6], 40: [8], 60: [10, 12]}.get(steps, []):
            if version == 8:
                assert weights.publish_reference(8, tensors)
            assert weights.publish(version, tensors, evaluate=version == 4)
            record(f"  the trainer publishes version {version}")
        if steps == 50:
            found.refusals = 10
        board.stop = steps == 80
        return original(self)

    original = Engine.step
    monkeypatch.setattr(Engine, "step", script)
    seen = {}
    columns = ("cursor", "version", "evaluated", "unscored_groups", "long_prompts")

    def stepped(result, self) -> None:
        record(f"step {steps}, pins {weights.pins.tolist()}, rows {self.rows}")

    def added(result, self, request, prompt, version, **sampling) -> None:
        settings = sorted(sampling.items())
        record(f"add {request}, prompt {len(prompt)}, version {version}, {settings}")

    def read(*_) -> None:
        record(f"read reference {weights.reference_version}")

    def written(result, self, name: str, column: str, value: float) -> None:
        if column in columns and seen.get(column, 0.0) != value:
            seen[column] = value
            record(f"board: {column} {value:g}")

    watch(monkeypatch, Engine, "step", stepped)
    watch(monkeypatch, Engine, "add", added)
    watch(monkeypatch, Engine, "load", lambda *_: record(f"load version {weights.version}"))
    watch(monkeypatch, SharedWeights, "read_reference", read)
    watch(monkeypatch, Board, "set", written)
    Searcher(config, 0, 0, "searcher 0", weights, found, board, str(tmp_path)).search()
    record.compare("searcher.txt")


def a_group(query_id: int, version: int, reference_version: int, rng: np.random.Generator) -> Group:
    lengths = rng.integers(1, 6, size=4).astype(np.int32)
    total = int(lengths.sum())
    drawn = dict(
        tokens=rng.integers(0, 256, size=total),
        ref_logprobs=rng.normal(-5, 1, size=total).astype(np.float32),
        behavior_logprobs=rng.normal(-5, 1, size=total).astype(np.float32),
        rewards=rng.integers(0, 2, size=4).astype(np.float32),
    )
    own = dict(reference_version=reference_version, prompt=np.full(3, 65 + query_id % 20, np.int32))
    return make_group(query_id, version, lengths, **drawn, **own)


class ScriptedSearcher:
    """The trainer's queue, filled by a script.

    It sends two groups a step, of the newest weights, and none while it is silent. Evaluations come
    late.
    """

    # Trainer steps at which nothing comes until the trainer has asked five times.
    SILENT = range(14, 23)

    def __init__(self, weights: SharedWeights):
        self.weights, self.rng = weights, np.random.default_rng(0)
        self.waiting: list = [Notice("a line for the user")]
        self.step, self.asked, self.groups, self.evaluated = -1, 0, 0, -1

    def qsize(self) -> int:
        step = self.trainer.step
        self.asked = self.asked + 1 if step == self.step else 1
        if step != self.step and step in (5, 6, 7):  # at step 6 slow readers hold every slot
            others = {0, 1, 2} - {int(self.weights.newest[0])}
            self.weights.pins[:] = torch.tensor([-1, -1] if step == 7 else sorted(others))
        new = step != self.step or step == 0 and self.asked <= 4
        if new and step not in self.SILENT or self.asked == 5 and self.step in self.SILENT:
            version, reference = max(0, self.weights.version), self.weights.reference_version
            for _ in range(2):
                query = self.groups * 7 % 11
                self.waiting.append(a_group(query, version, reference, self.rng))
                self.groups += 1
        if self.evaluated < self.weights.evaluation_version < step:
            self.evaluated = self.weights.evaluation_version
            self.waiting.append(Evaluation(self.evaluated, 0.5, 6, 0, 0))
        self.step = step
        return len(self.waiting)

    def get(self, timeout: float):
        return self.waiting.pop(0)


def test_a_trainer_does_what_it_did_when_this_was_recorded(untied_model, tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    sizes = dict(queries_per_batch=2, responses_per_query=3, samples_per_query=4, searchers=1)
    periods = dict(sync_period=2, eval_every=6, reference_reset_period=8, checkpoint_every=10)
    draws = dict(max_staleness=6, most_on_policy_prob=0.5, reward_inverse_temperature=1.0)
    own = dict(task="arithmetic", model=str(untied_model), steps=24, initial_responses=24)
    config = Config(**own, **sizes, **periods, **draws)
    weights = SharedWeights(weight_shapes(config), torch.float32, readers=2, reference=True)
    board, record = Board(["trainer", "searcher 0"]), Record()
    board.loaded("searcher 0")
    found = ScriptedSearcher(weights)
    shown = "step reward staleness_mean staleness_max received buffer_responses".split()
    shown += "buffer_queries skipped_publishes mismatch_version learning_rate".split()

    def published(done, self, version, tensors, evaluate=False) -> None:
        outcome = "done" if done else "no free slot"
        record(f"publish version {version}, evaluate {evaluate}: {outcome}")

    def published_reference(done, self, version, tensors) -> None:
        record(f"publish reference {version}: {done}")

    def added(result, self, groups, step) -> None:
        if groups:
            queries, versions = [g.query_id for g in groups], [g.version for g in groups]
            record(f"buffer: add queries {queries} of versions {versions} at step {step}")

    def sampled(rows, self, *arguments) -> None:
        queries, versions = [row.query_id for row in rows], [row.version for row in rows]
        record(f"sample {arguments}: queries {queries} of versions {versions}")

    def updated(metrics, self, rows) -> None:
        references = [row.reference_version for row in rows]
        record(f"update {len(rows)} rows, references {references}")

    def stepped(result, self, metrics) -> None:
        record(f"record { {name: metrics.get(name) for name in shown} }")

    def saved(result, self, step, tensors, arrays, state, is_last) -> None:
        due, reference = state["evaluation_due"], state["reference_version"]
        own = f"evaluation_due {due}, received {state['received']}, reference {reference}"
        record(f"checkpoint at step {step}: {own}")

    watch(monkeypatch, SharedWeights, "publish", published)
    watch(monkeypatch, SharedWeights, "publish_reference", published_reference)
    watch(monkeypatch, ReplayBuffer, "add", added)
    watch(monkeypatch, ReplayBuffer, "sample", sampled)
    watch(monkeypatch, Learner, "update", updated)
    watch(monkeypatch, Report, "say", lambda result, self, text: record(f"say {text!r}"))
    watch(monkeypatch, Report, "step", stepped)
    watch(monkeypatch, CheckpointWriter, "begin", saved)
    watch(monkeypatch, Learner, "save_model", lambda *_: record("save the model"))
    found.trainer = Trainer(config, weights, found, board, str(tmp_path))
    found.trainer.train()
    record.compare("trainer.txt")
