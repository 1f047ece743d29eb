"""What a person sees while a run goes on: one view on a terminal, lines elsewhere.

A line that ends with … says what is going on. On a terminal it stands in the view, until the next
such line or the next step.
"""

import math
import os
import sys
import time
from collections import defaultdict, deque
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from rich.columns import Columns
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from config import Config
from launch.display.alarms import Alarms
from launch.files import find_evaluations, is_metrics, new_lines
from runtime.record.metrics import RATE_WINDOW, rate_of
from runtime.transport.status import StatusTable

FIGURES = "reward loss log_z kl entropy staleness_mean trainer_busy searcher_busy".split()
FIGURE_WIDTH = 24  # of each in the view: three in a line of 80 columns, four of 100
LINE_PERIOD = 5.0  # seconds between two lines of progress where there is no terminal
REFRESHES_PER_SECOND = 2  # of the view
PACE_SECONDS = 300.0  # over which the pace is taken that the time left is estimated by
MOST_SEARCHERS = 6  # with a line each, so that the view has twelve; more are summed up


class ProgressView:
    """Shows a run: on a terminal as a view, while this block is entered.

    said: what the trainer writes to its stdout.
    """

    def __init__(self, config: Config, status: StatusTable, said: Connection):
        self.steps, self.status, self.said = config.steps, status, said
        os.set_blocking(said.fileno(), False)
        self.reader = os.fdopen(said.fileno(), "rb", closefd=False)
        self.begun = b""  # a line of it that is not whole yet
        self.alarms = Alarms(config.output_dir, config)
        self.metrics: dict = {}  # of the latest step
        self.doing = ""  # what is going on besides steps
        self.shown_at = -math.inf  # when there was a line of progress
        self.evaluations: dict[str, list[str]] = {}  # by metric: the first, the latest if another
        # (time, tokens) of each searcher.
        self.tokens: dict[str, deque[tuple[float, float]]] = defaultdict(deque)
        columns = "step {task.completed}/{task.total}", BarColumn(), TimeElapsedColumn()
        columns += TimeRemainingColumn(), "left"
        self.bar = Progress(*columns, speed_estimate_period=PACE_SECONDS)
        self.bar.add_task("", total=config.steps)
        (self.task,) = self.bar.tasks
        self.live = Live(
            get_renderable=self.view,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=sys.stderr.isatty(),
        )
        self.lines = new_lines(Path(config.output_dir, "metrics.jsonl"))
        for line in self.new_metrics():  # of a run that is resumed
            self.task.completed = line["step"]  # by update() it would be the pace of this start

    def __enter__(self) -> "ProgressView":
        if sys.stdout.isatty() and not self.live.console.is_dumb_terminal:
            self.live.start()
        return self

    def __exit__(self, *_) -> None:
        """End the view. What is said afterwards is printed."""
        self.look()
        if self.begun:  # the trainer has ended in the midst of a line
            self.say(self.begun.decode(sys.stdout.encoding, "replace"))
        self.live.stop()

    def look(self) -> None:
        """Show what is new. Call it often."""
        while data := self.reader.readline():  # the beginning of a line where there is no more yet
            self.begun += data
            if data.endswith(b"\n"):
                self.say(self.begun[:-1].decode(sys.stdout.encoding, "replace"))
                self.begun = b""
        for line in self.new_metrics():
            if "loss" in line:
                # What was not finite is null there.
                self.step({k: math.nan if value is None else value for k, value in line.items()})

    def say(self, text: str) -> None:
        """Show a line that stays, or what is going on. From any thread."""
        if text.endswith("…"):
            self.doing = text
            if self.live.is_started:
                return
        plain = dict(markup=False, emoji=False, highlight=False, soft_wrap=True)
        self.live.console.print(text, **plain)

    def new_metrics(self) -> list[dict]:
        """Return new lines of metrics.jsonl. Takes note of the evaluations among them."""
        lines = [*filter(is_metrics, next(self.lines))]
        for _, name, value, _ in find_evaluations(lines):
            if value is not None:
                metric = name.removeprefix("final_")
                first = self.evaluations.get(metric, [])[:1]
                self.evaluations[metric] = [*first, f"{value:.2f}"]
        return lines

    def step(self, metrics: dict) -> None:
        """Take in the metrics of a step."""
        self.metrics, self.doing = metrics, ""
        self.bar.update(self.task.id, completed=metrics["step"])
        for warning in self.alarms.observe(metrics):
            self.say(f"warning: {warning}")
        step, now, seconds = metrics["step"], time.monotonic(), f"{metrics['seconds']:.0f} s"
        is_last = step == self.steps
        is_due = not self.live.is_started and now - self.shown_at >= LINE_PERIOD
        if is_due or is_last:
            self.shown_at = now
            if remaining := self.task.time_remaining:
                seconds += f", {timedelta(seconds=remaining)} left"
            self.say("  ".join([f"step {step}/{self.steps}", *self.figures(), seconds]))
        if is_last:
            self.task.finished_time = None  # the clock goes on until all is written
            self.say("saving the model …")

    def figures(self) -> list[str]:
        """Write the figures of the latest step that its objective has."""
        return [f"{name} {number(self.metrics[name])}" for name in FIGURES if name in self.metrics]

    def evaluated(self) -> str:
        """Say how each metric has gone, from the first evaluation to the latest."""
        changes = [*self.evaluations.items()]  # at once: the view has a thread
        return ", ".join(f"{name} {' → '.join(ends)}" for name, ends in changes)

    def view(self) -> Group:
        """Build what is shown now."""
        parts = [self.doing, self.evaluated()]
        figures = []
        if not self.status.last_step_done:
            names, figures = self.status.searchers, self.figures()
            rows = [[name] for name in names] if len(names) <= MOST_SEARCHERS else [names]
            parts += map(self.describe, rows)
        lines = [Text(part, no_wrap=True, overflow="ellipsis") for part in parts if part]
        return Group(self.bar, Columns(figures, width=FIGURE_WIDTH), *lines)

    def describe(self, names: list[str]) -> str:
        """Describe one searcher, or several as one."""
        status, now, tokens_per_second = self.status, self.bar.get_time(), 0.0
        for name in names:
            self.tokens[name].append((now, status.get(name, "tokens")))
            tokens_per_second += rate_of(self.tokens[name], RATE_WINDOW)
        version = min(status.get(name, "version") for name in names)
        behind = max(0, self.metrics.get("step", 0) - int(version))
        restarts = sum(status.get(name, "restarts") for name in names)
        health = [status.health(name) for name in names]
        name, state = names[0], health[0]
        if len(names) > 1:
            alive = sum(each.startswith("alive") for each in health)
            name, state = f"{len(names)} searchers", f"{alive} alive"
        if restarts:
            state += f", {restarts:.0f} restarts"
        return f"{name}: {tokens_per_second:,.0f} tokens/s, {behind} steps behind, {state}"


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
