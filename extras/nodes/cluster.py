"""Searchers on further nodes of a Ray cluster (--ray); the trainer stays where it is.

Each node is a Supervisor with its searchers (node.py beside this). The driver, which is the process
that supervises this machine's searchers, has a thread for each node. It brings the node the newest
weights, and forwards to the trainer what the node found. Nodes may join and be lost: what is lost
is what was in flight there.
"""

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from config import LOAD_SECONDS, Config
from extras.nodes.joining import last_line, on_node, other_nodes
from extras.nodes.node import COUNTED, Found, Node, as_arrays, describe_environment
from launch.supervisor import DEATHS, RunFailed, Supervisor
from runtime.record.metrics import RATE_WINDOW, rate_of
from runtime.transport.messages import Evaluation, Notice
from runtime.transport.status import StatusTable, Watchdog

LOOK_SECONDS = 1.0  # between two looks at which nodes there are
WAIT_SECONDS = 0.1  # for an answer, before it is looked whether the run is over
LOGS_SECONDS = 1.0  # for the logs of a node that has failed
GOODBYE_SECONDS = 8.0  # for a node to end its searchers and send its logs
RETRY_SECONDS = 10.0  # before a node whose actor died gets another one
MAX_NODES = 64  # rows of the status table
GROUPS = 32  # that a node sends at once


class ClusterStatus(StatusTable):
    """The status table of the driver: a row for each searcher here, and for each further node."""

    def __init__(self, names: list[str]):
        """names: of the processes of this machine."""
        self.nodes = [f"searchers of node {number}" for number in range(1, MAX_NODES + 1)]
        super().__init__([*names, *self.nodes])
        self.words[-MAX_NODES:, self.COLUMNS.index("beat")] = 0  # nobody is there
        # (time, tokens) of each node, as figures() has seen them.
        self.tokens: dict[str, deque[tuple[float, float]]] = defaultdict(deque)

    @property
    def searchers(self) -> list[str]:
        """This machine's searchers, and the nodes that are there; where there are none, node 1."""
        beats = self.words[:, self.COLUMNS.index("beat")].tolist()
        return [self.names[i] for i in self.searching if beats[i]] or self.nodes[:1]

    def health(self, name: str) -> str:
        return super().health(name) if self.get(name, "beat") else "no node is there"

    def figures(self, version: int) -> dict[str, float]:
        """What each node that is there does, for metrics.jsonl."""
        figures: dict[str, float] = {}
        for row in self.searchers:
            beat = self.get(row, "beat")
            if row not in self.nodes or not beat:
                continue
            now, node, seen = time.monotonic(), f"node_{row.split()[-1]}", self.tokens[row]
            seen.append((now, self.get(row, "tokens")))
            figures |= {
                f"{node}_tokens_per_second": rate_of(seen, RATE_WINDOW),
                f"{node}_staleness": max(0, version) - self.get(row, "version"),
                f"{node}_restarts": self.get(row, "restarts"),
                f"{node}_silence": now - beat,
            }
        return figures

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
    logs: str  # what the names of its logs begin with
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
        # Of what a node's actors died, since its last group.
        self.deaths_of: dict[str, list[str]] = defaultdict(list)
        self.retry_at: dict[str, float] = {}
        # The newest version in Ray's store.
        self.stored: tuple[int, ray.ObjectRef | None] = -1, None
        self.storing = threading.Lock()  # the threads have one pin
        # The newest version whose evaluation has come; of a run that is resumed, before it.
        evaluated = self.status.COLUMNS.index("evaluated")
        self.evaluated = int(self.status.words[:, evaluated].max())
        self.alone = Watchdog()  # no node is there
        self.failure: RunFailed | None = None  # of a thread
        self.start_thread(self.watch_nodes)

    def check(self) -> None:
        """Watch over this machine's searchers, and over all nodes. Raises RunFailed."""
        super().check()
        if self.failure and not self.status.stop:
            raise self.failure

    # Nodes that come and go

    def watch_nodes(self) -> None:
        """Look for nodes until the run is over: in a thread, as Ray may not answer for a minute."""
        while not self.status.stop and not self.failure:
            with self.note_failure():
                self.look_for_nodes()
            time.sleep(LOOK_SECONDS)

    @contextmanager
    def note_failure(self) -> Iterator[None]:
        """Have check() raise what this block of a thread raises."""
        try:
            yield
        except RunFailed as failure:
            self.failure = failure
        except Exception as error:  # whatever it is: no node would be attended to any more
            self.failure = RunFailed(f"nodes cannot be attended to: {error!r}")

    def look_for_nodes(self) -> None:
        """Start an actor on each node that has none. Raises RunFailed where nobody searches."""
        nodes, now = {node["NodeID"]: node for node in other_nodes()}, time.monotonic()
        limit = max(self.config.searcher_timeout, LOAD_SECONDS)
        if self.alone.look(now if nodes or self.places else None) > limit:
            raise RunFailed(f"no node searches for {limit:.0f} s, and no searcher is here")
        hopeful = [id for id in nodes if len(self.deaths_of[id]) < DEATHS]
        if not self.places and nodes and not hopeful:
            reasons = "\n".join(deaths[-1] for deaths in self.deaths_of.values() if deaths)
            raise RunFailed(f"each node has failed {DEATHS} times in a row:\n{reasons}")
        for id in hopeful:
            if id not in self.far and self.retry_at.get(id, 0.0) < now:
                self.start_node(nodes[id])

    def start_node(self, node: dict) -> None:
        """Start the actor of a node, whose searchers load from now on, and the node's thread."""
        free = [row for row in self.status.nodes if self.status.get(row, "beat") == 0]
        if not free:
            return
        row, id, number = free[0], node["NodeID"], self.status.nodes.index(free[0]) + 1
        options = dict(num_gpus=node["Resources"].get("GPU"), scheduling_strategy=on_node(node))
        start = ray.remote(Node).options(num_cpus=0, **options).remote
        actor = start(
            self.given,
            self.weights.shapes,
            self.weights.slots[0].dtype,
            seeds=(number, int(self.status.get(row, "tokens"))),
            evaluates=not self.places and not self.far and self.evaluated < 0,
            target=self.target,
            environment=self.environment,
        )
        name = f"node {number} ({node['NodeManagerAddress']}, {id[:6]})"
        logs = f"node-{number}"
        if actors := list(Path(self.run_dir, "logs").glob(f"{logs}-*searcher-0.log")):  # earlier
            logs += f"-{len(actors) + 1}"
        earlier = {column: self.status.get(row, column) for column in COUNTED}
        self.far[id] = Far(id, row, name, logs, actor, earlier)
        self.status.beat(row)
        self.start_thread(self.attend, self.far[id])

    def lose(self, far: Far, why: str) -> None:
        """Go on without a node: what was in flight there is lost."""
        has_logs = self.fetch_logs(far, far.actor.logs.remote(), LOGS_SECONDS)
        logs = f"are logs/{far.logs}-*" if has_logs else "could not be fetched"
        ray.kill(far.actor)
        self.status.set(far.row, "beat", 0)
        self.status.set(far.row, "ready", 0)
        self.deaths_of[far.id].append(f"{far.name} {why}")
        self.retry_at[far.id] = time.monotonic() + RETRY_SECONDS
        del self.far[far.id]
        self.say(f"{far.name} {why}; the run goes on without it; its logs {logs}")

    # What goes to a node, and what comes from it

    def attend(self, far: Far) -> None:
        """Attend to a node, in a thread, until it is lost or the run is over."""
        with self.note_failure():
            why = self.exchange(far)
            if not self.status.stop:
                self.lose(far, why)

    def exchange(self, far: Far) -> str:
        """Bring a node what is new, and take what it found. Returns why that came to an end."""
        patience = max(self.config.searcher_timeout, LOAD_SECONDS)  # while its searchers load
        try:
            places = self.answer(far.actor.describe_places.remote(), patience)
            self.say(f"{far.name}: {places}")
            while not self.status.stop:
                self.send_weights(far, patience)
                call = far.actor.collect.remote(GROUPS, self.status.last_step_done)
                self.take(far, self.answer(call, patience))
                if self.status.get(far.row, "ready"):
                    patience = self.config.searcher_timeout
            return "is told to end"
        except RayTaskError as error:
            return f"failed: {str(error.cause or error).strip()}"
        except TimeoutError as error:
            return str(error)
        except RayError as error:
            return f"is lost: {last_line(error)}"

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
        weights, asked = self.weights, max(0, self.weights.evaluation_version)
        evaluates = not self.places and far.id == list(self.far)[0]
        is_asked = evaluates and asked > max(self.evaluated, far.asked_version)
        if weights.version <= far.version and not is_asked or weights.version < 0:
            return
        version, stored = self.store_weights()
        if self.status.stop:
            return
        call = far.actor.take_weights.remote(version, stored, is_asked)
        if self.answer(call, patience):
            far.version, far.asked_version = version, asked if is_asked else far.asked_version

    def store_weights(self) -> "tuple[int, ray.ObjectRef]":
        """Put the newest version into Ray's store, once for all nodes. Returns both."""
        with self.storing:
            if self.stored[0] < self.weights.version:
                self.stored = -1, None  # Ray holds one version at a time, if no transfer needs two
                with self.weights.read(self.pin) as (version, tensors):
                    self.stored = version, ray.put(as_arrays(tensors))
            return self.stored

    def take(self, far: Far, found: Found) -> None:
        """Take over what a node says of itself, and send the trainer what it has found."""
        earlier = far.earlier | {"beat": time.monotonic()}  # a node says how long ago
        for column, value in found.row.items():
            self.status.set(far.row, column, earlier.get(column, 0.0) + value)
        self.write_logs(far, found.logs)
        for item in found.items:
            if isinstance(item, Notice):
                self.say(f"{far.name}: {item.text}")
                continue
            if isinstance(item, Evaluation):
                self.evaluated = max(self.evaluated, item.version)
            else:
                self.deaths_of[far.id].clear()
            self.put(item)

    # The end, and the logs

    def stop(self) -> None:
        """End all searchers, and fetch the logs of those on other nodes."""
        # First the threads: what they ask Ray for after its end would start a cluster anew.
        until = time.monotonic() + GOODBYE_SECONDS
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        goodbyes = [(far, far.actor.stop.remote()) for far in list(self.far.values())]
        super().stop()
        until = time.monotonic() + GOODBYE_SECONDS
        for far, goodbye in goodbyes:
            if not self.fetch_logs(far, goodbye, max(0.1, until - time.monotonic())):
                print(f"{far.name}: its logs could not be fetched", file=sys.stderr)
        self.far.clear()
        ray.shutdown()  # ends the actors, and with each its searchers

    def fetch_logs(self, far: Far, answer: "ray.ObjectRef", seconds: float) -> bool:
        """Write a node's logs among those of the run. Returns False if it does not answer."""
        try:
            self.write_logs(far, ray.get(answer, timeout=seconds))
        except RayError:
            return False
        return True

    def write_logs(self, far: Far, logs: dict[str, str]) -> None:
        """Write a node's logs among those of the run."""
        for name, text in logs.items():
            with suppress(OSError):  # the disk is full: that costs a log
                Path(self.run_dir, "logs", f"{far.logs}-{name}").write_text(text)
