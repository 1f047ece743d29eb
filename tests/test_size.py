"""How many lines each room of this repository may have: the numbers only go down.

A fork has numbers of its own, or deletes this file.
"""

from pathlib import Path

import pytest
from conftest import ROOT

# Lines of each room, blank ones and comments included; launch/ with its template.
MOST = {
    ".": 2_054,
    "models": 1_454,
    "runtime": 1_531,
    "tasks": 2_309,
    "launch": 3_349,
    "extras": 2_106,
    "examples": 305,
    "tests": 13_221,
    "benchmarks": 3_030,
}
# What the two workers of an ordinary run import: files, and their lines (tests/test_runs.py).
MOST_IMPORTED = 38, 4_856


def files_of(room: str) -> list[Path]:
    """Return the files of a room; of the top level its own alone."""
    find = (ROOT / room).glob if room == "." else (ROOT / room).rglob
    return [file for ending in ("*.py", "*.j2") for file in find(ending)]


@pytest.mark.parametrize("room", MOST)
def test_a_room_has_no_more_lines_than_its_number(room):
    lines = {str(f): len(f.read_text(encoding="utf-8").splitlines()) for f in files_of(room)}
    total, longest = sum(lines.values()), sorted(lines, key=lines.get)[-5:]
    assert total <= MOST[room], f"{room} has {total} lines; the longest files are {longest}"


def test_every_room_has_a_number():
    rooms = {path.parent.name for path in ROOT.glob("*/*.py")}
    assert {room for room in rooms if room[0] != "."} <= MOST.keys()
