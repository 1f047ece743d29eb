"""The live view on a terminal."""

from collections import deque
from io import StringIO

import numpy as np
import pytest
import rich
from rich.console import Console

from runtime.record.live import RATE_WINDOW, LiveView, rate_of
from runtime.transport.board import Board

METRICS = {"step": 40, "seconds": 80.0, "queue_depth": 3, "loss": 0.5, "reward": 0.25}


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A list of one item, the time by rich's clock."""
    now = [1000.0]
    monkeypatch.setattr(rich.get_console(), "get_time", lambda: now[0])
    return now


def shown(view: LiveView, metrics: dict) -> str:
    console = Console(width=100, file=StringIO())
    console.print(view.view(metrics))
    return console.file.getvalue()


def test_the_live_view_has_the_time_left_a_line_a_searcher_and_first_what_matters_most(clock):
    board = Board(["trainer", "searcher 0", "searcher 1"])
    view = LiveView(board, steps=100)
    view.close()
    first = shown(view, METRICS | {"step": 20})
    assert "step 20 of 100" in first and "-:--:-- left" in first, "there is no pace yet"
    for name, tokens, version in ("searcher 0", 500.0, 38), ("searcher 1", 250.0, 30):
        board.loaded(name)
        board.set(name, "tokens", tokens)
        board.set(name, "version", version)
    board.set("searcher 1", "restarts", 1)
    clock[0] = 1010.0
    text = shown(view, METRICS)
    assert "step 40 of 100 0:00:10" in text and "0:00:30 left" in text
    lines = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    cells = {line[1]: line[2:-1] for line in lines if len(line) > 3}
    assert cells["searcher 0"] == ["50", "2", "0", "0 s ago"]
    assert cells["searcher 1"] == ["25", "10", "1", "0 s ago"]
    assert text.index("reward") < text.index("loss") < text.index("queue_depth")


def test_a_rate_follows_the_latest_seconds_and_is_zero_at_first():
    assert rate_of(deque([(0.0, 1.0)]), RATE_WINDOW) == 0.0
    slow_then_fast = deque([(0.0, np.zeros(2)), (100.0, np.ones(2)), (111.0, np.array([34, 1]))])
    assert rate_of(slow_then_fast, RATE_WINDOW).tolist() == [3.0, 0.0]
