"""What the processes of a run need of memory and disk, counted before anything starts.

Weights, moments and shared memory are arithmetic. Activations are counted by the policy's own
forward passes, on tensors without numbers (sizes.py beside this). What CUDA, kernels and vLLM's
work take is estimated. On a GPU only the trainer was measured (benchmarks/gpu_day.py).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from config import ENGINE_ROWS, Config
from launch.children import environment
from launch.places import Place, evaluation_place, searchers_of, trainers_of
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
# Estimated: fp32 copies of a step's logits, while vLLM samples; what it captures on a GPU; what it
# reads at a time there, and on a large one.
VLLM_LOGITS, CUDA_GRAPHS, VLLM_TOKENS, VLLM_TOKENS_LARGE = 4, GIB // 2, 8192, 16384
LARGE_GPU = 70 * GIB

Part = tuple[str, float]  # purpose and bytes of what a process needs at its place


@dataclass(frozen=True)
class Need:
    """What a process needs at a place for one purpose, in bytes."""

    place: str  # "GPU 0", MEMORY, SHARED or DISK
    process: str
    purpose: str
    bytes: float


class Needs:
    """What a run needs, and whether it is there.

    available: bytes by place; of a place that is not in there it is not known. models: that a
    searcher has for its task.
    """

    def __init__(
        self,
        config: Config,
        places: list[Place],
        available: dict[str, float],
        models: Iterable[str] = (),
    ):
        self.config, self.places, self.available = config, places, available
        self.models, self.ranks = models, config.trainer_processes
        self.size = size = sizes.PolicySize(config.model, config.trust_remote_code)
        self.on_gpu = places[0].gpu is not None
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.dtype = compute_dtype(config, self.device)
        self.master_bytes = getattr(torch, config.master_dtype).itemsize
        self.masters = self.trained = size.parameters * self.master_bytes
        if config.lora_rank:
            self.trained = num_elements(trained_shapes(config)) * self.master_bytes
        # Of a policy that is not trained, linear layers are held in what is computed in.
        others = size.parameters - size.linear
        self.frozen = size.linear * self.dtype.itemsize + others * self.master_bytes
        self.published = size.parameters * self.dtype.itemsize
        reset = (config.reference_reset_period > 0) * size.parameters * torch.float32.itemsize
        self.shared = SLOTS * self.published + reset  # of SharedWeights
        # The buffer comes on top, which has 14 bytes of a token it holds, twice during a write.
        self.checkpoint = 3 * self.trained + reset

    @cached_property
    def needs(self) -> list[Need]:
        """Every need of the run."""
        trainer = list(self.trainer())
        needs = [need for at in trainers_of(self.places) for need in self.process(at, trainer)]
        for place in searchers_of(self.places):
            needs += self.process(place, self.searcher(place))
        return [*needs, *self.loading_or_written(), *self.files()]

    @property
    def places_in_use(self) -> list[str]:
        """Where anything is needed: GPUs, then the rest."""
        used = dict.fromkeys(need.place for need in self.needs)
        return sorted(used, key=lambda name: not name.startswith("GPU"))

    def total(self, place: str) -> float:
        """Bytes needed at a place."""
        return sum(need.bytes for need in self.needs if need.place == place)

    def is_short(self, place: str) -> bool:
        """Whether more is needed there than there is."""
        return self.total(place) > self.available.get(place, math.inf)

    @property
    def step_operations(self) -> float:
        """Floating-point operations of a trainer process in a step of full-length responses.

        For each parameter and token that is 2 in a forward pass, twice as much in a backward one,
        or as much with LoRA. Attention is left out.
        """
        config = self.config
        passes = 3 + (config.low_memory == "on") - (config.lora_rank > 0)
        tokens = config.queries_per_batch * config.full_query_tokens / self.ranks
        return 2 * passes * self.size.parameters * tokens

    @cached_property
    def room(self) -> float:
        """Bytes that vLLM has for keys and values where the evaluation runs."""
        return self.vllm(evaluation_place(self.places))[1]

    @cached_property
    def responses(self) -> int:
        """Responses of full length to which vLLM has keys and values there at once."""
        return self.responses_in(self.room)

    def process(self, place: Place, parts: Iterable[Part]) -> Iterator[Need]:
        """Yield these parts of what a process needs, and what any process does."""
        for purpose, size in parts:
            yield Need(place_of(place), place.name, purpose, size)
        if self.on_gpu:
            yield Need(place_of(place), place.name, "CUDA, kernels, fragments", CUDA_BYTES)
        taken = GPU_PROCESS_BYTES if self.on_gpu else PROCESS_BYTES
        yield Need(MEMORY, place.name, "Python and libraries", taken)

    def largest_pass(self, queries: int, responses: int, most_tokens: int) -> Pass:
        """Return the largest flat pass over so many queries of so many responses of full length."""
        prompt, response = self.config.longest_row
        groups = np.repeat(np.arange(queries), responses)
        prompts = [np.full(prompt, group) for group in groups]
        first = split_rows(prompts, [np.zeros(response)] * len(groups), most_tokens)[0]
        return Pass(len(first), len(set(groups[first])), prompt, response)

    def trainer(self) -> Iterator[Part]:
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
        taken = sizes.pass_bytes(config, one, self.dtype, True, self.on_gpu)
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
        copies = 3 if self.on_gpu else 5
        layer = 4 * self.dtype.itemsize + 2 * torch.float32.itemsize
        return copies * self.master_bytes * self.size.outside + layer * self.size.layer

    def searcher(self, place: Place) -> Iterator[Part]:
        """Yield what a searcher needs: for vLLM, the reference policy and the task's models."""
        fixed, room = self.vllm(place)
        yield "vLLM: weights and temporary memory", fixed
        yield f"vLLM: {responses(self.responses_in(room))} of full length at once", room
        for model in self.models:
            yield f"the task's {Path(model).name}", sizes.loaded_bytes(model)
        if self.config.reads_reference:
            yield "reference policy", self.frozen
            yield "reference policy's largest forward pass", self.reference_pass

    @cached_property
    def reference_pass(self) -> int:
        """Bytes of a searcher's largest pass: all that finished together is scored together."""
        samples = self.config.samples_per_query
        most_tokens = TOKENS_PER_FORWARD[self.device.type]
        return self.forward(self.largest_pass(max(1, ENGINE_ROWS // samples), samples, most_tokens))

    def forward(self, one: Pass) -> int:
        """Bytes of a forward pass of a policy that is not trained."""
        taken = sizes.pass_bytes(self.config, one, self.dtype, False, self.on_gpu)
        head = self.head(one.rows * one.response, has_gradient=False)
        return taken.kept + max(head, taken.beyond)

    def head(self, positions: int, has_gradient: bool) -> int:
        """Bytes of logits while log-probabilities are taken, and of the head's copies.

        positions: response tokens in a pass. Logits are there twice: as they are and as terms of
        the normalizer, or of one slice and the next. The gradient of the head is there of the slice
        at hand, and of the pass.
        """
        size, on_cpu = self.size, not self.on_gpu
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
        size, logits = self.size, VLLM_LOGITS * ENGINE_ROWS * torch.float32.itemsize
        fixed = self.published + logits * size.vocabulary
        if place.gpu is None:
            return fixed, float(environment(place)["VLLM_CPU_KVCACHE_SPACE"]) * GIB
        card = self.available[place_of(place)]
        tokens = VLLM_TOKENS_LARGE if card >= LARGE_GPU else VLLM_TOKENS
        fixed += tokens * size.layer_values_per_token * self.dtype.itemsize + CUDA_GRAPHS
        share = self.config.gpu_memory_utilization * card
        return min(share, fixed), max(0, share - fixed)

    def responses_in(self, room: float) -> int:
        """How many responses of full length have their keys and values in so many bytes."""
        cached = self.size.cached_per_token * self.dtype.itemsize
        return int(room // (sum(self.config.longest_row) * cached))

    def loading_or_written(self) -> Iterator[Need]:
        """Yield what of host memory loads the policies, or writes checkpoints and model/.

        A checkpoint is written from a copy while the training goes on. The last one needs a copy
        too where the weights are sharded or on a GPU (runtime/checkpoints/writer.py).
        """
        config, written = self.config, 0
        if 0 < config.checkpoint_every <= config.steps or self.ranks > 1:
            written = self.checkpoint
        elif self.on_gpu:
            written = 3 * self.trained  # not of the reference, which is in shared memory
        if config.lora_rank or self.ranks > 1:
            written += self.masters  # model/, brought together
        if not self.on_gpu:
            if written:
                yield Need(MEMORY, "trainer", "copies, for checkpoints and model/", written)
            return
        # At the start each policy is loaded here in fp32, one after the other on a single GPU.
        loading = len(self.places) if len({place.gpu for place in self.places}) > 1 else 1
        most = max(loading * self.size.parameters * torch.float32.itemsize, written)
        yield Need(MEMORY, "all", "policies while they load, or what is written", most)

    def files(self) -> Iterator[Need]:
        """Yield what shared memory takes, and what is written."""
        config, most = self.config, 1
        yield Need(MEMORY, "all", "copies of the weights in shared memory", self.shared)
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
