"""The processes of a run: starts them, watches them, and ends them."""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import resource_tracker

import psutil
import torch
import torch.multiprocessing

from launch import children
from launch.checks import CheckedRun
from launch.display.alarms import FirstLook
from launch.display.progress import ProgressView
from launch.places import is_gpu_shared, searchers_of, trainers_of
from launch.supervisor import STOP_SECONDS, RunFailed, Supervisor
from models.device import compute_dtype
from runtime.checkpoints import checkpoint
from runtime.child import NOT_SAVED, SHOW_STACK
from runtime.transport.status import StatusTable
from weights import SharedWeights, num_elements

SAVE_SECONDS = 10.0  # grace period for the trainer's checkpoint and model at a shutdown ...
SAVE_BYTES_PER_SECOND = 100e6  # ... and this much more for a large model
POLL_SECONDS = 0.05
SPARE_SECONDS = 30.0  # that a collective outlives --searcher_timeout: this process says what hangs
EXIT_SECONDS = 10.0  # for a trainer process that has raised to end
KILLED_SECONDS = 0.5  # until one that was killed is seen to be dead
STACK_SECONDS = 0.5  # for each to write where it is


class Interrupt:
    """The signal that asked the run to end, if one did.

    A second signal kills the run, except SIGHUP, which a closing terminal sends twice.

    SystemExit, not os._exit: the queues' semaphores are unlinked on the way out.
    """

    def __init__(self):
        self.signal = 0
        # The resource tracker starts with these signals blocked: it must outlive this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, children.SIGNALS)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, children.SIGNALS)
        for number in children.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                signal.signal(number, self)

    def __call__(self, number: int, frame) -> None:
        if self.signal and number != signal.SIGHUP:
            for child in torch.multiprocessing.active_children():
                child.kill()
            raise SystemExit(128 + number)
        self.signal = self.signal or number


class Run:
    """The processes of a run, once its directory is there."""

    def __init__(self, checked: CheckedRun):
        self.config = config = checked.config
        self.places, self.resume = checked.places, checked.resume
        self.interrupt = Interrupt()
        searchers, names = searchers_of(self.places), [place.name for place in self.places]
        readers = len(searchers) + bool(config.ray)
        self.weights = SharedWeights(checked.shapes, compute_dtype(config), readers)
        if config.reference_reset_period:
            reference = SharedWeights(checked.shapes, torch.float32, readers, slots=1)
            self.weights.reference = reference
        if config.ray:
            from extras.nodes.cluster import Cluster, ClusterStatus

            self.status = ClusterStatus(names)
            supervise = partial(Cluster, given=checked.given)
        else:
            self.status, supervise = StatusTable(names), Supervisor
        self.trainers: list[torch.multiprocessing.Process] = []  # by rank
        if self.resume:
            self.status.load_state_dict(checkpoint.load_state(self.resume)["status"])
        self.parameters, self.can_save = num_elements(checked.shapes), True
        self.longest_silence = 0.0  # of the trainer, which sends a heartbeat after each step
        said, self.trainer_stdout = torch.multiprocessing.get_context("spawn").Pipe(duplex=False)
        self.view = ProgressView(config, self.status, said)
        say, is_new = self.view.say, self.resume is None
        self.first_look = FirstLook(config, self.status, say, is_new)
        arguments = config.output_dir, "searcher:run", say, self.first_look.take
        self.supervisor = supervise(config, searchers, self.weights, self.status, *arguments)
        self.tracking = None
        if config.track:
            from extras.tracking import Tracking

            self.tracking = Tracking(config, say)

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
        dead = [p for p in self.trainers if p.exitcode or status.get(p.name, "failed")]
        alive = [process for process in self.trainers if process.exitcode is None]
        if status.get("trainer", "ready"):  # a step is one silence, a pause of the run is none
            self.longest_silence = max(self.longest_silence, status.silence("trainer"))
        if dead:
            problem = self.describe_death(dead)
        elif any(status.is_silent(process.name, timeout) for process in alive):
            problem = self.describe_silence(alive)
        else:
            return
        if dead or len(self.trainers) > 1:
            self.can_save = False
        raise RunFailed(problem)

    def describe_death(self, dead: list[torch.multiprocessing.Process]) -> str:
        """Say which trainer process died first: that ends the others. Shows its log.

        dead: those known to be. A killed one may be noticed after those that failed because of it,
        as its connections close before it ends.
        """
        has_said_why = any(process.exitcode == NOT_SAVED for process in dead)
        if len(self.trainers) > 1 and not has_said_why:
            time.sleep(KILLED_SECONDS)
        dead = [*dead, *(process for process in self.trainers if process.exitcode)]
        # A killed process has raised nothing: its "failed" is 0, so it is the first.
        first = min(dead, key=lambda process: self.status.get(process.name, "failed"))
        first.join(EXIT_SECONDS)  # its log has its traceback then
        self.view.look()  # it may have said why
        if first.exitcode == NOT_SAVED:
            return "the trainer could not save the model"
        log = children.log_tail(self.config.output_dir, first.name)
        how = "failed, and does not end"
        if first.exitcode is not None:
            how = f"ended with exit code {first.exitcode}"
        return f"{in_words(first.name)} {how}\n{log}"

    def describe_silence(self, alive: list[torch.multiprocessing.Process]) -> str:
        """Say which trainer process is stopped; if none is, show where each of them is."""
        silence = max(self.status.silence(process.name) for process in alive)
        what = f"no heartbeat for {silence:.0f} s (--searcher_timeout)"
        for process in alive:
            if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                log = children.log_tail(self.config.output_dir, process.name)
                return f"{in_words(process.name)} is stopped: {what}\n{log}"
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
                print(f"error: {self.describe_death([trainer])}", file=sys.stderr)
            children.kill(trainer)
            for process in others:  # they end with it by themselves, unless one hangs
                process.join(STOP_SECONDS if trainer.exitcode == 0 else 0.0)
                children.kill(process)
        self.view.look()
        self.status.stop = True
        self.supervisor.stop()


def in_words(name: str) -> str:
    """Name a trainer process in a sentence."""
    return "the trainer" if name == "trainer" else name
