"""Where the processes of a run go: which GPU or cores each gets, and what follows from that."""

import dataclasses
import importlib.metadata
import os
import subprocess
from dataclasses import dataclass

import torch

from config import Config, UserError

# Of a GPU's memory, for vLLM. Alone it has the reference policy beside it, and a task's models.
MEMORY_ALONE, MEMORY_BESIDE_TRAINER = 0.55, 0.15
DRIVER_SECONDS = 20.0  # for nvidia-smi to answer
SHARED_AHEAD = 2  # syncs that a searcher may be ahead of the trainer whose GPU it shares


@dataclass
class Place:
    """Where a process runs: one GPU, or some cores."""

    name: str  # "trainer", "searcher 0"; "trainer 1" with --trainer_processes
    gpu: str | None  # for CUDA_VISIBLE_DEVICES
    cores: list[int]
    threads: int | None = None  # of OpenMP; None: one for each core

    def __str__(self) -> str:
        if self.gpu is not None:
            return f"GPU {self.gpu}"
        plural = "s" if len(self.cores) > 1 else ""
        return f"CPU core{plural} {', '.join(map(str, self.cores))}"


def find_gpus() -> list[str]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, as it names them.

    Raises UserError for none that CUDA can use, where vLLM needs one.
    """
    # is_available() asks CUDA, device_count() the driver, which may be too old for CUDA.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    gpus = [gpu.strip() for gpu in named.split(",")][:count]
    if not gpus and any(package.name == "vllm" for package in importlib.metadata.distributions()):
        raise UserError(
            f"{why_no_gpu()}, but the vLLM that is installed is the one for GPUs: mend that, or "
            "install requirements/cpu.txt instead"
        )
    return gpus


def why_no_gpu() -> str:
    """Say why torch finds no GPU: there is none, its driver fails, or torch does not see it."""
    try:
        how = dict(capture_output=True, text=True, timeout=DRIVER_SECONDS)
        listed = subprocess.run(["nvidia-smi", "-L"], **how)
    except OSError:
        return "this machine has no GPU (no nvidia-smi)"
    except subprocess.TimeoutExpired:
        return f"the GPU's driver does not answer (nvidia-smi, in {DRIVER_SECONDS:.0f} s)"
    if listed.returncode or not listed.stdout.strip():
        said = " ".join((listed.stdout + listed.stderr).split())
        return f"the GPU's driver does not work (nvidia-smi: {said or 'no GPU'})"
    why = "CUDA_VISIBLE_DEVICES hides them, or their driver is older than 580"
    if torch.version.cuda is None:
        why = "it is the build for CPUs, run make setup for the other"
    return f"torch {torch.__version__} sees none of the GPUs that nvidia-smi lists ({why})"


def find_places(config: Config, gpus: list[str] | None = None) -> list[Place]:
    """The places of the trainer's processes, then one per searcher.

    gpus: to take for this machine's. A GPU each where there are several, the one GPU shared, or the
    cores split. Raises UserError for more processes than fit.
    """
    gpus = find_gpus() if gpus is None else gpus
    cores = sorted(os.sched_getaffinity(0))
    trainers, searchers = config.trainer_processes, config.searchers
    if searchers is None:  # on a cluster others search: none here shares the trainer's GPU
        searchers = max(0 if gpus and config.ray else 1, len(gpus) - trainers)
    names = [f"trainer {rank}" if rank else "trainer" for rank in range(trainers)]
    names += [f"searcher {rank}" for rank in range(searchers)]
    if not gpus:
        split = split_cores(cores, trainers, searchers)
        return [Place(name, None, own) for name, own in zip(names, split)]
    check_gpus(config, len(gpus), searchers)
    threads = max(1, len(cores) // len(names))
    return [Place(name, gpus[i % len(gpus)], cores, threads) for i, name in enumerate(names)]


def check_gpus(config: Config, gpus: int, searchers: int) -> None:
    """Raise UserError where so many GPUs do not hold the processes. One may hold two of them."""
    trainers, most = config.trainer_processes, max(1, gpus - 1)
    there_are = "there is one GPU" if gpus == 1 else f"there are {gpus} GPUs"
    if trainers > most:
        raise UserError(
            f"--trainer_processes is {trainers}, but {there_are}: each takes one, a searcher "
            f"another; give at most {most}"
        )
    most = max(0 if config.ray else 1, gpus - trainers)
    if searchers > most:
        beside = "the trainer" if trainers == 1 else f"{trainers} trainer processes"
        raise UserError(
            f"--searchers is {searchers}, but {there_are}: room for {most} beside {beside}"
        )


def split_cores(cores: list[int], trainers: int, searchers: int) -> list[list[int]]:
    """Half of the cores for the trainer, the rest dealt out; with too few, some share one."""
    half = max(1, len(cores) // 2) if searchers else len(cores)
    parts = (cores[:half], trainers), (cores[half:] or cores, searchers)
    return [own[i::count] or [own[i % len(own)]] for own, count in parts for i in range(count)]


def searchers_of(places: list[Place]) -> list[Place]:
    return [place for place in places if place.name.startswith("searcher")]


def trainers_of(places: list[Place]) -> list[Place]:
    """Return the places of the trainer's processes, by rank."""
    return [place for place in places if place.name.startswith("trainer")]


def evaluation_place(places: list[Place]) -> Place:
    """Return where the final evaluation runs: a searcher's place, or the trainer's if none is."""
    return [*searchers_of(places), places[0]][0]


def resolve(config: Config, places: list[Place]) -> Config:
    """Fill in what these places decide, and leave out resets of a reference that is not read."""
    memory = config.gpu_memory_utilization
    if memory is None and places[0].gpu is not None:
        memory = MEMORY_BESIDE_TRAINER if is_gpu_shared(places) else MEMORY_ALONE
    return dataclasses.replace(
        config,
        reference_reset_period=config.reference_reset_period if config.reads_reference else 0,
        searchers=len(searchers_of(places)),
        gpu_memory_utilization=memory,
        search_ahead=config.search_ahead or search_ahead(config, places),
    )


def search_ahead(config: Config, places: list[Place]) -> int | None:
    """How many steps searchers may be ahead, if no setting says it.

    Two syncs where one shares the trainer's GPU.
    """
    trainer_may_wait = config.lockstep or config.max_staleness is not None
    is_limited = is_gpu_shared(places) and not trainer_may_wait
    return SHARED_AHEAD * config.sync_period if is_limited else None


def is_gpu_shared(places: list[Place]) -> bool:
    """Whether trainer and searcher have one GPU between them."""
    searchers = [place.gpu for place in searchers_of(places)]
    return places[0].gpu is not None and places[0].gpu in searchers
