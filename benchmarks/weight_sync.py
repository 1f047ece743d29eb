"""What a sync costs: publish, readers beside it, and how long a searcher generates nothing, against a plain copy of the same bytes.

    python benchmarks/weight_sync.py            # twenty minutes on 2 cores, 19 GB of memory
    python benchmarks/weight_sync.py --quick    # 10 M and 100 M parameters, in four minutes

publish   SharedWeights.publish of a Llama's tensors, beside 0, 1, 3 and 7 processes that each read every version as it comes; the
          writer, on a core of its own, computes for half a second, or ten publishes' time, before each, as a trainer does: by then
          they have read the version before
load      Engine.load into vLLM, and the engine step behind it, less a step without a load: the time in which a searcher generates nothing;
          that model has an output embedding of its own besides
copy      one tensor of the same bytes, copied
All in fp32, medians, taken in turns. On a GPU, where this has never been run: the trainer's fp32 tensors lie there and are published as bf16, a copy is
one from there into registered memory, at PCIe's rate, and publish is also measured into memory that is registered.
Writes benchmarks/results/weight_sync.md; with --quick benchmarks/results/quick/.
"""

import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
from common import arguments, byte_model, save, table

import torch
import torch.multiprocessing
from torch import Tensor

from runtime import processes
from config import Config
from models.policy import load_policy
from weights import SharedWeights, num_elements

SHAPES = {"10 M": (256, 8), "100 M": (768, 11), "1 B": (2048, 19)}  # hidden size, layers
ENGINE_SIZES = ("10 M", "100 M")  # 1 B: slots, source and vLLM's two copies do not fit into 24 GB
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of what is published, as in a run
READERS = (0, 1, 3, 7)
PUBLISHES = 10


def llama_shapes(hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Names do not matter here."""
    layer = {
        "q": (hidden, hidden),
        "k": (hidden, hidden),
        "v": (hidden, hidden),
        "o": (hidden, hidden),
        "gate": (11 * hidden // 4, hidden),
        "up": (11 * hidden // 4, hidden),
        "down": (hidden, 11 * hidden // 4),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    return {"embedding": (10_000, hidden)} | {
        f"{i}.{name}": shape for i in range(layers) for name, shape in layer.items()
    }


def compute(seconds: float) -> None:
    """As a trainer does between two syncs: the core is awake, and its caches hold something else."""
    end, matrix = time.perf_counter() + seconds, torch.zeros(1024, 1024)
    while time.perf_counter() < end:
        matrix @ matrix


def read(weights: SharedWeights, reader: int, cores: list[int], ready, active) -> None:
    """A process on these cores: reads each version, once, while more than `reader` readers are active; ends when less than none are."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    own = torch.zeros(
        max(map(math.prod, weights.shapes.values()))
    )  # one tensor's worth: seven readers' copies would not fit into memory
    version, ready[reader] = -1, 1
    while active[0] >= 0:
        if active[0] <= reader or weights.version == version:
            time.sleep(0.01)
            continue
        with weights.read(reader) as (version, tensors):
            for tensor in tensors.values():
                own[: tensor.numel()].copy_(tensor.view(-1))


def take_turns(
    kinds: Sequence[str | int], weights: SharedWeights, tensors: list, cast: Tensor, active: Tensor
) -> dict[str | int, list[float]]:
    """Seconds of PUBLISHES + 1 copies or publishes of each kind, beside as many readers as its number."""
    times: dict[str | int, list[float]] = {what: [] for what in kinds}
    version, pause = weights.version, 0.5
    for _ in range(PUBLISHES + 1):
        for what in kinds:
            active[0] = what if what in READERS else 0  # these now read the version before
            compute(pause)
            version += 1
            start = time.perf_counter()
            if what == "copy":
                weights.slots[(int(weights.newest[0]) + 1) % len(weights.slots)].copy_(cast)
            elif not weights.publish(version, tensors):
                sys.exit("no slot was free: the readers are slower than ten publishes")
            times[what].append(time.perf_counter() - start)
            pause = max(pause, 10 * times[what][-1])
    return times


def publish_seconds(
    shapes: dict[str, tuple[int, ...]], cores: list[int], device: torch.device
) -> dict[str | int, float]:
    """Medians: of a plain copy ("copy"), of a publish beside each number of readers on these cores, and on a GPU of one into registered memory."""
    weights = SharedWeights(shapes, DTYPE[device.type], readers=max(READERS))
    source = torch.ones(
        num_elements(shapes), device=device
    )  # zeros would be one page, read again and again
    tensors, cast = list(weights._views(source).items()), source.to(DTYPE[device.type])
    for slot in weights.slots:  # in memory, from now on
        slot.zero_()
    ready, active = (
        torch.zeros(max(READERS), dtype=torch.int64).share_memory_(),
        torch.zeros(1, dtype=torch.int64).share_memory_(),
    )
    spawn = torch.multiprocessing.get_context("spawn")
    children = [
        spawn.Process(target=read, args=(weights, reader, cores, ready, active), daemon=True)
        for reader in range(max(READERS))
    ]
    for child in children:
        child.start()
    while not ready.all():  # they import torch
        if not all(child.is_alive() for child in children):
            sys.exit("a reader died while it started: is there enough memory?")
        time.sleep(0.1)
    if device.type == "cpu":
        times = take_turns(["copy", *READERS], weights, tensors, cast, active)
    else:
        times = take_turns(READERS, weights, tensors, cast, active)
        for slot in weights.slots:
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(slot.data_ptr(), slot.nbytes, 0)
            )
        times |= take_turns(["copy", "registered"], weights, tensors, cast, active)
        for slot in weights.slots:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(slot.data_ptr()))
    active[0] = -1
    for child in children:
        child.join(60)
    return {
        what: float(np.median(values[1:])) for what, values in times.items()
    }  # at the first, readers map their memory


def load_seconds(hidden: int, layers: int, device: torch.device) -> dict[str, float]:
    """Medians: of Engine.load with the step behind it, less a step without; of a plain copy."""
    from models.engine import Engine

    with tempfile.TemporaryDirectory() as directory:
        byte_model(
            directory,
            hidden_size=hidden,
            intermediate_size=11 * hidden // 4,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            vocab_size=10_000,
        )
        config = Config(
            model=directory,
            max_prompt_tokens=64,
            max_response_tokens=400,
            gpu_memory_utilization=0.3,
        )
        engine = Engine(config)
        policy = load_policy(config, torch.device("cpu"))
        tensors = {
            name: parameter.detach().to(DTYPE[device.type])
            for name, parameter in policy.named_parameters()
        }
    engine.add("running", list(range(32)), 0, n=64, max_tokens=400, ignore_eos=True)
    source = torch.ones(
        sum(tensor.numel() for tensor in tensors.values()),
        dtype=DTYPE[device.type],
        pin_memory=device.type == "cuda",
    )
    target, times = torch.zeros_like(source, device=device), np.empty((4, PUBLISHES))
    for i in range(PUBLISHES + 2):
        start = time.perf_counter()
        engine.step()
        stepped = time.perf_counter()
        engine.load(tensors.items())
        loaded = time.perf_counter()
        engine.step()
        stepped_again = time.perf_counter()
        target.copy_(source)
        times[:, i - 2] = (
            loaded - stepped,
            stepped_again - loaded,
            stepped - start,
            time.perf_counter() - stepped_again,
        )  # the first two warm up
    load, step_after, step, copy = np.median(times, axis=1)
    return {"stall": load + step_after - step, "load": load, "copy": copy}


def main() -> None:
    quick = arguments(__doc__).quick
    device, gpu = processes.device(), processes.places(Config())[0].gpu
    own, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [own])  # as a run has its trainer and its searcher on two cores
    torch.set_num_threads(1)
    os.environ.update(
        processes.environment(processes.Place("weights", gpu, [own]))
    )  # vLLM reads it
    sizes = {name: SHAPES[name] for name in (ENGINE_SIZES if quick else SHAPES)}
    lines = []
    for name, (hidden, layers) in sizes.items():
        shapes = llama_shapes(hidden, layers)
        m = publish_seconds(shapes, others or [own], device)
        line = [
            name,
            f"{num_elements(shapes) * DTYPE[device.type].itemsize / 2**20:.0f}",
            f"{m['copy'] * 1000:.1f}",
            f"{m[0] / m['copy']:.2f}",
        ]
        if "registered" in m:
            line[-1] += f", registered {m['registered'] / m['copy']:.2f}"
        line += [f"{m[readers] / m[0]:.2f}" for readers in READERS[1:]]
        if name in ENGINE_SIZES:
            s = load_seconds(hidden, layers, device)
            line += [f"{s['stall'] * 1000:.0f}", f"{s['stall'] / s['copy']:.1f}"]
        lines.append(line + [""] * (9 - len(line)))
        print(lines[-1], flush=True)
    os.sched_setaffinity(0, [own, *others])  # the machine is all of them
    save(
        "weight_sync",
        quick,
        table(
            [
                "parameters",
                "MiB",
                "copy, ms",
                "publish, of copy",
                *(f"beside {n} reader{'s' * (n > 1)}, of alone" for n in READERS[1:]),
                "searcher's stall, ms",
                "of copy",
            ],
            lines,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
