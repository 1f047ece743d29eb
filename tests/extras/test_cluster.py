"""Searchers on further nodes of a Ray cluster: whole runs, and nodes that are lost.

The nodes are Ray's own, on this machine. make test-cluster runs this in a network namespace that
has the loopback interface alone: Ray would bind to this machine's other addresses.
"""

import dataclasses
import os
import queue
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from multiprocessing import resource_tracker
from pathlib import Path

import checked_search
import pytest
import torch
from conftest import PATIENCE, ROOT, Run, flags, living, read, shared_files, steps_of, tba, wait_for

from config import UserError
from launch.command_line import build_config
from launch.files import read_lines
from launch.places import find_places
from launch.supervisor import QUEUE_GROUPS, RunFailed
from runtime.record.metrics import RATE_WINDOW
from weights import SharedWeights

# Clusters and runs of these tests have a token. Ray reads this when it is imported.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
ray = pytest.importorskip("ray", reason="pip install -r requirements/ray.txt")
from ray.cluster_utils import Cluster  # noqa: E402 (only where it is installed)

from extras.nodes import cluster, joining  # noqa: E402 (they import it)

ALONE = [name for _, name in socket.if_nameindex()] == ["lo"]
skip = pytest.mark.skipif(not ALONE, reason="wants a network namespace: make test-cluster")
pytestmark = [pytest.mark.cluster, skip]


class Nodes:
    """A head node, on which the tests start runs, and further ones."""

    def __init__(self, tag: str):
        self.tag, self.further = tag, []
        self.arguments = dict(num_cpus=1, object_store_memory=200 * 2**20)  # bytes
        head = self.arguments | dict(include_dashboard=False)
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.flags = flags(ray=self.cluster.address)

    def add(self, number: int = 1) -> "Nodes":
        self.further += [self.cluster.add_node(**self.arguments) for _ in range(number)]
        return self

    def lose(self) -> None:
        """Kill the raylet of the node that joined first."""
        self.cluster.remove_node(self.further.pop(0), allow_graceful=False)

    def pids(self, file: str, text: bytes) -> list[int]:
        """Of the processes of nodes in whose file of /proc this text stands."""
        found = []
        for pid in living(self.tag):
            with suppress(OSError):
                if text in Path(f"/proc/{pid}/{file}").read_bytes():
                    found.append(pid)
        return found

    def searchers(self) -> list[int]:
        return self.pids("comm", b"tba searcher 0\n")

    def actors(self) -> list[int]:
        return self.pids("cmdline", b"ray::Node")


@pytest.fixture
def nodes(monkeypatch, tmp_path, request):
    tag = f"nodes of {tmp_path}"
    resource_tracker.ensure_running()  # this process's, without the tag
    monkeypatch.setenv("TBA_TEST_TAG", tag)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", getattr(request, "param", "token"))
    # Ray's workers run at 15: beside a trainer at 0 on the same cores they get next to nothing.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    found = Nodes(tag)
    yield found
    found.cluster.shutdown()
    for pid in living(tag):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def find_teaching(steps: list[dict]) -> set[str]:
    """The nodes whose latest tokens a second in these lines of metrics.jsonl are more than 0."""
    pattern = re.compile(r"(node_\d+)_tokens_per_second")
    figures = {name: value for line in steps for name, value in line.items()}
    return {m[1] for m in map(pattern.fullmatch, figures) if m and figures[m[0]] > 0}


@pytest.mark.parametrize("searchers", [0, 1])
def test_searchers_of_all_nodes_teach_arithmetic(searchers, nodes, tmp_path, record_property):
    nodes.add(2)
    run_dir = tmp_path / "run"
    settings = flags(searchers=searchers, initial_responses=4000, steps=1000, output_dir=run_dir)
    cores = os.sched_getaffinity(0)
    # A trainer alone would take all cores; the searchers of the nodes are on the second half.
    os.sched_setaffinity(0, cores if searchers else sorted(cores)[: len(cores) // 2 or 1])
    try:
        tba("arithmetic", *nodes.flags, *settings)
    finally:
        os.sched_setaffinity(0, cores)
    lines, steps = read(run_dir, "metrics.jsonl"), steps_of(run_dir)
    accuracy = lines[-1]["final_accuracy"]
    record_property("final accuracy", accuracy)
    assert accuracy >= 0.95
    assert find_teaching(steps) == {"node_1", "node_2"}
    logs = {path.name for path in (run_dir / "logs").iterdir()}
    assert {"node-1-searcher-0.log", "node-2-searcher-0.log"} <= logs
    assert max(line["mismatch"] for line in steps) < 1e-4
    assert next(line["step"] for line in lines if "accuracy" in line) == 0, "the base model's"


def test_a_node_plays_episodes(nodes, tmp_path):
    settings = flags(searchers=0, steps=50, initial_responses=100, output_dir=tmp_path / "run")
    tba("reach", *nodes.add().flags, *settings)
    assert read(tmp_path / "run", "metrics.jsonl")[-1]["final_moves"] > 1


def training(nodes: Nodes, run_dir: Path, **settings) -> Run:
    """A run that goes on for ever, once groups of all nodes are trained on."""
    settings |= dict(queries_per_batch=8, initial_responses=100, steps=10**6)
    run = Run(run_dir, "arithmetic", *nodes.flags, *flags(**settings))
    names = {f"node_{i + 1}" for i in range(len(nodes.further))}
    run.until(lambda: find_teaching(run.steps()) >= names, "groups of all nodes")
    return run


def node_searches(run: Run, number: int = 1) -> float:
    """Wait until this node has generated something from now on; how long that took."""
    start, rate = time.monotonic(), f"node_{number}_tokens_per_second"
    run.until(
        lambda: time.monotonic() > start + RATE_WINDOW + 3 and run.steps()[-1].get(rate, 0) > 0,
        f"tokens of node {number}",
    )
    return round(time.monotonic() - start, 1)


def evaluated(run: Run) -> list[int]:
    lines = read_lines(run.run_dir / "metrics.jsonl")
    return [line["step"] for line in lines if "accuracy" in line]


def test_node_faults_cost_no_step_and_dead_drivers_leave_nothing(nodes, tmp_path, record_property):
    """In one run: first an actor is stopped for 30 s."""
    with training(nodes.add(2), tmp_path / "run") as run:
        actor = nodes.actors()[0]
        os.kill(actor, signal.SIGSTOP)
        start = run.step()
        time.sleep(30)
        assert run.step() > start, "the others go on"
        os.kill(actor, signal.SIGCONT)
        run.until(lambda: all(0 <= s < 5 for s in of_nodes(run, "silence")), "a heartbeat")

        start = time.monotonic()
        os.kill(nodes.searchers()[0], signal.SIGKILL)
        run.until(lambda: sum(of_nodes(run, "restarts")) == 1, "a restart")
        run.until(lambda: len(nodes.searchers()) == 2, "another searcher")
        node_searches(run, 1)
        node_searches(run, 2)
        seconds = round(time.monotonic() - start, 1)
        record_property("seconds until a killed searcher searched again, at most", seconds)

        nodes.lose()
        run.is_at(run.step() + 20)
        nodes.add()
        node_searches(run)

        wait_for(lambda: len(nodes.searchers()) == 2, "searchers of both nodes")
        made = shared_files([*nodes.actors(), *nodes.searchers()])
        semaphores = {name for name in made if name.startswith("sem.")}
        assert semaphores
        start = time.monotonic()
        run.process.kill()
        out, _ = run.process.communicate(timeout=PATIENCE)
        wait_for(lambda: not nodes.searchers() + nodes.actors(), "their end")
        wait_for(lambda: not semaphores & set(os.listdir("/dev/shm")), "their semaphores")
        record_property("seconds until all had ended", round(time.monotonic() - start, 1))
        run.nothing_is_left()
    assert re.search(r"node \d \(127.0.0.1.*searcher 0 ended with exit code -9", out), out
    # Until Ray has noticed too, another actor may be lost with the same node.
    assert len(set(re.findall(r"(\w+)\) is lost", out))) == 1
    assert "the run goes on without it" in out


def of_nodes(run: Run, name: str) -> list[float]:
    """What the newest line says of each node."""
    return [run.steps()[-1][f"node_{number}_{name}"] for number in (1, 2)]


def test_without_its_only_node_a_run_goes_on_and_uses_the_next(nodes, tmp_path, record_property):
    with training(nodes.add(1), tmp_path / "run", searchers=0, checkpoint_every=10) as run:
        before = run.step()
        nodes.lose()
        run.until(lambda: "node_1_staleness" not in run.steps()[-1], "a step without nodes")
        run.is_at(run.step() + 20)  # on what is in the buffer
        assert run.steps()[-1]["searcher_tokens_per_second"] >= 0
        nodes.add()
        record_property("seconds until the next node searched, at most", node_searches(run))
        record_property("steps meanwhile", run.step() - before)
        run.end()


@pytest.mark.parametrize("searchers", [0, 1])
def test_a_node_killed_in_an_evaluation_costs_nothing(searchers, nodes, tmp_path, record_property):
    # Ten steps take less than an evaluation: one is always under way.
    with training(nodes.add(2), tmp_path / "run", searchers=searchers, eval_every=10) as run:
        for _ in range(2):  # each node that was there
            seen = len(evaluated(run))
            nodes.lose()
            start = time.monotonic()
            nodes.add()
            run.until(lambda seen=seen: len(evaluated(run)) > seen, "an evaluation")
            record_property("seconds to the next evaluation", round(time.monotonic() - start, 1))
            run.until(lambda seen=seen: len(evaluated(run)) > seen + 2, "three evaluations")
        run.is_at(run.step() + 20)
        run.end()
        assert evaluated(run) == sorted(set(evaluated(run)))


def test_which_version_was_evaluated_is_known_whoever_did_it_and_is_there_now():
    def status(searchers: int) -> cluster.ClusterStatus:
        config = build_config(["arithmetic", *flags(ray="local", searchers=searchers)])
        return cluster.ClusterStatus([place.name for place in find_places(config)])

    here, nodes_alone = status(1), status(0)
    here.set("searcher 0", "evaluated", 0)
    nodes_alone.load_state_dict(here.state_dict())
    assert nodes_alone.get(nodes_alone.searchers[0], "evaluated") == 0
    nodes_alone.set(nodes_alone.searchers[0], "evaluated", 7)
    again = status(1)
    again.load_state_dict(nodes_alone.state_dict())
    assert again.get("searcher 0", "evaluated") == 7


def test_a_run_is_resumed_with_another_number_of_nodes(nodes, tmp_path):
    settings = dict(checkpoint_every=10, eval_every=10**6)  # the base model alone
    with training(nodes.add(2), tmp_path / "run", **settings) as run:
        run.is_at(run.step() + 20)
        run.until(lambda: evaluated(run) == [0], "the base model's evaluation")
        run.end()
    step, received = run.step(), run.steps()[-1]["received"]
    nodes.lose()
    with Run(tmp_path / "run", *nodes.flags, "--searchers", 0, resume=True) as again:
        again.until(lambda: again.step() > step + 10, "further steps")
        node_searches(again)
        again.until(lambda: again.steps()[-1]["received"] > received, "new responses")
        again.end()
        assert evaluated(again) == [0]


class Driver:
    """Drives the nodes of a run, as a trainer that only publishes what checked_search.py checks."""

    SHAPES = {"a": (2_000_000,), "b": (3, 2_000_000)}  # 32 MB a version

    def __init__(self, nodes: Nodes, run_dir: Path, target: str = "run", **settings):
        (run_dir / "logs").mkdir(parents=True)
        settings |= dict(searchers=0, output_dir=run_dir)
        config = build_config(["arithmetic", *nodes.flags, *flags(**settings)])
        joining.check(config)
        self.weights = SharedWeights(self.SHAPES, torch.float32, readers=1)
        self.status = cluster.ClusterStatus([place.name for place in find_places(config)])
        here = dataclasses.replace(config, searchers=0), [], self.weights, self.status, str(run_dir)
        self.notices: list[str] = []
        own = f"tests.checked_search:{target}", self.notices.append
        self.cluster = cluster.Cluster(*here, *own, given=config)
        self.version, self.published_at = -1, 0.0
        self.visits: Counter[tuple[int, int, int]] = Counter()  # of (seed of a node, query, epoch)
        self.versions = set()

    def work(self, seconds: float) -> None:
        """Be the trainer for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.cluster.check()
            if time.monotonic() - self.published_at > 0.5:
                self.publish()
            with suppress(queue.Empty):
                while time.monotonic() < deadline:
                    self.take(self.cluster.rollout_queue.get(timeout=0.05))

    def publish(self) -> None:
        self.published_at = time.monotonic()
        self.version += 1
        tensors = [(name, torch.full(s, float(self.version))) for name, s in self.SHAPES.items()]
        assert self.weights.publish(self.version, tensors)

    def take(self, item) -> None:
        seed, visit, were_whole, checksum = item.prompt.tolist()
        assert were_whole, f"a version was seen in part before version {item.version}"
        assert checksum == checked_search.checksum(item.tokens), "a group is torn"
        assert (item.tokens["token"] == item.tokens["behavior_logprob"]).all(), "a group is torn"
        assert 0 <= item.version <= self.version
        self.versions.add(item.version)
        self.visits[seed, item.query_id, visit] += 1

    def work_until(self, condition, what: str) -> float:
        """Work until condition(); how long that took."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() < start + PATIENCE, (f"not in time: {what}", self.notices[-9:])
            self.work(0.2)
        return round(time.monotonic() - start, 1)

    def until_all_send(self, number: int = 2) -> float:
        """Work until so many nodes have sent what is new; how long that took."""
        before, what = self.tokens(), f"groups of {number} nodes"
        return self.work_until(lambda: len(self.tokens() - before) >= number, what)

    def tokens(self) -> Counter[str]:
        return Counter({row: self.status.get(row, "tokens") for row in self.status.searchers})

    def heard(self, text: str) -> int:
        return sum(text in notice for notice in self.notices)

    def close(self) -> None:
        self.status.stop = True
        self.cluster.stop()


@pytest.fixture
def driver(nodes, tmp_path, request):
    with closing(Driver(nodes.add(2), tmp_path / "run", **getattr(request, "param", {}))) as found:
        yield found


@pytest.mark.long
def test_kills_at_random_or_in_a_load_tear_no_group_and_no_version(driver, nodes, record_property):
    rng, slowest, kills = random.Random(0), 0.0, Counter()
    driver.until_all_send()
    while kills.total() < 50:
        what = rng.choice(["raylet", "actor", "searcher"])
        victims = nodes.searchers() if what == "searcher" else nodes.actors()
        if what == "raylet":
            nodes.lose()
            driver.work(rng.uniform(0, 2))
            nodes.add()
        elif victims:
            os.kill(rng.choice(victims), signal.SIGKILL)
        kills[what] += what == "raylet" or bool(victims)
        if rng.random() < 0.6:
            slowest = max(slowest, driver.until_all_send())
        driver.work(rng.uniform(0, 1))
    driver.until_all_send()
    record_property("kills", dict(kills))
    record_property("slowest until both nodes sent again, s", slowest)
    record_property("groups, versions seen", (driver.visits.total(), len(driver.versions)))
    assert len(driver.versions) > 50
    # A searcher that is started again repeats what it had sent and not noted.
    again = sum(count - 1 for count in driver.visits.values())
    record_property("queries from which groups came twice in an epoch of a node", again)
    assert again <= kills["searcher"]
    for _ in range(3):  # a node that gets weights
        deadline = time.monotonic() + PATIENCE
        driver.publish()
        while driver.cluster.stored[0] < driver.version:  # then it is on its way
            assert time.monotonic() < deadline
            time.sleep(0.001)
        nodes.lose()
        record_property("s until the other sent", driver.until_all_send(1))
        nodes.add()
        record_property("s until both sent", driver.until_all_send())
    newest = driver.version
    # Ray asks for what it lost again, after some seconds.
    driver.work_until(lambda: max(driver.versions) > newest, "a newer version")


def test_a_node_with_other_packages_is_named_thrice_and_others_go_on(driver, nodes, monkeypatch):
    monkeypatch.setattr(cluster, "RETRY_SECONDS", 1.0)
    driver.until_all_send()
    driver.cluster.environment |= {"torch": "1.0"}
    nodes.add()
    driver.work_until(lambda: driver.heard("this node has torch") >= 3, "three refusals")
    driver.work(10 * cluster.RETRY_SECONDS)
    driver.until_all_send()
    assert driver.heard("this node has torch") == 3


@pytest.mark.parametrize("driver", [dict(searcher_timeout=8)], indirect=True)
def test_searchers_of_nodes_wait_where_nobody_takes_their_groups(driver):
    driver.until_all_send()

    def found_in(seconds: float) -> float:
        before, deadline = driver.tokens().total(), time.monotonic() + seconds
        while time.monotonic() < deadline:  # the trainer takes nothing
            driver.cluster.check()
            time.sleep(0.2)
        return driver.tokens().total() - before

    assert found_in(1) > 0
    found_in(20)
    assert found_in(5) == 0
    driver.until_all_send()
    # What they found waits in the trainer's queue, or at a node: for its driver, or its supervisor.
    found = driver.tokens().total() / (checked_search.RESPONSES * checked_search.TOKENS)
    room = QUEUE_GROUPS + 2 * (cluster.GROUPS + 2 * QUEUE_GROUPS + 2)
    assert found - driver.visits.total() <= room
    assert not driver.heard("no heartbeat"), driver.notices


def test_a_run_with_no_searcher_or_failing_ones_ends_and_says_so(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "LOAD_SECONDS", 2.0)
    with closing(Driver(nodes, tmp_path / "run", searcher_timeout=1)) as driver:
        assert driver.status.searchers == ["searchers of node 1"]
        assert driver.status.health("searchers of node 1") == "no node is there"
        assert driver.status.figures(0) == {}
        with pytest.raises(RunFailed, match="no node searches for 2 s, and no searcher is here"):
            driver.work(PATIENCE)
    monkeypatch.setattr(cluster, "LOAD_SECONDS", PATIENCE)
    monkeypatch.setattr(cluster, "RETRY_SECONDS", 1.0)
    failed = r"each node has failed 3 times in a row:\nnode 1 .*failed: searcher 0"
    with closing(Driver(nodes.add(1), tmp_path / "failing", target="give_up")) as driver:
        with pytest.raises(RunFailed, match=failed):
            driver.work(PATIENCE)
        assert [len(deaths) for deaths in driver.cluster.deaths_of.values()] == [3]


@pytest.mark.parametrize(
    "address, written, expected",
    [
        ("127.0.0.1:9", None, "--ray 127.0.0.1:9: nobody answers there"),
        ("somewhere", None, "--ray is 'somewhere': it is auto, local or host:port"),
        ("auto", None, "--ray auto: no cluster was found"),
        ("auto", "127.0.0.1:9", "--ray 127.0.0.1:9: nobody answers there"),
    ],
)
def test_no_cluster_is_one_line(address, written, expected, record_property, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    if written:  # by a `ray start` whose cluster has ended without `ray stop`
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(written)
    start = time.monotonic()
    # In a process namespace of its own: Ray looks for clusters among all processes.
    own = ["unshare", "-pf", "--mount-proc"]
    result = tba("arithmetic", "--ray", address, code=2, prefix=own)
    record_property("seconds", round(time.monotonic() - start, 1))
    assert result.stderr.startswith(f"error: {expected}") and result.stderr.count("\n") == 1


ANOTHER = "error: --ray .*: its token is not this machine's .RAY_AUTH_MODE is '{}' here.: .*\n"


@pytest.mark.parametrize("nodes", ["disabled"], indirect=True)
def test_a_cluster_without_a_token_warns_and_refuses_one_and_a_local_one_has_one(nodes, tmp_path):
    to_no_model = "arithmetic", "--model", tmp_path / "none", "--ray"
    result = tba(*to_no_model, nodes.cluster.address, code=2)
    assert "--model" in result.stderr
    warning = f"warning: --ray {nodes.cluster.address}: whoever reaches it can run code there"
    assert result.stdout.startswith(warning) and result.stdout.count("warning") == 1
    with_token = dict(code=2, prefix=["env", "RAY_AUTH_MODE=token"])
    result = tba(*to_no_model, nodes.cluster.address, **with_token)
    assert re.fullmatch(ANOTHER.format("token"), result.stderr) and not result.stdout, result
    unset = ["env", "-u", "RAY_AUTH_MODE", "-u", "RAY_AUTH_TOKEN", f"HOME={tmp_path}"]
    result = tba(*to_no_model, "local", code=2, prefix=unset)
    assert "--model" in result.stderr and "warning" not in result.stdout
    assert (tmp_path / ".ray" / "auth_token").exists()  # Ray made one, and asks for it


def test_who_has_not_the_token_runs_nothing_and_a_node_with_other_packages_is_named(nodes):
    nodes.add(1)
    nodes.cluster.wait_for_nodes()
    code = f"import ray; ray.init({nodes.cluster.address!r})\n"
    client = [sys.executable, "-c", code + "print(ray.get(ray.remote(lambda: 'ran').remote()))"]
    assert subprocess.check_output(client, text=True) == "ran\n"
    without = ["env", "RAY_AUTH_MODE=disabled"]
    once = [*without, "RAY_NUM_REDIS_GET_RETRIES=1"]
    refused = subprocess.run([*once, *client], capture_output=True, text=True)
    assert refused.stdout == "" and "InvalidAuthToken" in refused.stderr
    for mode, prefix in ("disabled", without), ("token", ["env", "RAY_AUTH_TOKEN=another"]):
        result = tba("arithmetic", *nodes.flags, code=2, prefix=prefix)
        assert re.fullmatch(ANOTHER.format(mode), result.stderr) and not result.stdout, result
    wanted = joining.describe_environment() | {"torch": "1.0"}
    lacking = r"--ray: node 127.0.0.1 \(\w+\) has torch .*, the driver's machine has 1.0"
    sys.path.insert(0, str(ROOT))
    try:
        ray.init(address=nodes.cluster.address, log_to_driver=False)
        (node,) = joining.other_nodes()
        with pytest.raises(UserError, match=lacking):
            joining.check_node(node, wanted)
    finally:
        ray.shutdown()
