"""Measure a step of two trainer processes with a core each against one process with both cores.

    python benchmarks/sharded_step.py             # 10 minutes on 2 cores
    python benchmarks/sharded_step.py --quick     # the smallest model, in a minute

One process and two (--trainer_processes 2) live side by side and make steps in turns, so that the
machine's pace is the same for both: 4 queries x 8 responses of 64 + 64 tokens, one query at a time,
fp32. Publishing is weights() into SharedWeights. Memory is a process's most since its policy was
loaded (VmHWM), beside what --plan counts for it.
Writes benchmarks/results/sharded_step.md; with --quick benchmarks/results/quick/.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing
from common import arguments, byte_model, save, table

from buffer import Row
from config import Config
from learner import Learner
from models.policy import weight_shapes
from models.sharding import OneProcess, connect
from runtime.planning.memory_trial import largest_micro_batch
from runtime.planning.needs import GIB, MEMORY, PROCESS_BYTES, Needs
from runtime.processes import children
from runtime.processes.places import Place, find_places
from weights import SharedWeights, num_elements

SHAPES = {"small": (256, 4), "medium": (512, 8), "large": (1024, 8)}  # hidden size, layers
QUERIES, STEPS, TIMEOUT = 4, 7, 600.0
VOCABULARY = 32_000


class Contestant:
    """What one rank has: a learner, what it publishes to, and its clock."""

    def __init__(self, config: Config, ranks: OneProcess):
        self.config, self.ranks = config, ranks
        self.learner = Learner(config, print, ranks)
        if ranks.rank == 0:
            self.slots = SharedWeights(weight_shapes(config), torch.float32, readers=1)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self.version = 0

    def step(self) -> float:
        """Make a step. Returns its seconds."""
        rows = rows_of_step(self.config, self.version)
        start = time.perf_counter()
        self.learner.update(rows)
        return time.perf_counter() - start

    def publish(self) -> float:
        """Publish the weights. Returns the seconds."""
        self.version += 1
        start = time.perf_counter()
        self.slots.publish(self.version, self.learner.weights())
        return time.perf_counter() - start

    def memory(self) -> list[float]:
        """The most that each rank had, in GiB."""
        self.ranks.call("memory")
        lines = Path("/proc/self/status").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        return self.ranks.gather(kib * 1024 / GIB)

    def __getattr__(self, name: str):
        return getattr(self.learner, name)  # what rank 0 calls on its learner


def rows_of_step(config: Config, seed: int) -> list[Row]:
    """Make a batch of responses of full length, each step another."""
    rng, rows = np.random.default_rng(seed), []
    for row in largest_micro_batch(config, VOCABULARY) * QUERIES:
        tokens = rng.integers(VOCABULARY, size=config.max_response_tokens)
        rows.append(replace(row, tokens=tokens))
    return rows


def compete(config: Config, ranks: OneProcess, connection: Connection) -> None:
    """A process: rank 0 does what it is told through its connection, the others follow."""
    contestant = Contestant(config, ranks)
    if ranks.rank:
        ranks.follow(contestant, beat=lambda: None)
        return
    connection.send("ready")
    while (name := connection.recv()) != "end":
        connection.send(getattr(contestant, name)())


@contextmanager
def contestants(config: Config, cores: list[int], run_dir: str) -> Iterator[Connection]:
    """Start as many processes as the configuration says, on these cores. Yields what tells them."""
    size = config.trainer_processes
    ours, theirs = torch.multiprocessing.get_context("spawn").Pipe()
    ranks = connect(size, TIMEOUT)
    started = []
    for rank in ranks:
        place = Place(f"{size} {rank.rank}", None, cores[rank.rank :: size])
        target = "sharded_step:compete"
        started.append(children.start(place, target, (config, rank, theirs), run_dir))
    for connection in [theirs, *(end for rank in ranks for end in rank.connections)]:
        connection.close()
    try:
        ours.recv()
        yield ours
        ours.send("end")
        for process in started:
            process.join(10)
    finally:
        for process in started:
            children.kill(process)


def ask(connection: Connection, what: str):
    connection.send(what)
    if not connection.poll(TIMEOUT):
        raise TimeoutError(f"{what} took longer than {TIMEOUT:.0f} s")
    return connection.recv()


def planned(config: Config) -> float:
    """What the plan counts for a trainer process, without the shared memory, in GiB."""
    needs = Needs(config, find_places(config, []), {})
    own = [need for need in needs.count([]) if need.process == "trainer" and need.place == MEMORY]
    # Checkpoints and model/ are not written here.
    own = [need for need in own if "checkpoints" not in need.purpose]
    return sum(need.bytes for need in own if "model/" not in need.purpose) / GIB


def measure(hidden: int, layers: int, directory: str) -> list[str]:
    """Measure a model. Returns a line of the table."""
    byte_model(
        directory,
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
    )
    one = Config(
        model=directory,
        queries_per_batch=QUERIES,
        responses_per_query=8,
        samples_per_query=8,
        max_prompt_tokens=64,
        max_response_tokens=64,
        low_memory="off",
    )
    two = Config(**vars(one) | {"trainer_processes": 2})
    cores = sorted(os.sched_getaffinity(0))[:2]
    (Path(directory) / "logs").mkdir(exist_ok=True)
    with (
        contestants(one, cores, directory) as single,
        contestants(two, cores, directory) as double,
    ):
        steps: dict[Connection, list[float]] = {single: [], double: []}
        publishes: dict[Connection, list[float]] = {single: [], double: []}
        for _ in range(STEPS):
            for connection in (single, double):
                steps[connection].append(ask(connection, "step"))
                publishes[connection].append(ask(connection, "publish"))
        memory = [max(ask(connection, "memory")) for connection in (single, double)]
    shapes = weight_shapes(one)
    # The first of each makes moments, and fills slots for the first time.
    ratios = np.array(steps[double][2:]) / np.array(steps[single][2:])
    shared = 3 * 4 * num_elements(shapes) / GIB  # of rank 0, in VmHWM too
    return [
        f"{num_elements(shapes) / 1e6:.0f} M",
        f"{np.median(steps[single][2:]):.2f} s",
        f"{np.median(steps[double][2:]):.2f} s",
        f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})",
        f"{np.median(publishes[single][3:]):.3f} s",
        f"{np.median(publishes[double][3:]):.3f} s",
        f"{memory[0] - shared:.2f} / {planned(one):.2f}",
        f"{memory[1] - shared:.2f} / {planned(two):.2f}",
    ]


def main() -> None:
    quick = arguments(__doc__).quick
    lines = []
    for name in ["small"] if quick else SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            lines.append(measure(*SHAPES[name], directory))
            print(lines[-1], flush=True)
    header = [
        "parameters",
        "a step, one process",
        "two",
        "two / one (range)",
        "a publish, one",
        "two",
        "memory measured / planned, one, GiB",
        "each of two, GiB",
    ]
    save(
        "sharded_step",
        quick,
        f"Medians of {STEPS - 2} steps, in turns. Python and its libraries are in the memory, "
        f"{PROCESS_BYTES / GIB:.1f} GiB by the plan; the slots of SharedWeights are not.",
        table(header, lines),
    )


if __name__ == "__main__":
    sys.exit(main())
