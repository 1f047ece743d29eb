"""Which mutants of the core do the tests catch?

    make mutants        # 40 mutants of each of six files, the same every time: half an hour

cosmic-ray makes them: a number, an operator, a comparison, a condition or a loop is changed. Each
is tried in a copy of the project, with the tests of its file. Prints how many were caught, by file,
and each mutant that was not.
"""

import multiprocessing
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_item import MutationSpec, WorkerOutcome

ROOT = Path(__file__).parents[1]
# The tests that are run for a file, until one fails.
TESTS = {
    "loss.py": "loss objectives exact_posterior",
    "extras/objectives.py": "objectives",
    "buffer.py": "buffer",
    "weights.py": "weights",
    "learner.py": "trainer presets low_memory lora checkpoint dtype",
    "models/logprobs.py": "policy low_memory trainer dtype",
}
SAMPLE = 40  # mutants of a file
PATIENCE = 2.0  # time limit of a mutant's tests, of their usual time: some make them hang


def sample(file: str) -> list[MutationSpec]:
    """Choose SAMPLE mutants, the same every time: one of each place before a second of any."""
    by_place: dict[tuple, list[MutationSpec]] = defaultdict(list)
    for item in _all_work_items([Path(file)], {}):
        by_place[item.mutations[0].start_pos].append(item.mutations[0])
    rng = random.Random(file)
    turns = [
        (turn, rng.random(), mutant)
        for of_place in by_place.values()
        for turn, mutant in enumerate(rng.sample(of_place, len(of_place)))
    ]
    return [mutant for _, _, mutant in sorted(turns, key=lambda turn: turn[:2])[:SAMPLE]]


def command_for(file: str) -> list[str]:
    names = {f"test_{name}.py" for name in TESTS[file].split()}
    tests = [str(path) for path in Path("tests").rglob("test_*.py") if path.name in names]
    marks = ["-m", "not faults and not runs and not cluster"]
    return [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *marks, *tests]


def seconds_without_mutant(file: str) -> float:
    """Run the tests of a file, which must pass. Raises RuntimeError."""
    start = time.monotonic()
    done = subprocess.run(command_for(file), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the tests of {file} fail without a mutant:\n{done.stdout}")
    return time.monotonic() - start


def try_one(mutant: tuple[MutationSpec, str, float]) -> tuple[str, str]:
    """Run the tests on a mutant of a file, for so many seconds.

    Returns "caught", "survived", "timeout" or "not tried", and what differs, or why.
    """
    mutation, file, seconds = mutant
    result = mutate_and_test([mutation], shlex.join(command_for(file)), seconds)
    if result.worker_outcome != WorkerOutcome.NORMAL or result.test_outcome == "incompetent":
        return "not tried", f"@ {mutation}: {result.output}"
    caught = "timeout" if result.output == "timeout" else "caught"
    return caught if result.is_killed else "survived", result.diff


def in_a_copy(parent: str) -> None:
    """Give this process a copy of the project, in that directory, to work in."""
    directory = Path(parent, str(os.getpid()))
    command = "git ls-files --cached --others --exclude-standard".split()
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    for name in filter(os.path.exists, names):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    os.chdir(directory)


def main() -> None:
    os.chdir(ROOT)
    start = time.monotonic()
    mutants = [(mutation, file) for file in TESTS for mutation in sample(file)]
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as parent,
        multiprocessing.get_context("spawn").Pool(2, in_a_copy, [parent]) as pool,
    ):
        usual = dict(zip(TESTS, pool.map(seconds_without_mutant, TESTS, chunksize=1)))
        tried = [(mutation, file, PATIENCE * usual[file]) for mutation, file in mutants]
        counts: dict[str, Counter] = defaultdict(Counter)
        for (_, file), (outcome, diff) in zip(mutants, pool.imap(try_one, tried)):
            counts[file][outcome] += 1
            if outcome != "caught":
                shown = [line for line in diff.splitlines() if line[:1] in "+-@"]
                print("\n".join([outcome, *shown]), flush=True)
    for file, of_file in counts.items():
        print(f"{file}: {', '.join(f'{count} {outcome}' for outcome, count in of_file.items())}")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
