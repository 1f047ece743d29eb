"""What runtime/ needs of the Learner, which stands above it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from buffer import Row

if TYPE_CHECKING:
    from models.logprobs import Scorer
    from models.sharding import OneProcess


class LearnerLike(Protocol):
    """learner.Learner, as far as it is needed here."""

    policy: torch.nn.Module
    trained: dict[str, torch.nn.Parameter]
    ranks: "OneProcess"
    scorer: "Scorer"
    low_memory: bool

    def backward(self, rows: list[Row], beta: float) -> object: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def logprobs_under(
        self, weights: dict[str, Tensor] | None, rows: list[Row], temperature: float | None = None
    ) -> list[np.ndarray]: ...
