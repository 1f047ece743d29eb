"""Checkpoints: all that a run needs to go on, a directory per step in checkpoints/.

Each is written beside its place and renamed into it (runtime/checkpoints/writer.py), and holds the
checksum of each of its files: what is found under its name is whole, or can be told not to be.
Nothing in it can run code when it is read.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

KEPT = 2
NAME = re.compile(r"step-\d{8,}")
# What each has; one of a run that resets its reference has that too.
FILES = {"learner.safetensors", "buffer.npz", "torch.npz", "state.json"}


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
    """The checkpoints of a run, oldest first. What has another name is the user's."""
    found = (Path(run_dir) / "checkpoints").glob("step-*")
    return sorted(path for path in found if NAME.fullmatch(path.name) and path.is_dir())


def has_begun(run_dir: str) -> bool:
    """Whether the run's newest checkpoint has anything to go on from: a step, or a response."""
    checkpoints = list_checkpoints(run_dir)
    state = load_state(checkpoints[-1]) if checkpoints else {"step": 0, "received": 0}
    return state["step"] > 0 or state["received"] > 0


def find_corruption(directory: Path) -> str | None:
    """Compare each file with its checksum; None if all are there and whole."""
    try:
        checksums = json.loads((directory / "checksums.json").read_text())
        if missing := FILES - checksums.keys():
            return f"checksums.json does not name {min(missing)}"
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
