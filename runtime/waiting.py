"""The trainer's waits: each says for whom, and has a timeout."""

import time
from dataclasses import dataclass

from config import Config
from runtime.record.report import Report
from runtime.record.timeline import Timeline
from runtime.transport.status import StatusTable, Watchdog

POLL_SECONDS = 0.005
SAY_PERIOD = 5.0  # seconds of waiting between two lines that say for what


@dataclass
class Waits:
    """All waits of the trainer."""

    config: Config
    status: StatusTable
    report: Report
    timeline: Timeline
    is_interruptible: bool  # by a shutdown; False where checkpoints are exact only between batches
    seconds: float = 0.0  # that the trainer has waited so far


class Wait:
    """One wait: the condition of a loop, `while not is_done and wait.goes_on(for_what)`."""

    def __init__(self, waits: Waits, even_at_end: bool = False):
        # even_at_end: a shutdown does not end it.
        self.waits, self.is_interruptible = waits, waits.is_interruptible and not even_at_end
        self.start = self.seen = time.monotonic()
        self.said = self.start if waits.seconds else 0.0  # the first wait is said at once
        self.watchdog = Watchdog()

    def goes_on(self, awaited: str, progress: float = 0.0) -> bool:
        """Sleep a moment. Returns False at a shutdown.

        awaited: what, and how much of it has come. Raises TimeoutError if neither `awaited` nor
        `progress` has changed for --searcher_timeout seconds, in which no searcher loads.
        """
        waits, status, now = self.waits, self.waits.status, time.monotonic()
        if self.is_interruptible and status.shutdown:
            return False
        status.beat("trainer")
        health = "; ".join(f"{name}: {status.health(name)}" for name in status.searchers)
        if now - self.said > SAY_PERIOD:
            self.said = now
            waits.report.say(f"waiting {now - self.start:.0f} s for {awaited}; {health} …")
        are_ready = all(status.get(name, "ready") for name in status.searchers)
        # `now` is new each time: while a searcher loads the timeout does not run.
        seconds = self.watchdog.look((awaited, progress) if are_ready else now)
        if seconds > waits.config.searcher_timeout:
            problem = f"no progress for {seconds:.0f} s (--searcher_timeout)"
            where = f"; {health}" if health else ""
            raise TimeoutError(f"the trainer waited for {awaited}: {problem}{where}")
        with waits.timeline.span("wait"):
            time.sleep(POLL_SECONDS)
        waits.seconds += time.monotonic() - self.seen
        self.seen = time.monotonic()
        return True
