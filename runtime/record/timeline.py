"""The spans of each process, for timeline.json."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.record.lines import Lines
from runtime.transport.status import StatusTable

# Engine steps and polls that are closer than this, in seconds, become one span.
MERGED = {"search": 0.002, "wait": 0.05}


class Timeline:
    """The spans of one process, appended to logs/<process>.spans.jsonl as they end.

    The process's row of the status table counts the seconds in which it worked and waited.
    """

    def __init__(self, run_dir: str, status: StatusTable, process: str):
        self.status, self.process = status, process
        name = process.replace(" ", "-")
        self.lines = Lines(Path(run_dir) / "logs" / f"{name}.spans.jsonl")
        self.last: tuple[str, float, float] | None = None  # name, start, end

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.monotonic()  # one clock for all processes of a machine
        yield
        end = time.monotonic()
        column = "waited" if name == "wait" else "busy"
        self.status.add(self.process, column, end - start)
        if self.last and self.last[0] == name and start - self.last[2] < MERGED.get(name, 0.0):
            self.last = (name, self.last[1], end)
        else:
            self.flush()
            self.last = (name, start, end)

    def flush(self) -> None:
        if self.last:
            self.lines.write(self.last)
            self.last = None
