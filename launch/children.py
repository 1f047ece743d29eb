"""The processes of a run: how each starts at its place, and the signals that end them."""

import os
import re
import signal
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

import torch.multiprocessing

from launch.places import Place
from runtime.child import enter, log_path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that ask a run to end
NOISE = re.compile(r"nanobind: | - leaked |.*skipped remainder")
LOG_LINES = 25  # of a failed process, shown


class Interrupt:
    """The signal that asked the run to end, if one did.

    A second signal kills the run, except SIGHUP, which a closing terminal sends twice. It raises
    SystemExit: the queues' semaphores are unlinked on the way out.
    """

    def __init__(self):
        self.signal = 0
        # The resource tracker starts with these signals blocked: it must outlive this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                signal.signal(number, self)

    def __call__(self, number: int, frame) -> None:
        if self.signal and number != signal.SIGHUP:
            for child in torch.multiprocessing.active_children():
                child.kill()
            raise SystemExit(128 + number)
        self.signal = self.signal or number


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


def log_tail(run_dir: str, name: str) -> str:
    """The end of a process's log, under its path, without what vLLM's bindings say at every end."""
    path = log_path(run_dir, name)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    lines = [line for line in lines if not NOISE.match(line)]
    return "\n".join([f"the end of {path}:", *lines[-LOG_LINES:]])


def start(
    place: Place, target: str, arguments: tuple, run_dir: str, stdout: Connection | None = None
) -> torch.multiprocessing.Process:
    """Spawn `target` ("module:function") at its place; its output goes to its log, or to stdout.

    CUDA_VISIBLE_DEVICES, the number of threads and the cores must be set before the child imports
    torch, and it imports torch to unpickle its arguments. So the parent takes them on for the
    moment of the start, and the child inherits them.
    """
    saved_environment, saved_cores = dict(os.environ), os.sched_getaffinity(0)
    # Not a daemon: those may not have children, and a searcher may have scoring workers.
    process = torch.multiprocessing.get_context("spawn").Process(
        target=enter,
        args=(place.name, target, arguments, run_dir, os.getpid(), stdout),
        name=place.name,
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
        # Only what was changed: a thread may read the rest (extras/tracking.py).
        for name in os.environ.keys() - saved_environment.keys():
            del os.environ[name]
        os.environ.update(saved_environment)
        os.sched_setaffinity(0, saved_cores)
    return process


def kill(process: torch.multiprocessing.Process) -> None:
    process.kill()
    process.join()
