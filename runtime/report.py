"""What a person looks at while a run goes on: metrics.jsonl, and progress on the terminal."""

import json
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from buffer import Group
from models.logprobs import sampled
from runtime.board import Board
from runtime.timeline import Lines, read_lines

PLAIN_PERIOD = 5.0  # seconds between two progress lines where there is no terminal
LIVE_PERIOD = 0.25  # ... and between two updates of the live view
RATE_WINDOW = 10.0  # seconds over which rates and busy shares are taken
SHOWN = (
    "reward",
    "loss",
    "log_z",
    "kl",
    "entropy",
    "staleness_mean",
    "trainer_busy",
    "searcher_tokens_per_second",
)


class Report:
    """The trainer's: writes metrics.jsonl, and shows progress, live on a terminal."""

    def __init__(self, run_dir: str, steps: int):
        self.steps = steps
        self.start = time.monotonic()
        self.metrics = Lines(Path(run_dir) / "metrics.jsonl")
        self.shown_at = -PLAIN_PERIOD
        self.live = Live(auto_refresh=False) if sys.stdout.isatty() else None
        if self.live:
            self.live.start()

    @property
    def seconds(self) -> float:
        """Since the trainer's start."""
        return time.monotonic() - self.start

    def step(self, metrics: dict) -> None:
        """Write a line of metrics.jsonl, and now and then one for the person who watches."""
        self.metrics.write(metrics)
        now = time.monotonic()
        period = LIVE_PERIOD if self.live else PLAIN_PERIOD
        if now - self.shown_at < period and metrics["step"] < self.steps:
            return
        self.shown_at = now
        if self.live:
            self.live.update(self.table(metrics), refresh=True)
        else:
            figures = [f"{name} {number(metrics[name])}" for name in SHOWN if name in metrics]
            progress = f"step {metrics['step']}/{self.steps}"
            print("  ".join([progress, *figures, f"{self.seconds:.0f} s"]), flush=True)

    def say(self, text: str) -> None:
        """Show a line that stays: an evaluation, a wait, something dropped."""
        if self.live:
            self.live.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def table(self, metrics: dict) -> Table:
        """The live view."""
        title = f"step {metrics['step']} of {self.steps}, {self.seconds:.0f} s"
        table = Table(title=title, title_justify="left", show_header=False)
        bar = ProgressBar(total=self.steps, completed=metrics["step"], width=40)
        table.add_row("progress", bar)
        for name, value in metrics.items():
            if name not in ("step", "seconds"):
                table.add_row(name, number(value))
        return table

    def close(self) -> None:
        if self.live:
            self.live.stop()


class Rates:
    """Busy shares and tokens per second, over the latest RATE_WINDOW seconds."""

    def __init__(self, board: Board):
        self.board = board
        self.window: deque[tuple[float, float, float, float]] = deque()

    def measure(self, waited: float) -> dict[str, float]:
        """Look at the board. waited: seconds for which the trainer has waited so far."""
        now, board = time.monotonic(), self.board
        self.window.append((now, waited, board.total("busy"), board.total("tokens")))
        while self.window[0][0] < now - RATE_WINDOW and len(self.window) > 2:
            self.window.popleft()
        seconds, waited, worked, tokens = np.subtract(self.window[-1], self.window[0])
        seconds = seconds or 1.0  # the first look
        return {
            "trainer_busy": 1.0 - waited / seconds,
            "searcher_busy": worked / seconds / len(board.searchers),
            "searcher_tokens_per_second": tokens / seconds,
            **board.figures(),
        }


def describe(groups: list[Group]) -> dict[str, float]:
    """What the trainer received, in figures.

    KL (nats a response, against the reference policy, if there is one) and entropy (nats a token)
    are estimates for the policy that sampled; KL contains the mismatch with vLLM. Ends that were
    appended are left out.
    """
    was_sampled = np.concatenate([sampled(group) for group in groups])
    behavior = np.concatenate([group.behavior_logprobs for group in groups])[was_sampled]
    reference = np.concatenate([group.ref_logprobs for group in groups])[was_sampled]
    lengths = np.concatenate([group.lengths for group in groups])
    has_reference = not np.isnan(reference).all()
    kl = {"kl": float((behavior - reference).sum() / len(lengths))} if has_reference else {}
    return {
        "reward": float(np.concatenate([group.rewards for group in groups]).mean()),
        **kl,
        "entropy": float(-behavior.mean()),
        "response_tokens": float(was_sampled.sum() / len(lengths)),
        "finished": float(np.concatenate([group.finished for group in groups]).mean()),
    }


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def rewind(run_dir: str, step: int) -> None:
    """Drop the lines of metrics.jsonl after this step, for a run that is resumed there.

    The timeline begins anew: a gap in it would not be the run's.
    """
    path = Path(run_dir) / "metrics.jsonl"
    # This step's evaluation comes after it: only those of earlier versions are kept.
    kept = [
        line
        for line in read_lines(path)
        if (line["step"] <= step if "loss" in line else line["step"] < step)
    ]
    path.with_suffix(".unfinished").write_text("".join(json.dumps(line) + "\n" for line in kept))
    path.with_suffix(".unfinished").rename(path)
    for spans in (Path(run_dir) / "logs").glob("*.spans.jsonl"):
        spans.unlink()
