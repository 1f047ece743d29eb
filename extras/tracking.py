"""Tracking (--track): a thread of the launcher follows the run's files and feeds a tracker.

Searchers and trainer know nothing of it. A tracker that raises or hangs costs a line on the screen.
"""

import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.util import _exit_function as unlink_semaphores
from pathlib import Path

from config import Config, UserError, first_line
from launch.files import is_metrics, new_lines
from runtime.child import log_path

PERIOD = 1.0  # seconds between two looks at the files
FINISH_SECONDS = 10.0  # for a tracker to send what is left, at the end of a run
TABLES = 100  # of samples that a run shows, at most
SAMPLES = 8  # in a table
FIELDS = ("version", "query_id", "prompt", "answer", "response", "extracted", "reward")  # of each
# The first pattern that is found in the name of a metric of a step decides.
GROUPS = {
    "staleness": r"staleness|^ess_|^log_w_",
    "speed": r"busy|second|queue|buffer|received|restarts|publishes|prompts|unscored",
    "reward": r"reward|score|finished",
    "policy": r"kl|entropy|tokens|mismatch",
    "loss": r"",
}


def check(config: Config) -> None:
    """Raise UserError where the tracker's library is not installed. Imports nothing."""
    # A directory that happens to have the name is found too, without an origin.
    if not getattr(find_spec(config.track), "origin", None):
        how = "pip install -r requirements/track.txt"
        raise UserError(f"--track {config.track}: it is not installed: {how}")


class Tracking:
    """The thread that feeds the tracker. say: shows the user a line, from any thread."""

    def __init__(self, config: Config, say: Callable[[str], None]):
        self.name, self.run_dir, self.say = config.track, config.output_dir, say
        self.exit_code, self.is_over, self.has_ended = 0, threading.Event(), threading.Event()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        """Feed the tracker until the run is over, or until the tracker raises."""
        try:
            self.follow()
        except BaseException as error:
            log = log_path(self.run_dir, "tracker")
            log.write_text(traceback.format_exc())
            reason = f"{type(error).__name__}: {first_line(error)}; see {log}"
            self.say(f"--track {self.name}: it failed, and the run does without it: {reason}")
        self.has_ended.set()

    def follow(self) -> None:
        """Feed the tracker what there is, again and again, until the run is over.

        From the first line on, also in a resumed run: what an earlier tracker was given, and in
        what order, need not be known.
        """
        settings = json.loads(Path(self.run_dir, "config.json").read_text())
        tracker = TRACKERS[self.name](self.run_dir, settings)
        self.say(f"--track {self.name}: {tracker.where}")
        names = "metrics.jsonl", "samples.jsonl"
        metrics, samples = (new_lines(Path(self.run_dir, name)) for name in names)
        is_over, table_version = False, 0  # from which another table is due
        while not is_over:
            is_over = self.is_over.wait(PERIOD)  # what is there by then is sent below
            for line in filter(is_metrics, next(metrics)):
                tracker.log(line["step"], grouped(line))
            newest = next(samples)[-SAMPLES:]
            if newest and newest[-1]["version"] >= table_version:
                version = newest[-1]["version"]
                tracker.show(version, [[plain(line[name]) for name in FIELDS] for line in newest])
                table_version = version + settings["steps"] / TABLES
        tracker.close(self.exit_code)

    def finish(self, exit_code: int, seconds: float = FINISH_SECONDS) -> None:
        """Wait until the tracker has what is left, so many seconds at most. exit_code: the run's.

        A tracker that hangs is cut off: this process ends here, before exit hooks of the tracker's
        library, which would wait too.
        """
        self.exit_code = exit_code
        self.is_over.set()
        # Not by join(): after an interrupted one Python takes the thread for ended.
        if not self.has_ended.wait(seconds):
            problem = f"it did not end within {seconds:.0f} s and is cut off"
            print(f"--track {self.name}: {problem}; metrics.jsonl has all", file=sys.stderr)
            unlink_semaphores()
            sys.stdout.flush()
            os._exit(exit_code)


def grouped(line: dict) -> dict[str, float]:
    """Return the figures in a line of metrics.jsonl, as group/name.

    A line without a loss is an evaluation: its `reward` is not that of the responses of a step.
    """
    patterns = GROUPS if "loss" in line else {"evaluation": r""}
    return {
        f"{next(group for group in patterns if re.search(patterns[group], name))}/{name}": value
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)  # what can be drawn
    }


def plain(value: object) -> str | float:
    """Return a value as a tracker takes it: a list of messages, or what else there is, as JSON."""
    is_plain = isinstance(value, str | int | float)
    return value if is_plain else json.dumps(value, ensure_ascii=False)


# The trackers. `where` tells the user where to look; log() takes figures against the trainer step,
# show() FIELDS of a few samples, close() the run's exit code. Any of them may raise, or never
# return. A library is imported where its tracker is made: in the thread, as it may take seconds.


class Wandb:
    """Weights & Biases. WANDB_MODE=offline, WANDB_PROJECT and its other variables count.

    Each start of a run is a run of its own there, of one group. Charts are drawn against the metric
    trainer_step: wandb's own step goes only forward, while an evaluation comes late.
    """

    def __init__(self, run_dir: str, settings: dict):
        import wandb

        self.wandb, name = wandb, Path(run_dir).resolve().name
        # It neither prints, asks for a key nor takes over the terminal, which is the run's. A
        # kill -9 may cost a second of what was sent: wandb would keep 15 s in memory.
        quiet = dict(silent=True, console="off", x_transaction_log_flush_interval=1.0)
        wandb.setup(wandb.Settings(**quiet))
        project = os.environ.get("WANDB_PROJECT", "tba")
        self.run = wandb.init(project=project, group=name, name=name, dir=run_dir, config=settings)
        self.run.define_metric("trainer_step", hidden=True)
        self.run.define_metric("*", step_metric="trainer_step")
        directory = Path(self.run.dir).parent
        self.where = f"offline, see wandb sync {directory}" if self.run.offline else self.run.url

    def log(self, step: int, figures: dict) -> None:
        self.run.log({"trainer_step": step, **figures})

    def show(self, step: int, rows: list[list]) -> None:
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

    def log(self, step: int, figures: dict) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def show(self, step: int, rows: list[list]) -> None:
        texts = ["\n".join(f"{name}: {value}" for name, value in zip(FIELDS, row)) for row in rows]
        self.writer.add_text("samples", "\n\n---\n\n".join(map(as_code, texts)), step)

    def close(self, exit_code: int) -> None:
        self.writer.close()


def as_code(text: str) -> str:
    """Return text as a block of code in markdown: shown as it is, whatever it holds.

    By indentation: a fence could be closed by the text.
    """
    return "\n".join("    " + line for line in re.split(r"\r\n|\r|\n", text))


TRACKERS = {"wandb": Wandb, "tensorboard": TensorBoard}
