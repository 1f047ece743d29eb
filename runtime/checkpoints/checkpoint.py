"""Checkpoints: all that a run needs to go on, a directory per step in checkpoints/.

Each is written beside its place and renamed into it (runtime/checkpoints/writer.py), and holds the
checksum of each of its files: what is found under its name is whole, or can be told not to be.
Nothing in it can run code when it is read.
"""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

KEPT = 2
NAME = re.compile(r"step-\d{8,}")


def list_checkpoints(run_dir: str) -> list[Path]:
    """The checkpoints of a run, oldest first. What has another name is the user's."""
    found = (Path(run_dir) / "checkpoints").glob("step-*")
    return sorted(path for path in found if NAME.fullmatch(path.name) and path.is_dir())


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_state(directory: str | Path) -> dict:
    return json.loads((Path(directory) / "state.json").read_text())


def load_tensors(directory: str | Path, name: str) -> dict[str, Tensor]:
    return load_file(Path(directory) / f"{name}.safetensors")


def load_arrays(directory: str | Path, name: str) -> dict[str, np.ndarray]:
    with np.load(Path(directory) / f"{name}.npz", allow_pickle=False) as arrays:
        return dict(arrays)
