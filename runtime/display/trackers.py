"""The trackers that --track may name, and what each metric is called there.

A library is imported where its tracker is made: in the tracker's process alone (runtime/tracking).
Each has `where`, for the user to look; log() takes figures against the trainer step, show() a few
lines of samples.jsonl, close() the run's exit code. Any of them may raise, or never return.
"""

import json
import os
import re
from pathlib import Path

# The first pattern that is found in the name of a metric of a step decides.
GROUPS = {
    "staleness": r"staleness|^ess_|^log_w_",
    "speed": r"busy|second|queue|buffer|received|restarts|publishes|silence|prompts|unscored",
    "reward": r"reward|score|finished",
    "policy": r"kl|entropy|tokens|mismatch",
    "loss": r"",
}
# Of a sample.
FIELDS = ("version", "query_id", "prompt", "answer", "response", "extracted", "reward")


def grouped(line: dict) -> dict[str, float]:
    """Return the figures in a line of metrics.jsonl, as group/name.

    A line without a loss is an evaluation: its `reward` is not that of the responses of a step.
    """
    return {
        f"{group_of(name) if 'loss' in line else 'evaluation'}/{name}": value
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)  # what can be drawn
    }


def group_of(name: str) -> str:
    """Return the group of a metric of a step."""
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, name))


class Wandb:
    """Weights & Biases. WANDB_MODE=offline, WANDB_PROJECT and its other variables count.

    Each start of a run is a run of its own there, of one group. Charts are drawn against the metric
    trainer_step: wandb's own step goes only forward, while an evaluation comes late.
    """

    def __init__(self, run_dir: str, settings: dict):
        import wandb

        self.wandb, name = wandb, Path(run_dir).resolve().name
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tba"),
            group=name,
            name=name,
            dir=run_dir,
            config=settings,
            # This process prints nothing of the run. A kill -9 may cost a second of what was sent:
            # wandb would keep 15 s in memory.
            settings=wandb.Settings(console="off", x_transaction_log_flush_interval=1.0),
        )
        self.run.define_metric("trainer_step", hidden=True)
        self.run.define_metric("*", step_metric="trainer_step")
        directory = Path(self.run.dir).parent
        self.where = f"offline, see wandb sync {directory}" if self.run.offline else self.run.url

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.run.log({"trainer_step": step, **figures})

    def show(self, step: int, samples: list[dict]) -> None:
        rows = [[plain(sample[name]) for name in FIELDS] for sample in samples]
        table = self.wandb.Table(columns=list(FIELDS), data=rows, allow_mixed_types=True)
        self.log(step, {"samples": table})

    def close(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)
        self.wandb.teardown()  # waits until its process has written all


class TensorBoard:
    """TensorBoard's event files, in tensorboard/ in the run's directory.

    A resumed run writes all figures again: what was there of them is purged.
    """

    def __init__(self, run_dir: str, settings: dict):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(Path(run_dir, "tensorboard"), purge_step=0, flush_secs=1)
        text = as_code(json.dumps(settings, indent=2, ensure_ascii=False))
        self.writer.add_text("configuration", text)
        self.where = f"tensorboard --logdir {Path(run_dir).parent}"

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def show(self, step: int, samples: list[dict]) -> None:
        texts = [
            as_code("\n".join(f"{name}: {plain(sample[name])}" for name in FIELDS))
            for sample in samples
        ]
        self.writer.add_text("samples", "\n\n---\n\n".join(texts), step)

    def close(self, exit_code: int) -> None:
        self.writer.close()


TRACKERS = {"wandb": Wandb, "tensorboard": TensorBoard}


def plain(value: object) -> str | float:
    """Return a value as a tracker takes it: a list of messages, or what else there is, as JSON."""
    is_plain = isinstance(value, str | int | float)
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def as_code(text: str) -> str:
    """Return text as a block of code in markdown: shown as it is, whatever it holds.

    By indentation: a fence could be closed by the text.
    """
    return "\n".join("    " + line for line in re.split(r"\r\n|\r|\n", text))
