"""The live view of a run on a terminal: progress, a line a searcher, the figures."""

import time
from collections import deque

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from runtime.transport.board import Board

SHOWN = (  # first, and alone where there is no terminal
    "reward",
    "loss",
    "log_z",
    "kl",
    "entropy",
    "staleness_mean",
    "trainer_busy",
    "searcher_tokens_per_second",
)
PACE_SECONDS = 60.0  # over which the pace is taken that the time left is estimated by
RATE_WINDOW = 10.0  # seconds over which rates and busy shares are taken


class LiveView:
    """Shows a run as it goes. steps: that it is to make."""

    def __init__(self, board: Board, steps: int):
        self.board, self.steps = board, steps
        self.pace: deque[tuple[float, int]] = deque()  # (time, step)
        self.tokens: dict[str, deque[tuple[float, float]]] = {}  # of each searcher: (time, tokens)
        self.live = Live(auto_refresh=False)
        self.live.start()

    def show(self, metrics: dict) -> None:
        """Show the metrics of a step."""
        self.live.update(self.view(metrics, time.monotonic()), refresh=True)

    def say(self, text: str) -> None:
        """Show a line that stays, above the view."""
        self.live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self.live.stop()

    def view(self, metrics: dict, now: float) -> Group:
        """Build what is shown."""
        step = metrics["step"]
        bar = ProgressBar(total=self.steps, completed=step, width=40)
        title = f"step {step} of {self.steps}, {duration(metrics['seconds'])}"
        self.pace.append((now, step))
        left = seconds_left(self.pace, self.steps)
        figures = Table(show_header=False)
        for name in [*SHOWN, *(name for name in metrics if name not in SHOWN)]:
            if name in metrics and name not in ("step", "seconds"):
                figures.add_row(name, number(metrics[name]))
        return Group(title + left, bar, self.searchers(step, now), figures)

    def searchers(self, step: int, now: float) -> Table:
        """Build a table with a line for each searcher."""
        board, table = self.board, Table()
        for header in ("", "tokens/s", "steps behind", "restarts", "sign of life"):
            table.add_column(header, justify="right")
        for name in board.searchers:
            seen = self.tokens.setdefault(name, deque())
            seen.append((now, board.get(name, "tokens")))
            rate = rate_of(seen, RATE_WINDOW)
            behind = max(0, step - int(board.get(name, "version")))
            restarts = int(board.get(name, "restarts"))
            sign = board.sign_of_life(name).removeprefix(f"{name} ")
            table.add_row(name, f"{rate:.0f}", str(behind), str(restarts), sign)
        return table


def seconds_left(pace: deque[tuple[float, int]], steps: int) -> str:
    """Estimate the time left by the latest pace; "" while there is none."""
    rate = rate_of(pace, PACE_SECONDS)
    return f", about {duration((steps - pace[-1][1]) / rate)} left" if rate > 0 else ""


def rate_of(seen: deque[tuple[float, float]], seconds: float) -> float:
    """Per second, over the latest so many seconds of (time, count); 0 of a single one."""
    while len(seen) > 2 and seen[1][0] < seen[-1][0] - seconds:
        seen.popleft()
    (start, before), (end, after) = seen[0], seen[-1]
    return (after - before) / (end - start) if end > start else 0.0


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
