"""Searchers on further nodes of a Ray cluster (--ray); the trainer stays where it is.

Each node is a Supervisor with its searchers (node.py beside this). The driver, which is the process
that supervises this machine's searchers, has a thread for each node. It brings the node the newest
weights, and forwards to the trainer what the node found. Nodes may join and be lost: what is lost
is what was in flight there.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from config import LOAD_SECONDS, Config
from extras.nodes.joining import last_line, on_node, other_nodes
from extras.nodes.node import BITS, COUNTED, Items, Node, describe_environment
from launch.supervisor import DEATHS, RunFailed, Supervisor
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable, Watchdog

LOOK_SECONDS = 1.5  # between two looks at which nodes there are
LOGS_SECONDS = 1.0  # for the logs of a node that has failed
GOODBYE_SECONDS = 8.0  # for a node to end its searchers
WAIT_SECONDS = 0.1  # for an answer, before it is looked whether the run is over
MAX_NODES = 64  # rows of the status table
GROUPS = 32  # that a node sends at once


class ClusterStatus(StatusTable):
    """The status table of the driver: a row for each searcher here, and for each further node."""

    def __init__(self, names: list[str]):
        """names: of the processes of this machine."""
        self.nodes = [f"searchers of node {number}" for number in range(1, MAX_NODES + 1)]
        super().__init__([*names, *self.nodes])
        self.words[-MAX_NODES:, self.COLUMNS.index("beat")] = 0  # nobody is there

    @property
    def searchers(self) -> list[str]:
        """This machine's searchers, and the nodes that are there; where there are none, node 1."""
        beats = self.words[:, self.COLUMNS.index("beat")].tolist()
        return [self.names[i] for i in self.searching if beats[i]] or self.nodes[:1]

    def health(self, name: str) -> str:
        return super().health(name) if self.get(name, "beat") else "no node is there"

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        """Take over what a run of any number of nodes saved."""
        super().load_state_dict({name: row for name, row in state.items() if name in self.names})
        # Whoever has evaluated it: with --searchers 0 that row may be gone.
        evaluated = max((row["evaluated"] for row in state.values()), default=-1)
        self.set(self.searchers[0], "evaluated", evaluated)


@dataclass
class Far:
    """A node, as the driver sees it."""

    id: str  # Ray's
    row: str  # of the status table
    name: str  # for people
    actor: "ray.actor.ActorHandle"
    earlier: dict[str, float]  # what other actors in this row have counted
    version: int = -1  # that it has
    asked_version: int = -1  # whose evaluation it was asked for


class Cluster(Supervisor):
    """The searchers of this machine, as Supervisor has them, and those of all further nodes.

    arguments: of Supervisor, whose status is a ClusterStatus here. given: the settings as the user
    gave them: each node finds its own model by them.

    Where the trainer's queue is full the thread of a node waits: the node is not asked for more,
    and its searchers wait too.
    """

    def __init__(self, *arguments: Any, given: Config):
        super().__init__(*arguments)
        self.given, self.pin = given, len(self.places)
        self.environment = describe_environment()
        self.far: dict[str, Far] = {}  # by Ray's id of the node
        self.deaths_of: dict[str, list[str]] = defaultdict(list)  # why, since a node's last group
        self.stored: tuple[int, ray.ObjectRef | None] = -1, None  # the version in Ray's store
        self.storing = threading.Lock()  # the threads have one pin
        # The newest version whose evaluation has come; of a run that is resumed, before it.
        self.evaluated = max(self.status.get(name, "evaluated") for name in self.status.searchers)
        self.failure: RunFailed | None = None  # of a thread
        self.start_thread(self.note_failure, self.watch_nodes)

    def check(self) -> None:
        """Watch over this machine's searchers, and over all nodes. Raises RunFailed."""
        super().check()
        if self.failure and not self.status.stop:
            raise self.failure

    def note_failure(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do the work of a thread, and have check() raise what that raises."""
        try:
            work(*arguments)
        except RunFailed as failure:
            self.failure = failure
        except Exception as error:  # whatever it is: no node would be attended to any more
            self.failure = RunFailed(f"nodes cannot be attended to: {error!r}")

    def watch_nodes(self) -> None:
        """Start an actor on each node that has none, until the run is over.

        In a thread, as Ray may not answer for a minute. Raises RunFailed where nobody searches.
        """
        limit, alone = max(self.config.searcher_timeout, LOAD_SECONDS), Watchdog()
        while not self.status.stop:
            nodes = {node["NodeID"]: node for node in other_nodes()}
            if alone.look(time.monotonic() if nodes or self.places else None) > limit:
                raise RunFailed(f"no node searches for {limit:.0f} s, and no searcher is here")
            hopeful = [id for id in nodes if len(self.deaths_of[id]) < DEATHS]
            if not self.places and nodes and not hopeful:
                reasons = "\n".join(deaths[-1] for deaths in self.deaths_of.values() if deaths)
                raise RunFailed(f"each node has failed {DEATHS} times in a row:\n{reasons}")
            for id in hopeful:
                if id not in self.far:
                    self.start_node(nodes[id])
            time.sleep(LOOK_SECONDS)

    def start_node(self, node: dict) -> None:
        """Start the actor of a node, whose searchers load from now on, and the node's thread."""
        free = [row for row in self.status.nodes if self.status.get(row, "beat") == 0]
        if not free:
            return
        row, id, number = free[0], node["NodeID"], self.status.nodes.index(free[0]) + 1
        options = dict(num_gpus=node["Resources"].get("GPU"), scheduling_strategy=on_node(node))
        actor = ray.remote(num_cpus=0, **options)(Node).remote(
            self.given,
            self.weights.shapes,
            self.weights.slots[0].dtype,
            seeds=(number, int(self.status.get(row, "tokens"))),
            evaluates=not self.places and not self.far and self.evaluated < 0,
            target=self.target,
            environment=self.environment,
        )
        name = f"node {number} ({node['NodeManagerAddress']}, {id[:6]})"
        earlier = {column: self.status.get(row, column) for column in COUNTED}
        self.far[id] = Far(id, row, name, actor, earlier)
        self.status.beat(row)
        self.start_thread(self.note_failure, self.attend, self.far[id])

    def attend(self, far: Far) -> None:
        """Bring a node what is new, and take what it found, until it is lost or the run is over."""
        patience = max(self.config.searcher_timeout, LOAD_SECONDS)  # while its searchers load
        try:
            while not self.status.stop:
                self.send_weights(far, patience)
                call = far.actor.collect.remote(GROUPS, self.status.last_step_done)
                self.take(far, *self.answer(call, patience))
                if self.status.get(far.row, "ready"):
                    patience = self.config.searcher_timeout
            return
        except RayTaskError as error:
            why = f"failed: {str(error.cause or error).strip()}"
        except TimeoutError as error:
            why = str(error)
        except RayError as error:
            why = f"is lost: {last_line(error)}"
        if not self.status.stop:
            self.lose(far, why)

    def answer(self, call: "ray.ObjectRef", patience: float) -> Any:
        """Return what a node answers to a call.

        Raises TimeoutError after `patience` seconds without an answer, or at the end of the run.
        """
        watchdog = Watchdog()
        while not ray.wait([call], timeout=WAIT_SECONDS)[0]:
            silence = watchdog.look(call)
            if silence > patience or self.status.stop:
                raise TimeoutError(f"sent no heartbeat for {silence:.0f} s (--searcher_timeout)")
        return ray.get(call)

    def send_weights(self, far: Far, patience: float) -> None:
        """Send a node the newest version, if it has not got that, and have it evaluated."""
        newest, asked = self.weights.version, max(0, self.weights.evaluation_version)
        evaluates = not self.places and far.id == list(self.far)[0]
        is_asked = evaluates and asked > max(self.evaluated, far.asked_version)
        if newest > far.version or (is_asked and newest >= 0):
            version, stored = self.store_weights()
            call = far.actor.take_weights.remote(version, stored, is_asked)
            if self.answer(call, patience):
                far.version, far.asked_version = version, asked if is_asked else far.asked_version

    def store_weights(self) -> "tuple[int, ray.ObjectRef]":
        """Put the newest version into Ray's store, once for all nodes. Returns both."""
        with self.storing:
            if self.stored[0] < self.weights.version:
                self.stored = -1, None  # Ray holds one version at a time, if no transfer needs two
                with self.weights.read(self.pin) as (version, tensors):
                    arrays = [t.view(BITS[t.dtype]).numpy() for t in tensors.values()]
                    self.stored = version, ray.put(arrays)
            return self.stored

    def take(self, far: Far, items: Items, notices: list[str], row: dict[str, float]) -> None:
        """Take over what a node says of itself, and send the trainer what it has found."""
        self.status.beat(far.row)
        for column, value in row.items():
            self.status.set(far.row, column, far.earlier.get(column, 0.0) + value)
        for item in items:
            self.deaths_of[far.id].clear()
            if isinstance(item, Evaluation):
                self.evaluated = item.version
            self.put(item)
        for text in notices:
            self.say(f"{far.name}: {text}")

    def lose(self, far: Far, why: str) -> None:
        """Go on without a node, and fetch its logs: what was in flight there is lost."""
        logs = "could not be fetched"
        with suppress(RayError, OSError):
            for name, text in ray.get(far.actor.logs.remote(), timeout=LOGS_SECONDS).items():
                Path(self.run_dir, "logs", f"node-{far.id[:6]}-{name}").write_text(text)
            logs = f"are logs/node-{far.id[:6]}-*"
        ray.kill(far.actor)
        self.status.set(far.row, "beat", 0)
        self.status.set(far.row, "ready", 0)
        self.deaths_of[far.id].append(f"{far.name} {why}")
        self.far.pop(far.id, None)  # stop() may have been quicker
        self.say(f"{far.name} {why}; the run goes on without it; its logs {logs}")

    def stop(self) -> None:
        """End all searchers, those on other nodes too."""
        # First the threads: what they ask Ray for after its end would start a cluster anew.
        until = time.monotonic() + GOODBYE_SECONDS
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        goodbyes = [far.actor.stop.remote() for far in [*self.far.values()]]
        self.far.clear()
        super().stop()
        if goodbyes:
            ray.wait(goodbyes, num_returns=len(goodbyes), timeout=GOODBYE_SECONDS)
        ray.shutdown()  # ends the actors, and with each its searchers
