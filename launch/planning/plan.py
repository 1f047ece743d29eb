"""The plan of a run: what it needs of memory and disk, what there is, and what is short.

Weights, moments and shared memory are arithmetic. Activations are counted by the policy's own
forward passes, on tensors without numbers (memory.py beside this). What CUDA, kernels and vLLM's
work take is estimated. On a GPU only the trainer was measured (benchmarks/gpu_day.py).
"""

import math
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
import psutil
import torch

from config import ENGINE_ROWS, Config, UserError, users_code
from launch.children import environment
from launch.command_line import find_presets
from launch.places import (
    Place,
    evaluation_place,
    find_gpus,
    find_places,
    is_gpu_shared,
    resolve,
    why_no_gpu,
)
from launch.planning.memory import FP32, PolicyMemory, Rows, loaded_bytes
from models.logprobs import (
    TOKENS_IN_LOW_MEMORY,
    TOKENS_PER_FORWARD,
    full_queries,
    micro_batch_tokens,
    split_rows,
)
from runtime.checkpoints.checkpoint import KEPT
from tasks import Task
from weights import SHARED_MEMORY, SLOTS

GIB = 2**30
USABLE = 0.985  # of the GiB by which a card is called; its driver keeps the rest
LARGE = 1e9  # parameters of a policy from which on a preset that names it is for GPUs
# Estimated: a process on a GPU (context, kernels, fragments); one in host memory (Python and its
# libraries) without a GPU and with one.
CUDA_BYTES, PROCESS_BYTES, GPU_PROCESS_BYTES = 1.5 * GIB, 0.7 * GIB, 3 * GIB
# Estimated: fp32 copies of a step's logits, while vLLM samples; what it captures on a GPU; what it
# reads at a time there, and on a large one.
VLLM_LOGITS, CUDA_GRAPHS, VLLM_TOKENS, VLLM_TOKENS_LARGE = 4, GIB // 2, 8192, 16384
LARGE_GPU = 70 * GIB
# Assumed of a GPU in a step, in TFLOP/s. Of an A100's highest rates it is a third and a half; an
# H100 made 90 in bf16, before prompts and responses were one flat pass.
RATES = {torch.bfloat16: 100, torch.float32: 10}
MEMORY, SHARED, DISK = "host memory", "shared memory", "disk"
GPU_HINT = (
    "--low_memory on, --lora_rank 32, more --trainer_processes, a smaller "
    "--gpu_memory_utilization or --max_response_tokens take less"
)
HINTS = {
    MEMORY: "--low_memory on, --checkpoint_every 0, fewer --searchers or a smaller --model take "
    "less",
    SHARED: f"enlarge it (mount -o remount,size=… {SHARED_MEMORY}, docker run --shm-size=…)",
    DISK: "give an --output_dir on a larger disk; --checkpoint_every 0 takes less",
}

Bytes = dict[str, float]  # by place: "GPU 0", MEMORY, SHARED or DISK
Part = tuple[str, float]  # a purpose of a process, and the bytes that it takes
Need = tuple[str, str, float]  # a process, and such a part


class Plan:
    """What a run needs, and whether it is there.

    available: a place that is not in there is not checked. models: those of a searcher's task.
    """

    def __init__(
        self, config: Config, places: list[Place], available: Bytes, models: Iterable[str] = ()
    ):
        self.config, self.places, self.available = config, places, available
        self.models, self.ranks = models, config.trainer_processes
        self.on_gpu = places[0].gpu is not None
        self.policy = policy = PolicyMemory(config, self.on_gpu)
        reset = (config.reference_reset_period > 0) * policy.parameters * FP32
        self.shared = SLOTS * policy.published + reset  # of SharedWeights
        # The buffer comes on top, which has 14 bytes of a token it holds, twice during a write.
        self.checkpoint = 3 * policy.trained + reset

    @cached_property
    def needs(self) -> dict[str, list[Need]]:
        """Every need of the run by place: GPUs, then the rest."""
        gpus = [place_of(place) for place in self.places if self.on_gpu]
        needs: dict[str, list[Need]] = {name: [] for name in (*gpus, MEMORY, SHARED, DISK)}
        trainer = [*self.trainer()]
        for place in self.places:
            parts = trainer if place.name.startswith("trainer") else self.searcher(place)
            own = needs[place_of(place)]
            own += [(place.name, *part) for part in parts]
            if self.on_gpu:
                own.append((place.name, "CUDA, kernels, fragments", CUDA_BYTES))
            python = GPU_PROCESS_BYTES if self.on_gpu else PROCESS_BYTES
            needs[MEMORY].append((place.name, "Python and libraries", python))
        needs[MEMORY] += self.loaded_or_written()
        needs[MEMORY].append(("all", "copies of the weights in shared memory", self.shared))
        needs[SHARED].append(("all", "copies of the weights", self.shared))
        every = self.config.checkpoint_every
        most = min(KEPT + 1, self.config.steps // every + 1) if every else 1
        checkpoints = f"checkpoints, at most {most} at once"
        needs[DISK].append(("trainer", checkpoints, most * self.checkpoint))
        needs[DISK].append(("trainer", "model/", self.policy.masters))
        return needs

    def total(self, place: str) -> float:
        """Bytes needed at a place."""
        return sum(size for *_, size in self.needs[place])

    def is_short(self, place: str) -> bool:
        """Whether more is needed there than there is."""
        return self.total(place) > self.available.get(place, math.inf)

    def largest_pass(self, queries: int, responses: int, most_tokens: int) -> Rows:
        """Return the largest flat pass over so many queries of so many responses of full length."""
        prompt, response = self.config.longest_row
        prompts = [np.arange(prompt) + query for query in range(queries) for _ in range(responses)]
        rows = [np.arange(response) + number for number in range(len(prompts))]  # no two are equal
        first = len(split_rows(prompts, rows, most_tokens)[0])
        return prompts[:first], rows[:first]

    def trainer(self) -> Iterator[Part]:
        """Yield what a process of the trainer needs in its largest step."""
        config, policy, ranks = self.config, self.policy, self.ranks
        of_all = f", 1 / {ranks} of them" if ranks > 1 else ""
        if config.lora_rank:
            yield "base policy", policy.frozen
        trained = "LoRA's adapters" if config.lora_rank else "weights"
        yield f"{trained}, {config.master_dtype}{of_all}", policy.trained / ranks
        yield f"gradients{of_all}", policy.trained / ranks
        yield f"AdamW's two moments{of_all}", 2 * policy.trained / ranks
        if ranks > 1:
            # What a rank holds whole (extras/sharding.py). Embeddings and head, their gradients,
            # and these once more on the way to the other ranks; gloo, without a GPU, makes copies
            # of its own. Of layers: the one that is computed, the next and its way here, and two
            # gradients on their way.
            outside = (3 if self.on_gpu else 5) * policy.master_dtype.itemsize * policy.outside
            layers = (4 * policy.dtype.itemsize + 2 * FP32) * policy.layer
            yield "weights and gradients that are gathered", outside + layers
        most_tokens = micro_batch_tokens(config)
        if config.low_memory == "on":  # a pass of more rows without a graph takes less
            most_tokens = TOKENS_IN_LOW_MEMORY[policy.device]
        rows = self.largest_pass(full_queries(config), config.responses_per_query, most_tokens)
        taken = policy.count(rows, is_trained=True)
        what = "activations" if taken.is_counted else "activations (estimated)"
        length = "{} + {}".format(*config.longest_row)
        yield f"{what}, {responses(len(rows[0]))} of {length} tokens", taken.kept
        yield "logits, and what the backward pass adds", taken.beyond
        if config.lora_rank:
            # For the mismatch, and rows of an earlier reference. Without LoRA the gradients and
            # activations, which are gone by then, leave more room than it takes.
            other = policy.frozen + self.forward(rows) - taken.kept - taken.beyond
            if other > 0:
                yield "weights of an earlier version, beyond that", other

    def searcher(self, place: Place) -> Iterator[Part]:
        """Yield what a searcher needs: for vLLM, the reference policy and the task's models."""
        fixed, room, count = self.vllm(place)
        yield "vLLM: weights and temporary memory", fixed
        yield f"vLLM: {responses(count)} of full length at once", room
        for model in self.models:
            yield f"the task's {Path(model).name}", loaded_bytes(model)
        if self.config.reads_reference:
            yield "reference policy", self.policy.frozen
            yield "reference policy's largest forward pass", self.reference_pass

    @cached_property
    def reference_pass(self) -> int:
        """Bytes of a searcher's largest pass: all that finished together is scored together."""
        samples, most = self.config.samples_per_query, TOKENS_PER_FORWARD[self.policy.device]
        return self.forward(self.largest_pass(max(1, ENGINE_ROWS // samples), samples, most))

    def forward(self, rows: Rows) -> int:
        """Bytes of a forward pass of a policy that is not trained."""
        taken = self.policy.count(rows, is_trained=False)
        return taken.kept + taken.beyond

    def vllm(self, place: Place) -> tuple[float, float, int]:
        """Return the bytes that vLLM takes, and those it has for keys and values beyond that.

        And how many responses of full length have theirs there. On a GPU it takes its share,
        whatever it needs of that.
        """
        policy = self.policy
        fixed = policy.published + VLLM_LOGITS * ENGINE_ROWS * FP32 * policy.vocabulary
        if self.on_gpu:
            card = self.available[place_of(place)]
            tokens = VLLM_TOKENS_LARGE if card >= LARGE_GPU else VLLM_TOKENS
            fixed += tokens * policy.states_per_token + CUDA_GRAPHS
            share = self.config.gpu_memory_utilization * card
            fixed, room = min(share, fixed), max(0, share - fixed)
        else:
            room = float(environment(place)["VLLM_CPU_KVCACHE_SPACE"]) * GIB
        return fixed, room, int(room // (sum(self.config.longest_row) * policy.cached_per_token))

    def loaded_or_written(self) -> Iterator[Need]:
        """Yield what of host memory loads the policies, or writes checkpoints and model/.

        A checkpoint is written from a copy while the training goes on. The last one needs a copy
        too where the weights are sharded or on a GPU (runtime/checkpoints/writer.py).
        """
        config, policy, written = self.config, self.policy, 0
        if 0 < config.checkpoint_every <= config.steps or self.ranks > 1:
            written = self.checkpoint
        elif self.on_gpu:
            written = 3 * policy.trained  # not of the reference, which is in shared memory
        if config.lora_rank or self.ranks > 1:
            written += policy.masters  # model/, brought together
        if self.on_gpu:
            # At the start each policy is loaded here in fp32, one after the other on a single GPU.
            loading = len(self.places) if len({place.gpu for place in self.places}) > 1 else 1
            most = max(loading * policy.parameters * FP32, written)
            yield "all", "policies while they load, or what is written", most
        elif written:
            yield "trainer", "copies, for checkpoints and model/", written

    def print(self) -> None:
        """Print what each place needs, and for what, equal GPUs once; then the steps' minutes."""
        config = self.config
        passes = "two passes" if config.low_memory == "on" else "one pass"
        print(f"task {config.task}, model {config.model}; a step takes {passes} (--low_memory)")

        def amounts(place: str) -> tuple[float | None, dict[tuple[str, str], list[float]]]:
            """What there is, and what each kind of process needs of it for each purpose."""
            found = defaultdict(list)
            for process, purpose, size in self.needs[place]:
                found[process.split()[0], purpose].append(size)
            return self.available.get(place), found

        for (has, found), equal in groupby(self.needs, key=amounts):
            first, *others = equal
            name = f"{first} to {others[-1].removeprefix('GPU ')}, each" if others else first
            there_is = f"of {has / GIB:.2f}" if has else ""
            print(f"{name:<26} {there_is:<58} {self.total(first) / GIB:9.2f} GiB")
            for (kind, purpose), sizes in found.items():
                who = f"{len(sizes)} {kind}s" if len(sizes) > 1 else kind
                print(f"{'':<14}{who:<12} {purpose:<58} {sum(sizes) / GIB:9.2f}")
        print(
            "activations: counted; CUDA, kernels and vLLM's work: estimated, not measured on a GPU"
        )
        if self.on_gpu:
            # For each parameter and token 2 in a forward pass, twice as much in a backward one, or
            # as much with LoRA. Attention is left out.
            passes = 3 + (config.low_memory == "on") - (config.lora_rank > 0)
            prompt, response = config.longest_row
            query_tokens = prompt + config.responses_per_query * response
            tokens = config.queries_per_batch * query_tokens / self.ranks
            tera = 2 * passes * self.policy.parameters * tokens / 1e12
            rate = RATES[self.policy.dtype]
            minutes = config.steps * tera / rate / 60
            print(
                f"{config.steps} steps of {tera:.0f} TFLOP, each response of full length, at "
                f"{rate} TFLOP/s: {minutes:.0f} minutes, calculated and never measured on a GPU"
            )

    def check(self) -> None:
        """Raise UserError that says what is short, and what takes less."""
        for place in filter(self.is_short, self.needs):
            has, needed = self.available[place] / GIB, self.total(place) / GIB
            why = f"{why_no_gpu()}, and " if place == MEMORY and not self.on_gpu else ""
            raise UserError(
                f"{why}{place} is short: the run needs {needed:.4g} GiB, there are {has:.4g}; "
                f"{HINTS.get(place, GPU_HINT)} (--plan shows all)"
            )
        place = evaluation_place(self.places)
        if not self.vllm(place)[2]:
            larger = "--gpu_memory_utilization"
            if not self.on_gpu:
                larger = "VLLM_CPU_KVCACHE_SPACE, a number of GiB, in the environment"
            raise UserError(
                f"vLLM's share of {place_of(place)} has no room for a response of full length; "
                f"give a larger {larger} (--plan shows all)"
            )


def responses(count: int) -> str:
    """So many responses, in words."""
    return f"{count} response" if count == 1 else f"{count} responses"


def place_of(place: Place) -> str:
    """Where the tensors of a process are."""
    return MEMORY if place.gpu is None else str(place)


def make_plan(config: Config, task: Task, places: list[Place], available: Bytes) -> Plan:
    """Plan a run. --low_memory auto: on if the trainer fits only then."""
    with users_code("models()"):
        models = task.models()
    plan = Plan(config, places, available, models)
    if config.low_memory == "auto" and plan.is_short(place_of(places[0])):
        return Plan(replace(config, low_memory="on"), places, available, models)
    return plan


def check_plan(config: Config, task: Task, places: list[Place]) -> Config:
    """Check a run against this machine. Returns its settings, with --low_memory auto decided.

    Raises UserError that says what is short, and what takes less.
    """
    check_gpu(config, places)
    plan = make_plan(config, task, places, this_machine(config))
    plan.check()
    if not is_gpu_shared(places):
        return plan.config
    return replace(plan.config, kv_cache_bytes=int(plan.vllm(evaluation_place(places))[1]))


def show_plan(config: Config, task: Task) -> int:
    """--plan: print a run's plan. Returns the exit code; raises UserError if it does not fit."""
    if config.plan_gpus:
        count, gib = map(int, config.plan_gpus.split("x"))
        places = find_places(config, [str(gpu) for gpu in range(count)])
        available = {f"GPU {gpu}": USABLE * gib * GIB for gpu in range(count)}
    else:
        places = find_places(config)
        check_gpu(config, places)
        available = this_machine(config)
    plan = make_plan(resolve(config, places), task, places, available)
    plan.print()
    plan.check()
    unknown = f", if there is as much {MEMORY}, {SHARED} and {DISK}" if config.plan_gpus else ""
    print(f"fits{unknown}")
    return 0


def check_gpu(config: Config, places: list[Place]) -> None:
    """Raise UserError where a preset's own large model is to be trained without a GPU."""
    preset = find_presets(config.task).get(config.preset, {})
    own = [preset.get("model"), *preset.get("options", {}).values()]
    name = config.model.partition("@")[0]
    if places[0].gpu is not None or name not in own:
        return
    parameters = PolicyMemory(config, on_gpu=False).parameters
    if parameters >= LARGE:
        raise UserError(
            f"preset {config.preset!r} of {config.task} is made for GPUs ({name} has "
            f"{parameters / 1e9:.1f} B parameters), and {why_no_gpu()}: what runs here is `python "
            "tba.py arithmetic` or `python tba.py sums`; --plan_gpus 4x80 plans for other machines"
        )


def this_machine(config: Config) -> Bytes:
    """What there is, in bytes by place.

    All memory of a GPU counts as free: what other programs use now may change. On the disk a run
    that is resumed has what its checkpoints and its model take, for they are replaced.
    """
    directory = Path(config.output_dir or "runs").absolute()
    existing = next(path for path in [directory, *directory.parents] if path.exists())
    own = [*directory.glob("checkpoints/*/*"), *directory.glob("model/*")] if config.resume else []
    return {
        MEMORY: psutil.virtual_memory().available,
        SHARED: shutil.disk_usage(SHARED_MEMORY).free,
        DISK: shutil.disk_usage(existing).free + sum(path.stat().st_size for path in own),
    } | {
        f"GPU {gpu}": torch.cuda.get_device_properties(number).total_memory
        for number, gpu in enumerate(find_gpus())
    }
