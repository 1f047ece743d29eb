"""The Supervisor: starts the searchers, restarts those that die, and forwards what they send.

Each start of a searcher makes a queue of its own, read by a thread of its own: a process that
is killed may leave its queue locked, or half a group in it. All threads put into the one rollout
queue that the trainer drains.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.multiprocessing

from config import Config
from launch import children
from launch.places import Place
from rollouts import Group
from runtime.child import GIVE_UP, log_path
from runtime.transport.messages import Evaluation, Notice
from runtime.transport.status import StatusTable
from weights import SharedWeights

QUEUE_GROUPS = 256  # groups that may wait for the trainer before searchers wait too
POLL_SECONDS = 1.0  # after which a forwarding thread looks again whether the run is over
STOP_SECONDS = 2.0  # grace period for a process that is told to stop
DEATHS = 3  # in a row, without a group between them, that end the run

spawn = torch.multiprocessing.get_context("spawn")


class RunFailed(Exception):
    """The run cannot go on. The message says why, and shows the end of the log of the process."""


class Supervisor:
    """Starts the searchers of this machine, restarts those that fail, forwards what they send.

    Searcher i has share i of the queries, pin i of the weights, and the row "searcher i" of the
    status table.

    rollout_queue: of Group and Evaluation, for the trainer. target: the "module:function" that is a
    searcher. say: shows the user a line. show: is called with each group that goes to the trainer.
    """

    def __init__(
        self,
        config: Config,
        places: list[Place],
        weights: SharedWeights,
        status: StatusTable,
        run_dir: str,
        target: str,
        say: Callable[[str], None],
        show: Callable[[Group], None] = lambda group: None,
    ):
        self.config, self.places, self.weights, self.target = config, places, weights, target
        self.say, self.show = say, show
        self.status, self.run_dir = status, run_dir
        self.rollout_queue = spawn.Queue(QUEUE_GROUPS)
        # At the end nobody reads what is still in it: this process must not wait for that.
        self.rollout_queue.cancel_join_thread()
        self.deaths = [0] * len(places)  # of each searcher, since its last group
        self.threads: list[threading.Thread] = []
        self.searchers = [self.start(rank) for rank in range(len(places))]

    def start(self, rank: int) -> torch.multiprocessing.Process:
        """Start searcher `rank` with a new queue, and the thread that reads it."""
        row, groups = self.places[rank].name, spawn.Queue(QUEUE_GROUPS)
        self.status.set(row, "ready", 0)
        self.status.beat(row)  # being started is a heartbeat
        arguments = self.config, rank, self.weights, groups, self.status, self.run_dir
        process = children.start(self.places[rank], self.target, arguments, self.run_dir)
        # Now the searcher alone holds the writing end: its death ends the reading of half a group.
        groups._writer.close()
        self.start_thread(self.forward, rank, groups)
        return process

    def start_thread(self, target: Callable[..., None], *arguments) -> None:
        """Start a thread that ends by itself when the status table says stop."""
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        self.threads.append(thread)

    def forward(self, rank: int, groups: torch.multiprocessing.Queue) -> None:
        """Forward what a searcher sends, in a thread, until it is dead and its queue is empty."""
        while not self.status.stop:
            try:
                item = groups.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            except (EOFError, OSError):
                break
            if isinstance(item, Notice):
                self.say(item.text)
            else:
                if isinstance(item, Group):
                    self.deaths[rank] = 0
                self.put(item)
        groups.close()

    def put(self, item: Group | Evaluation) -> None:
        """Put into the rollout queue once it has room, unless the run is over by then."""
        if isinstance(item, Group):
            self.show(item)
        while not self.status.stop:
            with suppress(queue.Full):  # the searcher will wait too, on its own queue
                return self.rollout_queue.put(item, timeout=POLL_SECONDS)

    def check(self) -> None:
        """Restart searchers that died or fell silent.

        Raises RunFailed when one dies again and again, or asks to end the run. Once the status
        table says stop, they may end.
        """
        for rank, process in enumerate(self.searchers):
            name = process.name
            if process.exitcode is not None:
                fault = f"{name} ended with exit code {process.exitcode}"
            elif self.status.is_silent(name, self.config.searcher_timeout):
                silence = f"{self.status.silence(name):.0f} s (--searcher_timeout)"
                fault = f"{name} sent no heartbeat for {silence}"
            else:
                continue
            if self.status.stop:
                return
            children.kill(process)
            self.deaths[rank] += 1
            is_repeated = self.deaths[rank] == DEATHS
            # In lockstep every group is waited for, and those that died with the searcher will not
            # come.
            if process.exitcode == GIVE_UP or self.config.lockstep or is_repeated:
                repeated = f", {DEATHS} times without a group" if is_repeated else ""
                raise RunFailed(f"{fault}{repeated}\n{children.log_tail(self.run_dir, name)}")
            self.weights.unpin(rank)
            self.status.add(name, "restarts", 1)
            self.searchers[rank] = self.start(rank)
            self.say(f"{fault}: it is started again; its log is {log_path(self.run_dir, name)}")

    def stop(self) -> None:
        """Join the searchers, which end by themselves when the status table says stop.

        One that is loading, or has not ended after STOP_SECONDS, is killed.
        """
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.searchers:
            if self.status.get(process.name, "ready"):
                process.join(max(0.0, deadline - time.monotonic()))
            children.kill(process)
        # Each thread frees its queue's semaphores. One that this process's end cuts short in that
        # leaves a warning on stderr that they leaked.
        for thread in self.threads:
            thread.join(2 * POLL_SECONDS)
        self.rollout_queue.close()
        if feeder := self.rollout_queue._thread:
            feeder.join(POLL_SECONDS / 2)
