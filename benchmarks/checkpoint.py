"""Measure what a checkpoint costs the trainer while it is written.

    python benchmarks/checkpoint.py             # 100 M parameters, four minutes on 2 cores
    python benchmarks/checkpoint.py --quick     # 10 M parameters, in half a minute

A whole Trainer makes steps on what its buffer holds, on the cores that it has in a run, and
searchers are left out. It saves a checkpoint now and then. Steps that overlap none are compared
with those from the beginning of a checkpoint's copy to the end of its write, in the same run.

copy         of weights and moments to host memory: for this long the trainer makes no step
write        from there to the rename, in a thread, which reads each file back for its checksum;
             its CPU seconds are those of that thread
busy share   of the time, in which the trainer is in a step
speed        steps in a time, against the median of the steps that overlap no checkpoint

Writes benchmarks/results/checkpoint.md; with --quick benchmarks/results/quick/.
"""

import os
import queue
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import arguments, byte_model, save, table

import models.device
from buffer import Group
from config import Config
from models.policy import weight_shapes
from runtime.checkpoints import writer
from runtime.processes.places import find_places
from runtime.record.timeline import read_spans
from runtime.transport.board import Board
from trainer import Trainer
from weights import SharedWeights, num_elements

SHAPES = {"10 M": (384, 6), "100 M": (768, 14)}  # hidden size, layers
PROMPT, TOKENS, RESPONSES = 8, 24, 4  # of the one query of a batch
STEPS, PERIOD = 200, 50  # the last checkpoint is the final one: no step is made meanwhile


@dataclass
class Write:
    """Of one checkpoint: when the thread began and ended, and its CPU seconds."""

    start: float
    end: float
    cpu: float


@dataclass
class Figures:
    """Of one checkpoint: seconds, steps and shares."""

    copy: float
    write: float
    cpu: float
    steps: int
    busy: float
    speed: float


def group(query: int, rng: np.random.Generator) -> Group:
    """Make a group of random tokens, that two versions have made: no mismatch is measured."""
    size = RESPONSES * TOKENS
    return Group(
        query_id=query,
        version=0,
        last_version=1,
        reference_version=0,
        batch=None,
        prompt=np.ones(PROMPT, np.int32),
        lengths=np.full(RESPONSES, TOKENS, np.int32),
        tokens=rng.integers(1, 256, size, dtype=np.int32),
        ref_logprobs=np.full(size, -5.5, np.float32),
        behavior_logprobs=np.full(size, -5.5, np.float32),
        rewards=rng.integers(0, 2, RESPONSES).astype(np.float32),
        finished=np.ones(RESPONSES, bool),
        temperature=1.0,
    )


def train(directory: Path, hidden: int, layers: int) -> tuple[list[Write], int]:
    """Train a random model. Returns the writes, and the number of parameters."""
    byte_model(
        str(directory / "model"),
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        vocab_size=257,
    )
    (directory / "logs").mkdir()
    config = Config(
        model=str(directory / "model"),
        searchers=1,
        steps=STEPS,
        queries_per_batch=1,
        responses_per_query=RESPONSES,
        samples_per_query=RESPONSES,
        sync_period=STEPS,
        eval_every=0,
        checkpoint_every=PERIOD,
    )
    shapes, writes = weight_shapes(config), []
    weights = SharedWeights(shapes, torch.float32, readers=1)
    board = Board(["trainer", "searcher 0"])
    trainer = Trainer(config, weights, queue.Queue(), board, str(directory))
    rng = np.random.default_rng(0)
    trainer.batches.add([group(query, rng) for query in range(100)], 0)
    trainer.batches.wanted, trainer.evaluations.arrived_version = 1, 0  # of the base model
    write = writer.write_checkpoint

    def timed(*its_arguments) -> float:
        start, cpu = time.monotonic(), time.thread_time()
        seconds = write(*its_arguments)
        writes.append(Write(start, time.monotonic(), time.thread_time() - cpu))
        return seconds

    writer.write_checkpoint = timed
    trainer.train()
    writer.write_checkpoint = write
    return writes, num_elements(shapes)


def evaluate(run_dir: Path, writes: list[Write]) -> tuple[np.ndarray, float, list[Figures]]:
    """Read the run's timeline.

    Returns the seconds from the end of a step to that of the next, where no checkpoint is between
    them or beside them, the busy share there, and figures of each checkpoint but the final one.
    """
    spans = read_spans(str(run_dir))["trainer"]
    steps = np.array([span[1:] for span in spans if span[0] == "step"])[2:]  # the first warm up
    copies = [span[1:] for span in spans if span[0] == "checkpoint"]
    windows = [(copy[0], write.end) for copy, write in zip(copies, writes)][:-1]
    starts, ends = steps[:, 0], steps[:, 1]
    is_clean = np.ones(len(steps) - 1, bool)  # from the end of step i to that of step i + 1
    for begin, end in windows:
        is_clean &= (ends[1:] <= begin) | (ends[:-1] >= end)
    clean = np.diff(ends)[is_clean]
    busy = (ends - starts)[1:][is_clean].sum() / clean.sum()
    figures = []
    for copy, write, (begin, end) in zip(copies, writes, windows):
        inside = (starts >= begin) & (starts < end)
        length = ends[inside][-1] - begin
        in_steps = (ends - starts)[inside].sum()
        one = Figures(
            copy=copy[1] - copy[0],
            write=write.end - write.start,
            cpu=write.cpu,
            steps=int(inside.sum()),
            busy=in_steps / length,
            speed=inside.sum() * float(np.median(clean)) / length,
        )
        figures.append(one)
    return clean, float(busy), figures


def main() -> None:
    quick = arguments(__doc__).quick
    cores = sorted(os.sched_getaffinity(0))
    own = find_places(Config())[0].cores
    os.sched_setaffinity(0, own)  # the writer's thread too: it has the trainer's cores
    torch.set_num_threads(len(own))
    name = "10 M" if quick else "100 M"
    with tempfile.TemporaryDirectory() as directory:
        writes, parameters = train(Path(directory), *SHAPES[name])
        clean, busy, figures = evaluate(Path(directory), writes)
    os.sched_setaffinity(0, cores)  # the machine is all of them
    low, high = np.percentile(clean, [5, 95])
    lines = [
        [
            str(PERIOD * (i + 1)),
            f"{one.copy:.3f}",
            f"{one.write:.1f}",
            f"{one.cpu:.2f}",
            str(one.steps),
            f"{one.busy:.3f}",
            f"{one.busy / busy:.3f}",
            f"{one.speed:.3f}",
        ]
        for i, one in enumerate(figures)
    ]
    header = [
        "step",
        "copy, s",
        "write, s",
        "of CPU",
        "steps meanwhile",
        "busy share",
        "of that without",
        "speed, of that without",
    ]
    save(
        "checkpoint",
        quick,
        f"{parameters / 1e6:.0f} M parameters, fp32, a checkpoint of "
        f"{12 * parameters / 2**20:.0f} MiB; the trainer on {len(own)} of the cores, on "
        f"{models.device.device().type}. Without a checkpoint: {np.median(clean):.3f} s a step "
        f"(5 % under {low:.3f}, 5 % over {high:.3f}), busy share {busy:.3f}.",
        table(header, lines),
        f"The last write, while no step is made: {writes[-1].end - writes[-1].start:.1f} s.",
    )


if __name__ == "__main__":
    sys.exit(main())
