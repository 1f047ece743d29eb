"""The trackers that --track may name, and what each metric is called there.

A library is imported where its tracker is made: in the tracker's process alone (runtime/tracking).
"""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

GROUPS = {
    "reward": ("reward", "equal_rewards", "finished"),
    "loss": ("loss", "log_z", "pairs", "grad_norm", "learning_rate", "beta", "bad_steps"),
    "staleness": (
        "staleness_mean",
        "staleness_max",
        "staleness_in_flight",
        "staleness_in_buffer",
        "ess_responses",
        "ess_tokens",
        "log_w_5",
        "log_w_95",
    ),
    "speed": (
        "trainer_busy",
        "searcher_busy",
        "searcher_tokens_per_second",
        "queue_depth",
        "received",
        "buffer_responses",
        "buffer_queries",
        "long_prompts",
        "unscored_groups",
        "searcher_restarts",
        "skipped_publishes",
        "seconds",
    ),
    "policy": ("kl", "entropy", "response_tokens", "mismatch", "mismatch_version"),
}
# For names in no group: the first pattern that matches decides. A name that matches none comes
# from a user's objective and goes to loss/.
RULES = (
    (r"staleness|^ess_|^log_w_", "staleness"),
    (r"^node_|busy|per_second|seconds|queue|buffer|restarts|silence", "speed"),
    (r"reward|score", "reward"),
    (r"kl|entropy|tokens|mismatch", "policy"),
    (r"", "loss"),
)
# Of a sample.
FIELDS = ("version", "query_id", "prompt", "answer", "response", "extracted", "reward")


def grouped(line: dict) -> dict[str, float]:
    """The figures in a line of metrics.jsonl, as group/name.

    A line without a loss is an evaluation: its `reward` is not that of the responses of a step.
    """
    names = [
        name
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)  # what can be drawn
    ]
    if "loss" not in line:
        return {f"evaluation/{name}": line[name] for name in names}
    return {f"{group_of(name)}/{name}": line[name] for name in names}


def group_of(name: str) -> str:
    """The group of a metric of a step."""
    named = [group for group, names in GROUPS.items() if name in names]
    return [*named, *(group for pattern, group in RULES if re.search(pattern, name))][0]


@dataclass
class Record:
    """What a tracker has been given of a run, in a file beside what the tracker writes itself.

    step, evaluation: the last step, and the last version whose evaluation, it was given.
    """

    step: int = 0
    evaluation: int = -1
    rows: int = 0  # wandb's own steps, one for each thing that it is given
    run_id: str = ""  # wandb's

    @staticmethod
    def path(run_dir: str, name: str) -> Path:
        return Path(run_dir, name, "record.json")

    @classmethod
    def load(cls, run_dir: str, name: str) -> "Record | None":
        """None: the run had no such tracker yet."""
        path = cls.path(run_dir, name)
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def save(self, run_dir: str, name: str) -> None:
        path = self.path(run_dir, name)
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".unfinished").write_text(json.dumps(asdict(self)))
        path.with_suffix(".unfinished").rename(path)

    def has(self, line: dict) -> bool:
        """Whether it was given this line of metrics.jsonl."""
        return line["step"] <= (self.step if "loss" in line else self.evaluation)

    def note(self, line: dict) -> None:
        """Note that it was given this line."""
        if "loss" in line:
            self.step = max(self.step, line["step"])
        else:
            self.evaluation = max(self.evaluation, line["step"])


class Tracker(Protocol):
    """What the tracker's process wants of a tracker. Each call may raise, or never return.

    Its constructor takes the run's directory, its settings, its Record and, for a record that was
    begun before, the first step to be sent anew (None for a new one).
    """

    where: str  # to look, in words for the user

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Record figures against the trainer step. Those of an evaluation come late."""

    def show(self, step: int, samples: list[dict]) -> None:
        """Show a few lines of samples.jsonl."""

    def flush(self) -> None:
        """Write what it still holds."""

    def close(self, exit_code: int) -> None:
        """Write all and end. exit_code: the run's."""


class Wandb:
    """Weights & Biases. WANDB_MODE=offline, WANDB_PROJECT and its other variables count.

    Its own step counts what it is given: it goes only forward, while an evaluation comes late and a
    resumed run repeats steps. The charts are drawn against the metric trainer_step.
    """

    def __init__(self, run_dir: str, settings: dict, record: Record, again: int | None):
        import wandb

        self.record, self.wandb = record, wandb
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tba"),
            name=Path(run_dir).resolve().name,
            dir=run_dir,
            id=record.run_id or None,
            resume="allow",
            config=settings,
            # This process prints nothing of the run. A kill -9 may cost a second of what was sent:
            # wandb would keep 15 s in memory.
            settings=wandb.Settings(console="off", x_transaction_log_flush_interval=1.0),
        )
        record.run_id, record.rows = self.run.id, max(record.rows, self.run.step)
        self.run.define_metric("trainer_step", hidden=True)
        self.run.define_metric("*", step_metric="trainer_step")
        directory = Path(self.run.dir).parent
        self.where = f"offline, see wandb sync {directory}" if self.run.offline else self.run.url

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.run.log({"trainer_step": step, **figures}, step=self.record.rows, commit=True)
        self.record.rows += 1

    def show(self, step: int, samples: list[dict]) -> None:
        rows = [[plain(sample[name]) for name in FIELDS] for sample in samples]
        table = self.wandb.Table(columns=list(FIELDS), data=rows, allow_mixed_types=True)
        self.log(step, {"samples": table})

    def flush(self) -> None:
        pass  # a process of wandb's own writes

    def close(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)
        self.wandb.teardown()  # waits until its process has written all


class TensorBoard:
    """TensorBoard's event files, in tensorboard/ in the run's directory."""

    def __init__(self, run_dir: str, settings: dict, record: Record, again: int | None):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(Path(run_dir, "tensorboard"), purge_step=again)
        text = as_code(json.dumps(settings, indent=2, ensure_ascii=False))
        self.writer.add_text("configuration", text, again or 0)
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

    def flush(self) -> None:
        self.writer.flush()

    def close(self, exit_code: int) -> None:
        self.writer.close()


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "tensorboard": TensorBoard}


def plain(value: object) -> str | float:
    """A prompt may be a list of messages, what was extracted anything: those as JSON."""
    is_plain = isinstance(value, str | int | float)
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def as_code(text: str) -> str:
    """Text as a block of code in markdown: shown as it is, whatever it holds.

    By indentation: a fence could be closed by the text.
    """
    return "\n".join("    " + line for line in re.split(r"\r\n|\r|\n", text))
