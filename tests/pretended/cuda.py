"""A GPU that is none: tensors that say cuda:0 and compute on the CPU, with real numbers.

Under pretend(), a dispatch mode, what asks for "cuda" gets an OnCuda tensor. What mixes one with a
CPU tensor raises as CUDA does, and autograd and autocast see CUDA's dispatch keys: so autocast's
list of operations is CUDA's. A copy to the CPU that does not wait is made at the next
torch.cuda.synchronize(). There is no memory, no stream and no kernel of a GPU in it.

Import it before torch, with the library of gpu.cpp (its path is the environment's PRETENDED_GPU).
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

_lib = Path(importlib.util.find_spec("torch").origin).parent / "lib"
for _path in (_lib / "libc10.so", _lib / "libtorch_cpu.so", os.environ["PRETENDED_GPU"]):
    ctypes.CDLL(str(_path), mode=ctypes.RTLD_GLOBAL)

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.nn.attention.varlen  # noqa: E402
from torch.utils import _python_dispatch as dispatch  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map_only  # noqa: E402

aten, varlen = torch.ops.aten, torch.ops.torch_attn
# Operations in which CUDA lets devices mix: copies, and indices, which may be on the CPU.
MIXED = {aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor, aten.index.Tensor}
MIXED |= {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# Those in which not even a number may be on the CPU.
STRICT = {aten._fused_adamw_.default}

dtypes: set[torch.dtype] = set()  # of what was computed on the pretended GPU
waits: list[str] = []  # operations for which the host waits for the device
pinned: set[int] = set()  # where host memory begins that is locked
waiting: list[Callable[[], object]] = []  # copies to the CPU that nobody has waited for


class OnCuda(torch.Tensor):
    """A tensor that says cuda:0. inner: its numbers, on the CPU."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        memory = dict(strides=inner.stride(), storage_offset=inner.storage_offset())
        kind = dict(dtype=inner.dtype, layout=inner.layout, device=torch.device("cuda", 0))
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **memory, **kind)

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, OnCuda) or value.shape != self.shape or value.dtype != self.dtype:
            raise RuntimeError(".data wants a tensor of the same device, shape and dtype")
        self.inner = value.inner

    def __repr__(self) -> str:
        return f"OnCuda({self.inner})"

    def tolist(self) -> list:
        return self.inner.tolist()


class PretendedCuda(dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args: tuple, kwargs: dict):
    """Run an operation on the CPU, and say where its result is."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    on = [t for t in tensors if isinstance(t, OnCuda)]
    check_devices(func, args, on, [t for t in tensors if not isinstance(t, OnCuda)])
    is_on_gpu, is_late = bool(on), False
    note_wait(func, args, kwargs)
    if func is aten.copy_.default:
        is_on_gpu = isinstance(args[0], OnCuda)
        if on and not is_on_gpu:
            assert args[0].dtype == args[1].dtype, "converted on the CPU, at a tenth of the speed"
            is_late = (*args, False)[2]
    if (device := kwargs.get("device")) is not None:
        is_on_gpu = torch.device(device).type == "cuda"
        kwargs = kwargs | {"device": torch.device("cpu") if is_on_gpu else device}
    if func is aten._pin_memory.default:
        out = args[0].clone()
        pinned.add(out.data_ptr())
        return out
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    inner, named = tree_map_only(OnCuda, lambda t: t.inner, (args, kwargs))
    if is_late:
        waiting.append(lambda: func(*inner, **named))
        return args[0]
    if func is aten.mm.dtype:  # a product of two bf16 matrices summed in fp32: CUDA alone has it
        a, b, dtype = inner
        out = a.to(dtype) @ b.to(dtype)
    elif func is varlen._varlen_attn.default:
        out = attend(*inner[:5], *inner[8:10])
    elif func is varlen._varlen_attn_backward.default:
        out = attend(*inner[1:4], *inner[6:8], *inner[12:14], grad=inner[0])
    else:
        out = func(*inner, **named)
    if func is aten._to_copy.default and out is inner[0]:
        out = out.clone()
    if not is_on_gpu:
        return out
    tree_map_only(torch.Tensor, lambda t: dtypes.add(t.dtype), out)
    wrapped = tree_map_only(torch.Tensor, lambda t: t if isinstance(t, OnCuda) else OnCuda(t), out)
    return dispatch.return_and_correct_aliasing(func, args, kwargs, wrapped) if on else wrapped


def note_wait(func, args: tuple, kwargs: dict) -> None:
    """Note what would have the host wait: a number that it reads, a copy that is not queued."""
    if func in (aten.nonzero.default, aten._local_scalar_dense.default, aten.masked_select.default):
        waits.append(str(func))
    indices = args[1] if func in (aten.index.Tensor, aten.index_put_.default) else ()
    if any(i is not None and i.dtype == torch.bool for i in indices):
        waits.append(f"{func} by a mask")
    if func in (aten.copy_.default, aten._to_copy.default):
        to, source, *queued = args if func is aten.copy_.default else (None, args[0])
        to_gpu = isinstance(source if to is None and "device" not in kwargs else to, OnCuda)
        to_gpu |= "cuda" in str(kwargs.get("device"))
        is_queued = any(queued) or kwargs.get("non_blocking")
        if to_gpu:
            is_queued = is_queued and source.data_ptr() in pinned
        if isinstance(source, OnCuda) != to_gpu and not is_queued:
            waits.append(f"{func} of {tuple(source.shape)}")


def attend(query, key, value, query_ends, key_ends, scale, window, grad=None):
    """Compute what the kernel for packed segments does: (N, heads, D), or its three gradients."""
    group, left = query.shape[1] // key.shape[1], window[0] if window[0] >= 0 else len(key)
    scale = scale or query.shape[2] ** -0.5
    found = [torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value)]
    out = torch.zeros_like(found[0])
    for a, b, c, d in zip(query_ends, query_ends[1:], key_ends, key_ends[1:]):
        q = query[a:b].float().transpose(0, 1)
        k, v = (x[c:d].float().transpose(0, 1).repeat_interleave(group, 0) for x in (key, value))
        number, last = torch.arange(d - c), torch.arange(d - c - (b - a), d - c)[:, None]
        seen = (number <= last) & (number >= last - left)
        p = (q @ k.mT * scale).masked_fill(~seen, float("-inf")).softmax(-1)
        out[a:b] = (p @ v).transpose(0, 1)
        if grad is not None:
            g = grad[a:b].float().transpose(0, 1)
            of_p = g @ v.mT
            of_scores = scale * p * (of_p - (of_p * p).sum(-1, keepdim=True))
            found[0][a:b] = (of_scores @ k).transpose(0, 1)
            for all_of_it, own in ((found[1], of_scores.mT @ q), (found[2], p.mT @ g)):
                all_of_it[c:d] = own.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
    if grad is not None:
        return tuple(each.to(query.dtype) for each in found)
    return out.to(query.dtype), torch.zeros(query.shape[1], len(query)), torch.zeros(2)


def check_devices(func, args: tuple, on: list, off: list) -> None:
    """Raise RuntimeError where CUDA does. on, off: tensors on the GPU, and on the CPU."""
    is_bad = func not in MIXED and any(t.dim() > 0 or func in STRICT for t in off)
    is_bad |= func is aten.index.Tensor and not isinstance(args[0], OnCuda) and bool(off)
    if on and is_bad:
        shapes = [tuple(t.shape) for t in off]
        raise RuntimeError(f"tensors on two devices in {func}, on the CPU are those of {shapes}")


def synchronize(device=None) -> None:
    while waiting:
        waiting.pop(0)()


def check_error(code: int) -> None:
    if code:  # its own __init__ asks a library of CUDA for the text
        raise torch.cuda.CudaError.__new__(torch.cuda.CudaError)


@contextmanager
def pretend() -> Iterator[None]:
    """Have a GPU until the block ends."""
    answers = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.is_bf16_supported": lambda *_: True,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0),
        "torch.cuda.check_error": check_error,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.synchronize": synchronize,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
    }
    future = torch.__future__
    with ExitStack() as stack:
        for name, value in answers.items():
            stack.enter_context(mock.patch(name, value))
        # Else Module.to() changes what is in a Parameter, which loses OnCuda; tied ones stay one.
        swaps = future.get_swap_module_params_on_conversion()
        stack.callback(future.set_swap_module_params_on_conversion, swaps)
        future.set_swap_module_params_on_conversion(True)
        # torch.tensor(…, device="cuda") makes a CPU tensor and moves it where modes see it.
        lifts = torch._C._only_lift_cpu_tensors()
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(PretendedCuda())
        yield


@pytest.fixture
def gpu() -> Iterator[None]:
    with pretend():
        yield
