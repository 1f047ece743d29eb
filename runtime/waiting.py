"""The trainer's waits: each says for whom, and has a timeout."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from config import Config
from runtime.record.report import Report
from runtime.record.timeline import Timeline
from runtime.transport.status import StatusTable, Watchdog

POLL_SECONDS = 0.005
HEALTH_PERIOD = 10.0  # seconds of waiting between two lines that say for whom


@dataclass
class Waits:
    """All waits of the trainer."""

    config: Config
    status: StatusTable
    report: Report
    timeline: Timeline
    is_interruptible: bool  # by a shutdown; False where checkpoints are exact only between batches
    seconds: float = 0.0  # that the trainer has waited so far

    def until(
        self, is_done: Callable[[], bool], what: Callable[[], str], even_at_end: bool = False
    ) -> Iterator[None]:
        """Poll is_done() until it is true; yield each time, for the caller to do what may help.

        what: describes what is awaited and how much of it has come. Another text is progress.
        even_at_end: a shutdown does not end this wait. Raises TimeoutError after
        --searcher_timeout seconds without progress in which no searcher was loading.
        """
        if is_done():
            return
        is_interruptible = self.is_interruptible and not even_at_end
        start = said = time.monotonic()
        watchdog = Watchdog()
        with self.timeline.span("wait"):
            while True:
                yield
                if is_done() or (is_interruptible and self.status.shutdown):
                    break
                self.status.beat("trainer")
                now, awaited = time.monotonic(), what()
                if now - said > HEALTH_PERIOD:
                    said = now
                    beats = ", ".join(map(self.status.last_heartbeat, self.status.searchers))
                    waited = f"waiting since {now - start:.0f} s for {awaited}"
                    self.report.say(f"{waited}; heartbeats: {beats}")
                are_ready = all(self.status.get(name, "ready") for name in self.status.searchers)
                # `now` is new each time: while a searcher loads the timeout does not run.
                seconds = watchdog.look(awaited if are_ready else now)
                if seconds > self.config.searcher_timeout:
                    problem = f"no progress for {seconds:.0f} s (--searcher_timeout)"
                    raise TimeoutError(f"the trainer waited for {awaited}: {problem}")
                time.sleep(POLL_SECONDS)
        self.seconds += time.monotonic() - start
