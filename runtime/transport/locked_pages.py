"""Locked pages under the slots of the weights: publishing from a GPU is then a copy by the GPU."""

from collections.abc import Callable

import torch

from models.device import device
from weights import SharedWeights


def lock_pages(weights: SharedWeights, say: Callable[[str], None]) -> None:
    """Lock the pages if this process, the writer, has a GPU. say: shows the user a line.

    Where the machine does not allow it, publishing goes on as it is, and is slower.
    """
    if device().type != "cuda":
        return
    cuda = torch.cuda.cudart()
    try:
        for slot in weights.slots:
            torch.cuda.check_error(cuda.cudaHostRegister(slot.data_ptr(), slot.nbytes, 0))
    except torch.cuda.CudaError as error:
        say(f"publishing will be slower, its memory cannot be locked: {error}")
