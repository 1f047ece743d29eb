"""What the processes of a run need of memory and disk, counted before anything starts.

Weights, moments and shared memory are arithmetic. Activations are counted by the policy's own
forward passes, on tensors without numbers (models/sizes.py). What CUDA, kernels and vLLM's work
take is estimated. On a GPU nothing of it has been measured yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from config import Config
from models import sizes
from models.device import compute_dtype
from models.logprobs import TOKENS_IN_LOW_MEMORY, TOKENS_PER_FORWARD, split_rows
from models.sizes import ENGINE_ROWS, Pass
from runtime.checkpoint import KEPT
from runtime.memory_trial import largest_micro_batch
from runtime.places import Place
from runtime.processes import environment
from weights import SharedWeights

GIB = 2**30
MEMORY, SHARED, DISK = "host memory", "shared memory", "disk"
# Estimated: a process on a GPU (context, kernels, fragments); one in host memory (Python and its
# libraries) without a GPU and with one; what vLLM captures on a GPU; what it reads at a time.
CUDA_BYTES, PROCESS_BYTES, GPU_PROCESS_BYTES, CUDA_GRAPHS = 1.5 * GIB, 0.7 * GIB, 3 * GIB, GIB / 2
VLLM_TOKENS = 16384
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
        self.size = sizes.policy_size(config)
        self.device = torch.device("cpu" if places[0].gpu is None else "cuda")
        self.dtype, master = compute_dtype(config, self.device), getattr(torch, config.master_dtype)
        self.masters = self.size.parameters * master.itemsize
        self.published = self.size.parameters * self.dtype.itemsize
        self.cast = self.published if master != self.dtype else 0
        self.tokens = config.max_prompt_tokens + config.max_response_tokens

    def count(self, models: list[str]) -> Iterator[Need]:
        """All of them. models: that a searcher has for its task."""
        yield from self.trainer(self.places[0])
        for place in self.places[1:]:
            yield from self.searcher(place, models)
        yield from self.files()

    def passes(self, most_tokens: int) -> list[Pass]:
        """The forward passes over the largest micro-batch."""
        rows = largest_micro_batch(self.config, self.size.vocabulary)
        prompts, responses = [row.prompt for row in rows], [row.tokens for row in rows]
        split = split_rows(prompts, responses, most_tokens)
        return [Pass(len(few), len({prompts[row].tobytes() for row in few})) for few in split]

    def trainer(self, place: Place) -> Iterator[Need]:
        """The trainer's, in its largest step."""
        config, where, name = self.config, place_of(place), place.name
        yield Need(where, name, f"weights, {config.master_dtype}", self.masters)
        yield Need(where, name, "gradients", self.masters)
        yield Need(where, name, "AdamW's two moments", 2 * self.masters)
        passes = self.passes(TOKENS_PER_FORWARD[self.device.type])
        if config.low_memory == "on":
            passes = self.passes(TOKENS_IN_LOW_MEMORY)[:1]
        rows = sum(one.rows for one in passes)
        kept = sizes.activation_bytes(config, passes, self.dtype)
        length = f"{config.max_prompt_tokens} + {config.max_response_tokens}"
        yield Need(where, name, f"activations, {rows} responses of {length} tokens", kept)
        positions = rows * config.max_response_tokens
        head = sizes.head_bytes(self.size, self.dtype, self.device, positions, gradient=True)
        yield Need(where, name, "logits, and the head's gradient", head)
        yield from self.process(place)

    def searcher(self, place: Place, models: list[str]) -> Iterator[Need]:
        """A searcher's: vLLM, the reference policy and the task's models."""
        where, name = place_of(place), place.name
        fixed, vllm = self.vllm_without_responses(), self.vllm(place)
        yield Need(where, name, "vLLM: weights and work", min(fixed, vllm))
        purpose = f"vLLM: {self.responses(place)} responses of full length at once"
        yield Need(where, name, purpose, max(0.0, vllm - fixed))
        yield Need(where, name, "reference policy", self.masters + self.cast)
        positions = self.passes(TOKENS_PER_FORWARD[self.device.type])[0].rows * self.tokens
        states = positions * (self.size.keys_and_values + 2 * self.size.layer) * self.dtype.itemsize
        head = sizes.head_bytes(self.size, self.dtype, self.device, positions, gradient=False)
        yield Need(where, name, "its largest pass", states + head)
        for model in models:
            yield Need(where, name, f"the task's {Path(model).name}", sizes.loaded_bytes(model))
        yield from self.process(place)

    def vllm(self, place: Place) -> float:
        """What vLLM takes: a share of a GPU, whatever it needs of that."""
        if place.gpu is not None:
            return self.config.gpu_memory_utilization * self.available[place_of(place)]
        keys_and_values = float(environment(place)["VLLM_CPU_KVCACHE_SPACE"]) * GIB
        return self.vllm_without_responses() + keys_and_values

    def vllm_without_responses(self) -> float:
        """What vLLM takes before it has keys and values of a response."""
        logits = VLLM_LOGITS * ENGINE_ROWS * self.size.vocabulary * torch.float32.itemsize
        if self.device.type == "cpu":
            return self.published + logits
        states = VLLM_TOKENS * self.size.layer * self.dtype.itemsize
        return self.published + logits + states + CUDA_GRAPHS

    def responses(self, place: Place) -> int:
        """Responses of full length to which vLLM has keys and values at once."""
        each = self.tokens * self.size.keys_and_values * self.dtype.itemsize
        return max(0, int((self.vllm(place) - self.vllm_without_responses()) // each))

    def process(self, place: Place) -> Iterator[Need]:
        """What any process needs besides. A model is loaded in host memory, in fp32."""
        if place.gpu is None:
            yield Need(MEMORY, place.name, "Python and libraries", PROCESS_BYTES)
            return
        yield Need(place_of(place), place.name, "CUDA, kernels, fragments", CUDA_BYTES)
        loading = GPU_PROCESS_BYTES + self.size.parameters * torch.float32.itemsize
        yield Need(MEMORY, place.name, "Python, libraries, the policy on its way", loading)

    def files(self) -> Iterator[Need]:
        """Shared memory and checkpoints. The buffer comes on top: 12 bytes a token it holds."""
        config, shapes = self.config, {"all": (self.size.parameters,)}
        resets = config.reference_reset_period > 0
        shared = SharedWeights.required_bytes(shapes, self.dtype, resets)
        for place in (SHARED, MEMORY):  # it is a part of the other
            yield Need(place, "all", "copies of the weights", shared)
        reference = self.size.parameters * torch.float32.itemsize if resets else 0
        size = 3 * self.masters + reference
        kept = KEPT + 1 if config.checkpoint_every else 1
        # What is in host memory is written from where it is; only a reset reference is copied.
        copied = reference if self.device.type == "cpu" else size
        if copied:
            yield Need(MEMORY, "trainer", "a checkpoint while it is written", copied)
        yield Need(DISK, "trainer", f"checkpoints, at most {kept} at once", kept * size)
        yield Need(DISK, "trainer", "model/", self.masters)


def place_of(place: Place) -> str:
    """Where the tensors of a process are."""
    return MEMORY if place.gpu is None else f"GPU {place.gpu}"
