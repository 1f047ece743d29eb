"""What the trainer reports: metrics.jsonl, and lines for the user."""

import time
from pathlib import Path

from config import Config
from runtime.record.timeline import Lines
from runtime.transport.board import Board
from runtime.transport.messages import Evaluation


class Report:
    """Writes metrics.jsonl, which the launching process shows (launch/display/terminal.py).

    metric: what a score of the task is called.
    """

    def __init__(self, run_dir: str, config: Config, board: Board, metric: str):
        self.config, self.board, self.metric = config, board, metric
        self.start = time.monotonic()
        self.metrics = Lines(Path(run_dir) / "metrics.jsonl")

    def step(self, metrics: dict) -> None:
        """Write the line of a step."""
        self.metrics.write(metrics | {"seconds": time.monotonic() - self.start})

    def say(self, text: str) -> None:
        """Show the user a line: an evaluation, a wait, something dropped."""
        print(text, flush=True)  # the launching process reads it

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write the line of an evaluation, and show it."""
        self.metrics.write(evaluation.line(self.metric, self.config.base_model))
        if evaluation.version:
            self.say(f"step {evaluation.version}: {self.metric} {evaluation}")
            return
        self.say(f"base {self.metric}: {evaluation}")
        if evaluation.answers:
            self.say(str(evaluation.answers))

    def close(self) -> None:
        """Say what the run has left out."""
        if skipped := int(self.board.total("long_prompts")):
            limit = f"over --max_prompt_tokens {self.config.max_prompt_tokens}"
            self.say(f"{skipped} queries were skipped: prompt {limit}, empty or not Unicode")
        if unscored := int(self.board.total("unscored_groups")):
            self.say(f"{unscored} groups were dropped, they got no scores: see logs/")
