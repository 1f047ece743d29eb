"""The Supervisor: starts the searchers, replaces one that dies or falls silent, and hands on to the trainer what they find.

Each incarnation of a searcher has a queue of its own, read by a thread of its own: a process that is killed may leave its queue locked, or half a
group in it, and that must be nobody else's trouble. All threads put into the one queue that the trainer empties.
"""

import queue
import threading
import time

import torch.multiprocessing

import processes
from buffer import Group
from config import Config
from processes import Board, Place
from weights import SharedWeights

QUEUE_GROUPS = 256  # groups that may wait for the trainer before searchers wait too
DEATHS = 3  # in a row, without a group between them, that end the run

spawn = torch.multiprocessing.get_context("spawn")


class RunFailed(Exception):
    """The run cannot go on; the message says why, and shows the end of the log of the process that it is about."""


class Supervisor:
    """found: where groups, evaluations and lines for the user come out, for the trainer."""

    def __init__(
        self,
        config: Config,
        places: list[Place],
        weights: SharedWeights,
        board: Board,
        run_dir: str,
    ):
        self.config, self.places, self.weights, self.board, self.run_dir = (
            config,
            places,
            weights,
            board,
            run_dir,
        )
        self.found = spawn.Queue(QUEUE_GROUPS)
        self.found.cancel_join_thread()  # at the end nobody reads what is still in it: this process must not wait for that
        self.deaths = [0] * len(places)  # of each searcher, since its last group
        self.searchers = [self.start(rank) for rank in range(len(places))]

    def start(self, rank: int) -> torch.multiprocessing.Process:
        groups = spawn.Queue(QUEUE_GROUPS)
        self.board.set(self.places[rank].name, "ready", 0)
        self.board.beat(self.places[rank].name)  # being started is a sign of life
        arguments = (self.config, rank, self.weights, groups, self.board, self.run_dir)
        process = processes.start(self.places[rank], "searcher:run", arguments, self.run_dir)
        groups._writer.close()  # now the searcher alone holds the writing end, and its death ends the reading of half a group
        threading.Thread(target=self.hand_on, args=(rank, groups), daemon=True).start()
        return process

    def hand_on(self, rank: int, groups) -> None:
        """A thread: until the searcher is dead and its queue is empty."""
        while not self.board.stop:
            try:
                item = groups.get(timeout=1.0)
            except queue.Empty:
                continue
            except (EOFError, OSError):
                break
            if isinstance(item, Group):
                self.deaths[rank] = 0
            while not self.board.stop:
                try:
                    self.found.put(item, timeout=1.0)
                    break
                except queue.Full:  # the searcher will wait too, on its own queue
                    pass
        groups.close()

    def check(self) -> None:
        """Replaces searchers that died or fell silent. Raises RunFailed when one dies again and again, or asks to end the run."""
        for rank, (process, place) in enumerate(zip(self.searchers, self.places)):
            if process.exitcode is not None:
                fault = f"{place.name} ended with exit code {process.exitcode}"
            elif self.board.is_silent(place.name, self.config.searcher_timeout):
                fault = f"{place.name} gave no sign of life for {self.board.silence(place.name):.0f} s (--searcher_timeout)"
            else:
                continue
            processes.kill(process)
            self.deaths[rank] += 1
            # In lockstep every group is waited for, and those that died with the searcher will not come.
            if (
                process.exitcode == processes.GIVE_UP
                or self.config.lockstep
                or self.deaths[rank] == DEATHS
            ):
                times = f", {DEATHS} times without a group" if self.deaths[rank] == DEATHS else ""
                raise RunFailed(f"{fault}{times}\n{processes.log_tail(self.run_dir, place.name)}")
            self.weights.unpin(rank)
            self.board.add(place.name, "restarts", 1)
            self.searchers[rank] = self.start(rank)
            line = f"{fault}: it is started again; its last words are in {processes.log_path(self.run_dir, place.name)}"
            try:
                self.found.put_nowait(line)  # the trainer has the terminal
            except queue.Full:
                print(line, flush=True)

    def stop(self, deadline: float) -> None:
        """Searchers end by themselves when the board says stop; one that is loading, or has not ended at `deadline`, is killed."""
        for process in self.searchers:
            if self.board.get(process.name, "ready"):
                process.join(max(0.0, deadline - time.monotonic()))
            processes.kill(process)
