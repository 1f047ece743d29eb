"""What a person sees while a run goes on: what the trainer says, and progress from its metrics."""

import math
import os
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from config import Config
from launch.display.alarms import Alarms
from launch.display.live import SHOWN, LiveView, number
from launch.files import is_metrics, new_lines
from runtime.transport.status import StatusTable

PLAIN_PERIOD = 5.0  # seconds between two progress lines where there is no terminal
LIVE_PERIOD = 0.25  # ... and between two updates of the live view


class Terminal:
    """Shows a run, live on a terminal. said: what the trainer writes to its stdout."""

    def __init__(self, config: Config, status: StatusTable, said: Connection):
        self.steps, self.said = config.steps, said
        os.set_blocking(said.fileno(), False)
        self.begun = b""  # a line of it that is not whole yet
        self.metrics = new_lines(Path(config.output_dir, "metrics.jsonl"))
        next(self.metrics)  # of what is resumed
        self.alarms = Alarms(config.output_dir, config)
        self.shown_at = -PLAIN_PERIOD
        self.status, self.live = status, None

    def look(self) -> None:
        """Show what is new. Call it often."""
        with suppress(BlockingIOError):
            while data := os.read(self.said.fileno(), 1 << 16):
                whole, newline, self.begun = (self.begun + data).rpartition(b"\n")
                if newline:
                    self.say(whole.decode(sys.stdout.encoding, "replace"))
        for line in filter(is_metrics, next(self.metrics)):
            if "loss" in line:  # the trainer says what an evaluation gave
                # What was not finite is null there.
                self.step({k: math.nan if value is None else value for k, value in line.items()})

    def step(self, metrics: dict) -> None:
        """Take in the metrics of a step, and now and then show them."""
        for warning in self.alarms.observe(metrics):
            self.say(f"warning: {warning}")
        now = time.monotonic()
        period = LIVE_PERIOD if sys.stdout.isatty() else PLAIN_PERIOD
        if now - self.shown_at < period and metrics["step"] < self.steps:
            return
        self.shown_at = now
        if sys.stdout.isatty():
            self.live = self.live or LiveView(self.status, self.steps)
            self.live.show(metrics)
            return
        figures = [f"{name} {number(metrics[name])}" for name in SHOWN if name in metrics]
        progress, seconds = f"step {metrics['step']}/{self.steps}", f"{metrics['seconds']:.0f} s"
        print("  ".join([progress, *figures, seconds]), flush=True)

    def say(self, text: str) -> None:
        """Show a line that stays. From any thread."""
        if live := self.live:
            live.say(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Show what is left, and end the live view. What is said afterwards is printed."""
        self.look()
        rest, self.begun = self.begun, b""
        if rest:
            self.say(rest.decode(sys.stdout.encoding, "replace"))
        if live := self.live:
            self.live = None
            live.close()
