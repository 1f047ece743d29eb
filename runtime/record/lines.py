"""Files of lines of JSON that only grow."""

import json
from pathlib import Path

SAMPLES = 4  # responses of a group in samples.jsonl, at most


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
