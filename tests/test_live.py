"""The live view on a terminal."""

from collections import deque
from io import StringIO

import numpy as np
import rich
from rich.console import Console

from runtime.record.live import RATE_WINDOW, LiveView, rate_of
from runtime.transport.board import Board


def shown(view: LiveView, step: int) -> str:
    console, metrics = Console(width=100, file=StringIO()), {"step": step, "seconds": 80.0}
    console.print(view.view(metrics | {"queue_depth": 3, "loss": 0.5, "reward": 0.25}))
    return console.file.getvalue()


def test_the_live_view_has_the_time_left_a_line_a_searcher_and_first_what_matters_most(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(rich.get_console(), "get_time", lambda: clock[0])
    board = Board(["trainer", "searcher 0", "searcher 1"])
    view = LiveView(board, steps=100)
    view.close()
    first = shown(view, 20)
    assert "step 20 of 100" in first and "-:--:-- left" in first, "there is no pace yet"
    for name, tokens, version in ("searcher 0", 500.0, 38), ("searcher 1", 250.0, 30):
        board.loaded(name)
        board.set(name, "tokens", tokens)
        board.set(name, "version", version)
    board.set("searcher 1", "restarts", 1)
    clock[0] = 1010.0
    text = shown(view, 40)
    assert "step 40 of 100 0:00:10" in text and "0:00:30 left" in text
    lines = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    cells = {line[1]: line[2:-1] for line in lines if len(line) > 3}
    assert cells["searcher 0"] == ["50", "2", "0", "0 s ago"]
    assert cells["searcher 1"] == ["25", "10", "1", "0 s ago"]
    assert text.index("reward") < text.index("loss") < text.index("queue_depth")


def test_a_rate_follows_the_latest_seconds_and_is_zero_at_first():
    assert rate_of(deque([(0.0, 1.0)]), RATE_WINDOW) == 0.0
    counts = {0.0: [0, 0], 100.0: [1, 1], 105.0: [30, 1], 111.0: [34, 1]}
    slow_then_fast = deque((time, np.array(count)) for time, count in counts.items())
    assert rate_of(slow_then_fast, RATE_WINDOW).tolist() == [3.0, 0.0]
