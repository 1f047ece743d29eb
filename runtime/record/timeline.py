"""Files of lines that only grow, and the spans of each process in such a file."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.transport.status import StatusTable

SAMPLES = 4  # responses of a group in samples.jsonl, at most
# Engine steps and polls that are closer than this, in seconds, become one span.
MERGED = {"search": 0.002, "wait": 0.05}


class Lines:
    """A .jsonl file that only grows. A disk that is full costs lines, not the run."""

    def __init__(self, path: Path):
        # One write a call: searchers share samples.jsonl. Open as long as the process lives.
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115
        self.is_whole = True  # the latest write came to its end

    def write(self, *values) -> None:
        text = "".join(to_json(value) + "\n" for value in values)
        # Half of a character, such as of an emoji, has no encoding: "?" stands for it.
        data = (text if self.is_whole else "\n" + text).encode(errors="replace")
        try:
            self.is_whole = self.file.write(data) == len(data)
        except OSError:
            self.is_whole = False


def to_json(value: object) -> str:
    """Return a value as strict JSON: a number that is not finite is null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(finite, ensure_ascii=False)


class Timeline:
    """The spans of one process, appended to logs/<process>.spans.jsonl as they end.

    The process's row of the status table counts the seconds in which it did not wait.
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
        if name != "wait":
            self.status.add(self.process, "busy", end - start)
        if self.last and self.last[0] == name and start - self.last[2] < MERGED.get(name, 0.0):
            self.last = (name, self.last[1], end)
        else:
            self.flush()
            self.last = (name, start, end)

    def flush(self) -> None:
        if self.last:
            self.lines.write(self.last)
            self.last = None
