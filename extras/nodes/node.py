"""A node of a Ray cluster: a Supervisor and its searchers, as one machine has them (--ray).

It has weights, a status table and queues of its own, and draws the queries in an order of its own.
The driver (extras/nodes/cluster.py) brings new weights, and collects what is found.
"""

import dataclasses
import hashlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import torch

from config import Config, UserError
from launch.places import Place, find_gpus, find_places, resolve, searchers_of
from launch.resume import ROOT, find_versions
from launch.supervisor import Supervisor
from models.folder import fetch_weights
from rollouts import Group
from runtime.transport.messages import Evaluation, Notice
from runtime.transport.status import StatusTable
from tasks import load_task
from weights import SharedWeights

# Columns of the status table.
COUNTED = "tokens busy waited restarts long_prompts unscored_groups".split()
COLLECT_SECONDS = 0.1  # that a call waits for groups: calls are dearer than groups
Weights = dict[str, np.ndarray]


@dataclass
class Found:
    """What a node has to say when it is asked."""

    items: list[Group | Evaluation | Notice]
    row: dict[str, float]  # of the driver's status table: its searchers taken as one
    logs: dict[str, str]  # by name, if there is a Notice: something has died


def describe_environment() -> dict[str, str]:
    """What must be the same on all nodes, by name."""
    code = hashlib.blake2b(digest_size=6)
    others = "tests", "benchmarks", "examples"  # a run executes none of these, nor what is hidden
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    own = (path for path in paths if path.parts[0] not in others and path.parts[0][0] != ".")
    for path in sorted(own):
        code.update(str(path).encode() + (ROOT / path).read_bytes())
    # One node may have the builds for a CPU: vLLM's has another name, torch's ends in "+cpu".
    versions = {
        package.removesuffix("-cpu"): number.split("+")[0]
        for package, number in (find_versions() | {"ray": version("ray")}).items()
    }
    return {"the project's files": code.hexdigest()} | versions


def find_difference(environment: dict[str, str]) -> str:
    """Name what this machine has otherwise than the driver's, which is given; "" for nothing."""
    own = describe_environment()
    for what, value in environment.items():
        if own.get(what) != value:
            return f"{what} {own.get(what)}, the driver's machine has {value}"
    return ""


class Node:
    """The actor of a node. Each call is short, and all are made one after the other.

    config: not resolved for a machine. seeds: that no other node of the run has, for the order of
    its queries and its samples. evaluates: whether it evaluates the base model. target: as of
    Supervisor. environment: of the driver's machine. Raises UserError where this one's is another.
    """

    def __init__(
        self,
        config: Config,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        seeds: tuple[int, ...],
        evaluates: bool,
        target: str,
        environment: dict[str, str],
    ):
        if difference := find_difference(environment):
            raise UserError(f"this node has {difference}")
        # Ray's processes ignore it, and then nobody learns how a child ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        start_tracker_apart()
        self.run_dir = tempfile.mkdtemp(prefix="tba-node-")
        Path(self.run_dir, "logs").mkdir()
        wanted = dict(trainer_processes=1, searchers=config.searchers_per_node)
        seed = int(np.random.SeedSequence((config.seed, *seeds)).generate_state(1)[0])
        config = dataclasses.replace(config, output_dir=self.run_dir, seed=seed, **wanted)
        places = find_node_places(config)
        self.places, config = searchers_of(places), resolve(config, places)
        self.notices: deque[Notice] = deque()
        task = load_task(config.task, **config.options)
        task.prepare()
        model, trust = config.model or task.base_model(), config.trust_remote_code
        model = fetch_weights("--model", model, trust_remote_code=trust, is_policy=True)
        config = dataclasses.replace(config, model=model)
        self.weights = SharedWeights(shapes, dtype, len(self.places))
        self.status = StatusTable([place.name for place in self.places])
        self.status.set(self.places[0].name, "evaluated", -1 if evaluates else 0)
        self.supervisor = Supervisor(
            config, self.places, self.weights, self.status, self.run_dir, target, self.say
        )

    def say(self, text: str) -> None:
        """Have the driver show a line."""
        self.notices.append(Notice(text))

    def describe_places(self) -> str:
        """Say where each of the searchers runs."""
        return ", ".join(f"{place.name} on {place}" for place in self.places)

    def collect(self, room: int, last_step_done: bool) -> Found:
        """Return what the searchers found since the last call, at most so many groups.

        Waits COLLECT_SECONDS for them. Raises RunFailed when a searcher dies again and again.
        """
        self.status.last_step_done = last_step_done
        self.supervisor.check()
        items, deadline = [], time.monotonic() + COLLECT_SECONDS
        with suppress(queue.Empty):
            while len(items) < room:
                rest = max(1e-3, deadline - time.monotonic())
                items.append(self.supervisor.rollout_queue.get(timeout=rest))
        for item in items:
            if isinstance(item, Evaluation):
                self.status.set(self.places[0].name, "evaluated", item.version)
        # Threads may append meanwhile.
        notices = [self.notices.popleft() for _ in range(len(self.notices))]
        logs = self.logs() if notices else {}
        return Found(items + notices, self.row(), logs)

    def row(self) -> dict[str, float]:
        """Take the searchers as one: sums, and else what is lowest; the beat, from now."""
        sums = {column: self.status.total(column) for column in COUNTED}
        lowest = {
            column: float(self.status.words[:, StatusTable.COLUMNS.index(column)].min())
            for column in ("beat", "ready", "version")
        }
        return sums | lowest | {"beat": lowest["beat"] - time.monotonic()}

    def take_weights(self, version: int, weights: Weights, evaluate: bool) -> bool:
        """Publish a version on this node. False: its searchers still read what would be written."""
        return self.weights.publish(version, as_tensors(weights), evaluate)

    def logs(self) -> dict[str, str]:
        """Read the logs of its searchers: texts by the file's name."""
        files = Path(self.run_dir, "logs").glob("*.log")
        return {file.name: file.read_text(errors="replace") for file in files}

    def stop(self) -> dict[str, str]:
        """End the searchers. Returns logs()."""
        self.status.stop = True
        self.supervisor.stop()
        logs = self.logs()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        return logs


def start_tracker_apart() -> None:
    """Start Python's resource tracker, which unlinks the semaphores of who was killed, on its own.

    As this process's child, which Python makes it, Ray would kill it first.
    """
    reading, writing = os.pipe()
    code = f"from multiprocessing.resource_tracker import main; main({reading})"
    # The shell ends at once, and then it is nobody's child.
    shell = ["sh", "-c", 'setsid "$@" &', "sh", sys.executable, "-c", code]
    subprocess.run(shell, pass_fds=[reading], check=True)
    os.close(reading)
    resource_tracker._resource_tracker._fd = writing  # as in a child of who started it


def find_node_places(config: Config) -> list[Place]:
    """Return a place for each searcher of a node, on every GPU or on some of the cores.

    And one for a trainer, as find_places does, which stays empty.
    """
    gpus = find_gpus()
    if not gpus:
        return find_places(config, [])
    if config.searchers and config.searchers > len(gpus):
        raise UserError(
            f"--searchers_per_node is {config.searchers}, but a node has {len(gpus)} GPUs"
        )
    # Nobody trains there: a GPU that is not there is the trainer's.
    return find_places(config, ["none", *gpus])


def as_arrays(tensors: dict[str, torch.Tensor]) -> Weights:
    """View tensors as arrays: bf16 as its bits, for numpy has none."""
    return {
        name: (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy()
        for name, t in tensors.items()
    }


def as_tensors(arrays: Weights) -> list[tuple[str, torch.Tensor]]:
    """Undo as_arrays. They are read only: they lie in Ray's object store."""
    tensors = ((name, torch.from_numpy(array)) for name, array in arrays.items())
    return [(name, t.view(torch.bfloat16) if t.dtype == torch.uint16 else t) for name, t in tensors]
