"""The live view on a terminal."""

from collections import deque
from io import StringIO

from rich.console import Console

from runtime.record.live import LiveView, duration, seconds_left
from runtime.transport.board import Board

METRICS = {"step": 40, "seconds": 80.0, "queue_depth": 3, "loss": 0.5, "reward": 0.25}


def shown(view: LiveView, metrics: dict, now: float) -> str:
    console = Console(width=100, file=StringIO())
    console.print(view.view(metrics, now))
    return console.file.getvalue()


def test_the_live_view_has_the_time_left_a_line_a_searcher_and_first_what_matters_most():
    board = Board(["trainer", "searcher 0", "searcher 1"])
    view = LiveView(board, steps=100)
    view.close()
    shown(view, METRICS | {"step": 20}, now=1000.0)
    for name, tokens, version in ("searcher 0", 500.0, 38), ("searcher 1", 250.0, 30):
        board.loaded(name)
        board.set(name, "tokens", tokens)
        board.set(name, "version", version)
    board.set("searcher 1", "restarts", 1)
    text = shown(view, METRICS, now=1010.0)
    assert "step 40 of 100, 1 min 20 s, about 30 s left" in text
    lines = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    cells = {line[1]: line[2:-1] for line in lines if len(line) > 3}
    assert cells["searcher 0"] == ["50", "2", "0", "0 s ago"]
    assert cells["searcher 1"] == ["25", "10", "1", "0 s ago"]
    assert text.index("reward") < text.index("loss") < text.index("queue_depth")


def test_the_time_left_follows_the_latest_pace_and_is_unknown_at_first():
    assert seconds_left(deque([(0.0, 1)]), 100) == ""
    slow_then_fast = deque([(0.0, 0), (1000.0, 10), (1030.0, 40), (1061.0, 70)])
    assert seconds_left(slow_then_fast, 100) == ", about 30 s left"
    assert duration(59.4) == "59 s" and duration(3 * 3600 + 65) == "3 h 1 min"
