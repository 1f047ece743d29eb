"""Launch: checks what can be checked, starts the processes of a run and watches them to its end."""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.multiprocessing

from config import Config, UserError
from launch import children
from launch.checks import CheckedRun, check_run, lock
from launch.display.first_look import FirstLook
from launch.display.progress import ProgressView
from launch.evaluate import final_evaluation
from launch.files import rewind, trainer_busy
from launch.places import evaluation_place, is_gpu_shared, searchers_of, trainers_of
from launch.resume import drop_newer, has_begun, write_start
from launch.supervisor import STOP_SECONDS, RunFailed, Supervisor
from models.device import compute_dtype
from runtime.checkpoints import checkpoint
from runtime.child import NOT_SAVED, SHOW_STACK, tolerate_failed_prints
from runtime.transport.status import StatusTable
from weights import SharedWeights, num_elements

SAVE_SECONDS = 10.0  # grace period for the trainer's checkpoint and model at a shutdown ...
SAVE_BYTES_PER_SECOND = 100e6  # ... and this much more for a large model
POLL_SECONDS = 0.05
SPARE_SECONDS = 30.0  # that a collective outlives --searcher_timeout: this process says what hangs
EXIT_SECONDS = 10.0  # for a trainer process that has raised to end
KILLED_SECONDS = 0.5  # until one that was killed is seen to be dead
STACK_SECONDS = 0.5  # for each to write where it is


def launch(given: Config) -> int:
    """Train. Returns the exit code; raises UserError while nothing has started."""
    tolerate_failed_prints()
    checked = check_run(given)
    describe(checked)
    open_run_dir(checked)
    run = Run(checked)
    try:
        return supervise(run)
    except SystemExit as ended:  # by a second signal: nothing is waited for
        if run.tracking:
            run.tracking.finish(ended.code, seconds=0.0)
        raise


def describe(checked: CheckedRun) -> None:
    """Say what is about to happen, before it happens."""
    config, sizes, prompt = checked.config, checked.sizes, checked.prompt
    options = "".join(f", {name} {value}" for name, value in config.options.items())
    queries = f"{sizes['train']} queries to train on, {sizes['test']} to test on"
    print(f"task {config.task}{options}: {queries}")
    print(f"model {config.model}, {num_elements(checked.shapes) / 1e6:.1f} M parameters")
    if config.lora_rank:
        trained = f"{num_elements(checked.trained) / 1e6:.2f} M parameters are trained"
        print(f"LoRA of rank {config.lora_rank}: {trained}")
    for place in checked.places:
        print(f"{place.name} on {place}")
    mode = f"asynchronous, sync every {config.sync_period} steps"
    if config.lockstep:
        stale = config.constant_staleness
        mode = f"constant staleness {stale}" if stale else "synchronous, on-policy"
    batch = f"{config.queries_per_batch} queries x {config.responses_per_query} responses"
    passes = ", each in two passes (--low_memory)" if config.low_memory == "on" else ""
    print(f"{config.steps} steps of {batch}, {mode}, seed {config.seed}{passes}")
    print(f"results will be in {config.output_dir}")
    shown = prompt if len(prompt) < 400 else f"{prompt[:200]} … {prompt[-200:]}"
    print(f"the first prompt, as the model reads it: {shown!r}", flush=True)


def open_run_dir(checked: CheckedRun) -> None:
    """Make the directory of the run, or bring the one to resume back to its checkpoint.

    config.json is what was asked, before it was resolved for this machine. Raises UserError for a
    directory that cannot be written.
    """
    run_dir, resume = Path(checked.config.output_dir), checked.resume
    try:
        if resume:
            print(f"going on from {resume}")
        if resume and checked.config.output_dir == checked.config.resume:
            rewind(str(run_dir), checkpoint.load_state(resume)["step"])
            drop_newer(resume)
        else:
            (run_dir / "logs").mkdir(parents=True)
            lock(str(run_dir))
        settings = dataclasses.asdict(checked.asked) | {"resume": "", "config": ""}
        unfinished = run_dir / "config.json.unfinished"
        unfinished.write_text(json.dumps(settings, indent=2))
        unfinished.rename(run_dir / "config.json")
        write_start(str(run_dir), bool(resume))
    except FileExistsError:  # made since it was looked at
        problem = f"--output_dir {str(run_dir)!r} already holds a run: give another one"
        raise UserError(problem) from None
    except OSError as error:
        raise UserError(f"{str(run_dir)!r} cannot be written: {error}") from error


class Run:
    """The processes of a run, once its directory is there."""

    def __init__(self, checked: CheckedRun):
        self.config = config = checked.config
        self.places, self.resume = checked.places, checked.resume
        self.interrupt, supervise = children.Interrupt(), Supervisor
        searchers, names = searchers_of(self.places), [place.name for place in self.places]
        readers = len(searchers) + bool(config.ray)
        self.weights = SharedWeights(checked.shapes, compute_dtype(config), readers)
        if config.reference_reset_period:
            reference = SharedWeights(checked.shapes, torch.float32, readers, slots=1)
            self.weights.reference = reference
        self.status = StatusTable(names)
        if config.ray:
            from extras.nodes.cluster import Cluster, ClusterStatus

            self.status, supervise = ClusterStatus(names), partial(Cluster, given=checked.given)
        if self.resume:
            self.status.load_state_dict(checkpoint.load_state(self.resume)["status"])
        self.trainers: list[torch.multiprocessing.Process] = []  # by rank
        self.parameters, self.can_save = num_elements(checked.shapes), True
        self.longest_silence = 0.0  # of the trainer, which sends a heartbeat after each step
        said, self.trainer_stdout = torch.multiprocessing.get_context("spawn").Pipe(duplex=False)
        self.view = ProgressView(config, self.status, said)
        self.first_look = FirstLook(config, self.status, self.view.say, self.resume is None)
        arguments = config.output_dir, "searcher:run", self.view.say, self.first_look.take
        self.supervisor = supervise(config, searchers, self.weights, self.status, *arguments)
        self.tracking = None
        if config.track:
            from extras.tracking import Tracking

            self.tracking = Tracking(config, self.view.say)

    def train(self) -> None:
        """Start the trainer, and watch over all until it has ended. Raises RunFailed."""
        self.view.say("loading the models …")
        if is_gpu_shared(self.places):
            # vLLM measures what memory is free: the trainer must not load meanwhile.
            first = self.status.searchers[0]
            self.watch(until=lambda: self.status.get(first, "ready") == 1)
        self.start_trainer()
        self.watch(until=lambda: self.trainers[0].exitcode == 0)

    def start_trainer(self) -> None:
        """Start the trainer, and its further processes where it has any."""
        config, status, run_dir = self.config, self.status, self.config.output_dir
        rollout_queue = self.supervisor.rollout_queue
        ranks: list = [None]
        if config.trainer_processes > 1:
            timeout = config.searcher_timeout + SPARE_SECONDS
            from extras.sharding import connect

            ranks = connect(config.trainer_processes, timeout)
        for place, rank in zip(trainers_of(self.places), ranks):
            target, stdout = "extras.sharding:follow", None
            arguments = config, rank, status, place.name
            if rank is ranks[0]:
                target, stdout = "trainer:run", self.trainer_stdout
                arguments = config, self.weights, rollout_queue, status, run_dir, self.resume, rank
            status.beat(place.name)  # being started is a heartbeat
            self.trainers.append(children.start(place, target, arguments, run_dir, stdout))
        self.trainer_stdout.close()  # the trainer's alone now
        for rank in filter(None, ranks):
            for connection in rank.connections:  # theirs alone now: the end of one shows
                connection.close()

    def watch(self, until: Callable[[], bool]) -> None:
        """Return when `until` holds or a signal asks the run to end.

        Raises RunFailed when the trainer dies or goes silent, or a searcher for good.
        """
        while not self.interrupt.signal and not until():
            time.sleep(POLL_SECONDS)
            self.supervisor.check()
            self.check_trainer()
            self.first_look.say_if_due()
            self.view.look()

    def check_trainer(self) -> None:
        """Raise RunFailed when a trainer process has died, or sends no heartbeat."""
        status, timeout = self.status, self.config.searcher_timeout
        if status.get("trainer", "ready"):  # a step is one silence, a pause of the run is none
            self.longest_silence = max(self.longest_silence, status.silence("trainer"))
        if any(p.exitcode or status.get(p.name, "failed") for p in self.trainers):
            self.can_save = False
            raise RunFailed(self.describe_death())
        alive = [process for process in self.trainers if process.exitcode is None]
        if any(status.is_silent(process.name, timeout) for process in alive):
            self.can_save = len(self.trainers) == 1
            raise RunFailed(self.describe_silence(alive))

    def describe_death(self) -> str:
        """Say which trainer process died first: that ends the others. Shows its log."""
        # A killed one may be noticed after those that failed because of it: its connections close
        # before it ends.
        if len(self.trainers) > 1:
            time.sleep(KILLED_SECONDS)
        dead = [p for p in self.trainers if p.exitcode or self.status.get(p.name, "failed")]
        # A killed process has raised nothing: its "failed" is 0, so it is the first.
        first = min(dead, key=lambda process: self.status.get(process.name, "failed"))
        first.join(EXIT_SECONDS)  # its log has its traceback then
        self.view.look()  # it may have said why
        if NOT_SAVED in (process.exitcode for process in dead):
            return "the trainer could not save the model"
        log = children.log_tail(self.config.output_dir, first.name)
        how = "failed, and does not end"
        if first.exitcode is not None:
            how = f"ended with exit code {first.exitcode}"
        return f"{first.name} {how}\n{log}"

    def describe_silence(self, alive: list[torch.multiprocessing.Process]) -> str:
        """Say which trainer process is stopped; if none is, show where each of them is."""
        silence = max(self.status.silence(process.name) for process in alive)
        what = f"no heartbeat for {silence:.0f} s (--searcher_timeout)"
        for process in alive:
            if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                log = children.log_tail(self.config.output_dir, process.name)
                return f"{process.name} is stopped: {what}\n{log}"
            os.kill(process.pid, SHOW_STACK)
        time.sleep(STACK_SECONDS)
        logs = [children.log_tail(self.config.output_dir, process.name) for process in alive]
        return "\n".join([f"the trainer sent {what}", *logs])

    def grace_seconds(self) -> float:
        """Seconds that the trainer has to finish its step and to save, by the slowest of each.

        0 if there is nothing for which to wait.
        """
        if not self.can_save or not self.status.get("trainer", "ready"):
            return 0.0
        # A checkpoint holds fp32 weights and two moments at most, the one before may be under way;
        # the buffer and the model come with it.
        by_size = SAVE_SECONDS + 32 * self.parameters / SAVE_BYTES_PER_SECOND
        by_slowest = 3 * self.status.get("trainer", "save_seconds")
        return max(by_size, by_slowest) + 3 * self.longest_silence

    def stop(self) -> None:
        """End all processes. The trainer has time to save; what is still loading is killed."""
        self.status.shutdown = True
        if self.trainers:
            trainer, *others = self.trainers
            seconds = self.grace_seconds() if trainer.exitcode is None else 0.0
            if seconds and self.interrupt.signal:
                saving = f"to finish a step and to save may take up to {seconds:.0f} s"
                print(f"the run ends: {saving}; a second Ctrl-C ends it at once", file=sys.stderr)
            deadline = time.monotonic() + seconds
            while trainer.exitcode is None and time.monotonic() < deadline:
                self.view.look()  # at what it still says
                trainer.join(POLL_SECONDS)
            if seconds and trainer.exitcode is None:
                problem = f"the trainer did not save and end within {seconds:.0f} s: it is killed"
                print(problem, file=sys.stderr)
            elif seconds and trainer.exitcode > 0:
                print(f"error: {self.describe_death()}", file=sys.stderr)
            children.kill(trainer)
            for process in others:  # they end with it by themselves, unless one hangs
                process.join(STOP_SECONDS if trainer.exitcode == 0 else 0.0)
                children.kill(process)
        self.view.look()
        self.status.stop = True
        self.supervisor.stop()


def supervise(run: Run) -> int:
    """Let a run go to its end, whatever that is, and report it. Returns the exit code."""
    config, exit_code = run.config, 1
    run_dir, interrupt = config.output_dir, run.interrupt
    with run.view as view:
        try:
            run.train()
            run.stop()  # the evaluation needs the cores and GPUs
            if not interrupt.signal:
                final_evaluation(config, evaluation_place(run.places), interrupt, view.say)
            exit_code = 0
        except RunFailed as failure:
            print(f"error: {failure}", file=sys.stderr)
            if config.lockstep:  # the trainer may wait for what will never come
                run.can_save = False
        finally:
            run.stop()
            exit_code = 128 + interrupt.signal if interrupt.signal else exit_code
        view.say("writing report.html …")
        report(run_dir)
    if exit_code:
        advice = f"; to go on: python tba.py --resume {run_dir}" if has_begun(run_dir) else ""
        cause = f"stopped by {signal.Signals(interrupt.signal).name}: " if interrupt.signal else ""
        print(f"{cause}partial results are in {run_dir}{advice}", file=sys.stderr)
    else:
        if busy := trainer_busy(run_dir):
            print(f"trainer busy: {busy:.3f} of the time between the first and the last step")
        if changes := view.evaluated():
            print(changes)
        print(f"results: {run_dir}/report.html")
    if run.tracking:  # last: it may take a while, and nothing else is to wait for it
        run.tracking.finish(exit_code)
    return exit_code


def report(run_dir: str) -> None:
    """Draw the pictures of a run, and write report.html."""
    from launch.display import html_report  # slow to import, and not wanted before

    try:
        html_report.write(run_dir)
    except Exception as error:  # whatever it is, the run's own result stands
        problem = f"{type(error).__name__}: {error}"
        print(f"report.html could not be written: {problem}", file=sys.stderr)
