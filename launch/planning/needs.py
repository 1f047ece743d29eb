"""What the processes of a run need of memory and disk, counted before anything starts.

Weights, moments and shared memory are arithmetic. Activations are counted by the policy's own
forward passes, on tensors without numbers (sizes.py beside this). What CUDA, kernels and vLLM's
work take is estimated. On a GPU only the trainer was measured (benchmarks/gpu_day.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from config import ENGINE_ROWS, Config
from launch.children import environment
from launch.places import Place, searchers_of, trainers_of
from launch.planning import sizes
from launch.planning.sizes import Pass
from models.architecture import trained_shapes
from models.device import compute_dtype
from models.logprobs import (
    POSITIONS_PER_LOGITS,
    TOKENS_IN_LOW_MEMORY,
    TOKENS_PER_FORWARD,
    split_rows,
)
from runtime.checkpoints.checkpoint import KEPT
from weights import SLOTS, num_elements

GIB = 2**30
MEMORY, SHARED, DISK = "host memory", "shared memory", "disk"
# Estimated: a process on a GPU (context, kernels, fragments); one in host memory (Python and its
# libraries) without a GPU and with one.
CUDA_BYTES, PROCESS_BYTES, GPU_PROCESS_BYTES = 1.5 * GIB, 0.7 * GIB, 3 * GIB

Parts = Iterator[tuple[str, float]]  # purpose and bytes of what a process needs at its place


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
        self.ranks = config.trainer_processes
        self.size = size = sizes.policy_size(config.model, config.trust_remote_code)
        self.device = torch.device("cpu" if places[0].gpu is None else "cuda")
        self.dtype = compute_dtype(config, self.device)
        self.master_bytes = getattr(torch, config.master_dtype).itemsize
        self.masters = self.trained = size.parameters * self.master_bytes
        if config.lora_rank:
            self.trained = num_elements(trained_shapes(config)) * self.master_bytes
        # Of a policy that is not trained, linear layers are held in what is computed in.
        others = size.parameters - size.linear
        self.frozen = size.linear * self.dtype.itemsize + others * self.master_bytes
        self.published = size.parameters * self.dtype.itemsize
        resets = config.reference_reset_period > 0
        per_parameter = SLOTS * self.dtype.itemsize + resets * torch.float32.itemsize
        self.shared = per_parameter * size.parameters  # of SharedWeights
        # The buffer comes on top, which has 14 bytes of a token it holds, twice during a write.
        self.checkpoint = 3 * self.trained + resets * size.parameters * torch.float32.itemsize

    def count(self, models: list[str]) -> Iterator[Need]:
        """Yield every need of the run. models: that a searcher has for its task."""
        for place in trainers_of(self.places):
            yield from self.process(place, self.trainer())
        for place in searchers_of(self.places):
            yield from self.process(place, self.searcher(place, models))
        yield Need(MEMORY, "all", "copies of the weights in shared memory", self.shared)
        yield from self.loading_or_written()
        yield from self.files()

    def process(self, place: Place, parts: Parts) -> Iterator[Need]:
        """Yield these parts of what a process needs, and what any process does."""
        for purpose, size in parts:
            yield Need(place_of(place), place.name, purpose, size)
        on_gpu = place.gpu is not None
        if on_gpu:
            yield Need(place_of(place), place.name, "CUDA, kernels, fragments", CUDA_BYTES)
        taken = GPU_PROCESS_BYTES if on_gpu else PROCESS_BYTES
        yield Need(MEMORY, place.name, "Python and libraries", taken)

    def largest_pass(self, queries: int, responses: int, most_tokens: int) -> Pass:
        """Return the largest flat pass over so many queries of so many responses of full length."""
        prompt, response = self.config.longest_row
        groups = np.repeat(np.arange(queries), responses)
        prompts = [np.full(prompt, group) for group in groups]
        first = split_rows(prompts, [np.zeros(response)] * len(groups), most_tokens)[0]
        return Pass(len(first), len(set(groups[first])), prompt, response)

    def trainer(self) -> Parts:
        """Yield what a process of the trainer needs in its largest step."""
        config, ranks = self.config, self.ranks
        of_all = f", 1 / {ranks} of them" if ranks > 1 else ""
        if config.lora_rank:
            yield "base policy", self.frozen
        trained = "LoRA's adapters" if config.lora_rank else "weights"
        yield f"{trained}, {config.master_dtype}{of_all}", self.trained / ranks
        yield f"gradients{of_all}", self.trained / ranks
        yield f"AdamW's two moments{of_all}", 2 * self.trained / ranks
        if ranks > 1:
            yield "weights and gradients that are gathered", self.gathered()
        most_tokens = config.micro_batch_tokens
        if config.low_memory == "on":  # a pass of more rows without a graph takes less
            most_tokens = TOKENS_IN_LOW_MEMORY[self.device.type]
        one = self.largest_pass(config.full_queries, config.responses_per_query, most_tokens)
        on_gpu = self.device.type == "cuda"
        taken = sizes.pass_bytes(config, one, self.dtype, True, on_gpu)
        what = "activations" if taken.is_counted else "activations (estimated)"
        length = "{} + {}".format(*config.longest_row)
        yield f"{what}, {responses(one.rows)} of {length} tokens", taken.kept
        # Logits are there when the whole pass is kept; a layer's gradients, when logits are gone.
        more = max(self.head(one.rows * one.response, has_gradient=True), taken.beyond)
        yield "logits, and what the backward pass adds", more
        if config.lora_rank:
            # For the mismatch, and rows of an earlier reference. Without LoRA the gradients and
            # activations, which are gone by then, leave more room than it takes.
            other = self.frozen + self.forward(one) - taken.kept - more
            if other > 0:
                yield "weights of an earlier version, beyond that", other

    def gathered(self) -> int:
        """Bytes of what a rank holds whole (extras/sharding.py).

        Embeddings and head, their gradients, and these once more on the way to the other ranks. Of
        layers: the one that is computed, the next and its way here, and two gradients on their way.
        gloo, without a GPU, makes copies of its own.
        """
        copies = 5 if self.device.type == "cpu" else 3
        layer = 4 * self.dtype.itemsize + 2 * torch.float32.itemsize
        return copies * self.master_bytes * self.size.outside + layer * self.size.layer

    def searcher(self, place: Place, models: list[str]) -> Parts:
        """Yield what a searcher needs: for vLLM, the reference policy and the task's models."""
        config = self.config
        fixed, room = self.vllm(place)
        yield "vLLM: weights and temporary memory", fixed
        yield f"vLLM: {responses(self.responses(place))} of full length at once", room
        for model in models:
            yield f"the task's {Path(model).name}", sizes.loaded_bytes(model)
        if config.reads_reference:
            yield "reference policy", self.frozen
            # All that finished together is scored together.
            groups = max(1, ENGINE_ROWS // config.samples_per_query)
            most_tokens = TOKENS_PER_FORWARD[self.device.type]
            largest = self.largest_pass(groups, config.samples_per_query, most_tokens)
            yield "reference policy's largest forward pass", self.forward(largest)

    def forward(self, one: Pass) -> int:
        """Bytes of a forward pass of a policy that is not trained."""
        on_gpu = self.device.type == "cuda"
        taken = sizes.pass_bytes(self.config, one, self.dtype, False, on_gpu)
        head = self.head(one.rows * one.response, has_gradient=False)
        return taken.kept + max(head, taken.beyond)

    def head(self, positions: int, has_gradient: bool) -> int:
        """Bytes of logits while log-probabilities are taken, and of the head's copies.

        positions: response tokens in a pass. Logits are there twice: as they are and as terms of
        the normalizer, or of one slice and the next. The gradient of the head is there of the slice
        at hand, and of the pass.
        """
        size, on_cpu = self.size, self.device.type == "cpu"
        is_trained = has_gradient and not self.config.lora_rank
        fp32, logits, copies = torch.float32.itemsize, 2.0, 0
        if self.dtype == torch.bfloat16:
            logits += has_gradient * (1.0 if on_cpu else 0.5)  # their gradient, on a GPU in bf16
            if self.published != self.masters and (is_trained or size.is_tied):
                copies += self.dtype.itemsize  # else it is held in bf16
            if on_cpu:
                copies += fp32  # it multiplies in fp32 (_product)
        if is_trained:
            copies += 2 * fp32
        positions = min(positions, POSITIONS_PER_LOGITS[self.device.type])
        return int(logits * fp32 * positions * size.vocabulary + copies * size.output_embedding)

    def vllm(self, place: Place) -> tuple[float, float]:
        """Bytes that vLLM takes before it has keys and values of a response, and for these.

        On a GPU it takes its share, whatever it needs of that.
        """
        if place.gpu is None:
            room = float(environment(place)["VLLM_CPU_KVCACHE_SPACE"]) * GIB
            return sizes.vllm_bytes(self.size, self.dtype), room
        card = self.available[place_of(place)]
        share = self.config.gpu_memory_utilization * card
        fixed = min(share, sizes.vllm_bytes(self.size, self.dtype, card))
        return fixed, share - fixed

    def responses(self, place: Place) -> int:
        """Responses of full length to which vLLM has keys and values at once."""
        _, room = self.vllm(place)
        cached = self.size.cached_per_token * self.dtype.itemsize
        return int(room // (sum(self.config.longest_row) * cached))

    def loading_or_written(self) -> Iterator[Need]:
        """Yield what of host memory loads the policies, or writes checkpoints and model/.

        A checkpoint is written from a copy while the training goes on. The last one needs a copy
        too where the weights are sharded or on a GPU (runtime/checkpoints/writer.py).
        """
        config, on_gpu = self.config, self.device.type == "cuda"
        written = 0
        if 0 < config.checkpoint_every <= config.steps or self.ranks > 1:
            written = self.checkpoint
        elif on_gpu:
            written = 3 * self.trained  # not of the reference, which is in shared memory
        if config.lora_rank or self.ranks > 1:
            written += self.masters  # model/, brought together
        if not on_gpu:
            if written:
                yield Need(MEMORY, "trainer", "copies, for checkpoints and model/", written)
            return
        # At the start each policy is loaded here in fp32, one after the other on a single GPU.
        loading = len(self.places) if len({place.gpu for place in self.places}) > 1 else 1
        most = max(loading * self.size.parameters * torch.float32.itemsize, written)
        yield Need(MEMORY, "all", "policies while they load, or what is written", most)

    def files(self) -> Iterator[Need]:
        """Yield what is needed of shared memory and of the disk."""
        config, most = self.config, 1
        yield Need(SHARED, "all", "copies of the weights", self.shared)
        if config.checkpoint_every:
            most = min(KEPT + 1, config.steps // config.checkpoint_every + 1)
        purpose = f"checkpoints, at most {most} at once"
        yield Need(DISK, "trainer", purpose, most * self.checkpoint)
        yield Need(DISK, "trainer", "model/", self.masters)


def responses(count: int) -> str:
    """So many responses, in words."""
    return f"{count} response" if count == 1 else f"{count} responses"


def place_of(place: Place) -> str:
    """Where the tensors of a process are."""
    return MEMORY if place.gpu is None else f"GPU {place.gpu}"
