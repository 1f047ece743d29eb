"""How much memory a model takes, from its architecture alone: nothing is loaded or computed."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple
from weakref import finalize

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModel

from config import Config, UserError
from models.hub import fetch_model
from models.logprobs import POSITIONS_PER_LOGITS, response_states
from models.lora import add_adapters, trained_parameters
from models.policy import (
    decoder_layers,
    first_line,
    hold_as_multiplied,
    linear_layers,
    policy_without_weights,
)

ENGINE_ROWS = 256  # responses that vLLM generates at a time


class Pass(NamedTuple):
    """A forward pass over responses of full length: how many, and to how many queries."""

    rows: int
    queries: int


@dataclass(frozen=True)
class PolicySize:
    """How many numbers the parts of a policy have."""

    parameters: int
    linear: int  # of the linear layers, a tied output embedding aside
    output_embedding: int
    vocabulary: int
    layers: int
    layer: int  # of the largest layer
    outside: int  # of what is in no layer: embeddings and head, mostly
    layer_values_per_token: int  # states on the way through a layer, and inside its MLP
    cached_per_token: int  # keys and values of all layers


class PassBytes(NamedTuple):
    """What forward passes and their backward pass take, beside weights and gradients, in bytes."""

    kept: int  # after the forward passes, for the backward pass
    peak: int
    is_counted: bool  # or estimated, for a model that fake tensors cannot go through


@cache
def policy_size(model: str, trust_remote_code: bool) -> PolicySize:
    """Return the size of a policy. Raises UserError for a model without attention."""
    policy = policy_without_weights(Config(model=model, trust_remote_code=trust_remote_code))
    text = policy.config.get_text_config()
    head = policy.get_output_embeddings()
    if head is None or not hasattr(text, "num_attention_heads"):
        raise UserError(
            f"--model {model!r} is a {type(policy).__name__}, without attention or without an "
            "output embedding: use another architecture"
        )
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(policy)]
    return PolicySize(
        parameters=parameters,
        linear=sum(layer.weight.numel() for layer in linear_layers(policy)),
        output_embedding=head.weight.numel(),
        vocabulary=policy.get_input_embeddings().num_embeddings,
        layers=text.num_hidden_layers,
        layer=max(layers, default=0),
        outside=parameters - sum(layers),
        layer_values_per_token=4 * text.hidden_size + 3 * inner,
        cached_per_token=cached_per_token(policy),
    )


def cached_per_token(policy: torch.nn.Module) -> int:
    """Count the keys and values that all layers keep of a token."""
    try:
        token = torch.zeros(1, 1, dtype=torch.long, device="meta")
        layers = policy.base_model(input_ids=token, use_cache=True).past_key_values.layers
        return sum(layer.keys.numel() + layer.values.numel() for layer in layers)
    except Exception:  # the model looks at numbers, and here are none
        text = policy.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return 2 * text.num_hidden_layers * heads * size


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
    config: Config, passes: list[Pass], dtype: torch.dtype, has_gradient: bool
) -> PassBytes:
    """Count what response_logprobs keeps and needs, up to the last hidden states.

    dtype: what is computed in; has_gradient: whether a backward pass follows, and with LoRA there
    are adapters. Casts of the weights are part of it, gradients are not.
    """
    lengths = config.max_prompt_tokens, max(2, config.max_response_tokens)
    rank = config.lora_rank if has_gradient else 0
    model = config.model, config.trust_remote_code, config.master_dtype, rank
    try:
        return _count(model, lengths, tuple(passes), dtype, has_gradient)
    except Exception:  # a model may look at numbers, and here are none: that must not stop a run
        size = policy_size(config.model, config.trust_remote_code)
        masters = getattr(torch, config.master_dtype)
        tokens = sum(one.rows * lengths[1] + one.queries * lengths[0] for one in passes)
        casts = size.parameters * dtype.itemsize if dtype != masters else 0
        layers = size.layers if has_gradient else 1
        bytes_ = casts + 2 * tokens * layers * size.layer_values_per_token * dtype.itemsize
        return PassBytes(bytes_, bytes_, is_counted=False)


@cache
def _count(
    model: tuple[str, bool, str, int],
    lengths: tuple[int, int],
    passes: tuple[Pass, ...],
    dtype: torch.dtype,
    has_gradient: bool,
) -> PassBytes:
    """Run the passes on fake tensors, which have shapes and storages and no numbers.

    Passes of one shape are alike, so each shape runs once; where there are several of one, the
    first runs twice, for in the first pass of all the weights are cast.
    """
    name, trust_remote_code, master_dtype, lora_rank = model
    config = Config(
        model=name,
        trust_remote_code=trust_remote_code,
        master_dtype=master_dtype,
        lora_rank=lora_rank,
    )
    policy, masters = policy_without_weights(config).eval(), getattr(torch, master_dtype)
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(masters)
    if lora_rank:
        hold_as_multiplied(policy, dtype)
        add_adapters(policy, config)
    shapes, prompt = Counter(passes), np.arange(lengths[0])
    is_repeated = len(shapes) < len(passes)
    with FakeTensorMode(allow_non_fake_inputs=True):
        bring_to_cpu(policy)
        for parameter in trained_parameters(policy).values():
            parameter.grad = torch.zeros_like(parameter)
        live, kept, states = LiveBytes(), [], []
        with live, torch.set_grad_enabled(has_gradient):
            with torch.autocast("cpu", dtype, enabled=masters != dtype):
                for shape in (*passes[:is_repeated], *shapes):
                    prompts = [prompt + row % shape.queries for row in range(shape.rows)]
                    ids = torch.zeros(shape.rows, lengths[1], dtype=torch.long)
                    states.append(response_states(policy, prompts, ids).to(dtype))
                    kept.append(live.now)
                beyond = live.peak - live.now
            if has_gradient:
                live.peak = live.now
                torch.autograd.backward(states, [torch.zeros_like(state) for state in states])
                beyond = max(beyond, live.peak - kept[-1])
    total = kept[-1]
    if is_repeated:
        each = np.diff(kept)  # without casts
        total = kept[0] - each[0] + sum(count * size for count, size in zip(shapes.values(), each))
    return PassBytes(int(total), int(total + beyond), is_counted=True)


def bring_to_cpu(model: torch.nn.Module) -> None:
    """Replace a model's tensors on the meta device by new ones on a CPU; tied ones stay one.

    In a FakeTensorMode, where Module.to_empty does not work.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, meta in tensors.items():
                if meta is None:
                    continue
                if id(meta) not in made:
                    made[id(meta)] = torch.empty_like(meta, device="cpu")
                    if isinstance(meta, torch.nn.Parameter):
                        made[id(meta)] = torch.nn.Parameter(made[id(meta)], meta.requires_grad)
                tensors[name] = made[id(meta)]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are made in it and live, now and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = {_place(value) for value in tree_leaves((args, kwargs))}
        for value in tree_leaves(out):
            place = _place(value)
            if place is None or place in known or place in self.sizes:
                continue  # a view, or written in place
            storage = value.untyped_storage()
            self.sizes[place] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            finalize(storage, self.free, place)
        return out

    def free(self, place: int) -> None:
        """Take note that a storage is gone."""
        self.now -= self.sizes.pop(place)


def _place(value: object) -> int | None:
    """What tells one storage from another; None for anything but a tensor."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def head_bytes(
    size: PolicySize,
    dtype: torch.dtype,
    device: torch.device,
    positions: int,
    passes: int,
    is_trained: bool = True,
) -> int:
    """Count the bytes of logits while log-probabilities are taken, and of the head's copies.

    positions: response tokens in a pass; passes: that have a backward pass, or 0; is_trained:
    whether the head has a gradient, as it has without LoRA. Logits are there
    twice: as they are and as terms of the normalizer, or of one slice and the next. The gradient of
    the head is there of the slice at hand, of its pass, and of the passes before.
    """
    logits = min(positions, POSITIONS_PER_LOGITS[device.type]) * size.vocabulary
    copies, cast = 2.0, 0
    if dtype == torch.bfloat16:
        cast = size.output_embedding * dtype.itemsize
        if device.type == "cpu":  # which multiplies it in fp32 (_product)
            cast += size.output_embedding * torch.float32.itemsize
        # Their gradient in bf16; a CPU multiplies it in fp32.
        copies += (passes > 0) * (0.5 if device.type == "cuda" else 1.0)
    gradients = (1 + min(passes, 2)) * size.output_embedding if passes and is_trained else 0
    return int((logits * copies + gradients) * torch.float32.itemsize) + cast
