"""Tracking (--track): a process of its own follows the run's files and feeds a tracker.

Searchers and trainer know nothing of it. A tracker that raises, hangs or is killed costs a warning.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import torch.multiprocessing

from config import Config, UserError
from runtime.display.trackers import TRACKERS, grouped
from runtime.processes import children
from runtime.processes.places import Place
from runtime.record.timeline import NewLines, is_metrics

PERIOD = 1.0  # seconds between two looks at the files
QUIET_SECONDS = 2.0  # of the wait at the end of a run, before it is mentioned
FINISH_SECONDS = 30.0  # for a tracker to send what is left, at the end of a run
FAILED = "it failed"  # how a message of that begins
EXIT_SECONDS = 1.0  # for its process to end once it has said that it failed
NICENESS = 10  # what else runs comes first
TABLES = 100  # of samples that a run shows, at most
SAMPLES = 8  # in a table


def check_tracker(config: Config) -> None:
    """Raise UserError where --track wants a library that is not installed. Imports nothing."""
    spec = find_spec(config.track) if config.track else None
    # A directory that happens to have the name is found too, without an origin.
    if config.track and not (spec and spec.origin):
        raise UserError(
            f"--track {config.track}: it is not installed: pip install -r requirements-track.txt"
        )


class Tracking:
    """The process that feeds the tracker, as the run sees it. Made before the trainer starts."""

    def __init__(self, config: Config):
        self.name = config.track
        self.has_ended = False  # and what there is to say of it was said
        self.has_failed = False  # and said so
        context = torch.multiprocessing.get_context("spawn")
        self.connection, other_end = context.Pipe()
        place = Place("tracker", None, sorted(os.sched_getaffinity(0)), threads=1)
        target = "runtime.display.tracking:run"
        arguments = self.name, config.output_dir, other_end
        self.process = children.start(place, target, arguments, config.output_dir)
        other_end.close()

    def check(self, say: Callable[[str], None]) -> None:
        """Say what the process reports: where to look, or that it failed."""
        while not self.has_ended and self.connection.poll():
            try:
                message = self.connection.recv()
                self.has_failed = message.startswith(FAILED)
                say(f"--track {self.name}: {message}")
            except (EOFError, OSError):
                self.has_ended = True
                self.process.join(EXIT_SECONDS)
                if self.process.exitcode and not self.has_failed:
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
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        log = children.log_path(run_dir, "tracker")
        connection.send(f"{FAILED}, and the run does without it: {reason}; see {log}")
        raise


def follow(name: str, run_dir: str, connection: Connection) -> None:
    """Feed the tracker until the run's exit code arrives, and what is there by then.

    From the first line on, also in a resumed run: what an earlier tracker was given, and in what
    order, need not be known.
    """
    settings = json.loads(Path(run_dir, "config.json").read_text())
    tracker = TRACKERS[name](run_dir, settings)
    connection.send(tracker.where)
    metrics, samples = (NewLines(Path(run_dir, f"{what}.jsonl")) for what in ("metrics", "samples"))
    is_over, table_version = False, 0  # from which another table is due
    while not is_over:
        is_over = connection.poll(PERIOD)  # what is there by then is sent below
        for line in filter(is_metrics, metrics.read()):
            tracker.log(line["step"], grouped(line))
        newest = samples.read()[-SAMPLES:]
        if newest and newest[-1]["version"] >= table_version:
            version = newest[-1]["version"]
            tracker.show(version, newest)
            table_version = version + settings["steps"] / TABLES
    tracker.close(connection.recv())
