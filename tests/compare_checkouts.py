"""Compare what two checkouts of the project do, for a change that is to change nothing.

    python tests/compare_checkouts.py OLD NEW

Each has its own .venv (make setup-tests). In both the same runs are made from the same seeds, and
come out the same bit by bit: synchronous, late by a constant, with LoRA, the study's, resumed.
A line for each comparison; where something differs, the first places. About ten minutes.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

SMALL = "arithmetic --queries_per_batch 8 --seed 5"
RUNS = {  # each ends in steps of its own, so that a search that is cut short shows too
    "synchronous": "--synchronous --steps 9 --eval_every 3 --checkpoint_every 4",
    "late": "--constant_staleness 3 --reference_reset_period 5 --steps 12 --checkpoint_every 5",
    "lora": "--synchronous --lora_rank 4 --steps 8 --checkpoint_every 4",
}
# Of a line: what is measured by a clock, or of the group that came first.
TIMED = "busy", "second", "queue_depth", "mismatch"
UNLIKE = {"restarts", "mismatch"}  # in a checkpoint's state: the same of no two runs
STUDY = """
import json, study
settings = dict(task="addends", loss="tb", learning_rate=1e-3, seed=3, steps=30, sync_period=4)
print(json.dumps(study.train(settings, groups_per_sync=8)))
"""
# Every setting with values that are out of its range, not of its type, or odd. No run begins: there
# is no such model.
PROBE = """
import contextlib, dataclasses, io, json, re
from config import Config
from tasks import find_task, task_names
from tba import main
from launch.command_line import find_presets

found = {}
def call(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*words])
    texts = (re.sub("0x[0-9a-f]+", "", text.getvalue()) for text in (out, err))  # no addresses
    found[" ".join(words)] = [code, *texts]

for task in task_names():
    found[f"presets of {task}"] = find_presets(task)
    call(task, "--help")
for field in dataclasses.fields(Config):
    for value in ("-1", "0", "7", "nan", "x"):
        call("arithmetic", "--" + field.name, value, "--model", "absent")
print(json.dumps(found, default=str))
"""


class Checkout:
    """One of the two. work: what it makes lies there."""

    def __init__(self, root: str, work: Path):
        self.root, self.work = Path(root).resolve(), work
        work.mkdir()

    def python(self, *words: object, directory: str = ".") -> str:
        """Run its Python there; returns what it prints."""
        command = [str(self.root / ".venv" / "bin" / "python"), *map(str, words)]
        done = subprocess.run(command, cwd=self.root / directory, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{self.root}: {command}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def train(self, name: str) -> Path:
        """Make a run, unless it is there."""
        run_dir = self.work / name
        if not run_dir.exists():
            words = f"{self.root / 'tba.py'} {SMALL} {RUNS[name]} --output_dir {run_dir}"
            self.python(*words.split())
        return run_dir

    def resume(self, name: str) -> Path:
        """Go on with a copy of a run."""
        copy = self.work / f"{name} resumed"
        shutil.copytree(self.train(name), copy)
        self.python(self.root / "tba.py", "--resume", copy, "--steps", 12)
        return copy


def differ(old: object, new: object, where: str) -> Iterator[str]:
    """Yield each place where two values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in (old | new).keys() - UNLIKE:
            yield from differ(old.get(key), new.get(key), f"{where} {key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, pair in enumerate(zip(old, new)):
            yield from differ(*pair, f"{where}[{i}]")
    elif isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        if old.shape != new.shape or old.tobytes() != new.tobytes():
            yield f"{where}: arrays differ"
    elif old != new and not (old != old and new != new):
        yield f"{where}: {old!r:.300} | {new!r:.300}"


def read_run(run_dir: Path) -> dict[str, object]:
    """Return what a run has learnt and said, without times."""
    figures = [*map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())]
    for line in figures:
        for name in [name for name in line if any(word in name for word in TIMED)]:
            del line[name]
    checkpoint = max((run_dir / "checkpoints").glob("step-*"))
    state = json.loads((checkpoint / "state.json").read_text())
    arrays = {path.name: dict(np.load(path)) for path in checkpoint.glob("*.npz")}
    tensors = {path.name: load_file(path) for path in checkpoint.glob("*.safetensors")}
    model = load_file(run_dir / "model" / "model.safetensors")
    return {"metrics": figures, "state": state, "model": model, **arrays, **tensors}


# What is compared of each checkout.
COMPARED: dict[str, Callable[[Checkout], object]] = {
    "pinned actions": lambda c: {p.name: p.read_text() for p in c.root.glob("tests/pinned/*")},
    "lockstep runs": lambda c: {name: read_run(c.train(name)) for name in RUNS},
    "the study's run": lambda c: json.loads(c.python("-c", STUDY, directory="benchmarks")),
    "help, presets and refusals": lambda c: json.loads(c.python("-c", PROBE)),
    "resumed runs": lambda c: {name: read_run(c.resume(name)) for name in RUNS},
}


def main(old: str, new: str) -> int:
    os.environ |= {"COLUMNS": "100", "PYTHONHASHSEED": "0"}  # of --help; of tyro's sets
    num_different = 0
    with tempfile.TemporaryDirectory() as directory:
        before, after = Checkout(old, Path(directory, "old")), Checkout(new, Path(directory, "new"))
        for name, look in COMPARED.items():
            differences = list(differ(look(before), look(after), name))
            num_different += bool(differences)
            print(f"{name}: {f'{len(differences)} differences' if differences else 'equal'}")
            print("".join(f"  {line}\n" for line in differences[:10]), end="", flush=True)
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
