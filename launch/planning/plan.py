"""The plan of a run: what it needs of memory and disk, what there is, and what is short."""

import dataclasses
import shutil
from itertools import groupby
from pathlib import Path

import psutil
import torch

from config import Config, UserError
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
from launch.planning.needs import DISK, GIB, MEMORY, SHARED, Needs, place_of
from launch.planning.sizes import PolicySize
from tasks import Task
from weights import SHARED_MEMORY

USABLE = 0.985  # of the GiB by which a card is called; its driver keeps the rest
LARGE = 1e9  # parameters of a policy from which on a preset that names it is for GPUs
# Assumed of a GPU in a step, in floating-point operations a second. Of an A100's highest rates it
# is a third and a half; an H100 made 9e13 in bf16, before prompts and responses were one flat pass.
RATES = {torch.bfloat16: 1e14, torch.float32: 1e13}
HINTS = {
    "GPU": "--low_memory on, --lora_rank 32, more --trainer_processes, a smaller "
    "--gpu_memory_utilization or --max_response_tokens take less",
    MEMORY: "--low_memory on, --checkpoint_every 0, fewer --searchers or a smaller --model take "
    "less",
    SHARED: f"enlarge it (mount -o remount,size=… {SHARED_MEMORY}, docker run --shm-size=…)",
    DISK: "give an --output_dir on a larger disk; --checkpoint_every 0 takes less",
}


def check_plan(config: Config, task: Task, places: list[Place]) -> Config:
    """Check a run against this machine. Returns its settings, with --low_memory auto decided.

    Raises UserError that says what is short, and what takes less.
    """
    check_gpu(config, places)
    needs = make_plan(config, task, places, this_machine(config, places))
    check_needs(needs)
    if not is_gpu_shared(places):
        return needs.config
    return dataclasses.replace(needs.config, kv_cache_bytes=int(needs.room))


def show_plan(config: Config, task: Task) -> int:
    """--plan: print a run's plan. Returns the exit code; raises UserError if it does not fit."""
    if config.plan_gpus:
        count, gib = map(int, config.plan_gpus.split("x"))
        places = find_places(config, [str(gpu) for gpu in range(count)])
        available = {f"GPU {gpu}": USABLE * gib * GIB for gpu in range(count)}
    else:
        places = find_places(config)
        check_gpu(config, places)
        available = this_machine(config, places)
    needs = make_plan(resolve(config, places), task, places, available)
    print_plan(needs)
    check_needs(needs)
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
    parameters = PolicySize(config.model, config.trust_remote_code).parameters
    if parameters >= LARGE:
        raise UserError(
            f"preset {config.preset!r} of {config.task} is made for GPUs ({name} has "
            f"{parameters / 1e9:.1f} B parameters), and {why_no_gpu()}: what runs here is `python "
            "tba.py arithmetic` or `python tba.py sums`; --plan_gpus 4x80 plans for other machines"
        )


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


def make_plan(
    config: Config, task: Task, places: list[Place], available: dict[str, float]
) -> Needs:
    """Plan a run. --low_memory auto: on if the trainer fits only then."""
    needs = Needs(config, places, available, task.models())
    if config.low_memory == "auto" and needs.is_short(place_of(places[0])):
        two_passes = dataclasses.replace(config, low_memory="on")
        return make_plan(two_passes, task, places, available)
    return needs


def check_needs(needs: Needs) -> None:
    """Raise UserError that says what is short, and what takes less; not if nothing is short."""
    for place in needs.places_in_use:
        if needs.is_short(place):
            has, needed = needs.available[place] / GIB, needs.total(place) / GIB
            what = f"{place} is short: the run needs {needed:.4g} GiB, there are {has:.4g}"
            hint = HINTS[place if place in HINTS else "GPU"]
            if place == MEMORY and not needs.on_gpu:
                hint += f"; {why_no_gpu()}"
            raise UserError(f"{what}; {hint} (--plan shows all)")
    if not needs.responses:
        place = place_of(evaluation_place(needs.places))
        larger = "a larger --gpu_memory_utilization"
        if not needs.on_gpu:
            larger = "a larger VLLM_CPU_KVCACHE_SPACE, a number of GiB, in the environment"
        raise UserError(
            f"vLLM's share of {place} has no room for a response of full length; give {larger} "
            "(--plan shows all)"
        )


def print_plan(needs: Needs) -> None:
    """Print what each place needs, and for what, equal GPUs once; then how long the steps take."""
    config, available = needs.config, needs.available
    passes = "two passes" if config.low_memory == "on" else "one pass"
    print(f"task {config.task}, model {config.model}; a step takes {passes} (--low_memory)")

    def amounts(place: str) -> tuple[float | None, dict[tuple[str, str], list[float]]]:
        """What there is, and what each kind of process needs of it for each purpose."""
        found: dict[tuple[str, str], list[float]] = {}
        for need in needs.needs:
            if need.place == place:
                found.setdefault((need.process.split()[0], need.purpose), []).append(need.bytes)
        return available.get(place), found

    for (has, found), equal in groupby(needs.places_in_use, key=amounts):
        first, *others = equal
        name = f"{first} to {others[-1].removeprefix('GPU ')}, each" if others else first
        there_is = f"of {has / GIB:.2f}" if has else ""
        print(f"{name:<26} {there_is:<58} {needs.total(first) / GIB:9.2f} GiB")
        for (kind, purpose), sizes in found.items():
            who = f"{len(sizes)} {kind}s" if len(sizes) > 1 else kind
            print(f"{'':<14}{who:<12} {purpose:<58} {sum(sizes) / GIB:9.2f}")
    print("activations: counted; CUDA, kernels and vLLM's work: estimated, not measured on a GPU")
    if needs.on_gpu:
        rate = RATES[needs.dtype]
        minutes = config.steps * needs.step_operations / rate / 60
        print(
            f"{config.steps} steps of {needs.step_operations / 1e12:.0f} TFLOP, each response of "
            f"full length, at {rate / 1e12:.0f} TFLOP/s: {minutes:.0f} minutes, calculated and "
            "never measured on a GPU"
        )
