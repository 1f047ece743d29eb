"""What a run has left in its files, read again: metrics, evaluations and spans."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from runtime.record.lines import to_json

FIGURE = int | float | None  # in a line of metrics.jsonl


def read_lines(path: Path) -> list:
    """The values of a .jsonl file, [] if there is none; a line that was cut off is left out."""
    return parse_lines(path.read_bytes()) if path.exists() else []


def parse_lines(data: bytes) -> list:
    """The values of lines of JSON, in which a text may hold ends of lines that are not newlines."""
    values = []
    for line in data.decode(errors="replace").split("\n"):
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return values


def new_lines(path: Path) -> Iterator[list]:
    """Yield what a .jsonl file has got since the last look; a line that is not whole yet waits."""
    path.touch()
    with open(path, "rb") as file:
        rest = b""
        while True:
            whole, _, rest = (rest + file.read()).rpartition(b"\n")
            yield parse_lines(whole)


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
    work = [(start, end) for name, start, end in spans if name != "wait"]
    worked = sum(end - start for start, end in work if first <= start and end <= last)
    return worked / (last - first)


def rewind(run_dir: str, step: int) -> None:
    """Drop the lines of metrics.jsonl after this step, for a run that is resumed there.

    The timeline begins anew: a gap in it would not be the run's.
    """
    unfinished, text = Path(run_dir, "metrics.unfinished"), ""
    for line in read_metrics(run_dir):
        # This step's evaluation comes after it: only those of earlier versions are kept.
        if line["step"] < step or (line["step"] == step and "loss" in line):
            text += to_json(line) + "\n"
    unfinished.write_text(text)
    unfinished.rename(Path(run_dir, "metrics.jsonl"))
    for spans in Path(run_dir, "logs").glob("*.spans.jsonl"):
        spans.unlink()
