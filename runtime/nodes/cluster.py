"""Searchers on further nodes of a Ray cluster (--ray); the trainer stays where it is.

Each node is a Supervisor with its searchers (node.py beside this). The driver, which is the process
that supervises this machine's searchers, attends to the nodes in a thread: it brings each the
newest weights, one version at a time, and keeps one call outstanding that collects what the node
found. Nodes may join and be lost: what is lost is what was in flight there.
"""

import sys
import threading
import time
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError

from config import LOAD_SECONDS, Config
from runtime.nodes.joining import last_line, on_node, other_nodes
from runtime.nodes.node import COUNTED, Found, Node, as_arrays, describe_environment
from runtime.processes.places import Place
from runtime.processes.supervisor import RunFailed, Supervisor
from runtime.record.live import RATE_WINDOW, rate_of
from runtime.record.timeline import parse_lines, to_json
from runtime.transport.board import Board, Watchdog
from runtime.transport.messages import Evaluation, Notice
from weights import SharedWeights

LOOK_SECONDS = 1.0  # between two looks at which nodes there are
WAIT_SECONDS = 0.1  # for an answer, before it is looked whether there are new weights
LOGS_SECONDS = 1.0  # for the logs of a node that has failed
GOODBYE_SECONDS = 8.0  # for a node to end its searchers and send its logs
RETRY_SECONDS = 10.0  # before a node whose actor died gets another one
DEATHS = 3  # actors of a node in a row that found nothing: it is given up
MAX_NODES = 64  # rows of the board
GROUPS = 32  # that a node sends at once


class ClusterBoard(Board):
    """The trainer's board: a row for each searcher of this machine, one for each further node."""

    COLUMNS = (*Board.COLUMNS, "tokens_per_second", "staleness")  # of nodes
    FIGURES = ("tokens_per_second", "staleness", "restarts")

    def __init__(self, names: list[str]):
        """names: of the processes of this machine."""
        self.nodes = [f"searchers of node {number}" for number in range(1, MAX_NODES + 1)]
        super().__init__([*names, *self.nodes])
        self.words[-MAX_NODES:, self.COLUMNS.index("beat")] = 0  # nobody is there

    def beats(self) -> dict[str, float]:
        """Return the last signs of life: of searchers here, and of the nodes that are there."""
        beats = self.words[:, self.COLUMNS.index("beat")].tolist()
        return {self.names[i]: beats[i] for i in self.searching if beats[i]}

    @property
    def searchers(self) -> list[str]:
        """This machine's searchers, and the nodes that are there; where there are none, node 1."""
        return list(self.beats()) or self.nodes[:1]

    def sign_of_life(self, name: str) -> str:
        return super().sign_of_life(name) if self.get(name, "beat") else "no node is there"

    def figures(self) -> dict[str, float]:
        """What each node that is there does, for metrics.jsonl."""
        beats, figures = self.beats(), {}
        for row in self.nodes:
            if beat := beats.get(row):
                node = f"node_{row.split()[-1]}"
                figures |= {f"{node}_{name}": self.get(row, name) for name in self.FIGURES}
                figures[f"{node}_silence"] = time.monotonic() - beat
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
    row: str  # of the board
    name: str  # for people
    logs: str  # what the names of its logs begin with
    actor: "ray.actor.ActorHandle"
    earlier: dict[str, float]  # what other actors in this row have counted
    call: "ray.ObjectRef | None" = None  # the collect() that is under way
    watchdog: Watchdog = field(default_factory=Watchdog)  # of that call
    transfer: "ray.ObjectRef | None" = None  # the take_weights() that is under way
    version: int = -1  # that it was sent
    asked_version: int = -1  # whose evaluation it was asked for
    clock: float = 0.0  # its time.monotonic() minus this machine's
    tokens: deque[tuple[float, float]] = field(default_factory=deque)  # (time, generated so far)

    @property
    def under_way(self) -> "list[ray.ObjectRef]":
        return [ref for ref in (self.call, self.transfer) if ref]


class Cluster(Supervisor):
    """The searchers of this machine, as Supervisor has them, and those of all further nodes.

    given: the configuration as the user gave it, with the model's name and not its directory here.
    What nodes do is asked and answered in a thread: a large version takes seconds.
    """

    def __init__(
        self,
        config: Config,
        places: list[Place],
        weights: SharedWeights,
        board: ClusterBoard,
        run_dir: str,
        target: str,
        given: Config,
    ):
        self.given, self.pin = given, len(places)
        self.far: dict[str, Far] = {}  # by Ray's id of the node
        # Of what a node's actors died, since its last group.
        self.deaths_of: dict[str, list[str]] = defaultdict(list)
        self.retry_at: dict[str, float] = {}
        # The newest version in Ray's store, and the newest reference policy.
        self.stored: tuple[int, ray.ObjectRef | None] = -1, None
        self.stored_reference: tuple[int, ray.ObjectRef | None] = 0, None
        # The newest version whose evaluation has come; of a run that is resumed, before it.
        self.evaluated = int(board.words[:, board.COLUMNS.index("evaluated")].max())
        self.alone = Watchdog()  # no node is there
        super().__init__(config, places, weights, board, run_dir, target)
        self.environment = describe_environment()
        self.failure: Exception | None = None
        self.attendant = threading.Thread(target=self.attend, daemon=True)
        self.attendant.start()

    def check(self) -> None:
        """Watch over this machine's searchers, and over all nodes. Raises RunFailed."""
        super().check()
        if isinstance(self.failure, RunFailed):
            raise self.failure
        if self.failure:
            raise RunFailed(f"nodes cannot be attended to: {self.failure!r}") from self.failure

    def attend(self) -> None:
        """Attend to all nodes, in a thread, until the run is over."""
        looked_at = -LOOK_SECONDS
        try:
            while not self.board.stop:
                if time.monotonic() - looked_at > LOOK_SECONDS:
                    looked_at = time.monotonic()
                    self.look_for_nodes()
                under_way = [ref for far in self.far.values() for ref in far.under_way]
                if under_way:
                    ray.wait(under_way, timeout=WAIT_SECONDS)  # for the first
                else:
                    time.sleep(WAIT_SECONDS)
                for far in list(self.far.values()):
                    try:
                        self.serve(far)
                    except RayTaskError as error:
                        self.lose(far, f"failed: {str(error.cause or error).strip()}")
                    except RayError as error:
                        self.lose(far, f"is lost: {last_line(error)}")
        except Exception as error:  # for check(), in the thread that watches
            self.failure = error

    # Nodes that come and go

    def look_for_nodes(self) -> None:
        """Start an actor on each node that has none; lose those that Ray has lost."""
        nodes, now = {node["NodeID"]: node for node in other_nodes()}, time.monotonic()
        for id in [id for id in self.far if id not in nodes]:
            self.lose(self.far[id], "is lost: its Ray has ended")
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
        """Start the actor of a node; its searchers load from now on."""
        free = [row for row in self.board.nodes if self.board.get(row, "beat") == 0]
        if not free:
            return
        row, id, index = free[0], node["NodeID"], self.board.nodes.index(free[0])
        seeds = index, int(self.board.get(row, "tokens"))
        evaluates = not self.places and not self.far and self.evaluated < 0
        options = dict(num_cpus=0, scheduling_strategy=on_node(node), max_restarts=0)
        if gpus := node["Resources"].get("GPU"):
            options["num_gpus"] = gpus
        slots = self.weights.shapes, self.weights.slots[0].dtype
        settings = seeds, evaluates, self.target, self.environment
        actor = ray.remote(Node).options(**options).remote(self.given, *slots, *settings)
        name = f"node {index + 1} ({node['NodeManagerAddress']}, {id[:6]})"
        logs, again = f"node-{index + 1}", 1
        while any(Path(self.run_dir, "logs").glob(f"{logs}-searcher*")):  # of an earlier actor
            again += 1
            logs = f"node-{index + 1}-{again}"
        earlier = {column: self.board.get(row, column) for column in COUNTED}
        self.far[id] = Far(id, row, name, logs, actor, earlier)
        for column in ("ready", "tokens_per_second", "staleness"):
            self.board.set(row, column, 0)
        self.board.beat(row)

    def lose(self, far: Far, why: str) -> None:
        """Go on without a node: what was in flight there is lost."""
        has_logs = self.fetch_logs(far, far.actor.logs.remote(), LOGS_SECONDS)
        logs = f"are logs/{far.logs}-*" if has_logs else "could not be fetched"
        self.say(f"{far.name} {why}; the run goes on without it; its logs {logs}")
        ray.kill(far.actor)
        self.board.set(far.row, "beat", 0)
        self.board.set(far.row, "ready", 0)
        self.deaths_of[far.id].append(f"{far.name} {why}")
        self.retry_at[far.id] = time.monotonic() + RETRY_SECONDS
        del self.far[far.id]

    # What goes to a node, and what comes from it

    def serve(self, far: Far) -> None:
        """Take what a node has answered, and ask it for more."""
        refs = far.under_way
        done = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        if far.transfer in done:
            was_taken, far.transfer = ray.get(far.transfer), None
            if not was_taken:  # its searchers still read all slots: the newest once more
                far.version = far.asked_version = -1
        if far.call in done:
            found, far.call = ray.get(far.call), None
            self.take(far, found)
        if far.transfer is None:
            self.send_weights(far)
        if far.call is None:
            far.call = far.actor.collect.remote(GROUPS, self.board.last_step_done)
        staleness = max(0, self.weights.version) - self.board.get(far.row, "version")
        self.board.set(far.row, "staleness", staleness)
        silence, limit = far.watchdog.look(far.call), self.config.searcher_timeout
        if not self.board.get(far.row, "ready"):
            limit = max(limit, LOAD_SECONDS)
        if silence > limit:
            self.lose(far, f"gave no sign of life for {silence:.0f} s (--searcher_timeout)")

    def take(self, far: Far, found: Found) -> None:
        """Take over what a node says of itself, and send the trainer what it has found.

        Where the trainer's queue is full all nodes wait: none is asked for more.
        """
        board, now = self.board, time.monotonic()
        far.clock = found.clock - now
        if not far.tokens:  # it is heard for the first time
            self.say(f"{far.name}: {', '.join(found.places)}")
        row = found.row | {"beat": found.row["beat"] - far.clock}
        for column, value in row.items():
            board.set(far.row, column, far.earlier.get(column, 0.0) + value)
        far.tokens.append((now, board.get(far.row, "tokens")))
        board.set(far.row, "tokens_per_second", rate_of(far.tokens, RATE_WINDOW))
        self.write_logs(far, found.logs)
        for item in found.items:
            if isinstance(item, Notice):
                item = Notice(f"{far.name}: {item.text}")
            elif isinstance(item, Evaluation):
                self.evaluated = max(self.evaluated, item.version)
            else:
                self.deaths_of[far.id].clear()
            self.put(item)

    def send_weights(self, far: Far) -> None:
        """Begin to send a node the newest version, if it has not got that."""
        weights, is_first = self.weights, far is next(iter(self.far.values()))
        asked = max(0, weights.evaluation_version)
        evaluates = not self.places and is_first
        is_asked = evaluates and asked > max(self.evaluated, far.asked_version)
        if weights.version <= far.version and not is_asked or weights.version < 0:
            return
        if self.stored[0] < weights.version:
            self.stored = -1, None  # Ray holds one version at a time, if no transfer needs two
            with weights.read(self.pin) as (version, tensors):
                self.stored = version, ray.put(as_arrays(tensors))
        if weights.reference_version > self.stored_reference[0]:
            with weights.read_reference(self.pin) as (version, tensors):
                if version > 0:  # it is not being written
                    self.stored_reference = version, ray.put(as_arrays(tensors))
        version, stored = self.stored
        reference_version, reference = self.stored_reference
        far.transfer = far.actor.take_weights.remote(
            version, stored, is_asked, reference_version, reference
        )
        far.version, far.asked_version = version, asked if is_asked else far.asked_version

    # The end, and the logs

    def stop(self, deadline: float) -> None:
        """End all searchers, and fetch the logs of those on other nodes."""
        self.attendant.join(GOODBYE_SECONDS)
        goodbyes = [(far, far.actor.stop.remote()) for far in self.far.values()]
        super().stop(deadline)
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
        """Write a node's logs among those of the run; spans by this machine's clock."""
        for name, text in logs.items():
            if name.endswith(".spans.jsonl"):
                text = shifted(text, far.clock)
            with suppress(OSError):  # the disk is full: that costs a log
                Path(self.run_dir, "logs", f"{far.logs}-{name}").write_text(text)


def shifted(text: str, clock: float) -> str:
    """Return lines of spans by this machine's clock, without one that was cut off."""
    spans = parse_lines(text.encode())
    return "".join(to_json((what, start - clock, end - clock)) + "\n" for what, start, end in spans)
