"""The entry point of every process of a run: it dies with its parent, and has a log of its own."""

import ctypes
import faulthandler
import importlib
import io
import os
import signal
import sys
import threading
from multiprocessing import active_children
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path

from tqdm import tqdm

from config import UserError

SHOW_STACK = signal.SIGUSR1  # has a process write into its log where it is
GIVE_UP = 3  # exit code of a searcher that would fail again after a restart
NOT_SAVED = 4  # exit code of a trainer that could not save the model, and has said why
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # of prctl


def enter(
    name: str, target: str, arguments: tuple, run_dir: str, parent: int, stdout: Connection | None
) -> None:
    """Call `target` ("module:function") in a process that has just been spawned.

    stdout: the pipe that gets what it prints. None: its log, which always gets its stderr.
    """
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(1)
    # tqdm's own lock is a semaphore, which a killed process would leave behind.
    tqdm.set_lock(threading.RLock())
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"tba {name}".encode())  # what top and ps show
    with open(log_path(run_dir, name), "a") as file:
        os.dup2(file.fileno(), 2)
        os.dup2((stdout or file).fileno(), 1)
    if stdout:
        os.set_blocking(1, False)  # a reader that has stopped costs lines, not the run
        stdout.close()
    tolerate_failed_prints()
    faulthandler.register(SHOW_STACK, all_threads=False)
    # At its end it would wait for ever for a pool of processes that a task made.
    Finalize(None, lambda: [child.kill() for child in active_children()], exitpriority=0)
    module, function = target.split(":")
    try:
        getattr(importlib.import_module(module), function)(*arguments)
    except UserError as error:  # it needs no traceback
        sys.exit(f"error: {error}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, whatever ends that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def log_path(run_dir: str, name: str) -> Path:
    return Path(run_dir) / "logs" / f"{name.replace(' ', '-')}.log"


class Output(io.FileIO):
    """The file under a stream. Never raises: a pipe may be closed, a disk full, a terminal gone."""

    def write(self, data: bytes | memoryview) -> int:
        try:
            return super().write(data) or len(data)  # None: a full pipe that does not wait
        except OSError:
            return len(data)


def tolerate_failed_prints() -> None:
    """Keep prints to stdout and stderr from raising OSError or UnicodeEncodeError."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue  # somebody has put another one there, as pytest does
        # None: it was closed at the start.
        number = stream.fileno() if stream else os.open(os.devnull, os.O_WRONLY)
        file = io.BufferedWriter(Output(number, "wb", closefd=False))
        encoding = stream.encoding if stream else "utf-8"
        text = io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, text)
