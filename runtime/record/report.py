"""What a person looks at while a run goes on: metrics.jsonl, and progress on the terminal."""

import sys
import time
from pathlib import Path

from config import Config
from runtime.record.alarms import Alarms
from runtime.record.live import SHOWN, LiveView, number
from runtime.record.timeline import Lines, read_metrics, to_json
from runtime.transport.board import Board
from runtime.transport.messages import Evaluation

PLAIN_PERIOD = 5.0  # seconds between two progress lines where there is no terminal
LIVE_PERIOD = 0.25  # ... and between two updates of the live view


class Report:
    """The trainer's: writes metrics.jsonl, and shows progress, live on a terminal.

    metric: what a score of the task is called. base_model: what the run began with.
    """

    def __init__(self, run_dir: str, config: Config, board: Board, metric: str, base_model: str):
        self.steps, self.max_prompt_tokens = config.steps, config.max_prompt_tokens
        self.board, self.metric, self.base_model = board, metric, base_model
        self.start = time.monotonic()
        self.metrics = Lines(Path(run_dir) / "metrics.jsonl")
        self.alarms = Alarms(run_dir, config)
        self.shown_at = -PLAIN_PERIOD
        self.live = LiveView(board, self.steps) if sys.stdout.isatty() else None

    @property
    def seconds(self) -> float:
        """Since the trainer's start."""
        return time.monotonic() - self.start

    def step(self, metrics: dict) -> None:
        """Write a line of metrics.jsonl, and now and then one for the person who watches."""
        metrics = metrics | {"seconds": self.seconds}
        self.metrics.write(metrics)
        for warning in self.alarms.observe(metrics):
            self.say(f"warning: {warning}")
        now = time.monotonic()
        period = LIVE_PERIOD if self.live else PLAIN_PERIOD
        if now - self.shown_at < period and metrics["step"] < self.steps:
            return
        self.shown_at = now
        if self.live:
            self.live.show(metrics)
        else:
            figures = [f"{name} {number(metrics[name])}" for name in SHOWN if name in metrics]
            progress = f"step {metrics['step']}/{self.steps}"
            print("  ".join([progress, *figures, f"{self.seconds:.0f} s"]), flush=True)

    def say(self, text: str) -> None:
        """Show a line that stays: an evaluation, a wait, something dropped."""
        if self.live:
            self.live.say(text)
        else:
            print(text, flush=True)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write the line of an evaluation, and show it."""
        self.metrics.write(evaluation.line(self.metric, self.base_model))
        if evaluation.version:
            self.say(f"step {evaluation.version}: {self.metric} {evaluation}")
            return
        self.say(f"base {self.metric}: {evaluation}")
        if evaluation.answers:
            self.say(str(evaluation.answers))

    def close(self) -> None:
        """Say what the run has left out, and end the live view."""
        if skipped := int(self.board.total("long_prompts")):
            why = f"over --max_prompt_tokens {self.max_prompt_tokens}, empty or not Unicode"
            self.say(f"{skipped} queries were skipped: prompt {why}")
        if unscored := int(self.board.total("unscored_groups")):
            self.say(f"{unscored} groups were dropped, they got no scores: see logs/")
        if self.live:
            self.live.close()


def rewind(run_dir: str, step: int) -> None:
    """Drop the lines of metrics.jsonl after this step, for a run that is resumed there.

    The timeline begins anew: a gap in it would not be the run's.
    """
    path = Path(run_dir) / "metrics.jsonl"
    # This step's evaluation comes after it: only those of earlier versions are kept.
    kept = [
        line
        for line in read_metrics(run_dir)
        if (line["step"] <= step if "loss" in line else line["step"] < step)
    ]
    path.with_suffix(".unfinished").write_text("".join(to_json(line) + "\n" for line in kept))
    path.with_suffix(".unfinished").rename(path)
    for spans in (Path(run_dir) / "logs").glob("*.spans.jsonl"):
        spans.unlink()
