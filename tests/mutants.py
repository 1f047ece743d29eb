"""Which mutants of the core do the tests catch?

    make mutants        # 40 mutants of each of six files, the same every time: half an hour or more

cosmic-ray makes them: a number, an operator, a comparison, a condition or a loop is changed. Each
is tried in a copy of the project, with the tests of its file. Prints the share that was caught by
file, and each mutant that was not.
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
from collections import defaultdict
from pathlib import Path

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).parents[1]
# The tests that are run for a file: what holds most of it first.
TESTS = {
    "loss.py": "loss objectives exact_posterior",
    "objectives.py": "objectives",
    "buffer.py": "buffer",
    "weights.py": "weights",
    "learner.py": "trainer low_memory lora checkpoint dtype",
    "models/logprobs.py": "policy low_memory trainer",
}
SAMPLE, SECONDS = 40, 300.0  # mutants of a file; that a mutant's tests may take


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


def try_one(mutation: MutationSpec | None, file: str) -> str | None:
    """Run the tests on a mutant. Returns its difference where they pass, else None."""
    tests = [f"tests/test_{name}.py" for name in TESTS[file].split()]
    marks = ["-m", "not faults and not runs and not cluster"]
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *marks, *tests]
    if mutation is None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return None
    result = mutate_and_test([mutation], shlex.join(command), SECONDS)
    return None if result.is_killed else result.diff


def in_a_copy(parent: str) -> None:
    """Give this process a copy of the project, in that directory, to work in."""
    directory = Path(parent, str(os.getpid()))
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for name in tracked:
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
        pool.starmap(try_one, [(None, file) for file in TESTS])  # green without a mutant
        survivors = pool.starmap(try_one, mutants, chunksize=1)
    for file in TESTS:
        own = [diff for (_, of), diff in zip(mutants, survivors) if of == file]
        alive = [diff for diff in own if diff]
        print(f"{file}: {len(own) - len(alive)} of {len(own)} caught")
        for diff in alive:
            print("\n".join(line for line in diff.splitlines() if line[:1] in "+-@"))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
