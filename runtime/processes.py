"""The processes of a run: which device each gets, how it starts, and where its output goes."""

import ctypes
import importlib
import importlib.metadata
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.multiprocessing
from tqdm import tqdm

from config import Config, UserError

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # that ask a run to end
GIVE_UP = 3  # exit code of a searcher that would fail again after a restart
LOG_LINES = 25  # of a failed process, shown
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # of prctl


@dataclass
class Place:
    """Where a process runs: one GPU, or some cores."""

    name: str  # "trainer", "searcher 0"
    gpu: str | None  # for CUDA_VISIBLE_DEVICES
    cores: list[int]
    threads: int | None = None  # of OpenMP; None: one for each core

    def __str__(self) -> str:
        if self.gpu is not None:
            return f"GPU {self.gpu}"
        plural = "s" if len(self.cores) > 1 else ""
        return f"CPU core{plural} {', '.join(map(str, self.cores))}"


def places(config: Config) -> list[Place]:
    """The trainer's place and then one per searcher.

    A GPU each where there are several, the one GPU shared, or the cores split. Raises UserError for
    more searchers than fit, and for GPUs that CUDA cannot use.
    """
    cores = sorted(os.sched_getaffinity(0))
    count = torch.cuda.device_count()
    if count and not torch.cuda.is_available():  # the one asks the driver, the other CUDA
        raise UserError(
            f"there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}, but CUDA "
            f"{torch.version.cuda} cannot use them: see nvidia-smi (CUDA 13 needs driver 580 or "
            "newer), or hide them with CUDA_VISIBLE_DEVICES="
        )
    all_gpus = ",".join(map(str, range(count)))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")[:count]
    searchers = config.searchers or max(1, len(gpus) - 1)
    names = ["trainer"] + [f"searcher {rank}" for rank in range(searchers)]
    if not gpus:
        if any(package.name == "vllm" for package in importlib.metadata.distributions()):
            raise UserError(
                "no GPU is visible, but the vLLM that is installed is the one for GPUs: "
                "install requirements-cpu.txt instead"
            )
        return [Place(name, None, own) for name, own in zip(names, split_cores(cores, searchers))]
    if len(gpus) > 1 and searchers > len(gpus) - 1:
        raise UserError(
            f"--searchers is {searchers}, but {len(gpus)} GPUs hold one trainer and at most "
            f"{len(gpus) - 1} searchers"
        )
    if len(gpus) == 1 and searchers > 1:
        raise UserError(
            f"--searchers is {searchers}, but there is one GPU: it holds one trainer and one "
            "searcher"
        )
    threads = max(1, len(cores) // len(names))
    return [Place(name, gpus[i % len(gpus)], cores, threads) for i, name in enumerate(names)]


def split_cores(cores: list[int], searchers: int) -> list[list[int]]:
    """Half of the cores for the trainer, the rest dealt out; with too few, some share one."""
    half = max(1, len(cores) // 2)
    rest = cores[half:] or cores
    dealt = [rest[rank::searchers] or [rest[rank % len(rest)]] for rank in range(searchers)]
    return [cores[:half], *dealt]


def environment(place: Place) -> dict[str, str]:
    """What a process must find in its environment before it imports torch or vLLM."""
    threads = str(place.threads or len(place.cores))
    variables = {
        "CUDA_VISIBLE_DEVICES": place.gpu or "",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        # Engine and worker in the searcher's own process: nothing to orphan.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Or vLLM moves the threads to cores of its own choice.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",  # a searcher's log is for what goes wrong
        "VLLM_NO_USAGE_STATS": "1",
    }
    if place.gpu is None:
        variables["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        # For each shape that it has multiplied oneDNN, and torch's wrapper of it, keep a quarter of
        # a MiB, and each number of running responses is another shape. By default they keep 1,024,
        # which is no faster.
        variables["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = variables["LRU_CACHE_CAPACITY"] = "64"
        # vLLM's sampler would be compiled during the search, 16 s at the first time.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def log_path(run_dir: str, name: str) -> Path:
    return Path(run_dir) / "logs" / f"{name.replace(' ', '-')}.log"


def log_tail(run_dir: str, name: str) -> str:
    """The end of a process's log, under its path."""
    path = log_path(run_dir, name)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join([f"the end of {path}:", *lines[-LOG_LINES:]])


def start(
    place: Place, target: str, arguments: tuple, run_dir: str
) -> torch.multiprocessing.Process:
    """Spawn `target` ("module:function") at its place; its output goes to its log.

    CUDA_VISIBLE_DEVICES, the number of threads and the cores must be set before the child imports
    torch, and it imports torch to unpickle its arguments. So the parent takes them on for the
    moment of the start, and the child inherits them.
    """
    saved_environment, saved_cores = dict(os.environ), os.sched_getaffinity(0)
    # Not a daemon: those may not have children, and a searcher may have scoring workers.
    process = torch.multiprocessing.get_context("spawn").Process(
        target=_child, args=(place.name, target, arguments, run_dir, os.getpid()), name=place.name
    )
    try:
        os.environ.update(environment(place))
        os.sched_setaffinity(0, place.cores)
        # Ctrl-C reaches the whole process group, and so do some schedulers' signals: children never
        # see it, the parent decides.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.environ.clear()
        os.environ.update(saved_environment)
        os.sched_setaffinity(0, saved_cores)
    return process


def kill(process: torch.multiprocessing.Process) -> None:
    process.kill()
    process.join()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, whatever ends that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(name: str, target: str, arguments: tuple, run_dir: str, parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(1)
    # tqdm's own lock is a semaphore, which a killed process would leave behind.
    tqdm.set_lock(threading.RLock())
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"tba {name}".encode())  # what top and ps show
    with open(log_path(run_dir, name), "a") as file:
        os.dup2(file.fileno(), 2)
        if name != "trainer":  # it shows the progress
            os.dup2(file.fileno(), 1)
    module, function = target.split(":")
    getattr(importlib.import_module(module), function)(*arguments)
