"""Tracking (--track): a process of its own follows the run's files and feeds a tracker.

Searchers and trainer know nothing of it. A tracker that raises, hangs or is killed costs a warning.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import torch.multiprocessing

from config import Config, UserError
from runtime import processes
from runtime.places import Place
from runtime.timeline import NewLines, is_metrics, read_metrics
from runtime.trackers import TRACKERS, Record, grouped

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
        self.name, self.run_dir = config.track, config.output_dir
        self.has_ended = False  # and what there is to say of it was said
        self.has_failed = False  # and said so
        context = torch.multiprocessing.get_context("spawn")
        self.connection, other_end = context.Pipe()
        place = Place("tracker", None, sorted(os.sched_getaffinity(0)), threads=1)
        arguments = self.name, self.run_dir, last_step(self.run_dir), other_end
        self.process = processes.start(place, "runtime.tracking:run", arguments, self.run_dir)
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
            if self.process.exitcode is None:
                print(
                    f"--track {self.name}: sending what is left, for {FINISH_SECONDS:.0f} s at most"
                )
                self.process.join(FINISH_SECONDS)
            if self.process.exitcode is None:
                print(
                    f"--track {self.name}: it did not end within {FINISH_SECONDS:.0f} s and is "
                    f"killed: {self.describe_unsent()}",
                    file=sys.stderr,
                )
            else:
                self.check(print)
        processes.kill(self.process)

    def describe_unsent(self) -> str:
        """Say what the tracker was not given."""
        record, last = Record.load(self.run_dir, self.name) or Record(), last_step(self.run_dir)
        if record.step >= last:
            return "it was given all steps, and may not have sent the last ones"
        return f"steps {record.step + 1} to {last} were not sent"


def last_step(run_dir: str) -> int:
    """The last step in metrics.jsonl, 0 if there is none."""
    return max((line["step"] for line in read_metrics(run_dir) if "loss" in line), default=0)


def run(name: str, run_dir: str, resumed_step: int, connection: Connection) -> None:
    """The tracker's process. resumed_step: that the run goes on from, 0 for a new one."""
    os.nice(NICENESS)
    sys.argv = sys.argv[:1]  # wandb would send the command line, and with it a task's secrets
    try:
        follow(name, run_dir, resumed_step, connection)
    except BaseException as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        log = processes.log_path(run_dir, "tracker")
        connection.send(f"{FAILED}, and the run does without it: {reason}; see {log}")
        raise


def follow(name: str, run_dir: str, resumed_step: int, connection: Connection) -> None:
    """Feed the tracker until the run's exit code arrives, and what is there by then."""
    feed = Feed(name, run_dir, resumed_step)
    connection.send(feed.tracker.where)
    while not connection.poll(PERIOD):
        feed.send_new()
    feed.send_new()
    feed.tracker.close(connection.recv())


class Feed:
    """Gives a tracker each line of metrics.jsonl once, and some of samples.jsonl.

    A resumed run makes the steps after the resumed one again, and the evaluation of that one.
    """

    def __init__(self, name: str, run_dir: str, resumed_step: int):
        self.name, self.run_dir = name, run_dir
        settings = json.loads(Path(run_dir, "config.json").read_text())
        self.steps = settings["steps"]
        record = Record.load(run_dir, name)
        is_new = record is None
        self.record = record or Record()
        self.record.step = min(self.record.step, resumed_step)
        self.record.evaluation = min(self.record.evaluation, resumed_step - 1)
        self.before = replace(self.record)  # what an earlier process has sent
        if not is_new:  # even if the tracker fails: these steps are made again
            self.record.save(run_dir, name)
        again = None if is_new else self.record.step + 1
        self.tracker = TRACKERS[name](run_dir, settings, self.record, again)
        self.record.save(run_dir, name)
        self.metrics = NewLines(Path(run_dir, "metrics.jsonl"))
        self.samples = NewLines(Path(run_dir, "samples.jsonl"), from_end=resumed_step > 0)
        self.num_tables = 0  # that would have been due by now

    def send_new(self) -> None:
        """Give the tracker what has come since the last time."""
        try:
            for line in filter(is_metrics, self.metrics.read()):
                if not self.before.has(line):
                    self.tracker.log(line["step"], grouped(line))
                    self.record.note(line)
            self.send_samples()
            self.tracker.flush()
        finally:  # a resumed run goes on from there
            self.record.save(self.run_dir, self.name)

    def send_samples(self) -> None:
        """Show the newest samples, each time that another hundredth of the steps is done."""
        samples = self.samples.read()[-SAMPLES:]
        if not samples:
            return
        version = samples[-1]["version"]
        due = 1 + version * TABLES // self.steps
        if due > self.num_tables:
            self.tracker.show(version, samples)
            self.num_tables = due
