"""Tracking (--track): a process of its own follows the run's files and feeds a tracker.

Searchers and trainer know nothing of it. A tracker that raises, hangs or is killed costs a warning.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from config import Config, UserError
from launch import children
from launch.files import is_metrics, new_lines
from launch.places import Place
from runtime.child import log_path

PERIOD = 1.0  # seconds between two looks at the files
QUIET_SECONDS = 2.0  # of the wait at the end of a run, before it is mentioned
FINISH_SECONDS = 30.0  # for a tracker to send what is left, at the end of a run
EXIT_SECONDS = 1.0  # for its process to end once it has said that it failed
NICENESS = 10  # what else runs comes first
TABLES = 100  # of samples that a run shows, at most
SAMPLES = 8  # in a table
FIELDS = ("version", "query_id", "prompt", "answer", "response", "extracted", "reward")  # of each
# The first pattern that is found in the name of a metric of a step decides.
GROUPS = {
    "staleness": r"staleness|^ess_|^log_w_",
    "speed": r"busy|second|queue|buffer|received|restarts|publishes|silence|prompts|unscored",
    "reward": r"reward|score|finished",
    "policy": r"kl|entropy|tokens|mismatch",
    "loss": r"",
}


def check(config: Config) -> None:
    """Raise UserError where the tracker's library is not installed. Imports nothing."""
    spec = find_spec(config.track)
    # A directory that happens to have the name is found too, without an origin.
    if not (spec and spec.origin):
        raise UserError(
            f"--track {config.track}: it is not installed: pip install -r requirements-track.txt"
        )


class Tracking:
    """The process that feeds the tracker, as the run sees it. Made before the trainer starts."""

    def __init__(self, config: Config):
        self.name = config.track
        self.has_ended = False  # and what there is to say of it was said
        self.connection, other_end = Pipe()
        place = Place("tracker", None, sorted(os.sched_getaffinity(0)), threads=1)
        target = "extras.tracking:run"
        arguments = self.name, config.output_dir, other_end
        self.process = children.start(place, target, arguments, config.output_dir)
        other_end.close()

    def check(self, say: Callable[[str], None]) -> None:
        """Say what the process reports: where to look, or that it failed."""
        while not self.has_ended and self.connection.poll():
            try:
                say(f"--track {self.name}: {self.connection.recv()}")
            except (EOFError, OSError):
                self.has_ended = True
                self.process.join(EXIT_SECONDS)
                if self.process.exitcode:
                    say(
                        f"--track {self.name}: its process ended with exit code "
                        f"{self.process.exitcode}; the run does without it"
                    )

    def finish(self, exit_code: int) -> None:
        """Have the tracker sent what is left, for a bounded time. exit_code: the run's."""
        self.check(print)
        if not self.has_ended:
            with suppress(OSError):  # it ends just now
                self.connection.send(exit_code)
            self.process.join(QUIET_SECONDS)
            limit = f"{FINISH_SECONDS:.0f} s"
            if self.process.exitcode is None:
                print(f"--track {self.name}: sending what is left, for {limit} at most")
                self.process.join(FINISH_SECONDS)
            if self.process.exitcode is None:
                problem = f"it did not end within {limit} and is killed; metrics.jsonl has all"
                print(f"--track {self.name}: {problem}", file=sys.stderr)
            else:
                self.check(print)
        children.kill(self.process)


def run(name: str, run_dir: str, connection: Connection) -> None:
    """The tracker's process."""
    os.nice(NICENESS)
    sys.argv = sys.argv[:1]  # wandb would send the command line, and with it a task's secrets
    try:
        follow(name, run_dir, connection)
    except BaseException as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        log = log_path(run_dir, "tracker")
        connection.send(f"it failed, and the run does without it: {reason}; see {log}")


def follow(name: str, run_dir: str, connection: Connection) -> None:
    """Feed the tracker until the run's exit code arrives, and what is there by then.

    From the first line on, also in a resumed run: what an earlier tracker was given, and in what
    order, need not be known.
    """
    settings = json.loads(Path(run_dir, "config.json").read_text())
    tracker = TRACKERS[name](run_dir, settings)
    connection.send(tracker.where)
    metrics = new_lines(Path(run_dir, "metrics.jsonl"))
    samples = new_lines(Path(run_dir, "samples.jsonl"))
    is_over, table_version = False, 0  # from which another table is due
    while not is_over:
        is_over = connection.poll(PERIOD)  # what is there by then is sent below
        for line in filter(is_metrics, next(metrics)):
            tracker.log(line["step"], grouped(line))
        newest = next(samples)[-SAMPLES:]
        if newest and newest[-1]["version"] >= table_version:
            version = newest[-1]["version"]
            tracker.show(version, newest)
            table_version = version + settings["steps"] / TABLES
    tracker.close(connection.recv())


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


# The trackers. `where` tells the user where to look; log() takes figures against the trainer step,
# show() a few lines of samples.jsonl, close() the run's exit code. Any of them may raise, or never
# return. A library is imported where its tracker is made: in the tracker's process alone.


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
