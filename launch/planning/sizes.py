"""How much memory a model takes, from its architecture alone: nothing is loaded or computed."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import NamedTuple
from weakref import WeakSet, finalize

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoConfig, AutoModel

from config import Config, UserError, first_line
from models.architecture import policy_without_weights
from models.hub import fetch_model
from models.logprobs import response_states
from models.policy import cast_linear_layers, decoder_layers, linear_layers, trained_parameters


class Pass(NamedTuple):
    """A forward pass: over how many responses, to how many queries, and of how many tokens each."""

    rows: int
    queries: int
    prompt: int
    response: int


class PassBytes(NamedTuple):
    """What a forward and a backward pass take, beside weights and gradients, in bytes."""

    kept: int  # after the forward pass, for the backward pass
    beyond: int  # what is kept, at the peak
    is_counted: bool  # or estimated, for a model that fake tensors cannot go through


@cache
class PolicySize:
    """How many numbers the parts of a policy have. Raises UserError for one without attention."""

    def __init__(self, model: str, trust_remote_code: bool):
        policy = policy_without_weights(Config(model=model, trust_remote_code=trust_remote_code))
        text = policy.config.get_text_config()
        head, embedding = policy.get_output_embeddings(), policy.get_input_embeddings()
        heads = getattr(text, "num_attention_heads", None)
        if head is None or heads is None:
            raise UserError(
                f"--model {model!r} is a {type(policy).__name__}, without attention or without an "
                "output embedding: use another architecture"
            )
        self.parameters = sum(parameter.numel() for parameter in policy.parameters())
        # Of the linear layers, a tied output embedding aside.
        self.linear = sum(layer.weight.numel() for layer in linear_layers(policy))
        self.output_embedding, self.vocabulary = head.weight.numel(), embedding.num_embeddings
        self.is_tied = head.weight is embedding.weight  # the output embedding is the input's
        layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(policy)]
        self.layers, self.layer = text.num_hidden_layers, max(layers, default=0)  # the largest one
        self.outside = self.parameters - sum(layers)  # of all layers: embeddings and head, mostly
        # States on the way through a layer, and inside its MLP.
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        self.layer_values_per_token = 4 * text.hidden_size + 3 * inner
        # Keys and values of all layers.
        cached_heads = getattr(text, "num_key_value_heads", None) or heads
        head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
        self.cached_per_token = 2 * self.layers * cached_heads * head_size


@cache
def loaded_bytes(model: str) -> int:
    """Count the bytes of a model as transformers loads it with dtype="auto", a head aside.

    Raises UserError for one that cannot be had.
    """
    try:
        directory = fetch_model("the task's model", model, weights=False)
        architecture = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with torch.device("meta"):
            parameters = AutoModel.from_config(architecture).num_parameters()
    except (OSError, ValueError) as error:
        problem = first_line(error)
        raise UserError(f"the task's model {model!r} cannot be used: {problem}") from error
    return parameters * (architecture.dtype or torch.float32).itemsize


def pass_bytes(
    config: Config, one: Pass, dtype: torch.dtype, has_gradient: bool, on_gpu: bool = False
) -> PassBytes:
    """Count what response_logprobs keeps and needs, up to the last hidden states.

    dtype: what is computed in; has_gradient: whether a backward pass follows, and with LoRA there
    are adapters; on_gpu: whether autocast is CUDA's. With a gradient autocast's copies of the
    weights are part of it; gradients are not. A policy that is not trained has no such copies
    (cast_linear_layers), nor has a sharded one.
    """
    if not has_gradient:
        config = replace(config, lora_rank=0)
    size = PolicySize(config.model, config.trust_remote_code)
    is_counted = True
    try:
        kept, beyond = _count(config, one, dtype, has_gradient, on_gpu)
    except Exception:  # a model may look at numbers, and here are none: that must not stop a run
        is_counted = False
        tokens = one.rows * one.response + one.queries * one.prompt
        layers = size.layers if has_gradient else 1
        kept, beyond = 2 * tokens * layers * size.layer_values_per_token * dtype.itemsize, 0
    is_plain = not config.lora_rank and config.trainer_processes == 1
    if has_gradient and is_plain and dtype != getattr(torch, config.master_dtype):
        kept += (size.parameters - size.outside) * dtype.itemsize
    return PassBytes(kept, beyond, is_counted)


def _count(
    config: Config, one: Pass, dtype: torch.dtype, has_gradient: bool, on_gpu: bool
) -> tuple[int, int]:
    """Run a pass on fake tensors, which have shapes and storages and no numbers.

    Returns the bytes that it keeps, without autocast's copies of a layer's weights, and what its
    peak is beyond that.
    """
    policy, masters = policy_without_weights(config).eval(), getattr(torch, config.master_dtype)
    policy.to(masters)
    packed = on_gpu and dtype == torch.bfloat16
    if has_gradient and not config.lora_rank:
        for layer in decoder_layers(policy):
            for parameter in layer.parameters():
                if parameter.ndim > 1:  # autocast has nothing left to copy
                    parameter.data = parameter.data.to(dtype)
    else:
        cast_linear_layers(policy, dtype)
    if config.lora_rank:
        from extras.lora import add_adapters

        add_adapters(policy, config)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        policy.to_empty(device="cpu")
        policy.tie_weights()  # to_empty makes two of a tied one
        for parameter in trained_parameters(policy).values():
            parameter.grad = torch.zeros_like(parameter)
        before = live.peak = live.now
        # No two are equal.
        prompts = [np.arange(one.prompt) + row % one.queries for row in range(one.rows)]
        responses = [np.arange(one.response) + row for row in range(one.rows)]
        autocast = torch.autocast("cpu", dtype, enabled=masters != dtype)
        as_cuda = CudaAutocast() if on_gpu and masters != dtype else nullcontext()
        with torch.set_grad_enabled(has_gradient), autocast, as_cuda:
            states, *_ = response_states(policy, prompts, responses, dtype, packed)
            states = states.to(dtype)
        after = live.now
        if has_gradient:
            states.backward(torch.zeros_like(states))
        return after - before, live.peak - after


class CudaAutocast(TorchFunctionMode):
    """Computes a policy's operations in fp32 where CUDA's autocast does and a CPU's does not."""

    IN_FP32 = {F.layer_norm, F.rms_norm, torch.pow, Tensor.pow, Tensor.__pow__}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        given = args, kwargs or {}
        if function in self.IN_FP32:
            given = tree_map_only(Tensor, Tensor.float, given)
        return function(*given[0], **given[1])


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are made in it and live, now and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            storage = value.untyped_storage() if isinstance(value, torch.Tensor) else None
            if storage is not None and storage not in self.known:  # else a view, or in place
                self.known.add(storage)
                self.add(storage.nbytes())
                finalize(storage, self.add, -storage.nbytes())
        return out

    def add(self, nbytes: int) -> None:
        """Take note that so many bytes come, or go."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)
