"""The trainer's waits: each says for whom, and has a timeout."""

import time
from collections.abc import Callable

from config import Config
from runtime.record.report import Report
from runtime.record.timeline import Timeline
from runtime.transport.board import Board, Watchdog

POLL_SECONDS = 0.005
HEALTH_PERIOD = 10.0  # seconds of waiting between two lines that say for whom


class Waits:
    """All waits of the trainer.

    is_interruptible: a shutdown ends a wait; False where a checkpoint is exact only between
    batches. seconds: for which the trainer has waited so far.
    """

    def __init__(
        self,
        config: Config,
        board: Board,
        report: Report,
        timeline: Timeline,
        is_interruptible: bool,
    ):
        self.config, self.board, self.report, self.timeline = config, board, report, timeline
        self.is_interruptible = is_interruptible
        self.seconds = 0.0

    def until(
        self, succeeds: Callable[[], bool], what: Callable[[], str], even_at_end: bool = False
    ) -> None:
        """Call succeeds() until it does.

        what: says what is awaited, and how much of it has come: a change of that is progress.
        even_at_end: a shutdown does not end this wait. Raises TimeoutError after
        --searcher_timeout seconds without progress in which no searcher was loading.
        """
        is_interruptible = self.is_interruptible and not even_at_end
        start = said = time.monotonic()
        watchdog = Watchdog()
        with self.timeline.span("wait"):
            while not succeeds() and not (is_interruptible and self.board.end):
                self.board.beat("trainer")
                now, awaited = time.monotonic(), what()
                if now - said > HEALTH_PERIOD:
                    said = now
                    signs = ", ".join(map(self.board.sign_of_life, self.board.searchers))
                    waited = f"waiting since {now - start:.0f} s for {awaited}"
                    self.report.say(f"{waited}; signs of life: {signs}")
                are_ready = all(self.board.get(name, "ready") for name in self.board.searchers)
                seconds = watchdog.look(awaited if are_ready else now)
                if seconds > self.config.searcher_timeout:
                    problem = f"no progress for {seconds:.0f} s (--searcher_timeout)"
                    raise TimeoutError(f"the trainer waited for {awaited}: {problem}")
                time.sleep(POLL_SECONDS)
        self.seconds += time.monotonic() - start

    def until_worked(self, succeeds: Callable[[], bool], what: str) -> None:
        """Wait for what searchers have begun: that ends, so all their work is progress."""
        self.until(succeeds, lambda: f"{what}; they worked {self.board.total('busy'):.0f} s so far")
