"""What a checkpoint holds: all that a resumed run needs, of each part of the trainer."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from buffer import ReplayBuffer
from learner import Learner
from runtime.checkpoints import checkpoint
from runtime.evaluation_requests import EvaluationRequests
from runtime.record.metrics import StepMetrics
from runtime.transport.status import StatusTable
from weights import SharedWeights

Tensors = dict[str, Iterable[tuple[str, Tensor]]]  # by file: names and tensors
Arrays = dict[str, dict[str, np.ndarray]]


@dataclass
class RunState:
    """Collects what a checkpoint holds, and puts it back."""

    learner: Learner
    weights: SharedWeights
    buffer: ReplayBuffer
    status: StatusTable
    metrics: StepMetrics
    evaluations: EvaluationRequests

    def collect(self) -> tuple[Tensors, Arrays, dict]:
        """Collect tensors by file, which come one at a time, arrays by file, and plain values."""
        tensors = {"learner": self.learner.state()}
        if self.weights.reference_version:
            tensors["reference"] = self.weights.reference_tensors().items()
        rng = {"rng": torch.get_rng_state().numpy()}
        arrays = {"buffer": self.buffer.state_dict(), "torch": rng}
        values = {
            "step": self.learner.step,
            "base_model": self.learner.config.base_model,
            "data_digest": self.learner.config.data_digest,
            "received": self.buffer.received,
            "reference_version": self.weights.reference_version,
            **self.metrics.state_dict(),
            **self.evaluations.state_dict(self.learner.step),
            "board": self.status.state_dict(),
        }
        return tensors, arrays, values

    def load(self, directory: str) -> None:
        """Take over a checkpoint. The status table's part is read before any process is there."""
        values = checkpoint.load_state(directory)
        self.learner.load_state(checkpoint.load_tensors(directory, "learner"))
        if values["reference_version"]:
            reference = checkpoint.load_tensors(directory, "reference")
            self.weights.publish_reference(values["reference_version"], reference.items())
        self.buffer.load_state_dict(checkpoint.load_arrays(directory, "buffer"))
        self.buffer.received = values["received"]
        self.metrics.load_state_dict(values)
        self.evaluations.load_state_dict(values, self.learner.step)
        rng = checkpoint.load_arrays(directory, "torch")["rng"]
        torch.set_rng_state(torch.from_numpy(rng))
