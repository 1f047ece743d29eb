"""Searchers on further nodes of a Ray cluster (--ray); the trainer stays where it is.

Each node is a Supervisor with its searchers (node.py beside this). The driver, which is the process
that supervises this machine's searchers, attends to the nodes in a thread: it brings each the
newest weights, one version at a time, and keeps one call outstanding that collects what the node
found. Nodes may join and be lost: what is lost is what was in flight there.
"""

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from buffer import Group
from config import LOAD_SECONDS, Config, UserError
from runtime.nodes.node import Found, Node, as_arrays, describe_environment, find_difference
from runtime.processes.places import Place
from runtime.processes.supervisor import RunFailed, Supervisor
from runtime.transport.board import Board, Watchdog
from runtime.transport.messages import Evaluation, Notice
from weights import SharedWeights

try:
    import ray
    from ray._private.services import get_ray_address_from_environment
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise UserError(
        f"--ray needs Ray, and that cannot be imported ({error}): "
        "pip install -r requirements-ray.txt"
    ) from error

CONNECT_SECONDS = 5.0  # for an address to answer
LOOK_SECONDS = 1.0  # between two looks at which nodes there are
WAIT_SECONDS = 0.1  # for an answer, before it is looked whether there are new weights
LOGS_SECONDS = 1.0  # for the logs of a node that has failed
GOODBYE_SECONDS = 8.0  # for a node to end its searchers and send its logs
RETRY_SECONDS = 10.0  # before a node whose actor died gets another one
DEATHS = 3  # actors of a node in a row that found nothing: it is given up
MAX_NODES = 64  # rows of the board
GROUPS = 32  # that a node sends at once
COUNTED = ("tokens", "busy", "restarts", "long_prompts", "unscored_groups")  # of the board
FIGURES = ("tokens_per_second", "staleness", "restarts", "silence")
RATE_SECONDS = 10.0  # over which tokens per second are taken


def connect(config: Config) -> None:
    """Join the cluster, and compare what is installed on its nodes. Raises UserError."""
    options = dict(include_dashboard=False) if config.ray == "local" else {}
    try:
        check_address(config.ray)
        ray.init(address=config.ray, logging_level="ERROR", log_to_driver=False, **options)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"--ray {config.ray}: no cluster was found: {reason}") from error
    here, nodes = describe_environment(), other_nodes()
    for node in nodes:
        check_node(node, here)
    print(f"further nodes in the Ray cluster: {len(nodes)}", flush=True)


def check_address(address: str) -> None:
    """Refuse a host:port where nobody answers or the token is not ours; warn where it has none."""
    if address == "auto":  # RAY_ADDRESS, or the cluster that was last started on this machine
        address = get_ray_address_from_environment(address, None)
    if address == "local":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--ray is {address!r}: it is auto, local or host:port")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"--ray {address}: nobody answers there ({error}): see `ray status` on that machine"
        ) from error
    # Unset is disabled: for "auto" Ray would else take up a token that it finds.
    mode = os.environ.setdefault("RAY_AUTH_MODE", "disabled").lower()
    answers = {each: ask(address, each) for each in {mode, "disabled"}}
    see, is_open = "see More than one machine in docs/operations.md", not answers["disabled"]
    # Who has a token is let into a cluster without one, but can start no actor there.
    if mode == "token" if is_open else "uthenticat" in answers[mode]:
        token = f"its token is not this machine's (RAY_AUTH_MODE is {mode!r} here)"
        raise UserError(f"--ray {address}: {token}: {see}")
    if is_open:
        print(f"warning: --ray {address}: whoever reaches it can run code there: {see}", flush=True)


def ask(address: str, mode: str) -> str:
    """Return "" if the cluster lets in a client with this RAY_AUTH_MODE, else what Ray says.

    In a process of its own: there Ray prints, and aborts where it finds no token.
    """
    code = f"from ray._raylet import GcsClient; GcsClient(address={address!r})"
    environment = os.environ | {"RAY_AUTH_MODE": mode}
    command = [sys.executable, "-Pc", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    return result.stderr if result.returncode else ""


def other_nodes() -> list[dict]:
    """Return the living nodes of the cluster but this one."""
    own = ray.get_runtime_context().get_node_id()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]


def on_node(node: dict) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def check_node(node: dict, here: dict[str, str]) -> None:
    """Raise UserError for a node that has something else installed than this machine."""
    name = f"node {node['NodeManagerAddress']} ({node['NodeID'][:6]})"
    asked = ray.remote(describe_environment).options(
        num_cpus=0, scheduling_strategy=on_node(node), max_retries=0
    )
    try:
        there = ray.get(asked.remote(), timeout=LOAD_SECONDS)
    except RayError as error:
        if node["NodeID"] not in [other["NodeID"] for other in other_nodes()]:
            return  # it has just been lost
        raise UserError(
            f"--ray: {name} cannot run the project, which must lie at the same path there, with "
            f"the same environment: {last_line(error)}"
        ) from error
    if difference := find_difference(there, here):
        raise UserError(f"--ray: {name} has {difference}")


def last_line(error: Exception) -> str:
    """The end of what Ray says: what was raised, if anything was."""
    return str(error).strip().rpartition("\n")[2]


class ClusterBoard(Board):
    """The trainer's board: a row for each searcher of this machine, one for each further node."""

    def __init__(self, places: list[Place]):
        self.nodes = [f"searchers of node {number}" for number in range(1, MAX_NODES + 1)]
        super().__init__([*(place.name for place in places), *self.nodes])
        self.node_figures = torch.zeros(MAX_NODES, len(FIGURES)).share_memory_()
        self.beats = self.words[:, self.COLUMNS.index("beat")]
        self.beats[-MAX_NODES:] = 0  # nobody is there

    @property
    def searchers(self) -> list[str]:
        """This machine's searchers, and the nodes that are there; where there are none, node 1."""
        beats = self.beats.tolist()
        there = [self.names[i] for i in self.searching if beats[i]]
        return there or self.nodes[:1]

    def sign_of_life(self, name: str) -> str:
        return super().sign_of_life(name) if self.get(name, "beat") else "no node is there"

    def figures(self) -> dict[str, float]:
        """What each node that is there does, for metrics.jsonl."""
        beats, figures = self.beats.tolist()[-MAX_NODES:], self.node_figures.tolist()
        return {
            f"node_{number}_{name}": value
            for number, (beat, values) in enumerate(zip(beats, figures), 1)
            if beat
            for name, value in zip(FIGURES, values)
        }

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
    log_call: "ray.ObjectRef | None" = None  # the logs() that is under way
    version: int = -1  # that it was sent
    asked_version: int = -1  # whose evaluation it was asked for
    is_ready: bool = False  # its searchers have loaded
    was_heard: bool = False
    clock: float = 0.0  # its time.monotonic() minus this machine's
    tokens: deque = field(default_factory=deque)  # (time, generated so far)

    @property
    def under_way(self) -> "list[ray.ObjectRef]":
        return [ref for ref in (self.call, self.transfer, self.log_call) if ref]


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
        self.deaths_of: dict[str, int] = {}  # of a node's actors, since its last group
        self.reasons: dict[str, str] = {}  # of the last of these deaths
        self.retry_at: dict[str, float] = {}
        # The newest version in Ray's store, and the newest reference policy.
        self.stored: tuple[int, ray.ObjectRef | None] = -1, None
        self.stored_reference: tuple[int, ray.ObjectRef | None] = 0, None
        # The newest version whose evaluation has come; of a run that is resumed, before it.
        self.evaluated = int(board.words[:, board.COLUMNS.index("evaluated")].max())
        self.alone = Watchdog()  # no node is there
        self.outbox: deque[Group | Evaluation | Notice] = deque()
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
                    self.write_figures()
                self.send()
                under_way = [ref for far in self.far.values() for ref in far.under_way]
                if under_way and not self.outbox:
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
        hopeful = [id for id in nodes if self.deaths_of.get(id, 0) < DEATHS]
        if not self.places and nodes and not hopeful:
            reasons = "\n".join(self.reasons.values())
            raise RunFailed(f"each node has failed {DEATHS} times in a row:\n{reasons}")
        for id in hopeful:
            if id not in self.far and self.retry_at.get(id, 0.0) < now:
                self.start_node(nodes[id])

    def start_node(self, node: dict) -> None:
        """Start the actor of a node; its searchers load from now on."""
        free = [row for row in self.board.nodes if self.board.get(row, "beat") == 0]
        if not free:
            return
        row, id = free[0], node["NodeID"]
        seeds = self.board.nodes.index(row), int(self.board.get(row, "tokens"))
        evaluates = not self.places and not self.far and self.evaluated < 0
        options = dict(num_cpus=0, scheduling_strategy=on_node(node), max_restarts=0)
        if gpus := node["Resources"].get("GPU"):
            options["num_gpus"] = gpus
        slots = self.weights.shapes, self.weights.slots[0].dtype
        settings = seeds, evaluates, self.target, self.environment
        actor = ray.remote(Node).options(**options).remote(self.given, *slots, *settings)
        name = f"node {seeds[0] + 1} ({node['NodeManagerAddress']}, {id[:6]})"
        logs, again = f"node-{seeds[0] + 1}", 1
        while any(Path(self.run_dir, "logs").glob(f"{logs}-searcher*")):  # of an earlier actor
            again += 1
            logs = f"node-{seeds[0] + 1}-{again}"
        earlier = {column: self.board.get(row, column) for column in COUNTED}
        self.far[id] = Far(id, row, name, logs, actor, earlier)
        self.board.node_figures[self.board.nodes.index(row)] = 0
        self.board.set(row, "ready", 0)
        self.board.beat(row)

    def lose(self, far: Far, why: str) -> None:
        """Go on without a node: what was in flight there is lost."""
        has_logs = self.fetch_logs(far, far.actor.logs.remote(), LOGS_SECONDS)
        logs = f"are logs/{far.logs}-*" if has_logs else "could not be fetched"
        self.say(f"{far.name} {why}; the run goes on without it; its logs {logs}")
        ray.kill(far.actor)
        self.board.set(far.row, "beat", 0)
        self.board.set(far.row, "ready", 0)
        self.deaths_of[far.id] = self.deaths_of.get(far.id, 0) + 1
        self.reasons[far.id] = f"{far.name} {why}"
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
        if far.log_call in done:
            logs, far.log_call = ray.get(far.log_call), None
            self.write_logs(far, logs)
        if far.transfer is None:
            self.send_weights(far)
        if far.call is None and not self.outbox:
            far.call = far.actor.collect.remote(GROUPS, self.board.last_step_done)
        silence = far.watchdog.look(far.call) if far.call else 0.0
        limit = self.config.searcher_timeout
        if silence > (limit if far.is_ready or limit > LOAD_SECONDS else LOAD_SECONDS):
            self.lose(far, f"gave no sign of life for {silence:.0f} s (--searcher_timeout)")

    def take(self, far: Far, found: Found) -> None:
        """Take over what a node has found, and what it says of itself."""
        board, now = self.board, time.monotonic()
        far.clock = found.clock - now
        rows = found.rows.values()
        if not far.was_heard:
            far.was_heard = True
            self.say(f"{far.name}: {', '.join(found.places)}")
        far.is_ready = far.is_ready or all(row["ready"] for row in rows)
        for column in COUNTED:
            number = sum(row[column] for row in rows)
            # Of busy seconds the mean: the row counts as one searcher.
            mean = number / len(rows) if column == "busy" else number
            board.set(far.row, column, far.earlier[column] + mean)
        board.set(far.row, "version", min(row["version"] for row in rows))
        board.set(far.row, "ready", all(row["ready"] for row in rows))
        board.set(far.row, "beat", now - max(found.silence.values()))
        far.tokens.append((now, board.get(far.row, "tokens")))
        for item in found.items:
            if isinstance(item, Notice):
                item = Notice(f"{far.name}: {item.text}")
                far.log_call = far.log_call or far.actor.logs.remote()
            elif isinstance(item, Evaluation):
                self.evaluated = max(self.evaluated, item.version)
            else:
                self.deaths_of[far.id] = 0
            self.outbox.append(item)
        self.send()

    def send(self) -> None:
        """Send what came from nodes to the trainer, as far as its queue has room.

        No node is asked for more until all of it is sent.
        """
        while self.outbox:
            try:
                self.rollout_queue.put_nowait(self.outbox[0])
            except queue.Full:
                return
            self.outbox.popleft()

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

    # What a person sees

    def say(self, text: str) -> None:
        self.outbox.append(Notice(text))

    def write_figures(self) -> None:
        """Put on the board what each node does, for metrics.jsonl."""
        for far in self.far.values():
            while len(far.tokens) > 2 and far.tokens[0][0] < far.tokens[-1][0] - RATE_SECONDS:
                far.tokens.popleft()
            if len(far.tokens) < 2:
                continue
            (start, before), (end, after), board = far.tokens[0], far.tokens[-1], self.board
            board.node_figures[board.nodes.index(far.row)] = torch.tensor(
                [
                    (after - before) / (end - start),
                    max(0, self.weights.version) - board.get(far.row, "version"),
                    board.get(far.row, "restarts"),
                    board.silence(far.row),
                ]
            )

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
                text = "".join(shifted(line, far.clock) for line in text.splitlines())
            with suppress(OSError):  # the disk is full: that costs a log
                Path(self.run_dir, "logs", f"{far.logs}-{name}").write_text(text)


def shifted(line: str, clock: float) -> str:
    """A line of spans by this machine's clock; "" for one that was cut off."""
    try:
        what, start, end = json.loads(line)
    except ValueError:
        return ""
    return json.dumps((what, start - clock, end - clock)) + "\n"
