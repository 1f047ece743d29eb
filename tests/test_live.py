"""What a person sees of a run: one view on a terminal, plain lines elsewhere."""

import os
import sys
from collections import deque
from io import StringIO
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import rich
from rich.console import Console

from config import Config
from launch.display.progress import FIGURES, MOST_SEARCHERS, ProgressView
from runtime.record.metrics import RATE_WINDOW, rate_of
from runtime.record.report import Report
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time that the view sees, in a list."""
    now = [1000.0]
    monkeypatch.setattr(rich.get_console(), "get_time", lambda: now[0])
    return now


class Shown:
    """A run of 100 steps with so many searchers, as its view shows it."""

    def __init__(self, run_dir: Path, searchers: int = 2):
        config = Config(task="arithmetic", steps=100, output_dir=str(run_dir))
        self.status = StatusTable(["trainer", *(f"searcher {i}" for i in range(searchers))])
        said, self.stdout = Pipe(duplex=False)
        self.view = ProgressView(config, self.status, said)
        self.report = Report(str(run_dir), config, self.status)

    def step(self, step: int) -> None:
        self.report.step(dict.fromkeys(FIGURES, -1e-5) | {"step": step, "received": 8})
        self.view.look()

    def evaluation(self, version: int, accuracy: float, prefix: str = "") -> None:
        evaluation = Evaluation(version, {"accuracy": (accuracy, 0.0, 1.0)}, 30)
        self.report.metrics.write(evaluation.line("a base model", prefix))
        self.view.look()

    def lines(self) -> list[str]:
        console = Console(width=100, file=StringIO())
        console.print(self.view.view())
        return console.file.getvalue().splitlines()


def test_the_view_has_the_time_left_the_evaluation_and_a_line_a_searcher(tmp_path, clock):
    run = Shown(tmp_path)
    run.step(20)
    assert "step 20/100" in run.lines()[0] and "-:--:-- left" in run.lines()[0], "no pace yet"
    for name, tokens, version in ("searcher 0", 500.0, 38), ("searcher 1", 25000.0, 30):
        run.status.mark_ready(name)
        run.status.set(name, "tokens", tokens)
        run.status.set(name, "version", version)
    run.status.set("searcher 1", "restarts", 1)
    clock[0] = 1010.0
    run.step(40)
    run.evaluation(0, 0.294)
    bar, *_, accuracy, first, second = run.lines()
    assert "0:00:10 0:00:30 left" in bar and accuracy == "accuracy 0.29"
    assert first == "searcher 0: 50 tokens/s, 2 steps behind, 0 restarts, alive"
    assert second == "searcher 1: 2,500 tokens/s, 10 steps behind, 1 restarts, alive"


@pytest.mark.parametrize("searchers", [1, MOST_SEARCHERS, MOST_SEARCHERS + 1])
def test_the_view_never_has_more_than_twelve_lines(searchers, tmp_path):
    run = Shown(tmp_path, searchers)
    run.step(3)
    run.evaluation(0, 0.5)
    run.view.doing = f"waiting for {'a very ' * 30} long time …"
    lines = run.lines()
    assert len(lines) <= 12 and all(any(name in line for line in lines) for name in FIGURES)
    last = f"{searchers} searchers: " if searchers > MOST_SEARCHERS else f"searcher {searchers - 1}"
    assert lines[-1].startswith(last)


def test_after_the_last_step_the_view_says_what_goes_on_and_the_clock_does_too(tmp_path, clock):
    run = Shown(tmp_path)
    run.step(99)
    run.step(100)
    run.status.last_step_done = True
    clock[0] += 20
    bar, doing = run.lines()
    assert "0:00:20" in bar and doing == "saving the model …"


def test_on_a_terminal_what_goes_on_stands_in_the_view_and_lines_stay_above(tmp_path, monkeypatch):
    terminal, other_end = os.openpty()
    monkeypatch.setattr(sys, "stdout", os.fdopen(other_end, "w"))
    monkeypatch.setenv("TERM", "xterm")
    run = Shown(tmp_path)
    with run.view as view:
        view.say("loading the models …")
        view.say("a line that [bold]stays[/bold]")
        view.live.refresh()
        screen = os.read(terminal, 1 << 16).decode()
        assert screen.index("a line that [bold]stays[/bold]") < screen.index("loading the models …")
        run.step(100)
        assert "step 100/100  reward" in os.read(terminal, 1 << 16).decode()


def test_elsewhere_there_are_lines_of_what_is_said_of_progress_and_of_what_goes_on(
    tmp_path, capsys
):
    # There is no log Z: only trajectory balance has one.
    run = Shown(tmp_path)
    os.write(run.stdout.fileno(), "a line\nwaiting …\nhalf of".encode())
    for step in (1, 2):  # the second one comes too soon for another line
        run.report.step({"step": step, "reward": 0.5, "loss": 2.0, "received": 8})
    with run.view:
        run.view.look()
        line, waiting, progress = capsys.readouterr().out.splitlines()
        assert progress.startswith("step 1/100  reward 0.5  loss 2  ") and line == "a line"
        assert progress.endswith("  0 s") and waiting == "waiting …"
        os.write(run.stdout.fileno(), b" a line")
        run.stdout.close()
    assert capsys.readouterr().out == "half of a line\n"


def test_a_run_ends_with_how_each_metric_has_gone(tmp_path):
    Shown(tmp_path).evaluation(0, 0.294)
    run = Shown(tmp_path)  # resumed
    run.evaluation(40, 0.7)
    run.evaluation(100, 0.999, prefix="final_")
    assert run.view.evaluated() == "accuracy 0.29 → 1.00"


def test_a_rate_follows_the_latest_seconds_and_is_zero_at_first():
    assert rate_of(deque([(0.0, 1.0)]), RATE_WINDOW) == 0.0
    counts = {0.0: [0, 0], 100.0: [1, 1], 105.0: [30, 1], 111.0: [34, 1]}
    slow_then_fast = deque((time, np.array(count)) for time, count in counts.items())
    assert rate_of(slow_then_fast, RATE_WINDOW).tolist() == [3.0, 0.0]
