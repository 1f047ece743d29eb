"""The plan of a run: what it needs of memory and disk, what there is, and what would help."""

import dataclasses
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from config import Config, UserError
from launch.places import Place, evaluation_place, find_gpus, find_places, is_gpu_shared, resolve
from launch.planning.needs import DISK, GIB, MEMORY, SHARED, Need, Needs, place_of
from launch.settings import find_lacking_extra
from tasks import Task
from weights import SHARED_MEMORY

USABLE = 0.985  # of the GiB by which a card is called; its driver keeps the rest


@dataclass(frozen=True)
class Plan:
    """The needs of a run, and what there is.

    config: with --low_memory auto decided. available: bytes by place; of a place that is not in
    there it is not known. responses: of full length that a searcher's vLLM runs at once.
    """

    config: Config
    needs: list[Need]
    available: dict[str, float]
    responses: int

    def total(self, place: str) -> float:
        """Bytes needed there."""
        return sum(need.bytes for need in self.needs if need.place == place)

    def is_short(self, place: str) -> bool:
        """Whether more is needed there than there is."""
        return self.total(place) > self.available.get(place, math.inf)

    def places(self) -> list[str]:
        """Where anything is needed: GPUs, then the rest."""
        return sorted({need.place for need in self.needs}, key=lambda name: (name[0] != "G", name))


def check_plan(config: Config, task: Task, places: list[Place]) -> Config:
    """Check a run against this machine. Returns its settings, with --low_memory auto decided.

    Raises UserError that says what is short, and what would help.
    """
    plan = make_plan(config, task, places, this_machine(config, places))
    if problem := find_problem(plan, task, places):
        raise UserError(problem)
    if not is_gpu_shared(places):
        return plan.config
    _, room = Needs(plan.config, places, plan.available).vllm(evaluation_place(places))
    return dataclasses.replace(plan.config, kv_cache_bytes=int(room))


def show_plan(config: Config, task: Task) -> int:
    """--plan: print a run's plan. Returns the exit code; raises UserError if it does not fit."""
    if config.plan_gpus:
        count, gib = map(int, config.plan_gpus.split("x"))
        places = find_places(config, [str(gpu) for gpu in range(count)])
        available = {f"GPU {gpu}": USABLE * gib * GIB for gpu in range(count)}
    else:
        places = find_places(config)
        available = this_machine(config, places)
    plan = make_plan(resolve(config, places), task, places, available)
    print_plan(plan)
    if problem := find_problem(plan, task, places):
        raise UserError(problem)
    return 0


def this_machine(config: Config, places: list[Place]) -> dict[str, float]:
    """What there is, in bytes by place.

    All memory of a GPU counts as free: what other programs use now may change. On the disk a run
    that is resumed has what its checkpoints and its model take, for they are replaced.
    """
    directory = Path(config.output_dir or "runs").absolute()
    existing = next(path for path in [directory, *directory.parents] if path.exists())
    own = [*directory.glob("checkpoints/*/*"), *directory.glob("model/*")] if config.resume else []
    used = {place.gpu for place in places}
    return {
        MEMORY: psutil.virtual_memory().available,
        SHARED: shutil.disk_usage(SHARED_MEMORY).free,
        DISK: shutil.disk_usage(existing).free + sum(path.stat().st_size for path in own),
    } | {
        f"GPU {gpu}": torch.cuda.get_device_properties(number).total_memory
        for number, gpu in enumerate(find_gpus())
        if gpu in used
    }


def make_plan(config: Config, task: Task, places: list[Place], available: dict[str, float]) -> Plan:
    """Plan a run. --low_memory auto: on if the trainer fits only then."""
    needs = Needs(config, places, available)
    responses = needs.responses(evaluation_place(places))
    plan = Plan(config, [*needs.count(task.models())], available, responses)
    if config.low_memory == "auto" and plan.is_short(place_of(places[0])):
        two_passes = dataclasses.replace(config, low_memory="on")
        return make_plan(two_passes, task, places, available)
    return plan


def find_problem(plan: Plan, task: Task, places: list[Place]) -> str | None:
    """Say what is short, and what would help; None if nothing is short."""
    short = [place for place in plan.places() if plan.is_short(place)]
    if short:
        place = short[0]
        has, needed = plan.available[place] / GIB, plan.total(place) / GIB
        problem = f"{place} is short: the run needs {needed:.2f} GiB, there are {has:.2f}"
        advice = LAST_RESORTS.get(place, LAST_RESORTS[MEMORY])
    elif not plan.responses:
        place = place_of(evaluation_place(places))
        problem = f"vLLM's share of {place} has no room for a response of full length"
        advice = "raise VLLM_CPU_KVCACHE_SPACE, a number of GiB, in the environment"
    else:
        return None
    gpus = [name.removeprefix("GPU ") for name in plan.available if name.startswith("GPU ")]
    for settings, note in remedies(plan, place, len(gpus)):
        config = dataclasses.replace(plan.config, **settings)
        if find_lacking_extra(config):
            continue
        changed = make_plan(config, task, find_places(config, gpus), plan.available)
        if changed.responses and not changed.is_short(place):
            flags = " ".join(f"--{name} {value}" for name, value in settings.items())
            advice = f"{flags}{note} would do"
            break
    return f"{problem}; {advice} (--plan shows all)"


LAST_RESORTS = {
    SHARED: f"enlarge it (mount -o remount,size=… {SHARED_MEMORY}, docker run --shm-size=…)",
    DISK: "give an --output_dir on a larger disk",
    MEMORY: "no one setting is enough: take a smaller --model, or a larger machine",
}


def remedies(plan: Plan, place: str, gpus: int) -> Iterator[tuple[dict, str]]:
    """Yield settings that may need less there, and a note; those that change the result last.

    gpus: how many there are.
    """
    config, on_gpu = plan.config, place.startswith("GPU")
    yield dict(low_memory="on"), ""
    yield dict(tokens_per_micro_batch=0), ""
    yield dict(checkpoint_every=0), " (one comes at the end, or at an interrupt)"
    if on_gpu:
        spare = 1 - plan.total(place) / plan.available[place]
        share = int(20 * (config.gpu_memory_utilization + spare)) / 20
        yield dict(gpu_memory_utilization=share), ""
    if config.resume:  # what follows changes what is learnt, or who learns it
        return
    is_trainers = any(need.place == place and need.process == "trainer" for need in plan.needs)
    if on_gpu and is_trainers and not config.lora_rank:
        for more in range(config.trainer_processes + 1, min(gpus, config.queries_per_batch + 1)):
            yield dict(trainer_processes=more, searchers=gpus - more), ""
    if config.searchers > 1:
        yield dict(searchers=1), ""
    length, least = "max_response_tokens", 1
    if config.max_episode_tokens:
        length, least = "max_episode_tokens", config.max_prompt_tokens + 1
    for part in (2, 4):
        yield {length: max(least, getattr(config, length) // part)}, ""
    bfloat16 = dict(dtype="bfloat16", master_dtype="bfloat16")
    yield bfloat16, " (steps below a weight's precision are lost then)"
    if on_gpu and not config.lora_rank and find_spec("peft"):
        alone = dict(trainer_processes=1) if config.trainer_processes > 1 else {}
        yield dict(lora_rank=32) | alone, " (adapters are trained then, not all weights)"


def print_plan(plan: Plan) -> None:
    """Print the plan as a table: of each place what it needs, and for what."""
    config, passes = plan.config, "two passes" if plan.config.low_memory == "on" else "one pass"
    print(f"task {config.task}, model {config.model}; a step takes {passes} (--low_memory)")
    for place in plan.places():
        has = f"of {plan.available[place] / GIB:.2f}" if place in plan.available else ""
        print(f"{place:<26} {has:<58} {plan.total(place) / GIB:9.2f} GiB")
        for need in plan.needs:
            if need.place == place:
                print(f"{'':<14}{need.process:<12} {need.purpose:<58} {need.bytes / GIB:9.2f}")
    print("activations: counted; CUDA, kernels and vLLM's work: estimated, not measured on a GPU")
