"""The live view of a run on a terminal: progress, a line a searcher, the figures."""

from collections import defaultdict, deque

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from runtime.record.metrics import RATE_WINDOW, rate_of
from runtime.transport.status import StatusTable

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
PACE_SECONDS = 300.0  # over which the pace is taken that the time left is estimated by


class LiveView:
    """Shows a run as it goes. steps: that it is to make."""

    def __init__(self, status: StatusTable, steps: int):
        self.status = status
        self.progress = Progress(
            "step {task.completed} of {task.total}",
            TimeElapsedColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            "left",
            speed_estimate_period=PACE_SECONDS,
        )
        self.bar = self.progress.add_task("", total=steps)
        # Of each searcher: (time, tokens).
        self.tokens: dict[str, deque[tuple[float, float]]] = defaultdict(deque)
        # What this process prints besides goes where it always does.
        self.live = Live(auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self.live.start()

    def show(self, metrics: dict) -> None:
        """Show the metrics of a step."""
        self.live.update(self.view(metrics), refresh=True)

    def say(self, text: str) -> None:
        """Show a line that stays, above the view."""
        self.live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self.live.stop()

    def view(self, metrics: dict) -> Group:
        """Build what is shown."""
        self.progress.update(self.bar, completed=metrics["step"])
        figures = Table(show_header=False)
        for name in [*SHOWN, *(name for name in metrics if name not in SHOWN)]:
            if name in metrics and name not in ("step", "seconds"):
                figures.add_row(name, number(metrics[name]))
        return Group(self.progress, self.searchers(metrics["step"]), figures)

    def searchers(self, step: int) -> Table:
        """Build a table with a line for each searcher."""
        status, table = self.status, Table()
        for header in ("", "tokens/s", "steps behind", "restarts", "heartbeat"):
            table.add_column(header, justify="right")
        for name in status.searchers:
            seen = self.tokens[name]
            seen.append((self.progress.get_time(), status.get(name, "tokens")))
            rate = rate_of(seen, RATE_WINDOW)
            behind = max(0, step - int(status.get(name, "version")))
            restarts = int(status.get(name, "restarts"))
            beat = status.last_heartbeat(name).removeprefix(f"{name} ")
            table.add_row(name, f"{rate:.0f}", str(behind), str(restarts), beat)
        return table


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
