"""The task with many right answers, and the base model that spreads over them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from unittest.mock import Mock

import pytest
from conftest import PATIENCE, ROOT

from config import UserError
from tasks import Query, load_task
from tasks.support import pretraining
from tasks.support.cache import cached

SAMPLES = 100  # of each query
TASK = load_task(str(ROOT / "benchmarks/addends/task.py"))
WRONG = (
    "12+46 12+35 99+58 7+50 50+7 007+50 57 12+45= 12+450 12+45+00 12+40+05 =12+45 12-45 1245 ١٢+45"
)


@pytest.mark.parametrize("response", [*WRONG.split(" "), "", "12+45 ", "12+45\n"])
def test_what_is_not_two_numbers_of_two_digits_that_add_up_is_wrong(response):
    query = Query(id=57, prompt="57=", answer=57)
    assert TASK.score([query], [response], [True]) == [0.0]


def test_every_number_from_10_to_99_is_asked_for_in_one_split():
    train, test = TASK.queries("train"), TASK.queries("test")
    queries = sorted([*train, *test], key=lambda query: query.id)
    assert queries == [Query(id=n, prompt=f"{n}=", answer=n) for n in range(10, 100)]
    assert len(test) == 20 and test == TASK.queries("test"), "the same each time"


@pytest.mark.parametrize("index", [0, -1])
def test_any_two_numbers_that_add_up_are_right_in_a_finished_response(index):
    query = TASK.queries("test")[index]
    responses = [f"{first:02}+{second:02}" for first in range(100) for second in range(100)]
    rewards = TASK.score([query] * len(responses), responses, [True] * len(responses))
    expected = [f"{first:02}+{query.id - first:02}" for first in range(query.id + 1)]
    assert [response for response, reward in zip(responses, rewards) if reward] == expected
    assert sum(rewards) == len(expected)
    assert not any(TASK.score([query] * len(responses), responses, [False] * len(responses)))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="the cache .*file/tba' cannot be written: Not a directory"):
        cached("some_task", "", Path.mkdir)


def test_two_runs_that_build_at_once_both_get_a_whole_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both_build = Barrier(2)

    def build(directory: Path) -> None:
        directory.mkdir()
        both_build.wait(PATIENCE)
        (directory / "last").touch()

    with ThreadPoolExecutor() as pool:
        one, other = pool.map(lambda _: cached("some_task", "", build), range(2))
    assert one == other and [*one.iterdir()] == [one / "last"]
    assert [*(tmp_path / "tba").iterdir()] == [one], "nothing unfinished is left"


def test_the_models_of_a_task_are_built_once_for_each_recipe(tmp_path, monkeypatch):
    build, queries = Mock(side_effect=Path.mkdir), TASK.queries("train")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pretraining, "cached", lambda name, recipe, _: cached(name, recipe, build))

    def directory(answer: str, steps: int) -> str:
        return pretraining.pupil("some_task", queries, lambda query, rng: answer, steps)

    first = directory("one homework", 10)
    assert directory("one homework", 10) == first and build.call_count == 1
    second = directory("another homework", 10)
    assert len({first, second, directory("another homework", 20)}) == build.call_count == 3
