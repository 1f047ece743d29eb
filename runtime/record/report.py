"""What the trainer reports: metrics.jsonl, and lines for the user."""

import time
from pathlib import Path

from config import Config
from runtime.record.lines import Lines
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable


class Report:
    """Writes metrics.jsonl and prints, both of which the launching process shows."""

    def __init__(self, run_dir: str, config: Config, status: StatusTable):
        self.config, self.status = config, status
        self.start = time.monotonic()
        self.metrics = Lines(Path(run_dir) / "metrics.jsonl")

    def step(self, metrics: dict) -> None:
        self.metrics.write(metrics | {"seconds": time.monotonic() - self.start})

    def say(self, text: str) -> None:
        """Show the user a line: an evaluation, a wait, something dropped."""
        print(text, flush=True)  # the launching process reads it

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write the line of an evaluation, and show it."""
        self.metrics.write(evaluation.line(self.config.base_model))
        when = f"step {evaluation.version}" if evaluation.version else "base"
        for line in evaluation.describe():
            self.say(f"{when} {line}")
        if evaluation.answers and not evaluation.version:
            self.say(str(evaluation.answers))

    def close(self) -> None:
        """Say what the run has left out."""
        if unscored := int(self.status.total("unscored_groups")):
            self.say(f"{unscored} groups were dropped, they got no scores: see logs/")
