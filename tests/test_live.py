"""What a person sees of a run: one view on a terminal, plain lines elsewhere."""

import os
import re
import subprocess
import sys
import termios
from contextlib import suppress
from io import StringIO
from multiprocessing import Pipe
from pathlib import Path

import rich
from rich.console import Console

from config import Config
from launch.display.progress import FIGURES, MOST_SEARCHERS, ProgressView
from runtime.record.report import Report
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable


class Shown:
    """A run of 100 steps, as its view shows it."""

    def __init__(self, run_dir: Path, searchers: int = 2):
        config = Config(task="arithmetic", steps=100, output_dir=str(run_dir))
        self.status = StatusTable(["trainer", *(f"searcher {i}" for i in range(searchers))])
        said, self.stdout = Pipe(duplex=False)
        self.view = ProgressView(config, self.status, said)
        self.report = Report(str(run_dir), config, self.status)

    def step(self, step: int, **figures: float) -> None:
        self.report.step(figures | {"step": step, "loss": 2.0, "received": 8})
        self.view.look()

    def evaluation(self, version: int, accuracy: float, prefix: str = "") -> None:
        evaluation = Evaluation(version, {"accuracy": (accuracy, 0.0, 1.0)}, 30)
        self.report.metrics.write(evaluation.line("a base model", prefix))
        self.view.look()

    def lines(self) -> list[str]:
        console = Console(width=100, file=StringIO())
        console.print(self.view.view())
        return console.file.getvalue().splitlines()


def test_the_view_has_the_time_left_each_searcher_and_at_last_what_goes_on(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(rich.get_console(), "get_time", lambda: clock[0])
    run = Shown(tmp_path)
    run.step(20)
    assert "step 20/100" in run.lines()[0] and "-:--:-- left" in run.lines()[0], "no pace yet"
    for name, tokens, version in ("searcher 0", 500.0, 38), ("searcher 1", 25000.0, 30):
        run.status.mark_ready(name)
        run.status.set(name, "tokens", tokens)
        run.status.set(name, "version", version)
    run.status.set("searcher 1", "restarts", 2)
    clock[0] = 1010.0
    run.step(40)
    bar, _, first, second = run.lines()
    assert "0:00:10 0:00:30 left" in bar
    assert first == "searcher 0: 50 tokens/s, 2 steps behind, alive"
    assert second == "searcher 1: 2,500 tokens/s, 10 steps behind, alive, 2 restarts"
    bar = Shown(tmp_path).lines()[0]  # of the run resumed: what it has read is no pace
    assert "step 40/100" in bar and "-:--:-- left" in bar
    run.step(100)
    run.status.last_step_done = True
    clock[0] = 1030.0
    bar, doing = run.lines()
    assert "0:00:30" in bar and doing == "saving the model …", "the clock goes on"


ON_A_TERMINAL = """
import os, sys
from pathlib import Path
from test_live import FIGURES, MOST_SEARCHERS, Shown

run = Shown(Path(sys.argv[1]), MOST_SEARCHERS)
with run.view:
    run.view.say("a line that stays")
    run.step(3, **dict.fromkeys(FIGURES, -1.234e-5))
    run.evaluation(0, 0.5)
    run.view.say("saving a checkpoint …")
    run.view.live.refresh()
    os._exit(0)  # the view stays on the screen
"""


def screen(output: str) -> list[str]:
    """The lines that a terminal has in the end, by the codes with which rich draws a view anew."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\x1b\r":
            lines[row] += part
    return lines


def test_on_a_terminal_the_view_has_twelve_lines_that_fit_and_is_drawn_in_its_place(tmp_path):
    """In a process of its own: rich's global console keeps what it found at its first use."""
    tests = Path(__file__).parent
    # Given whole: readline, which pytest imports, puts COLUMNS into what a child would inherit.
    hidden = "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    variables |= dict(TERM="xterm", PYTHONPATH=f"{tests.parent}:{tests}")
    own, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (30, 80))
    command = [sys.executable, "-c", ON_A_TERMINAL, str(tmp_path)]
    process = subprocess.Popen(command, env=variables, stdout=terminal, stderr=terminal)
    os.close(terminal)
    output = b""
    with suppress(OSError):  # the other end is closed
        while data := os.read(own, 1 << 16):
            output += data
    os.close(own)
    assert process.wait() == 0, output.decode()
    assert b"step 0/100" in output, "it was drawn before"
    said, bar, *view = screen(output.decode())
    assert said == "a line that stays" and len(view) == 11
    assert bar.startswith("step 3/100 ") and bar.rstrip().endswith(" left")
    assert all(name in " ".join(view[:3]) for name in FIGURES)
    assert [line.rstrip() for line in view[3:5]] == ["saving a checkpoint …", "accuracy 0.50"]
    searchers = [f"searcher {i}" for i in range(MOST_SEARCHERS)]
    assert [line.split(":")[0] for line in view[5:]] == searchers
    assert max(map(len, view)) <= 80


def test_elsewhere_all_that_is_said_is_a_line_and_so_is_progress_now_and_then(tmp_path, capsys):
    run = Shown(tmp_path)
    os.write(run.stdout.fileno(), "a line\nwaiting …\nhalf of".encode())
    with run.view:
        run.step(1, reward=0.5)  # there is no log Z: only trajectory balance has one
        run.step(2)  # too soon for another line
        said = ["a line", "waiting …", "step 1/100  reward 0.5  loss 2  0 s"]
        assert capsys.readouterr().out.splitlines() == said
        os.write(run.stdout.fileno(), b" a line")
        run.stdout.close()
    assert capsys.readouterr().out == "half of a line\n"


def test_a_run_ends_with_how_each_metric_has_gone_before_it_was_resumed_too(tmp_path):
    Shown(tmp_path).evaluation(0, 0.294)
    run = Shown(tmp_path)
    run.evaluation(40, 0.7)
    run.evaluation(100, 0.999, prefix="final_")
    assert run.view.evaluated() == "accuracy 0.29 → 1.00"
