"""Measure what Ray costs: searchers on further nodes (--ray), against as many on this machine.

    python benchmarks/cluster.py                # 25 minutes on 2 cores, 18 GB of memory
    python benchmarks/cluster.py --quick        # one size of weights, two alternations

The nodes are Ray's own, all on this machine: where a network would be is its loopback interface.
What is on a node, the driver, the queues and the weights are the real ones.

groups     searchers that send groups as fast as they are taken: 12 responses of 4 tokens ("short"),
           24 of 121, as GSM8K's ("long")
versions   new weights of 0.13 M parameters without a pause; each searcher says what it has read
transfer   one version of 10 M, 100 M, 1 B parameters in bf16: from the end of its publish until the
           searcher has copied all of it, and the driver knows
runs       the arithmetic task with one searcher, here or on a further node: the trainer and the
           process that supervises have one core, the searcher (and its node) the other

Writes benchmarks/results/cluster.md; with --quick benchmarks/results/quick/.
"""

import contextlib
import dataclasses
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
from common import ROOT, arguments, as_flags, save, table
from overlap import steps_of
from ray.cluster_utils import Cluster as Nodes

from buffer import Group
from config import Config
from runtime.command_line import build_config
from runtime.nodes import cluster, joining
from runtime.processes.places import find_places, searchers_of
from runtime.processes.supervisor import Supervisor
from runtime.record.timeline import trainer_busy
from runtime.transport.board import Board
from weights import SharedWeights

NODES = (1, 2, 4)
SIZES = {"10 M": 10_000_000, "100 M": 100_000_000, "1 B": 1_000_000_000}
POLICIES = {"GSM8K, 1.1 B": 1.1e9, "MATH, 7.6 B": 7.6e9}  # parameters, for the calculation
NETWORKS = {"10 Gb/s": 1.25e9, "25 Gb/s": 3.125e9}  # bytes a second
STORE = 200 * 2**20  # bytes of a node's object store, if the weights are small
LAYER = 50_000_000  # parameters of a tensor at most, as in a model
TRANSFERS = 5
ALTERNATIONS, STEPS = 5, 1500
RUN = as_flags(steps=STEPS, initial_responses=4000, eval_every=0, checkpoint_every=0)


def short(*arguments) -> None:
    """Search, without a model: short groups, as fast as they are taken."""
    search(*arguments, group=make_group(12, 4), always=True)


def long(*arguments) -> None:
    search(*arguments, group=make_group(24, 121), always=True)


def answer(*arguments) -> None:
    """Copy each version, and send a group that says so."""
    search(*arguments, group=make_group(1, 1), always=False)


def search(
    config: Config,
    rank: int,
    pin: int,
    row: str,
    weights: SharedWeights,
    groups: torch.multiprocessing.Queue,
    board: Board,
    run_dir: str,
    group: Group,
    always: bool,
) -> None:
    """Be a searcher: a process, in the place of searcher:run."""
    torch.set_num_threads(1)
    version = -1
    board.loaded(row)
    while not board.stop:
        board.beat(row)
        is_new = weights.version > version
        if is_new:
            with weights.read(pin) as (version, tensors):
                for tensor in tensors.values():
                    tensor.clone()
            board.set(row, "version", version)
        if is_new or always:
            with contextlib.suppress(queue.Full):
                groups.put(dataclasses.replace(group, version=version), timeout=0.1)
        else:
            time.sleep(0.001)
    groups.cancel_join_thread()


def make_group(responses: int, tokens: int) -> Group:
    number, rng = responses * tokens, np.random.default_rng(0)
    return Group(
        query_id=0,
        version=0,
        last_version=0,
        reference_version=0,
        batch=None,
        prompt=np.zeros(20, np.int32),
        lengths=np.full(responses, tokens, np.int32),
        tokens=rng.integers(0, 1000, number, dtype=np.int32),
        ref_logprobs=rng.normal(size=number).astype(np.float32),
        behavior_logprobs=rng.normal(size=number).astype(np.float32),
        rewards=np.zeros(responses, np.float32),
        finished=np.ones(responses, bool),
        temperature=1.0,
    )


@contextlib.contextmanager
def nodes_of_ray(number: int, store: int = STORE, cores: set[int] | None = None) -> Iterator[Nodes]:
    """A head, which stands for this machine, and so many further nodes, on these cores."""
    head = dict(num_cpus=1, object_store_memory=store, include_dashboard=False)
    nodes, all_cores = Nodes(initialize_head=True, head_node_args=head), os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or all_cores)
    for _ in range(number):
        nodes.add_node(num_cpus=1, object_store_memory=store)
    os.sched_setaffinity(0, all_cores)
    nodes.wait_for_nodes()
    try:
        yield nodes
    finally:
        nodes.shutdown()


@contextlib.contextmanager
def searching(
    target: str, number: int, is_far: bool, parameters: int
) -> Iterator[tuple[Supervisor, SharedWeights]]:
    """So many searchers, here or one on each of as many nodes, that have all been heard of."""
    store = max(STORE, 3 * parameters)  # bytes: of a version and a half
    layers = [min(LAYER, parameters - first) for first in range(0, parameters, LAYER)]
    with contextlib.ExitStack() as stack:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory())
        Path(run_dir, "logs").mkdir()
        flags = ["arithmetic", "--output_dir", run_dir, "--searchers", str(0 if is_far else number)]
        shapes, here = {f"layer {i}": (n,) for i, n in enumerate(layers)}, 0 if is_far else number
        weights = SharedWeights(shapes, torch.bfloat16, readers=here + is_far)
        if is_far:
            nodes = stack.enter_context(nodes_of_ray(number, store))
            config = build_config([*flags, "--ray", nodes.address])
            joining.connect(config)
            board = cluster.ClusterBoard([place.name for place in find_places(config)])
            settings = config, [], weights, board, run_dir, f"cluster:{target}", config
            supervisor = cluster.Cluster(*settings)
        else:
            config = build_config(flags)
            places = find_places(config)
            board = Board([place.name for place in places])
            settings = config, searchers_of(places), weights, board, run_dir, f"cluster:{target}"
            supervisor = Supervisor(*settings)
        publish(weights, 0)
        deadline = time.monotonic() + 120
        while len(heard(board)) < number:
            if time.monotonic() > deadline:
                sys.exit(f"only {len(heard(board))} of {number} searchers loaded: see {run_dir}")
            drain(supervisor, 0.1)
        try:
            yield supervisor, weights
        finally:
            board.stop = True
            supervisor.stop()


def publish(weights: SharedWeights, version: int) -> bool:
    zero = torch.zeros(1, dtype=torch.bfloat16)
    tensors = ((name, zero.expand(shape)) for name, shape in weights.shapes.items())
    return weights.publish(version, tensors)


def heard(board: Board) -> list[str]:
    return [name for name in board.searchers if board.get(name, "ready")]


def drain(supervisor: Supervisor, seconds: float) -> list[Group]:
    """What comes in so many seconds."""
    supervisor.check()
    groups, deadline = [], time.monotonic() + seconds
    while (rest := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            item = supervisor.rollout_queue.get(timeout=rest)
            if isinstance(item, Group):
                groups.append(item)
    return groups


def groups_per_second(target: str, number: int, is_far: bool, seconds: float) -> float:
    with searching(target, number, is_far, 130_000) as (supervisor, _):
        drain(supervisor, 3.0)  # to get going
        return len(drain(supervisor, seconds)) / seconds


def versions_per_second(number: int, is_far: bool, seconds: float) -> float:
    """Measure how many versions each searcher reads, the mean over them."""
    with searching("answer", number, is_far, 130_000) as (supervisor, weights):
        version, answers, deadline = 0, 0, time.monotonic() + seconds
        while time.monotonic() < deadline:
            version += publish(weights, version + 1)
            answers += len(drain(supervisor, 0.002))
        return answers / seconds / number


def seconds_of_a_version(parameters: int, is_far: bool) -> float:
    """Measure how long a version takes to a searcher: the median."""
    with searching("answer", 1, is_far, parameters) as (supervisor, weights):
        (row,), taken = heard(supervisor.board), []
        for version in range(1, TRANSFERS + 1):
            while not publish(weights, version):
                time.sleep(0.01)
            start = time.monotonic()
            while supervisor.board.get(row, "version") < version:
                drain(supervisor, 0.001)
            taken.append(time.monotonic() - start)
        return float(np.median(taken))


def run(is_far: bool) -> dict[str, float]:
    """Make a run whose trainer and driver have the first core, whose searcher has the second."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        output = Path(directory, "run")
        command = [sys.executable, str(ROOT / "tba.py"), "arithmetic", *RUN]
        command += ["--output_dir", str(output)]
        if is_far:
            nodes = stack.enter_context(nodes_of_ray(1, cores={second}))
            command = ["taskset", "-c", str(first), *command]
            command += ["--ray", nodes.address, "--searchers", "0"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        driver, used = psutil.Process(process.pid), []  # CPU seconds: a line of figures a look
        while process.poll() is None:
            time.sleep(1.0)
            num_steps = len(steps_of(output))
            if not 0 < num_steps < STEPS:
                continue
            if not used:
                for thread in driver.threads():  # its children have cores of their own by now
                    os.sched_setaffinity(thread.id, {first})
            with contextlib.suppress(psutil.Error):
                groups = [driver], trainers_of(driver), *processes_of_ray(is_far)
                used.append([*map(seconds_of, groups), time.monotonic(), num_steps])
        if process.returncode:
            sys.exit(f"a run failed: {process.stderr.read().decode()}")
        steps = steps_of(output)
        steady = steps[len(steps) // 20 :]
        span = steady[-1]["seconds"] - steady[0]["seconds"]
        # The most, not the last: what a process used is gone with it.
        *cpu, took, num_steps = np.max(used, axis=0) - used[0]
        return {
            "steps/s": (steady[-1]["step"] - steady[0]["step"]) / span,
            "trainer busy": trainer_busy(str(output)),
            "responses/s": (steady[-1]["received"] - steady[0]["received"]) / span,
            "staleness": float(np.mean([line["staleness_mean"] for line in steady])),
            "trainer's CPU": cpu[1] / took,
            "trainer's CPU, ms a step": 1e3 * cpu[1] / num_steps,
            "driver's CPU": cpu[0] / took,
            "Ray's CPU": cpu[2] / took,
            "CPU of the node's actor": cpu[3] / took,
        }


def trainers_of(driver: psutil.Process) -> list[psutil.Process]:
    return [child for child in driver.children() if child.name() == "tba trainer"]


def processes_of_ray(is_far: bool) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Ray's own processes, and the actors of nodes; none without nodes."""
    own, actors = [], []
    for process in psutil.process_iter(["cmdline"]) if is_far else ():
        command = " ".join(process.info["cmdline"] or [])
        if "ray::Node" in command:
            actors.append(process)
        elif any(name in command for name in ("raylet", "gcs_server", "ray::")):
            own.append(process)
    return own, actors


def seconds_of(processes: list[psutil.Process]) -> float:
    """CPU seconds that these have used."""
    times = [process.cpu_times() for process in processes]
    return sum(used.user + used.system for used in times)


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def saturation() -> str:
    """Calculate what a network takes: nobody has measured it."""
    rows = []
    group = 24 * 121 * 12  # bytes: a token and two log-probabilities
    for name, parameters in POLICIES.items():
        size = 2 * parameters
        cells = [f"{size / rate:.1f} s" for rate in NETWORKS.values()]
        rows.append([f"a version of {name}: {size / 1e9:.1f} GB a node", *cells])
    cells = [f"{rate / group:,.0f} a second" for rate in NETWORKS.values()]
    rows.append([f"groups of 24 x 121 tokens, {group / 1e3:.0f} kB, all nodes together", *cells])
    return (
        "By calculation, at the driver's network, which sends each node its own copy:\n\n"
        + table(["", *NETWORKS], rows)
    )


def main() -> None:
    quick = arguments(__doc__).quick
    # Ray's workers would run at niceness 15, and give way to what shares this machine with them.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    seconds = 4.0 if quick else 10.0
    counts, parts = NODES[:2] if quick else NODES, []
    rows = []
    for number in counts:
        cells = [str(number)]
        for target in ("short", "long"):
            near, far = (groups_per_second(target, number, f, seconds) for f in (False, True))
            cells.append(f"{far:.0f}, {near:.0f} ({far / near:.2f})")
        near, far = (versions_per_second(number, f, seconds) for f in (False, True))
        cells.append(f"{far:.1f}, {near:.1f}")
        rows.append(cells)
        print(cells, flush=True)
    header = ["nodes, searchers", "short groups/s", "long groups/s", "versions/s of each"]
    parts.append("Through Ray, here (their ratio):\n\n" + table(header, rows))
    rows = []
    for name, parameters in list(SIZES.items())[: 1 if quick else None]:
        near, far = (seconds_of_a_version(parameters, f) for f in (False, True))
        rows.append([name, f"{2 * parameters / 1e9:.2f}", f"{far:.2f}", f"{near:.3f}"])
        print(rows[-1], flush=True)
    header = ["parameters", "GB", "s through Ray", "s here"]
    parts.append(f"A version, median of {TRANSFERS}:\n\n" + table(header, rows))
    parts.append(saturation())
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(2 if quick else ALTERNATIONS):
        for is_far in runs:
            runs[is_far].append(run(is_far))
            print(is_far, runs[is_far][-1], flush=True)
    rows = [
        [name, *(spread([one[name] for one in runs[is_far]]) for is_far in (True, False))]
        for name in runs[True][0]
    ]
    ratios = [a["steps/s"] / b["steps/s"] for a, b in zip(runs[True], runs[False])]
    rows.append(["steps/s, ratio of neighbours", spread(ratios), ""])
    title = f"{len(ratios)} alternations, arithmetic, {STEPS} steps; mean (smallest to largest)"
    parts.append(f"{title}:\n\n" + table(["", "searcher on a node", "searcher here"], rows))
    save("cluster", quick, *parts)


if __name__ == "__main__":
    main()
