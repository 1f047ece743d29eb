"""Checkpoints: all that a run needs to go on, a directory per step in checkpoints/.

Each is written beside its place and renamed into it (runtime/checkpoints/writer.py), and holds the
checksum of each of its files: what is found under its name is whole, or can be told not to be.
Nothing in it can run code when it is read.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from buffer import ReplayBuffer
from learner import Learner
from runtime.checkpoints import FORMAT
from runtime.record.metrics import StepMetrics
from runtime.responses.evaluation import EvaluationRequests
from runtime.transport.status import StatusTable
from weights import SharedWeights

KEPT = 2
Tensors = dict[str, Iterable[tuple[str, Tensor]]]  # by file: names and tensors
Arrays = dict[str, dict[str, np.ndarray]]
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


@dataclass
class RunState:
    """All that a resumed run needs, of each part of the trainer: collects it, and puts it back."""

    learner: Learner
    weights: SharedWeights
    buffer: ReplayBuffer
    status: StatusTable
    metrics: StepMetrics
    evaluations: EvaluationRequests

    def collect(self) -> tuple[Tensors, Arrays, dict]:
        """Collect tensors by file, which come one at a time, arrays by file, and plain values."""
        tensors, config = {"learner": self.learner.state()}, self.learner.config
        reference = self.weights.reference
        reset_step = max(0, reference.version) if reference else 0
        if reset_step:
            tensors["reference"] = reference.held()[reset_step].items()
        rng = {"rng": torch.get_rng_state().numpy()}
        arrays = {"buffer": self.buffer.state_dict(), "torch": rng}
        values = {
            "format": FORMAT,
            "step": self.learner.step,
            "base_model": config.base_model,
            "data_digest": config.data_digest,
            "received": self.buffer.received,
            "reference_version": reset_step,
            **self.metrics.state_dict(),
            **self.evaluations.state_dict(self.learner.step),
            "status": self.status.state_dict(),
        }
        return tensors, arrays, values

    def load(self, directory: str) -> None:
        """Take over a checkpoint. The status table's part is read before any process is there."""
        values = load_state(directory)
        self.learner.load_state(load_tensors(directory, "learner"))
        if values["reference_version"]:
            reference = load_tensors(directory, "reference")
            self.weights.reference.publish(values["reference_version"], reference.items())
        self.buffer.load_state_dict(load_arrays(directory, "buffer"))
        self.buffer.received = values["received"]
        self.metrics.load_state_dict(values)
        self.evaluations.load_state_dict(values, self.learner.step)
        torch.set_rng_state(torch.from_numpy(load_arrays(directory, "torch")["rng"]))
