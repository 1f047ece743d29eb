"""Writing checkpoints beside the training: the trainer copies its state, a thread writes the copy.

The thread spends its time in writes and hashes of megabytes, for which Python's lock is free.
"""

import errno
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from runtime.checkpoints.checkpoint import KEPT, Arrays, Tensors, checksum, list_checkpoints
from runtime.child import NOT_SAVED
from runtime.waiting import Wait, Waits

NICENESS = 14  # of the thread: where the trainer keeps its cores busy, it takes 4 % of one


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time.

    say: shows the user a line. written_step: of the newest checkpoint that is whole, or -1.
    """

    def __init__(self, run_dir: str, waits: Waits, say: Callable[[str], None]):
        self.run_dir, self.waits, self.say = run_dir, waits, say
        self.written_step = self.begun_step = -1
        self.start_thread(NICENESS)
        self.under_way: Future | None = None
        # Kept from one checkpoint to the next: what the first one found room for, the others have.
        self.copies: dict[tuple[str, str], Tensor] = {}

    def start_thread(self, niceness: int) -> None:
        """Write in a new thread from now on, at this priority or the process's if that is lower."""
        self.thread = ThreadPoolExecutor(1)
        self.clock = self.thread.submit(give_way, niceness).result()

    def begin(
        self, step: int, tensors: Tensors, arrays: Arrays, state: dict, may_alias: bool = False
    ) -> None:
        """Copy the state, and write it in the background as the checkpoint of `step`.

        Call wait() first: the copies of the previous checkpoint are reused. Tensors arrive one at a
        time. The arrays must not change afterwards. may_alias: the tensors do not change either, so
        those that can be written directly are not copied.
        """
        taken = {
            part: {name: self.take(part, name, tensor, may_alias) for name, tensor in named}
            for part, named in tensors.items()
        }
        self.begun_step = step
        written = self.run_dir, step, taken, arrays, json.dumps(state)
        self.under_way = self.thread.submit(write_checkpoint, *written)

    def take(self, part: str, name: str, tensor: Tensor, may_alias: bool) -> Tensor:
        """Copy a tensor into its buffer in host memory, which all checkpoints reuse.

        Or return it with may_alias, if it is contiguous on the CPU: safetensors would copy those on
        a GPU itself, all at once, and refuses transposed ones.
        """
        if may_alias and tensor.is_cpu and tensor.is_contiguous():
            return tensor
        if (part, name) not in self.copies:
            self.copies[part, name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self.copies[part, name].copy_(tensor)

    def wait(self) -> None:
        """Wait for the write that is under way, if one is. A shutdown does not end this wait.

        Progress is the CPU time of the thread: syncs and checksums take some, and add no bytes.
        """
        unfinished = Path(self.run_dir, "checkpoints", "unfinished")
        wait = Wait(self.waits, even_at_end=True)
        while not self.note_written():
            seconds = time.clock_gettime(self.clock)
            written = f"{num_bytes(unfinished)} bytes are, after {seconds:.3f} s of CPU"
            wait.goes_on(f"the checkpoint of step {self.begun_step} to be written, {written}")

    def note_written(self) -> bool:
        """Take note of a write that has ended. Returns whether none is under way.

        A full disk costs the checkpoint, not the run.
        """
        if self.under_way and self.under_way.done():
            ended, self.under_way, status = self.under_way, None, self.waits.status
            try:
                slowest = max(ended.result(), status.get("trainer", "save_seconds"))
                status.set("trainer", "save_seconds", slowest)  # the grace period depends on it
                self.written_step = self.begun_step
            except OSError as error:
                problem = f"no checkpoint was written, the one before stays: {error}"
                self.say(f"step {self.begun_step}: {problem}")
        return self.under_way is None

    def save_model(self, save: Callable[[Path], None]) -> None:
        """Have the model saved. Where that fails the user is told, and the process ends."""
        model = Path(self.run_dir) / "model"
        unfinished = model.with_suffix(".unfinished")
        try:
            saved = ThreadPoolExecutor(1).submit(save, model)
            wait = Wait(self.waits, even_at_end=True)
            while not saved.done() and wait.goes_on(f"the model, {num_bytes(unfinished)} bytes"):
                pass
            saved.result()
        except Exception as error:  # of a full disk each library has an exception of its own
            self.say(f"the model could not be saved: {error}")
            traceback.print_exc()
            sys.exit(NOT_SAVED)


def num_bytes(directory: Path) -> int:
    """Count what the files of a directory take of the disk: a size is final from the beginning."""
    with suppress(FileNotFoundError):  # it is renamed when it is whole
        return sum(512 * file.stat().st_blocks for file in directory.iterdir())
    return 0


def give_way(niceness: int) -> int:
    """Lower the priority of the calling thread. Returns the clock of its CPU time."""
    niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))  # only root may lower one
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    return time.pthread_getcpuclockid(threading.get_ident())


def write_checkpoint(
    run_dir: str, step: int, tensors: dict[str, dict[str, Tensor]], arrays: Arrays, state: str
) -> float:
    """Write a checkpoint beside its place, rename it, and keep the latest KEPT.

    state: as JSON. Returns the seconds that it took. Raises OSError, and leaves what was there as
    it was, when the disk is full.
    """
    start, root = time.monotonic(), Path(run_dir) / "checkpoints"
    root.mkdir(exist_ok=True)
    unfinished, directory = root / "unfinished", root / f"step-{step:08}"
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    parts = [*tensors.values(), *arrays.values()]
    needed = sum(value.nbytes for part in parts for value in part.values()) / 2**20
    if needed > (free := shutil.disk_usage(root).free / 2**20):  # others write to it too
        problem = f"a checkpoint needs {needed:.0f} MiB, {root} has {free:.0f} MiB free"
        raise OSError(errno.ENOSPC, problem)
    try:
        unfinished.mkdir()
        (unfinished / "state.json").write_text(state)
        for name, part in tensors.items():
            write_tensors(part, unfinished / f"{name}.safetensors")
        for name, part in arrays.items():
            np.savez(unfinished / f"{name}.npz", **part)
        checksums = {path.name: checksum(path) for path in unfinished.iterdir()}
        (unfinished / "checksums.json").write_text(json.dumps(checksums))
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        # There may be one of the same step that was found to be damaged.
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.rename(directory)
        sync(root)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for old in list_checkpoints(run_dir)[:-KEPT]:
        shutil.rmtree(old)
    return time.monotonic() - start


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors to a file. Raises OSError where the library has an error of its own."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    shutil.copymode(path.with_name("state.json"), path)  # the library's is the owner's alone


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
