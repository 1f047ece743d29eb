"""What a person looks at while a run goes on: metrics.jsonl, and progress on the terminal."""

import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

from buffer import Group
from config import Config
from models.logprobs import sampled
from runtime.record.alarms import Alarms
from runtime.record.live import RATE_WINDOW, SHOWN, LiveView, number
from runtime.record.timeline import Lines, read_metrics, to_json
from runtime.transport.board import Board

PLAIN_PERIOD = 5.0  # seconds between two progress lines where there is no terminal
LIVE_PERIOD = 0.25  # ... and between two updates of the live view


class Report:
    """The trainer's: writes metrics.jsonl, and shows progress, live on a terminal."""

    def __init__(self, run_dir: str, config: Config, board: Board):
        self.steps = config.steps
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

    def close(self) -> None:
        if self.live:
            self.live.close()


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
        "equal_rewards": float(np.mean([np.ptp(group.rewards) == 0 for group in groups])),
        **kl,
        "entropy": float(-behavior.mean()),
        "response_tokens": float(was_sampled.sum() / len(lengths)),
        "finished": float(np.concatenate([group.finished for group in groups]).mean()),
    }


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
