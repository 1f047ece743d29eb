"""The device of a process."""

import torch


def device() -> torch.device:
    """The device of this process: the parent left it one GPU to see, or none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
