"""Measure what a publish costs, against a plain copy of the same bytes, in fp32 on CPUs.

    python benchmarks/weight_sync.py            # fifteen minutes on 2 cores, 19 GB of memory
    python benchmarks/weight_sync.py --quick    # 10 M and 100 M parameters

SharedWeights.publish of a Llama's tensors, beside 0, 1, 3 and 7 processes that each read every
version as it comes. The writer, on a core of its own, computes for half a second, or ten publishes'
time, before each, as a trainer does: by then they have read the version before. Medians, taken in
turns. What a load costs a searcher is in search.py.
"""

import math
import os
import sys
import time

import numpy as np
import torch
import torch.multiprocessing
from common import arguments, save, show, table_of
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from weights import SharedWeights, num_elements

SIZES = {"10 M": (256, 8), "100 M": (768, 11), "1 B": (2048, 19)}  # hidden size, layers
READERS, PUBLISHES = (0, 1, 3, 7), 10


def compute(seconds: float) -> None:
    """Compute as a trainer does between two syncs.

    The core is awake afterwards, and its caches hold something else.
    """
    end, matrix = time.perf_counter() + seconds, torch.zeros(1024, 1024)
    while time.perf_counter() < end:
        matrix @ matrix


def read(
    weights: SharedWeights, reader: int, cores: list[int], ready: Tensor, active: Tensor
) -> None:
    """Read each version once, in a process on `cores`, while more than `reader` readers are active.

    active: how many are; negative, it ends the process.
    """
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    # One tensor's worth: seven readers' copies would not fit into memory.
    own = torch.zeros(max(map(math.prod, weights.shapes.values())))
    version, ready[reader] = -1, 1
    while active[0] >= 0:
        if active[0] <= reader or weights.version == version:
            time.sleep(0.01)
            continue
        with weights.read(reader) as (version, tensors):
            for tensor in tensors.values():
                own[: tensor.numel()].copy_(tensor.view(-1))


def measure(size: str, cores: list[int]) -> dict[str, str]:
    """Measure a plain copy, and a publish beside each number of readers on these cores."""
    hidden, layers = SIZES[size]
    shape = dict(hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers)
    shape |= dict(num_attention_heads=hidden // 64, vocab_size=10_000, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = SharedWeights(shapes, torch.float32, readers=max(READERS))
    # Not zeros: they would be one page, read again and again.
    source = torch.ones(num_elements(shapes))
    tensors = list(weights._views(source).items())
    for slot in weights.slots:  # in memory, from now on
        slot.zero_()
    ready = torch.zeros(max(READERS), dtype=torch.int64).share_memory_()
    active = torch.zeros(1, dtype=torch.int64).share_memory_()
    spawn = torch.multiprocessing.get_context("spawn")
    readers = [
        spawn.Process(target=read, args=(weights, reader, cores, ready, active), daemon=True)
        for reader in range(max(READERS))
    ]
    for process in readers:
        process.start()
    while not ready.all():  # they import torch
        if not all(process.is_alive() for process in readers):
            sys.exit("a reader died while it started: is there enough memory?")
        time.sleep(0.1)
    times: dict[int, list[float]] = {kind: [] for kind in (-1, *READERS)}  # -1: a copy
    version, pause = 0, 0.5
    for _ in range(PUBLISHES + 1):
        for kind in times:
            active[0] = max(kind, 0)  # these now read the version before
            compute(pause)
            version += 1
            start = time.perf_counter()
            if kind < 0:
                weights.slots[(int(weights.newest_slot) + 1) % len(weights.slots)].copy_(source)
            elif not weights.publish(version, tensors):
                sys.exit("no slot was free: the readers are slower than ten publishes")
            times[kind].append(time.perf_counter() - start)
            pause = max(pause, 10 * times[kind][-1])
    active[0] = -1
    for process in readers:
        process.join(60)
    # The first of each is left out: there, readers map their memory.
    copy, alone, *beside = (np.median(values[1:]) for values in times.values())
    row = {
        "parameters": size,
        "MiB": f"{num_elements(shapes) * 4 / 2**20:.0f}",
        "copy, ms": f"{copy * 1000:.1f}",
        "publish, of copy": f"{alone / copy:.2f}",
    }
    return row | {f"beside {n}, of alone": f"{t / alone:.2f}" for n, t in zip(READERS[1:], beside)}


def main() -> None:
    quick = arguments(__doc__).quick
    own, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [own])  # as a run has its trainer and its searcher on two cores
    torch.set_num_threads(1)
    rows = [show(measure(size, others or [own])) for size in list(SIZES)[: 2 if quick else 3]]
    os.sched_setaffinity(0, [own, *others])  # the machine is all of them
    save("weight_sync", quick, table_of(rows))


if __name__ == "__main__":
    sys.exit(main())
