"""Measure what a sync costs, against a plain copy of the same bytes.

    python benchmarks/weight_sync.py            # twenty minutes on 2 cores, 19 GB of memory
    python benchmarks/weight_sync.py --quick    # 10 M and 100 M parameters, in four minutes

publish   SharedWeights.publish of a Llama's tensors, beside 0, 1, 3 and 7 processes that each read
          every version as it comes; the writer, on a core of its own, computes for half a second,
          or ten publishes' time, before each, as a trainer does: by then they have read the version
          before
load      Engine.load into vLLM, and the engine step after it, less a step without a load: the time
          in which a searcher generates nothing; that model has an output embedding of its own
          besides
LoRA      a publish of weights that are merged with adapters of rank 32 on the way, against one of
          the same model without (only where peft is installed)
copy      one tensor of the same bytes, copied

All in fp32, medians, taken in turns.
On a GPU, where this has never been run, the trainer's fp32 tensors lie there and are published as
bf16. A copy is one from there into registered memory, at PCIe's rate, and publish is also measured
into memory that is registered.
Writes benchmarks/results/weight_sync.md; with --quick benchmarks/results/quick/.
"""

import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
import torch.multiprocessing
from common import arguments, byte_model, save, table
from torch import Tensor

import models.device
from config import Config
from models.lora import load_trained_policy, merged
from models.policy import load_policy, weight_shapes
from runtime.processes import children
from runtime.processes.places import Place, find_places
from runtime.transport.locked_pages import lock_pages
from weights import SharedWeights, num_elements

SHAPES = {"10 M": (256, 8), "100 M": (768, 11), "1 B": (2048, 19)}  # hidden size, layers
ENGINE_SIZES = ("10 M", "100 M")  # 1 B: slots, source and vLLM's two copies do not fit into 24 GB
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of what is published, as in a run
READERS = (0, 1, 3, 7)
PUBLISHES = 10
LORA_RANK = 32


def llama_shapes(hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    """List the shapes of a Llama's tensors. The names do not matter here."""
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


def take_turns(
    kinds: Sequence[str | int], weights: SharedWeights, tensors: list, cast: Tensor, active: Tensor
) -> dict[str | int, list[float]]:
    """Measure PUBLISHES + 1 copies or publishes of each kind, in seconds.

    A kind that is a number is a publish beside as many readers.
    """
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
    """Measure a plain copy ("copy"), and a publish beside each number of readers on these cores.

    On a GPU also a publish into registered memory ("registered"). Returns medians, in seconds.
    """
    weights = SharedWeights(shapes, DTYPE[device.type], readers=max(READERS))
    # Not zeros: they would be one page, read again and again.
    source = torch.ones(num_elements(shapes), device=device)
    tensors, cast = list(weights._views(source).items()), source.to(DTYPE[device.type])
    for slot in weights.slots:  # in memory, from now on
        slot.zero_()
    ready = torch.zeros(max(READERS), dtype=torch.int64).share_memory_()
    active = torch.zeros(1, dtype=torch.int64).share_memory_()
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
        lock_pages(weights, sys.exit)
        times |= take_turns(["copy", "registered"], weights, tensors, cast, active)
    active[0] = -1
    for child in children:
        child.join(60)
    # The first of each is left out: there, readers map their memory.
    return {what: float(np.median(values[1:])) for what, values in times.items()}


def load_seconds(hidden: int, layers: int, device: torch.device) -> dict[str, float]:
    """Measure the stall at a load, the load alone, and a plain copy. Returns medians, in seconds.

    The stall is Engine.load with the step after it, less a step without a load.
    """
    # Here, as vLLM reads the environment, which main() sets; and the readers do without it.
    from models.engine import Engine

    with tempfile.TemporaryDirectory() as directory:
        make_model(directory, hidden, layers)
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
    for i in range(-2, PUBLISHES):  # the first two warm up: later ones overwrite their columns
        start = time.perf_counter()
        engine.step()
        stepped = time.perf_counter()
        engine.load(tensors.items())
        loaded = time.perf_counter()
        engine.step()
        stepped_again = time.perf_counter()
        target.copy_(source)
        copied = time.perf_counter()
        times[:, i] = (
            loaded - stepped,
            stepped_again - loaded,
            stepped - start,
            copied - stepped_again,
        )
    load, step_after, step, copy = np.median(times, axis=1)
    return {"stall": load + step_after - step, "load": load, "copy": copy}


def make_model(directory: str, hidden: int, layers: int) -> None:
    """Make a Llama of that size, on the disk."""
    byte_model(
        directory,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        vocab_size=10_000,
    )


def merged_publish(hidden: int, layers: int, device: torch.device) -> str:
    """Measure a publish with LoRA against one without, medians taken in turns: their ratio."""
    if not find_spec("peft"):
        return ""
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory, hidden, layers)
        config = Config(model=directory, lora_rank=LORA_RANK, max_response_tokens=400)
        weights = SharedWeights(weight_shapes(config), DTYPE[device.type], readers=1)
        plain = load_policy(config, device)
        adapted = load_trained_policy(config, DTYPE[device.type])[0].to(device)
    times: dict[str, list[float]] = {"plain": [], "adapted": []}
    for version in range(2 * (PUBLISHES + 2)):
        kind, policy = ("adapted", adapted) if version % 2 else ("plain", plain)
        compute(0.5)
        start = time.perf_counter()
        weights.publish(version, merged(policy))
        times[kind].append(time.perf_counter() - start)
    # The first two of each fill slots for the first time.
    return f"{np.median(times['adapted'][2:]) / np.median(times['plain'][2:]):.2f}"


def main() -> None:
    quick = arguments(__doc__).quick
    device, gpu = models.device.device(), find_places(Config())[0].gpu
    own, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [own])  # as a run has its trainer and its searcher on two cores
    torch.set_num_threads(1)
    place = Place("weights", gpu, [own])
    os.environ.update(children.environment(place))  # vLLM reads it
    sizes = {name: SHAPES[name] for name in (ENGINE_SIZES if quick else SHAPES)}
    lines = []
    for name, (hidden, layers) in sizes.items():
        shapes = llama_shapes(hidden, layers)
        publish = publish_seconds(shapes, others or [own], device)
        mebibytes = num_elements(shapes) * DTYPE[device.type].itemsize / 2**20
        ratio = f"{publish[0] / publish['copy']:.2f}"
        if "registered" in publish:
            ratio += f", registered {publish['registered'] / publish['copy']:.2f}"
        line = [name, f"{mebibytes:.0f}", f"{publish['copy'] * 1000:.1f}", ratio]
        line += [f"{publish[readers] / publish[0]:.2f}" for readers in READERS[1:]]
        if name in ENGINE_SIZES:
            load = load_seconds(hidden, layers, device)
            line += [f"{load['stall'] * 1000:.0f}", f"{load['stall'] / load['copy']:.1f}"]
            line += [merged_publish(hidden, layers, device)]
        else:
            line += ["", "", ""]
        lines.append(line)
        print(lines[-1], flush=True)
    os.sched_setaffinity(0, [own, *others])  # the machine is all of them
    header = [
        "parameters",
        "MiB",
        "copy, ms",
        "publish, of copy",
        *(f"beside {n} reader{'s' if n > 1 else ''}, of alone" for n in READERS[1:]),
        "searcher's stall, ms",
        "of copy",
        "publish with LoRA, of without",
    ]
    save("weight_sync", quick, table(header, lines))


if __name__ == "__main__":
    sys.exit(main())
