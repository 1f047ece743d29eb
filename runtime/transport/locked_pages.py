"""Locked pages under the published weights: a copy from or to a GPU is then made by the GPU."""

from collections.abc import Callable
from contextlib import suppress

import torch

from models.device import device
from weights import SharedWeights


def lock_pages(weights: SharedWeights, say: Callable[[str], None]) -> None:
    """Lock the pages for this process, if it has a GPU. say: reports a failure.

    Where the machine does not allow it, copies go on as they are, and are slower.
    """
    if device().type != "cuda":
        return
    cuda = torch.cuda.cudart()
    try:
        for memory in filter(torch.numel, (*weights.slots, weights.reference)):
            torch.cuda.check_error(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except torch.cuda.CudaError as error:
        # It stays CUDA's last error, and the next launch of a kernel would raise it.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        say(f"copies of the weights will be slower, their memory cannot be locked: {error}")
