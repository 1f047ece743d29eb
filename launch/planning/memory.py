"""What a policy takes of memory, by its architecture alone: nothing is loaded or computed."""

from contextlib import nullcontext
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
from models.architecture import policy_without_weights, trained_shapes
from models.device import compute_dtype
from models.hub import fetch_model
from models.logprobs import POSITIONS_PER_LOGITS, response_states
from models.policy import cast_linear_layers, decoder_layers, linear_layers, trained_parameters
from weights import num_elements

FP32 = torch.float32.itemsize
Rows = tuple[list[np.ndarray], list[np.ndarray]]  # prompts of one length, and their responses


class PassBytes(NamedTuple):
    """What a forward and a backward pass take, beside weights and gradients, in bytes."""

    kept: int  # after the forward pass, for the backward pass
    beyond: int  # what is kept, at the peak
    is_counted: bool  # or estimated, for a model that fake tensors cannot go through


class PolicyMemory:
    """How many numbers the parts of a policy have, and how many bytes they and a pass take.

    on_gpu: whether it runs there. Raises UserError for a model without attention.
    """

    def __init__(self, config: Config, on_gpu: bool):
        self.config, self.on_gpu = config, on_gpu
        self.device = "cuda" if on_gpu else "cpu"
        self.dtype = compute_dtype(config, torch.device(self.device))
        self.master_dtype = getattr(torch, config.master_dtype)
        policy = policy_without_weights(config)
        head, embedding = policy.get_output_embeddings(), policy.get_input_embeddings()
        text = policy.config.get_text_config()
        heads = getattr(text, "num_attention_heads", None)
        if head is None or heads is None:
            raise UserError(
                f"--model {config.model!r} is a {type(policy).__name__}, without attention or "
                "without an output embedding: use another architecture"
            )
        # Numbers: of all, of the output embedding, of the largest layer and outside of all layers.
        self.parameters = policy.num_parameters()
        self.output_embedding, self.vocabulary = head.weight.numel(), embedding.num_embeddings
        self.is_tied = head.weight is embedding.weight  # the output embedding is the input's
        layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(policy)]
        self.layer, self.outside = max(layers, default=0), self.parameters - sum(layers)
        # Bytes: of what is trained; of a policy that is not, whose linear layers are held in what
        # is computed in; of all in that dtype.
        master, computed = self.master_dtype.itemsize, self.dtype.itemsize
        self.masters = self.trained = self.parameters * master
        if config.lora_rank:
            self.trained = num_elements(trained_shapes(config)) * master
        linear = sum(layer.weight.numel() for layer in linear_layers(policy))
        self.frozen = linear * computed + (self.parameters - linear) * master
        self.published = self.parameters * computed
        # Bytes per token: states on the way through a layer and inside its MLP; keys and values.
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        self.num_layers = text.num_hidden_layers
        self.states_per_token = (4 * text.hidden_size + 3 * inner) * computed
        cached_heads = getattr(text, "num_key_value_heads", None) or heads
        head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
        self.cached_per_token = 2 * self.num_layers * cached_heads * head_size * computed

    def count(self, rows: Rows, is_trained: bool) -> PassBytes:
        """Count what response_logprobs keeps and needs of memory for these rows.

        is_trained: whether a backward pass follows, and with LoRA there are adapters. Autocast's
        copies of the weights are part of it. A policy that is not trained has no such copies
        (cast_linear_layers), nor has a sharded one.
        """
        is_counted = True
        try:
            kept, beyond = self.count_layers(rows, is_trained)
        except Exception:  # a model may look at numbers, and here are none
            is_counted = False
            prompts, responses = map(np.stack, rows)
            tokens = np.unique(prompts, axis=0).size + responses.size
            kept = 2 * tokens * self.states_per_token * (self.num_layers if is_trained else 1)
            beyond = 0
        is_plain = not self.config.lora_rank and self.config.trainer_processes == 1
        if is_trained and is_plain and self.dtype != self.master_dtype:
            kept += (self.parameters - self.outside) * self.dtype.itemsize
        # Logits are there when the whole pass is kept; a layer's gradients, when logits are gone.
        head = self.count_head(sum(map(len, rows[1])), is_trained)
        return PassBytes(kept, max(head, beyond), is_counted)

    def count_head(self, positions: int, is_trained: bool) -> int:
        """Count the bytes of logits while log-probabilities are taken, and of the head's copies.

        positions: response tokens in a pass. Logits are there twice: as they are and as terms of
        the normalizer, or of one slice and the next. The gradient of the head is there of the slice
        at hand, and of the pass.
        """
        logits, copies = 2.0, 0
        has_own_gradient = is_trained and not self.config.lora_rank
        if self.dtype == torch.bfloat16:
            logits += is_trained * (0.5 if self.on_gpu else 1.0)  # their gradient, there in bf16
            if self.dtype != self.master_dtype and (has_own_gradient or self.is_tied):
                copies += self.dtype.itemsize  # else it is held in bf16
            if not self.on_gpu:
                copies += FP32  # as which it is multiplied (_product)
        if has_own_gradient:
            copies += 2 * FP32
        positions = min(positions, POSITIONS_PER_LOGITS[self.device])
        return int(logits * FP32 * positions * self.vocabulary + copies * self.output_embedding)

    def count_layers(self, rows: Rows, is_trained: bool) -> tuple[int, int]:
        """Run a pass up to the last hidden states on fake tensors, which have no numbers.

        Returns the bytes that it keeps, without autocast's copies of a layer's weights, and what
        its peak is beyond that.
        """
        policy = policy_without_weights(self.config).eval()
        policy.to(self.master_dtype)
        if is_trained and not self.config.lora_rank:
            for layer in decoder_layers(policy):
                for parameter in layer.parameters():
                    if parameter.ndim > 1:  # autocast has nothing left to copy
                        parameter.data = parameter.data.to(self.dtype)
        else:
            cast_linear_layers(policy, self.dtype)
        if is_trained and self.config.lora_rank:
            from extras.lora import add_adapters

            add_adapters(policy, self.config)
        casts = self.dtype != self.master_dtype
        autocast = torch.autocast("cpu", self.dtype, enabled=casts)
        as_cuda = CudaAutocast() if self.on_gpu and casts else nullcontext()
        is_packed = self.on_gpu and self.dtype == torch.bfloat16
        with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
            policy.to_empty(device="cpu")
            policy.tie_weights()  # to_empty makes two of a tied one
            for parameter in trained_parameters(policy).values():
                parameter.grad = torch.zeros_like(parameter)
            before = live.peak = live.now
            with torch.set_grad_enabled(is_trained), autocast, as_cuda:
                states, *_ = response_states(policy, *rows, self.dtype, is_packed)
                states = states.to(self.dtype)
            after = live.now
            if is_trained:
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
            storage = value.untyped_storage() if isinstance(value, Tensor) else None
            if storage is not None and storage not in self.known:  # else a view, or in place
                self.known.add(storage)
                self.add(storage.nbytes())
                finalize(storage, self.add, -storage.nbytes())
        return out

    def add(self, nbytes: int) -> None:
        """Take note that so many bytes come, or go."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)


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
    except (OSError, ValueError, LookupError, AttributeError, ImportError) as error:
        problem = first_line(error)
        raise UserError(f"the task's model {model!r} cannot be used: {problem}") from error
    return parameters * (architecture.dtype or torch.float32).itemsize
