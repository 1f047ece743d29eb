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
RESUMED = "--steps 12"
# Of a line: what is measured by a clock, or of the group that came first.
TIMED = "busy", "second", "queue_depth", "mismatch"
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
from tasks import find_presets, find_task, task_names
from tba import main

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
Differences = Iterator[str]


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

    def train(self, name: str, flags: str) -> Path:
        """Make a run, unless it is there."""
        run_dir = self.work / name
        if not run_dir.exists():
            words = f"{self.root / 'tba.py'} {SMALL} {flags} --output_dir {run_dir}"
            self.python(*words.split())
        return run_dir

    def resume(self, name: str, run_dir: Path) -> Path:
        """Go on with a copy of a run of whichever checkout."""
        copy = self.work / name
        shutil.copytree(run_dir, copy)
        self.python(self.root / "tba.py", "--resume", copy, *RESUMED.split())
        return copy


def differ(old: object, new: object, where: str) -> Differences:
    """Yield each place where two values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
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
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    figures = [
        {name: value for name, value in line.items() if not any(word in name for word in TIMED)}
        for line in lines
    ]
    checkpoint = max((run_dir / "checkpoints").glob("step-*"))
    state = json.loads((checkpoint / "state.json").read_text())
    arrays = {path.name: dict(np.load(path)) for path in checkpoint.glob("*.npz")}
    tensors = {path.name: load_file(path) for path in checkpoint.glob("*.safetensors")}
    model = load_file(run_dir / "model" / "model.safetensors")
    for row in state["board"].values():
        row.pop("restarts", None)
    state["fresh"].pop("mismatch", None)
    return {"metrics": figures, "state": state, "model": model, **arrays, **tensors}


def keys_of_files(run_dir: Path) -> dict[str, object]:
    """Return the files of a run, and what the lines or the object in each have for keys."""
    keys = {}
    for path in sorted(run_dir.rglob("*")):
        name = str(path.relative_to(run_dir))
        keys[name] = []
        if path.suffix in (".json", ".jsonl") and "spans" not in name and "model/" not in name:
            text = path.read_text()
            values = map(json.loads, text.splitlines() if path.suffix == ".jsonl" else [text])
            found = (value if isinstance(value, dict) else {} for value in values)
            keys[name] = sorted({key for value in found for key in value})
    return keys


def compare_pinned(old: Checkout, new: Checkout) -> Differences:
    files = ({f.name: f.read_text() for f in c.root.glob("tests/pinned/*")} for c in (old, new))
    yield from differ(*files, "tests/pinned")


def compare_runs(old: Checkout, new: Checkout) -> Differences:
    for name, flags in RUNS.items():
        yield from differ(*(read_run(c.train(name, flags)) for c in (old, new)), name)


def compare_study(old: Checkout, new: Checkout) -> Differences:
    results = (json.loads(c.python("-c", STUDY, directory="benchmarks")) for c in (old, new))
    yield from differ(*results, "study")


def compare_words(old: Checkout, new: Checkout) -> Differences:
    yield from differ(*(json.loads(c.python("-c", PROBE)) for c in (old, new)), "tba.py")


def compare_files(old: Checkout, new: Checkout) -> Differences:
    for name, flags in RUNS.items():
        yield from differ(*(keys_of_files(c.train(name, flags)) for c in (old, new)), name)


def compare_resumed(old: Checkout, new: Checkout) -> Differences:
    """The old checkout's runs are resumed by both."""
    for name in ("synchronous", "lora"):
        run_dir = old.train(name, RUNS[name])
        resumed = (read_run(c.resume(f"{name} resumed", run_dir)) for c in (old, new))
        yield from differ(*resumed, f"{name}, resumed")


COMPARISONS: dict[str, Callable[[Checkout, Checkout], Differences]] = {
    "pinned actions": compare_pinned,
    "lockstep runs": compare_runs,
    "the study's run": compare_study,
    "help, presets and refusals": compare_words,
    "files of a run": compare_files,
    "an old checkpoint": compare_resumed,
}


def main(old: str, new: str) -> int:
    os.environ |= {"COLUMNS": "100", "PYTHONHASHSEED": "0"}  # of --help; of tyro's sets
    num_different = 0
    with tempfile.TemporaryDirectory() as directory:
        pair = Checkout(old, Path(directory, "old")), Checkout(new, Path(directory, "new"))
        for name, compare in COMPARISONS.items():
            differences = list(compare(*pair))
            num_different += bool(differences)
            print(f"{name}: {f'{len(differences)} differences' if differences else 'equal'}")
            print("".join(f"  {line}\n" for line in differences[:10]), end="", flush=True)
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
