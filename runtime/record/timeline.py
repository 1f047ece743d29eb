"""Files of lines that only grow, and the spans of each process in such a file."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.transport.board import Board

FIGURE = int | float | None  # in a line of metrics.jsonl
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


def read_lines(path: Path) -> list:
    """The values of a .jsonl file, [] if there is none; a line that was cut off is left out."""
    return parse_lines(path.read_bytes()) if path.exists() else []


def read_metrics(run_dir: str) -> list[dict]:
    """The lines of metrics.jsonl; one that is none costs nothing but itself."""
    return [line for line in read_lines(Path(run_dir, "metrics.jsonl")) if is_metrics(line)]


def find_evaluations(metrics: list[dict]) -> Iterator[tuple[int, str, float | None, list | None]]:
    """Yield step, name and value, and the ends of the 95 % interval where they are known."""
    for line in metrics:
        if "loss" in line:
            continue
        for name, value in line.items():
            if name not in ("step", "base_model") and not name.endswith("_interval"):
                yield line["step"], name, value, line.get(f"{name}_interval")


def is_metrics(line: object) -> bool:
    """Whether it has a step, and else numbers, or pairs as intervals; not finite ones are null.

    An evaluation also names its base model.
    """
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return False
    for name, value in line.items():
        if name == "base_model":
            continue
        is_pair = name.endswith("_interval") and "loss" not in line
        numbers = value if is_pair and isinstance(value, list) else [value]
        if len(numbers) != 1 + is_pair or not all(isinstance(x, FIGURE) for x in numbers):
            return False
    return True


def parse_lines(data: bytes) -> list:
    """The values of lines of JSON, in which a text may hold ends of lines that are not newlines."""
    values = []
    for line in data.decode(errors="replace").split("\n"):
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return values


class Timeline:
    """The spans of one process, appended to logs/<process>.spans.jsonl as they end.

    The process's row of the board counts the seconds in which it did not wait.
    """

    def __init__(self, run_dir: str, board: Board, process: str):
        self.board, self.process = board, process
        name = process.replace(" ", "-")
        self.lines = Lines(Path(run_dir) / "logs" / f"{name}.spans.jsonl")
        self.last: tuple[str, float, float] | None = None  # name, start, end

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.monotonic()  # one clock for all processes of a machine
        yield
        end = time.monotonic()
        if name != "wait":
            self.board.add(self.process, "busy", end - start)
        if self.last and self.last[0] == name and start - self.last[2] < MERGED.get(name, 0.0):
            self.last = (name, self.last[1], end)
        else:
            self.flush()
            self.last = (name, start, end)

    def flush(self) -> None:
        if self.last:
            self.lines.write(self.last)
            self.last = None


def read_spans(run_dir: str) -> dict[str, list[tuple[str, float, float]]]:
    """Process -> its spans (name, start, end), the trainer first."""
    files = (Path(run_dir) / "logs").glob("*.spans.jsonl")
    ordered = sorted(files, key=lambda file: (not file.stem.startswith("trainer"), file.stem))
    return {file.name.removesuffix(".spans.jsonl"): read_lines(file) for file in ordered}


def trainer_busy(run_dir: str) -> float | None:
    """Share of the time from the first step's start to the last one's end that was no waiting.

    None: there was no step.
    """
    spans = read_spans(run_dir)["trainer"]
    steps = [span for span in spans if span[0] == "step"]
    if not steps:
        return None
    first, last = steps[0][1], steps[-1][2]
    worked = [
        end - start
        for name, start, end in spans
        if name != "wait" and first <= start and end <= last
    ]
    return sum(worked) / (last - first)
