"""samples.jsonl: what the policy answers, for a person to read."""

import time
from pathlib import Path

import numpy as np

from runtime.scoring import Responses
from runtime.timeline import Lines
from tasks import Task

PERIOD = 1.0  # seconds between two groups of one searcher
PER_GROUP = 4


class SampleLog:
    """Writes some responses of about a group a second."""

    def __init__(self, run_dir: str, task: Task):
        self.lines, self.task = Lines(Path(run_dir) / "samples.jsonl"), task
        self.written_at = -PERIOD  # time.monotonic()

    def write(self, group: Responses, rewards: np.ndarray, version: int) -> None:
        """Write a few responses of this group, unless one was written just before.

        rewards: (S,); version: of the weights that the group was started with.
        """
        if time.monotonic() - self.written_at < PERIOD:
            return
        self.written_at = time.monotonic()
        rows = list(zip(group.texts, group.finished, rewards.tolist()))
        lines = [
            {
                "version": version,
                "query_id": group.query.id,
                "prompt": group.query.prompt,
                "answer": str(group.query.answer),
                "response": text,
                "extracted": self.task.extract(text),
                "reward": reward,
                "finished": finished,
            }
            for text, finished, reward in rows[:PER_GROUP]
        ]
        self.lines.write(*lines)
