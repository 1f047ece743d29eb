"""The processes of a run: how each starts at its place, and where its output goes."""

import ctypes
import faulthandler
import importlib
import os
import re
import signal
import sys
import threading
from multiprocessing import resource_tracker
from pathlib import Path

import torch.multiprocessing
from tqdm import tqdm

from config import UserError
from runtime.processes.output import tolerate_failed_prints
from runtime.processes.places import Place

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that ask a run to end
SHOW_STACK = signal.SIGUSR1  # has a process write into its log where it is
GIVE_UP = 3  # exit code of a searcher that would fail again after a restart
NOT_SAVED = 4  # exit code of a trainer that could not save the model, and has said why
NOISE = re.compile(r"nanobind: | - leaked |.*skipped remainder")
LOG_LINES = 25  # of a failed process, shown
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # of prctl


def environment(place: Place) -> dict[str, str]:
    """What a process must find in its environment before it imports torch or vLLM."""
    threads = str(place.threads or len(place.cores))
    variables = {
        "CUDA_VISIBLE_DEVICES": place.gpu or "",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",  # a task that goes through a set makes the same queries everywhere
        # Engine and worker in the searcher's own process: nothing to orphan.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Or vLLM moves the threads to cores of its own choice.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",  # a searcher's log is for what goes wrong
        "VLLM_NO_USAGE_STATS": "1",
    }
    if place.gpu is not None:
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it gives no processed log-probabilities
        names = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
        if place.name.startswith("trainer") and not names & os.environ.keys():
            # Passes differ in size and would fragment memory.
            variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    else:
        variables["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE") or "1"  # GiB
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
    """The end of a process's log, under its path, without what vLLM's bindings say at every end."""
    path = log_path(run_dir, name)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    lines = [line for line in lines if not NOISE.match(line)]
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
    resource_tracker.ensure_running()  # its own start, inside of process.start(), unblocks signals
    try:
        os.environ.update(environment(place))
        # Of another launcher: torch would take it for a GPU, vLLM wait for other engines.
        for name in ("LOCAL_RANK", *(name for name in saved_environment if "VLLM_DP_" in name)):
            os.environ.pop(name, None)
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
    tolerate_failed_prints()
    faulthandler.register(SHOW_STACK, all_threads=False)
    module, function = target.split(":")
    try:
        getattr(importlib.import_module(module), function)(*arguments)
    except UserError as error:  # it needs no traceback
        sys.exit(f"error: {error}")
