"""The plan, where it takes two passes or advises what extras/ holds."""

import re

import pytest
from test_plan import GSM8K, make_shapes, plan_on

from config import Config
from launch.command_line import find_presets
from launch.places import find_places, resolve
from launch.planning import plan
from launch.planning.needs import DISK, GIB, MEMORY, SHARED, Needs
from launch.planning.plan import check_plan
from tasks import load_task


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> dict[str, str]:
    return make_shapes(tmp_path_factory.mktemp("shapes"))


def test_beside_the_trainer_vllm_gets_what_its_share_leaves_for_the_cache(shapes, monkeypatch):
    config = Config(**GSM8K | dict(model=shapes["rho"], gpu_memory_utilization=0.5))
    places, task = find_places(config, ["0"]), load_task("gsm8k")
    monkeypatch.setattr(plan, "this_machine", lambda *_: {"GPU 0": 79 * GIB})
    checked = check_plan(resolve(config, places), task, places)
    needs = Needs(checked, places, {"GPU 0": 79 * GIB})
    assert sum(needs.vllm(places[1])) == 0.5 * 79 * GIB
    assert checked.kv_cache_bytes == int(needs.vllm(places[1])[1]) > 30 * GIB
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
    assert off.is_short("GPU 0") and "; --low_memory on would do" in problem


ROOM = "vLLM's share of GPU 1 has no room for a response of full length"


BFLOAT16 = r"--dtype bfloat16 --master_dtype bfloat16 \(steps below a weight's precision are lost"


PROBLEMS = [
    ("1x6", {}, "GPU 0 is short: the run needs 11.* GiB, there are 5.91; no one setting"),
    ("4x7", {}, "GPU 0 is short: .*; --trainer_processes 3 --searchers 1 would do"),
    ("2x7", {}, rf"GPU 0 is short: .*; {BFLOAT16} then\) would do"),
    ("4x20", {"gpu_memory_utilization": 0.03}, f"{ROOM}; --gpu_memory_utilization 0.8.? would do"),
    # A run that is resumed may change less.
    ("4x8", {"resume": "runs/old"}, "no one setting is enough"),
]


@pytest.mark.parametrize("gpus, settings, words", PROBLEMS)
def test_a_plan_that_does_not_fit_says_which_setting_would_do(gpus, settings, words, shapes):
    _, problem = plan_on(gpus, model=shapes["four"], **settings)
    assert re.search(words, problem) and "\n" not in problem, problem


def test_the_small_preset_fits_on_one_card_of_24_gib(shapes):
    settings = find_presets("gsm8k")["small"] | {"model": shapes["qwen"]}
    made, problem = plan_on("1x24", **settings)
    assert problem is None and made.responses >= 50
    assert plan_on("1x22", **settings)[1] is None, "some cards of 24 GB have less"


@pytest.mark.runs
def test_the_lora_preset_of_math_fits_on_one_card_of_80_gib(shapes):
    pytest.importorskip("peft", reason="pip install -r requirements-lora.txt")
    own = {"task": "competition_math", "model": shapes["qwen_7b"]}
    settings = find_presets("competition_math")["lora"] | own
    made, problem = plan_on("1x80", **settings)
    assert problem is None and made.responses >= 30
    _, problem = plan_on("1x80", **settings | {"lora_rank": 0})
    assert "--lora_rank 32 (adapters are trained then, not all weights) would do" in problem


def test_without_a_gpu_memory_shared_memory_and_disk_must_do(shapes, monkeypatch):
    def total(**settings) -> float:
        return plan_on("0x0", **own, **settings)[0].total(MEMORY)

    own = dict(model=shapes["shallow"])
    for place, advice in (
        (SHARED, r"enlarge it \(mount -o remount,size=… /dev/shm, docker run --shm-size=…\)"),
        (DISK, "give an --output_dir on a larger disk"),
        (MEMORY, "no one setting is enough: take a smaller --model, or a larger machine"),
    ):
        _, problem = plan_on("0x0", {place: GIB / 4}, **own, low_memory="off")
        assert re.match(f"{place} is short: .* there are 0.25; {advice}", problem), problem
    little = {MEMORY: total(low_memory="on") + GIB / 10}
    _, problem = plan_on("0x0", little, **own, low_memory="off")
    assert "; --low_memory on would do" in problem
    without = total(low_memory="on", checkpoint_every=0)
    _, problem = plan_on("0x0", {MEMORY: without + GIB / 10}, **own)
    assert "; --checkpoint_every 0 (one comes at the end, or at an interrupt) would do" in problem
    late = total(low_memory="on", checkpoint_every=10**6)
    assert late == without, "the last one needs no copy"
    monkeypatch.setattr(plan, "this_machine", lambda *_: little)
    config, places = Config(**GSM8K | own), find_places(Config(), [])
    planned = check_plan(resolve(config, places), load_task("gsm8k"), places)
    assert planned.low_memory == "on", "auto"
