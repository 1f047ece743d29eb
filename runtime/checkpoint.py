"""Checkpoints: all that a run needs to go on, a directory per step in checkpoints/.

Each is written beside its place and renamed into it, and holds the checksum of each of its files:
what is found under its name is whole, or can be told not to be. Nothing in it can run code when it
is read.
"""

import errno
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

KEPT = 2


def save(
    run_dir: str,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    arrays: dict[str, dict[str, np.ndarray]],
    state: dict,
) -> None:
    """Write the named tensors, arrays and plain values, and keep the latest KEPT checkpoints.

    Raises OSError, and leaves what was there as it was, when the disk is full.
    """
    root = Path(run_dir) / "checkpoints"
    root.mkdir(exist_ok=True)
    unfinished, directory = root / "unfinished", root / f"step-{step:08}"
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    parts = [*tensors.values(), *arrays.values()]
    check_disk(root, sum(value.nbytes for part in parts for value in part.values()))
    try:
        unfinished.mkdir()
        for name, part in tensors.items():
            contiguous = {key: value.contiguous() for key, value in part.items()}
            save_file(contiguous, unfinished / f"{name}.safetensors")
        for name, part in arrays.items():
            np.savez(unfinished / f"{name}.npz", **part)
        (unfinished / "state.json").write_text(json.dumps(state))
        checksums = {path.name: checksum(path) for path in sorted(unfinished.iterdir())}
        (unfinished / "checksums.json").write_text(json.dumps(checksums))
        # There may be one of the same step that was found to be damaged.
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.rename(directory)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, SafetensorError):  # its name for a full disk
            raise OSError(str(error)) from error
        raise
    for old in list_checkpoints(run_dir)[:-KEPT]:
        shutil.rmtree(old)


def check_disk(root: Path, needed: int) -> None:
    """Raise OSError before the disk is full: others write to it too. needed: bytes."""
    free = shutil.disk_usage(root).free
    if needed > free:
        message = (
            f"a checkpoint needs {needed / 2**20:.0f} MiB, {root} has {free / 2**20:.0f} MiB free"
        )
        raise OSError(errno.ENOSPC, message)


def newest_whole(run_dir: str) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with each newer one."""
    complaints = []
    for directory in reversed(list_checkpoints(run_dir)):
        problem = find_corruption(directory)
        if problem is None:
            return directory, complaints
        complaints.append(f"{directory} cannot be used: {problem}")
    return None, complaints


def drop_newer(directory: str | Path) -> None:
    """Delete checkpoints newer than the one being resumed: they are damaged."""
    for other in list_checkpoints(str(Path(directory).parents[1])):
        if other.name > Path(directory).name:
            shutil.rmtree(other)


def list_checkpoints(run_dir: str) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((Path(run_dir) / "checkpoints").glob("step-*"))


def find_corruption(directory: Path) -> str | None:
    """Compare each file with its checksum; None if all is whole."""
    try:
        checksums = json.loads((directory / "checksums.json").read_text())
        for name, expected in checksums.items():
            if checksum(directory / name) != expected:
                return f"{name} is damaged"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shape_mismatch(directory: str | Path, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """What keeps a model of these parameters from taking the checkpoint's; None if nothing does."""
    with safe_open(Path(directory) / "learner.safetensors", "pt") as file:
        saved = {
            key.removeprefix("policy."): tuple(file.get_slice(key).get_shape())
            for key in file.keys()  # noqa: SIM118 (no dict: it cannot be iterated)
            if key.startswith("policy.")
        }
    for name in saved | shapes:
        if saved.get(name) != shapes.get(name):
            return f"{name} has shape {shapes.get(name)}, in the checkpoint {saved.get(name)}"
    return None


def load_state(directory: str | Path) -> dict:
    return json.loads((Path(directory) / "state.json").read_text())


def load_tensors(directory: str | Path, name: str) -> dict[str, Tensor]:
    return load_file(Path(directory) / f"{name}.safetensors")


def load_arrays(directory: str | Path, name: str) -> dict[str, np.ndarray]:
    with np.load(Path(directory) / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)
