"""What the processes of a run need of memory and disk, counted before anything starts.

Weights, moments and shared memory are arithmetic. Activations are counted by the policy's own
forward passes, on tensors without numbers (models/sizes.py). What CUDA, kernels and vLLM's work
take is estimated. On a GPU nothing of it has been measured yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from config import Config
from models import sizes
from models.device import compute_dtype
from models.logprobs import TOKENS_IN_LOW_MEMORY, TOKENS_PER_FORWARD, split_rows
from models.lora import trained_shapes
from models.sizes import ENGINE_ROWS, Pass, PassBytes
from objectives import WITHOUT_REFERENCE
from runtime.checkpoints.checkpoint import KEPT
from runtime.processes.children import environment
from runtime.processes.places import Place, searchers_of, trainers_of
from weights import SharedWeights, num_elements

GIB = 2**30
MEMORY, SHARED, DISK = "host memory", "shared memory", "disk"
# Estimated: a process on a GPU (context, kernels, fragments); one in host memory (Python and its
# libraries) without a GPU and with one; what vLLM captures on a GPU; what it reads at a time.
CUDA_BYTES, PROCESS_BYTES, GPU_PROCESS_BYTES, CUDA_GRAPHS = 1.5 * GIB, 0.7 * GIB, 3 * GIB, GIB / 2
VLLM_TOKENS, VLLM_TOKENS_LARGE = 8192, 16384  # on a card of 70 GiB or more
VLLM_LOGITS = 4  # fp32 copies of the logits of a step, while vLLM samples


@dataclass(frozen=True)
class Need:
    """What a process needs at a place for one purpose, in bytes."""

    place: str  # "GPU 0", MEMORY, SHARED or DISK
    process: str
    purpose: str
    bytes: float


class Needs:
    """Counts what a run needs. available: bytes by place."""

    def __init__(self, config: Config, places: list[Place], available: dict[str, float]):
        self.config, self.places, self.available = config, places, available
        self.size = sizes.policy_size(config.model, config.trust_remote_code)
        self.device = torch.device("cpu" if places[0].gpu is None else "cuda")
        self.dtype = compute_dtype(config, self.device)
        master_bytes = getattr(torch, config.master_dtype).itemsize
        self.masters = self.size.parameters * master_bytes
        # Of a policy that is not trained, linear layers are held in what is computed in.
        self.linear = self.size.linear * self.dtype.itemsize
        self.frozen = self.linear + (self.size.parameters - self.size.linear) * master_bytes
        self.ranks = config.trainer_processes
        self.trained = self.masters
        if config.lora_rank:
            self.trained = num_elements(trained_shapes(config)) * master_bytes
        self.published = self.size.parameters * self.dtype.itemsize
        self.usual_tokens = TOKENS_PER_FORWARD[self.device.type]

    def count(self, models: list[str]) -> Iterator[Need]:
        """Yield every need of the run. models: that a searcher has for its task."""
        for place in trainers_of(self.places):
            yield from self.trainer(place)
        for place in searchers_of(self.places):
            yield from self.searcher(place, models)
        yield from self.host_memory()
        yield from self.files()

    def passes(self, queries: int, responses: int, most_tokens: int) -> list[Pass]:
        """Split so many queries of so many responses of full length into forward passes."""
        config, rows = self.config, queries * responses
        groups = np.repeat(np.arange(queries), responses)
        lengths = [np.zeros(config.max_prompt_tokens)], [np.zeros(config.max_response_tokens)]
        split = split_rows(*(row * rows for row in lengths), most_tokens)
        return [Pass(len(few), len(set(groups[few]))) for few in split]

    def trainer(self, place: Place) -> Iterator[Need]:
        """Yield what a process of the trainer needs in its largest step."""
        config, where, name, ranks = self.config, place_of(place), place.name, self.ranks
        of_all = f", 1 / {ranks} of them" if ranks > 1 else ""
        if config.lora_rank:
            yield Need(where, name, "base policy", self.frozen)
            yield Need(where, name, f"LoRA's adapters, {config.master_dtype}", self.trained)
        else:
            yield Need(where, name, f"weights, {config.master_dtype}{of_all}", self.trained / ranks)
        yield Need(where, name, f"gradients{of_all}", self.trained / ranks)
        yield Need(where, name, f"AdamW's two moments{of_all}", 2 * self.trained / ranks)
        if ranks > 1:
            yield Need(where, name, "weights and gradients that are gathered", self.gathered())
        micro_batch = config.queries_per_pass, config.responses_per_query
        passes, before = self.passes(*micro_batch, self.usual_tokens), 0
        if config.low_memory == "on":
            # First a pass without a graph, as large as usual.
            before = self.forward(passes[0], is_frozen=config.lora_rank > 0 or ranks > 1)
            passes = self.passes(*micro_batch, TOKENS_IN_LOW_MEMORY)[:1]
        taken = self.without_casts(sizes.pass_bytes(config, passes, self.dtype, has_gradient=True))
        rows = sum(one.rows for one in passes)
        head = self.head(passes[0].rows * config.max_response_tokens, len(passes))
        what = "activations" if taken.is_counted else "activations (estimated)"
        length = f"{config.max_prompt_tokens} + {config.max_response_tokens}"
        yield Need(where, name, f"{what}, {responses(rows)} of {length} tokens", taken.kept)
        # Logits are there when all passes are kept; a layer's gradients, when logits are gone.
        most = max(taken.kept + head, taken.peak, before)
        yield Need(where, name, "logits, and what the backward pass adds", most - taken.kept)
        if config.lora_rank:
            # For the mismatch, and rows of an earlier reference. Without LoRA the gradients and
            # activations, which are gone by then, leave more room than it takes.
            other = self.frozen + self.forward(passes[0]) - most
            if other > 0:
                yield Need(where, name, "weights of an earlier version, beyond that", other)
        yield from self.process(place)

    def gathered(self) -> int:
        """Bytes of what a rank holds whole (models/sharding.py).

        Embeddings and head, their gradients, and these once more on the way to the other ranks. Of
        layers: the one that is computed, the next and its way here, and two gradients on their way.
        gloo, without a GPU, makes copies of its own.
        """
        masters = self.masters // self.size.parameters
        copies = 5 if self.device.type == "cpu" else 3
        layer = 4 * self.dtype.itemsize + 2 * torch.float32.itemsize
        return copies * masters * self.size.outside + layer * self.size.layer

    def without_casts(self, taken: PassBytes) -> PassBytes:
        """Leave out the casts of a sharded policy's layers, which are gathered for the moment."""
        if self.ranks == 1 or self.published == self.masters:
            return taken
        casts = (self.size.parameters - self.size.outside) * self.dtype.itemsize
        return taken._replace(kept=taken.kept - casts, peak=taken.peak - casts)

    def searcher(self, place: Place, models: list[str]) -> Iterator[Need]:
        """Yield what a searcher needs: for vLLM, the reference policy and the task's models."""
        config, where, name = self.config, place_of(place), place.name
        fixed, vllm = self.vllm_without_responses(place), self.vllm(place)
        yield Need(where, name, "vLLM: weights and temporary memory", min(fixed, vllm))
        purpose = f"vLLM: {responses(self.responses(place))} of full length at once"
        yield Need(where, name, purpose, max(0.0, vllm - fixed))
        for model in models:
            yield Need(where, name, f"the task's {Path(model).name}", sizes.loaded_bytes(model))
        yield from self.process(place)
        if config.loss in WITHOUT_REFERENCE:
            return
        yield Need(where, name, "reference policy", self.frozen)
        # All that finished together is scored together.
        groups = max(1, ENGINE_ROWS // config.samples_per_query)
        largest = self.passes(groups, config.samples_per_query, self.usual_tokens)[0]
        taken = self.forward(largest)
        yield Need(where, name, "reference policy's largest forward pass", taken)

    def forward(self, one: Pass, is_frozen: bool = True) -> int:
        """Bytes of a forward pass without a gradient; a frozen policy needs no casts."""
        taken = sizes.pass_bytes(self.config, [one], self.dtype, has_gradient=False)
        head = self.head(one.rows * self.config.max_response_tokens, passes=0)
        most = max(taken.peak, taken.kept + head)
        return most - self.linear if is_frozen and self.published != self.masters else most

    def head(self, positions: int, passes: int) -> int:
        """Bytes of the logits of so many response tokens a pass; passes: with a gradient."""
        is_trained = not self.config.lora_rank
        return sizes.head_bytes(self.size, self.dtype, self.device, positions, passes, is_trained)

    def vllm(self, place: Place) -> float:
        """Bytes that vLLM takes: a share of a GPU, whatever it needs of that."""
        if place.gpu is not None:
            return self.config.gpu_memory_utilization * self.available[place_of(place)]
        keys_and_values = float(environment(place)["VLLM_CPU_KVCACHE_SPACE"]) * GIB
        return self.vllm_without_responses(place) + keys_and_values

    def vllm_without_responses(self, place: Place) -> float:
        """Bytes that vLLM takes before it has keys and values of a response."""
        logits = VLLM_LOGITS * ENGINE_ROWS * self.size.vocabulary * torch.float32.itemsize
        if self.device.type == "cpu":
            return self.published + logits
        is_large = self.available[place_of(place)] > 70 * GIB
        tokens = VLLM_TOKENS_LARGE if is_large else VLLM_TOKENS
        states = tokens * self.size.layer_values_per_token * self.dtype.itemsize
        return self.published + logits + states + CUDA_GRAPHS

    def responses(self, place: Place) -> int:
        """Responses of full length to which vLLM has keys and values at once."""
        tokens = self.config.max_prompt_tokens + self.config.max_response_tokens
        each = tokens * self.size.cached_per_token * self.dtype.itemsize
        return max(0, int((self.vllm(place) - self.vllm_without_responses(place)) // each))

    def process(self, place: Place) -> Iterator[Need]:
        """Yield what any process on a GPU needs there besides."""
        if place.gpu is not None:
            yield Need(place_of(place), place.name, "CUDA, kernels, fragments", CUDA_BYTES)

    def host_memory(self) -> Iterator[Need]:
        """Yield what processes and weights take of host memory, wherever the models run."""
        on_gpu = self.device.type == "cuda"
        for place in self.places:
            taken = GPU_PROCESS_BYTES if on_gpu else PROCESS_BYTES
            yield Need(MEMORY, place.name, "Python and libraries", taken)
        yield Need(MEMORY, "all", "copies of the weights in shared memory", self.shared())
        if not on_gpu:
            if copy := self.checkpoint_copy():
                purpose = "the copy that checkpoints are written from"
                yield Need(MEMORY, "trainer", purpose, copy)
            if self.is_brought_together:
                kind = "merged" if self.config.lora_rank else "whole"
                yield Need(MEMORY, "trainer", f"{kind} weights, for model/", self.masters)
            return
        # At the start each policy is loaded here in fp32, one after the other on a single GPU.
        loading = len(self.places) if len({place.gpu for place in self.places}) > 1 else 1
        written = self.checkpoint_copy() + (self.masters if self.is_brought_together else 0)
        most = max(loading * self.size.parameters * torch.float32.itemsize, written)
        yield Need(MEMORY, "all", "policies while they load, or what is written", most)

    def shared(self) -> int:
        """Bytes of shared memory."""
        shapes, resets = {"all": (self.size.parameters,)}, self.config.reference_reset_period > 0
        return SharedWeights.required_bytes(shapes, self.dtype, resets)

    def checkpoint(self) -> int:
        """Bytes of a checkpoint.

        The buffer comes on top, which has 12 bytes of a token it holds, twice during a write.
        """
        resets = self.config.reference_reset_period > 0
        reference = self.size.parameters * torch.float32.itemsize if resets else 0
        return 3 * self.trained + reference

    def checkpoint_copy(self) -> int:
        """Bytes of the copy that a checkpoint is written from while the training goes on.

        Of a sharded policy the last one is written from a copy too.
        """
        period = self.config.checkpoint_every
        is_copied = 0 < period <= self.config.steps or self.ranks > 1
        return self.checkpoint() if is_copied else 0

    @property
    def is_brought_together(self) -> bool:
        """Whether model/ is saved from a copy in host memory, whole or merged."""
        return self.config.lora_rank > 0 or self.ranks > 1

    def files(self) -> Iterator[Need]:
        """Yield what is needed of shared memory and of the disk."""
        config, most = self.config, 1
        yield Need(SHARED, "all", "copies of the weights", self.shared())
        if config.checkpoint_every:
            most = min(KEPT + 1, config.steps // config.checkpoint_every + 1)
        purpose = f"checkpoints, at most {most} at once"
        yield Need(DISK, "trainer", purpose, most * self.checkpoint())
        yield Need(DISK, "trainer", "model/", self.masters)


def responses(count: int) -> str:
    """So many responses, in words."""
    return f"{count} response" if count == 1 else f"{count} responses"


def place_of(place: Place) -> str:
    """Where the tensors of a process are."""
    return MEMORY if place.gpu is None else f"GPU {place.gpu}"
