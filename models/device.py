"""The device of this process, and the dtype that it computes in."""

from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np
import torch

from config import Config

# On an H100 torch prefers cuDNN's attention, which with a mask and a key length of 64 modulo 128
# gives NaN gradients, and makes a plan for each new shape. vLLM switches it off for itself: so
# policy and reference policy have the same kernel, too.
torch.backends.cuda.enable_cudnn_sdp(False)


def device() -> torch.device:
    """The device of this process: the parent left it one GPU to see, or none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compute_dtype(config: Config, on: torch.device | None = None) -> torch.dtype:
    """What forward passes, published weights and vLLM compute in. on: None for this process's."""
    if config.dtype == "auto":
        return torch.bfloat16 if (on or device()).type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


def to_device(values: np.ndarray | torch.Tensor, on: torch.device) -> torch.Tensor:
    """Copy from the host to a device. To a GPU the copy is queued, and the host does not wait."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(on, non_blocking=True) if on.type == "cuda" else tensor


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Try whether oneDNN multiplies matrices of this dtype: bf16 it does not on every processor."""
    row = torch.ones(1, 1, dtype=dtype)
    try:
        torch.ops.mkldnn._linear_pointwise(row, row, None, "none", [], "")
    except RuntimeError:
        return False
    return True


def lock_pages(memories: Iterable[torch.Tensor], say: Callable[[str], None]) -> None:
    """Lock the pages of shared tensors, if this process has a GPU, which then makes copies itself.

    Where the machine does not allow it copies are slower, and `say` reports that.
    """
    if device().type != "cuda":
        return
    cuda = torch.cuda.cudart()
    try:
        for memory in filter(torch.numel, memories):
            torch.cuda.check_error(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except torch.cuda.CudaError as error:
        # It stays CUDA's last error, and the next launch of a kernel would raise it.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        say(f"copies of the weights will be slower, their memory cannot be locked: {error}")
