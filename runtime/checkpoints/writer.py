"""Writing checkpoints beside the training: the trainer copies its state, a thread writes the copy.

A file's checksum is made from the bytes on their way to the disk, so that nothing is read again.
The thread spends its time in copies, hashes and writes of megabytes, for which Python's lock is
free.
"""

import errno
import hashlib
import io
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runtime.checkpoints.checkpoint import KEPT, list_checkpoints
from runtime.processes.children import NOT_SAVED
from runtime.processes.waiting import Waits

CHUNK = 1 << 22  # bytes that are hashed and then written, while a core's cache still has them
SYNC_BYTES = 1 << 28  # after which a file is synced: no sync, in which none is counted, is long
NICENESS = 14  # of the thread: where the trainer keeps its cores busy, it takes 4 % of one
# As the safetensors library calls them.
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.float64: "F64",
}


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time.

    waits: the trainer's. say: shows the user a line. written_step: of the newest checkpoint that is
    whole, -1 before the first.
    """

    def __init__(self, run_dir: str, waits: Waits, say: Callable[[str], None]):
        self.run_dir, self.waits, self.say = run_dir, waits, say
        self.written_step = self.begun_step = -1
        self.thread = ThreadPoolExecutor(1, initializer=give_way)
        self.under_way: Future | None = None
        # Kept from one checkpoint to the next: what the first one found room for, the others have.
        self.copies: dict[tuple[str, str], Tensor] = {}

    def begin(
        self,
        step: int,
        tensors: dict[str, Iterable[tuple[str, Tensor]]],
        arrays: dict[str, dict[str, np.ndarray]],
        state: dict,
        is_last: bool = False,
    ) -> None:
        """Copy the named tensors and plain values, and have them written, with the named arrays.

        Tensors come one at a time: what makes them need not hold two of them.

        Call wait() before: the copies are those of the checkpoint before. The arrays must not
        change afterwards. is_last: nor do the tensors, so they are written as they are, uncopied.
        """
        take = (lambda part, name, tensor: tensor) if is_last else self.copy
        taken = {
            part: {name: take(part, name, tensor) for name, tensor in named}
            for part, named in tensors.items()
        }
        self.begun_step = step
        HashedFile.num_written = 0
        self.under_way = self.thread.submit(
            write_checkpoint, self.run_dir, step, taken, arrays, json.dumps(state)
        )

    def copy(self, part: str, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to host memory, in which its copy for the checkpoint before was."""
        if (part, name) not in self.copies:
            self.copies[part, name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self.copies[part, name].copy_(tensor)

    def wait(self) -> None:
        """Wait for the write that is under way, if one is. A shutdown does not end this wait."""
        what = f"the checkpoint of step {self.begun_step} to be written"
        self.waits.until(
            self.collect, lambda: f"{what}, {HashedFile.num_written} bytes are", even_at_end=True
        )

    def collect(self) -> bool:
        """Take note of a write that has ended. Returns whether none is under way.

        A full disk costs the checkpoint, not the run: the user is told.
        """
        if self.under_way is None:
            return True
        if not self.under_way.done():
            return False
        ended, self.under_way = self.under_way, None
        try:
            self.note_seconds(ended.result())
            self.written_step = self.begun_step
        except OSError as error:
            problem = f"no checkpoint was written, the one before stays: {error}"
            self.say(f"step {self.begun_step}: {problem}")
        return True

    def note_seconds(self, seconds: float) -> None:
        """Note how long a write took: the grace period at the end of the run depends on it."""
        board = self.waits.board
        board.set("trainer", "save_seconds", max(seconds, board.get("trainer", "save_seconds")))

    def save_model(self, save: Callable[[Path], None]) -> None:
        """Have the model saved. Where that fails the user is told, and the process ends."""
        model = Path(self.run_dir) / "model"
        unfinished = model.with_suffix(".unfinished")
        try:
            saved = ThreadPoolExecutor(1).submit(save, model)
            self.waits.until(
                saved.done, lambda: f"the model, {num_bytes(unfinished)} bytes", even_at_end=True
            )
            saved.result()
        except Exception as error:  # of a full disk each library has an exception of its own
            self.say(f"the model could not be saved: {error}")
            traceback.print_exc()
            sys.exit(NOT_SAVED)


def num_bytes(directory: Path) -> int:
    """Count what the files of a directory hold."""
    with suppress(FileNotFoundError):  # it is renamed when it is whole
        return sum(file.stat().st_size for file in directory.iterdir())
    return 0


def give_way() -> None:
    """Lower the priority of the calling thread: the trainer's threads go first."""
    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))  # only root may lower one
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def write_checkpoint(
    run_dir: str,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    arrays: dict[str, dict[str, np.ndarray]],
    state: str,
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
    check_disk(root, sum(value.nbytes for part in parts for value in part.values()))
    files: dict[str, Callable[[HashedFile], object]] = {
        **{f"{name}.safetensors": partial(write_tensors, part) for name, part in tensors.items()},
        **{f"{name}.npz": partial(write_arrays, part) for name, part in arrays.items()},
        "state.json": partial(write_text, state),
    }
    try:
        unfinished.mkdir()
        checksums = {name: write_file(unfinished / name, write) for name, write in files.items()}
        write_file(unfinished / "checksums.json", partial(write_text, json.dumps(checksums)))
        sync_directory(unfinished)
        # There may be one of the same step that was found to be damaged.
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.rename(directory)
        sync_directory(root)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for old in list_checkpoints(run_dir)[:-KEPT]:
        shutil.rmtree(old)
    return time.monotonic() - start


def check_disk(root: Path, needed: int) -> None:
    """Raise OSError before the disk is full: others write to it too. needed: bytes."""
    free = shutil.disk_usage(root).free
    if needed > free:
        message = (
            f"a checkpoint needs {needed / 2**20:.0f} MiB, {root} has {free / 2**20:.0f} MiB free"
        )
        raise OSError(errno.ENOSPC, message)


class HashedFile(io.RawIOBase):
    """A file that can only be written, from its first byte to its last: sha256 is of all of them.

    As it cannot seek, zip files put sizes behind their members instead of going back.
    num_written: bytes in all files of a checkpoint; while it grows, the trainer waits.
    """

    num_written = 0

    def __init__(self, target: io.BufferedWriter):
        self.target, self.sha256, self.num_unsynced = target, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            self.sha256.update(chunk)
            self.target.write(chunk)
            HashedFile.num_written += len(chunk)
            self.num_unsynced += len(chunk)
            if self.num_unsynced >= SYNC_BYTES:
                self.sync()
        return len(view)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        self.target.flush()
        os.fsync(self.target.fileno())
        self.num_unsynced = 0


def write_file(path: Path, write: Callable[[HashedFile], object]) -> str:
    """Make a file of what `write` writes, on the disk when this returns. Returns its checksum."""
    with open(path, "wb") as target:
        file = HashedFile(target)
        write(file)
        file.sync()
    return file.sha256.hexdigest()


def write_text(text: str, file: HashedFile) -> None:
    file.write(text.encode())


def write_arrays(arrays: dict[str, np.ndarray], file: HashedFile) -> None:
    np.savez(file, **arrays)


def write_tensors(tensors: dict[str, Tensor], file: HashedFile) -> None:
    """Write tensors in the safetensors format: a header, then their bytes.

    None is copied but, one at a time, those on a GPU.

    The library would make a second copy of all, or write to a path, where nothing can be hashed.
    """
    # Wide elements first: so each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
