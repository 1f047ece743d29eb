"""The trainer's waits: each says for whom, and has a timeout."""

import time
from collections.abc import Callable

from config import Config
from runtime.board import Board
from runtime.report import Report
from runtime.timeline import Timeline

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
        """Call succeeds() until it does. what: says what is awaited.

        even_at_end: a shutdown does not end this wait. Raises TimeoutError after
        --searcher_timeout seconds in which no searcher was loading.
        """
        is_interruptible = self.is_interruptible and not even_at_end
        start = said = loaded = time.monotonic()
        with self.timeline.span("wait"):
            while not succeeds() and not (is_interruptible and self.board.end):
                now = time.monotonic()
                self.board.beat("trainer")
                if now - said > HEALTH_PERIOD:
                    said = now
                    signs = ", ".join(map(self.board.sign_of_life, self.board.searchers))
                    waited = f"waiting since {now - start:.0f} s for {what()}"
                    self.report.say(f"{waited}; signs of life: {signs}")
                if not all(self.board.get(name, "ready") for name in self.board.searchers):
                    loaded = now
                if now - loaded > self.config.searcher_timeout:
                    raise TimeoutError(
                        f"the trainer waited {now - start:.0f} s (--searcher_timeout) for {what()}"
                    )
                time.sleep(POLL_SECONDS)
        self.seconds += time.monotonic() - start
