"""The device of a process, and what is computed in there."""

import torch

from config import Config


def device() -> torch.device:
    """The device of this process: the parent left it one GPU to see, or none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compute_dtype(config: Config) -> torch.dtype:
    """What forward passes, published weights and vLLM compute in."""
    if config.dtype == "auto":
        return torch.bfloat16 if device().type == "cuda" else torch.float32
    return getattr(torch, config.dtype)
