"""The plan, where it takes two passes or advises what extras/ holds."""

import re

import pytest
from test_plan import GSM8K, make_shapes, num_responses, plan_on

from config import Config
from launch.command_line import find_presets
from launch.places import find_places, resolve
from launch.planning import plan
from launch.planning.plan import DISK, GIB, MEMORY, SHARED, Plan, check_plan
from tasks import load_task


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> dict[str, str]:
    return make_shapes(tmp_path_factory.mktemp("shapes"))


def test_beside_the_trainer_vllm_gets_what_its_share_leaves_for_the_cache(shapes, monkeypatch):
    config = Config(**GSM8K | dict(model=shapes["rho"], gpu_memory_utilization=0.5))
    places, task = find_places(config, ["0"]), load_task("gsm8k")
    monkeypatch.setattr(plan, "this_machine", lambda *_: {"GPU 0": 79 * GIB})
    checked = check_plan(resolve(config, places), task, places)
    fixed, room, _ = Plan(checked, places, {"GPU 0": 79 * GIB}).vllm(places[1])
    assert fixed + room == 0.5 * 79 * GIB
    assert checked.kv_cache_bytes == int(room) > 30 * GIB
    two = find_places(config, ["0", "1"])
    monkeypatch.setattr(plan, "this_machine", lambda *_: {f"GPU {i}": 79 * GIB for i in (0, 1)})
    assert check_plan(resolve(config, two), task, two).kv_cache_bytes is None


def test_two_passes_are_taken_where_only_they_fit(shapes):
    large, problem = plan_on("4x20", model=shapes["four"])
    assert problem is None and large.config.low_memory == "auto", "the trial has the last word"
    small, problem = plan_on("4x11", model=shapes["four"])
    assert problem is None and small.config.low_memory == "on"
    assert small.total("GPU 0") < 0.7 * large.total("GPU 0")
    off, problem = plan_on("4x11", model=shapes["four"], low_memory="off")
    assert off.is_short("GPU 0") and "; --low_memory on, " in problem


LESS = "--low_memory on, --lora_rank 32, more --trainer_processes, a smaller --gpu_memory"
ROOM = "vLLM's share of GPU 1 has no room for a response of full length"
LITTLE = "is short: the run needs .* GiB, there are 0.25"
HOST = "--low_memory on, --checkpoint_every 0, .* take less "
REMOUNT = r"enlarge it \(mount -o remount,size=… /dev/shm, docker run --shm-size=…\)"
PROBLEMS = [
    ("1x6", None, {}, f"GPU 0 is short: the run needs 11.* GiB, there are 5.91; {LESS}"),
    ("4x20", None, {"gpu_memory_utilization": 0.03}, f"{ROOM}; give a larger --gpu_memory_util"),
    ("0x0", MEMORY, {}, f".*[gG]PU.*, and {MEMORY} {LITTLE}; {HOST}"),
    ("0x0", SHARED, {}, f"{SHARED} {LITTLE}; {REMOUNT}"),
    ("0x0", DISK, {}, f"{DISK} {LITTLE}; give an --output_dir on a larger disk"),
]


@pytest.mark.parametrize("gpus, place, settings, words", PROBLEMS)
def test_a_plan_that_does_not_fit_says_what_is_short_and_what_takes_less(
    gpus, place, settings, words, shapes
):
    available = {place: GIB / 4} if place else None
    _, problem = plan_on(gpus, available, model=shapes["four"], **settings)
    assert re.match(words, problem) and "\n" not in problem, problem


def test_the_small_preset_fits_on_one_card_of_24_gib(shapes):
    settings = find_presets("gsm8k")["small"] | {"model": shapes["qwen"]}
    made, problem = plan_on("1x24", **settings)
    assert problem is None and num_responses(made) >= 50
    assert plan_on("1x22", **settings)[1] is None, "some cards of 24 GB have less"


@pytest.mark.runs
def test_the_lora_preset_of_math_fits_on_one_card_of_80_gib(shapes):
    pytest.importorskip("peft", reason="pip install -r requirements/lora.txt")
    own = {"task": "competition_math", "model": shapes["qwen_7b"]}
    settings = find_presets("competition_math")["lora"] | own
    made, problem = plan_on("1x80", **settings)
    assert problem is None and num_responses(made) >= 30
    assert plan_on("1x80", **settings | {"lora_rank": 0})[1].startswith("GPU 0 is short")


def test_without_a_gpu_two_passes_and_no_checkpoints_need_less_host_memory(shapes, monkeypatch):
    def total(**settings) -> float:
        return plan_on("0x0", **own, **settings)[0].total(MEMORY)

    own = dict(model=shapes["shallow"])
    two_passes, without = total(low_memory="on"), total(low_memory="on", checkpoint_every=0)
    assert without < two_passes < total(low_memory="off")
    late = total(low_memory="on", checkpoint_every=10**6)
    assert late == without, "the last one needs no copy"
    monkeypatch.setattr(plan, "this_machine", lambda *_: {MEMORY: two_passes + GIB / 10})
    config, places = Config(**GSM8K | own), find_places(Config(), [])
    planned = check_plan(resolve(config, places), load_task("gsm8k"), places)
    assert planned.low_memory == "on", "auto"
