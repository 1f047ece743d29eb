"""What a person sees of a run: the live view on a terminal, plain lines elsewhere."""

import os
from collections import deque
from io import StringIO
from multiprocessing import Pipe

import numpy as np
import rich
from rich.console import Console

from config import Config
from launch.display.live import LiveView
from launch.display.terminal import Terminal
from runtime.record.metrics import RATE_WINDOW, rate_of
from runtime.record.report import Report
from runtime.transport.status import StatusTable


def shown(view: LiveView, step: int) -> str:
    console, metrics = Console(width=100, file=StringIO()), {"step": step, "seconds": 80.0}
    console.print(view.view(metrics | {"queue_depth": 3, "loss": 0.5, "reward": 0.25}))
    return console.file.getvalue()


def test_the_live_view_has_the_time_left_a_line_a_searcher_and_first_what_matters_most(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(rich.get_console(), "get_time", lambda: clock[0])
    status = StatusTable(["trainer", "searcher 0", "searcher 1"])
    view = LiveView(status, steps=100)
    view.close()
    first = shown(view, 20)
    assert "step 20 of 100" in first and "-:--:-- left" in first, "there is no pace yet"
    for name, tokens, version in ("searcher 0", 500.0, 38), ("searcher 1", 250.0, 30):
        status.mark_ready(name)
        status.set(name, "tokens", tokens)
        status.set(name, "version", version)
    status.set("searcher 1", "restarts", 1)
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


def test_plain_lines_show_what_the_trainer_says_and_an_objectives_figures(tmp_path, capsys):
    # There is no log Z: only trajectory balance has one.
    config = Config(task="arithmetic", steps=1, output_dir=str(tmp_path))
    status, (said, stdout) = StatusTable(["trainer"]), Pipe(duplex=False)
    terminal = Terminal(config, status, said)
    report = Report(str(tmp_path), config, status)
    report.step({"step": 1, "reward": 0.5, "loss": 2.0, "received": 8})
    os.write(stdout.fileno(), b"a line\nhalf of")
    terminal.look()
    line, progress = capsys.readouterr().out.splitlines()
    assert progress.startswith("step 1/1  reward 0.5  loss 2  ") and line == "a line"
    os.write(stdout.fileno(), b" a line")
    stdout.close()
    terminal.close()
    assert capsys.readouterr().out == "half of a line\n"
