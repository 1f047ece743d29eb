"""What only a GPU machine does: the number of GPUs, and whether CUDA can use them, is a mock."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, WHOLE_RUN, flags, python, read, steps_of

from config import Config, UserError
from launch import children
from launch.places import Place, find_places, resolve, why_no_gpu
from runtime.transport.status import StatusTable
from searcher import Searcher
from weights import SharedWeights


def test_gpus_that_cuda_cannot_use_are_refused_in_one_line(gpus, monkeypatch):
    gpus(4, usable=False)
    assert all(place.gpu is None for place in find_places(Config())), "with vLLM's build for CPUs"
    installed = [SimpleNamespace(name="vllm")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    with pytest.raises(UserError, match=r"^[^\n]*: mend that, or install requirements/cpu.txt"):
        find_places(Config())


FAILS = "echo NVIDIA-SMI has failed because it cannot reach the driver.; exit 9"
LISTS = "echo GPU 0: NVIDIA H200"
REASONS = [
    (None, None, "this machine has no GPU (no nvidia-smi)"),
    (FAILS, None, "(nvidia-smi: NVIDIA-SMI has failed because it cannot reach the driver.)"),
    (LISTS, None, "nvidia-smi lists (it is the build for CPUs, run make setup for the other)"),
    (LISTS, "13.0", "(CUDA_VISIBLE_DEVICES hides them, or their driver is older than 580)"),
]


@pytest.mark.parametrize("nvidia_smi, cuda, reason", REASONS)
def test_a_gpu_that_is_missing_hidden_or_without_a_driver_is_named(
    nvidia_smi, cuda, reason, tmp_path, monkeypatch
):
    if nvidia_smi:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert why_no_gpu().endswith(reason)


def test_each_process_gets_its_part_of_the_cores(gpus, monkeypatch):
    gpus(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0, GPU-1, GPU-2, GPU-3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    places = find_places(Config())
    assert len(places) == 4
    for number, place in enumerate(places):
        found = children.environment(place)
        assert found["CUDA_VISIBLE_DEVICES"] == place.gpu == f"GPU-{number}"
        assert ("PYTORCH_CUDA_ALLOC_CONF" in found) == (place.name == "trainer")
        assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "16"
        assert place.cores == list(range(64)), "it may run on any"
    # Without GPUs trainer processes share the half of the cores that the trainer has.
    for cores, expected in (8, [[0, 2], [1, 3], [4, 5, 6, 7]]), (2, [[0], [0], [1]]):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        config = Config(trainer_processes=2)
        places = {p.name: p.cores for p in find_places(config, [])}
        assert [places[name] for name in ("trainer", "trainer 1", "searcher 0")] == expected


def test_the_rank_that_another_launcher_gave_is_not_handed_on(tmp_path, monkeypatch):
    """torch would take it for the number of a GPU."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("LOCAL_RANK", "3")
    show = ["sh", "-c", f"env > {tmp_path}/environment"]
    place = Place("searcher 0", None, sorted(os.sched_getaffinity(0)))
    process = children.start(place, "subprocess:check_call", (show,), str(tmp_path))
    process.join(WHOLE_RUN)
    assert process.exitcode == 0
    assert "LOCAL_RANK" not in (tmp_path / "environment").read_text()


def test_trainer_processes_get_the_first_gpus_and_searchers_the_others_if_any(gpus):
    gpus(8)
    places = find_places(Config(trainer_processes=3, searchers=2))
    names = ["trainer", "trainer 1", "trainer 2", "searcher 0", "searcher 1"]
    assert {place.gpu: place.name for place in places} == dict(zip("01234", names))
    assert len(find_places(Config(trainer_processes=3))) == 8, "each other GPU has a searcher"
    # On a cluster no searcher shares the trainer's.
    gpus(1)
    (place,) = find_places(Config(ray="auto"))
    assert place.name == "trainer"
    with pytest.raises(UserError, match="--searchers is 1, .* one GPU: room for 0 beside"):
        find_places(Config(ray="auto", searchers=1))


def make(directory: Path, *words: str, nvidia_smi: str, path: str) -> subprocess.CompletedProcess:
    """Run make there, on the project's Makefile. nvidia_smi: the body of a script of that name."""
    for file in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / file, directory)
    shutil.copytree(ROOT / "requirements", directory / "requirements", dirs_exist_ok=True)
    (directory / "bin").mkdir(exist_ok=True)
    (directory / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    (directory / "bin" / "nvidia-smi").chmod(0o755)
    options = dict(cwd=directory, env={"PATH": path}, capture_output=True, text=True)
    return subprocess.run(["make", *words], **options)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_with_a_gpu_the_tests_have_the_cpu_build_in_an_environment_of_their_own(has_gpu, tmp_path):
    machine = dict(nvidia_smi="echo GPU 0" if has_gpu else "exit 1")
    machine["path"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    demo, test = (make(tmp_path, "--dry-run", name, **machine).stdout for name in ("demo", "test"))
    assert f"-r {'requirements.txt' if has_gpu else 'requirements/cpu.txt'}" in demo
    assert ("--overrides" in demo) == (not has_gpu), "CUDA builds break import transformers"
    assert ".venv/bin/python tba.py" in demo
    asked = set(re.findall(r"-r requirements/(\S*)\.txt", test))
    assert asked == {"cpu", "lora", "track", "gym"}
    assert f"\n{'.venv-cpu' if has_gpu else '.venv'}/bin/python -m pytest" in test


OLD_DRIVER = "a driver for CUDA 13, 580 or newer (this one is for CUDA 12)"
LACKING = [("12.4", ["gcc"], OLD_DRIVER), ("13.0", [], "gcc")]


@pytest.mark.parametrize("cuda, tools, lacking", LACKING)
def test_the_set_up_says_in_one_line_what_a_gpu_machine_lacks(cuda, tools, lacking, tmp_path):
    """It stops before anything is installed."""
    found = tmp_path / "bin"
    found.mkdir()
    for name in ("sh", "make", "sed", "head", *tools):
        (found / name).symlink_to(shutil.which(name) or shutil.which("true"))
    (found / "python3").symlink_to(sys.executable)
    header = f"| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: {cuda}  |"
    made = make(tmp_path, "setup", nvidia_smi=f"echo '{header}'", path=str(found))
    assert made.returncode and not (tmp_path / ".venv").exists()
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    headers = "" if has_headers else ", the headers of Python (python3-dev)"
    line = f"this machine lacks {lacking}{headers}: see Platform in docs/operations.md"
    assert made.stdout.splitlines() == [line]


def test_a_searcher_on_the_trainers_gpu_has_less_memory_and_alone_is_throttled(gpus):
    config = Config(sync_period=2)
    for count, share, ahead in ((4, 0.55, None), (2, 0.55, None), (1, 0.15, 4)):
        gpus(count)
        places = find_places(config)
        found = resolve(config, places)
        assert (found.gpu_memory_utilization, found.search_ahead) == (share, ahead)
        asked = resolve(Config(gpu_memory_utilization=0.4, search_ahead=3), places)
        assert (asked.gpu_memory_utilization, asked.search_ahead) == (0.4, 3)
    for free in (Config(max_staleness=5), Config(constant_staleness=2)):
        assert resolve(free, find_places(free)).search_ahead is None, "the trainer may wait"


def test_a_throttled_search_goes_on_as_the_trainer_steps(untied_model, tmp_path, monkeypatch):
    def draw(searcher: Searcher) -> list:
        """Draw until the search is ahead."""
        return [*iter(lambda: None if searcher.is_ahead() else searcher.draw(), None)]

    (tmp_path / "logs").mkdir()
    monkeypatch.setattr("searcher.Engine", lambda *_, **__: None)
    batch = dict(queries_per_batch=3, samples_per_query=10, initial_responses=45)
    config = Config(model=str(untied_model), searchers=1, search_ahead=2, **batch)
    weights = SharedWeights({"a": (1,)}, torch.float32, readers=1)
    parts = config, 0, weights, None, StatusTable(["trainer", "searcher 0"]), str(tmp_path)
    searcher = Searcher(*parts)
    drawn = draw(searcher)
    assert len(drawn) == 11, "45 responses in 4.5 groups, and two steps of three"
    for step in (0, 2):
        weights.publish(step, [("a", torch.zeros(1))])
    assert draw(searcher) == [], "more than two steps of three groups are in flight"
    for group in drawn:
        searcher.share.end(group)
    assert len(more := draw(searcher)) == 6, "two steps of three groups"
    searcher.drop(more[0])
    assert len(draw(searcher)) == 1, "a group that got no scores is made up for"
    assert len(draw(Searcher(*parts))) == 11, "a restarted one counts from its own start"
    later = SharedWeights({"a": (1,)}, torch.float32, readers=1)
    resumed = Searcher(replace(config, resume="a run"), 0, later, *parts[3:])
    later.publish(500, [("a", torch.zeros(1))])
    resumed.begin()
    assert len(draw(resumed)) == 11, "and one of a resumed run from the version that it waited for"


@pytest.mark.runs
def test_a_run_with_a_throttled_searcher_makes_no_more_than_it_may(tmp_path):
    run_dir = tmp_path / "run"
    small = flags(steps=150, initial_responses=240, queries_per_batch=1, eval_every=0)
    python("tba.py", *small, *flags(output_dir=run_dir, search_ahead=10))
    lines = steps_of(run_dir)
    made = np.array([line["received"] for line in lines])
    allowed = np.array([240 + 12 * (line["step"] + 10) for line in lines])
    assert (made <= allowed).all() and made[-1] > 0.5 * allowed[-1], "and it does search"
    assert "final_accuracy" in read(run_dir, "metrics.jsonl")[-1]
