"""What the processes of a run say: text that cannot be written is dropped, the run goes on."""

import io
import os
import sys


class Output(io.FileIO):
    """The file under a stream. Never raises: a pipe may be closed, a disk full, a terminal gone."""

    def write(self, data: bytes | memoryview) -> int:
        try:
            return super().write(data) or len(data)  # None: a full pipe that does not wait
        except OSError:
            return len(data)


def tolerate_failed_prints() -> None:
    """Let no print to stdout or stderr raise in this process: of an OSError, or of its encoding."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue  # somebody has put another one there, as pytest does
        # None: it was closed at the start.
        number = stream.fileno() if stream else os.open(os.devnull, os.O_WRONLY)
        file = io.BufferedWriter(Output(number, "wb", closefd=False))
        encoding = stream.encoding if stream else "utf-8"
        text = io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, text)
