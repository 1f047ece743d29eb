"""Measure what Ray costs: searchers on further nodes (--ray), against as many on this machine.

    python benchmarks/cluster.py                # 25 minutes on 2 cores, 18 GB of memory
    python benchmarks/cluster.py --quick        # one size of weights, two alternations

The nodes are Ray's own, all on this machine: where a network would be is its loopback interface.
What is on a node, the driver, the queues and the weights are the real ones.

groups     of GSM8K's size, 24 responses of 121 tokens, sent as fast as they are taken
transfer   one version of 10 M, 100 M, 1 B parameters in bf16: from the end of its publish until the
           searcher has copied all of it, and the driver knows
runs       the arithmetic task with one searcher, here or on a further node: the trainer and the
           process that supervises have one core, the searcher (and its node) the other
"""

import contextlib
import dataclasses
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import ROOT, arguments, as_flags, make_group, mean_and_each, save, steps_of, table
from overlap import copy_newest
from ray.cluster_utils import Cluster as Nodes

from extras.nodes import cluster, joining
from launch.command_line import build_config
from launch.files import trainer_busy
from launch.places import find_places, searchers_of
from launch.supervisor import Supervisor
from rollouts import Group
from runtime.transport.status import StatusTable
from weights import SharedWeights

NODES = (1, 2, 4)
SIZES = {"10 M": 10_000_000, "100 M": 100_000_000, "1 B": 1_000_000_000}
STORE = 200 * 2**20  # bytes of a node's object store, if the weights are small
LAYER = 50_000_000  # parameters of a tensor at most, as in a model
TRANSFERS, ALTERNATIONS, STEPS = 5, 5, 1500
RUN = as_flags(steps=STEPS, initial_responses=4000, eval_every=0, checkpoint_every=0)


def search(group: Group, always: bool, *its_arguments) -> None:
    """Send a group for each new version, or `always`: a process, with searcher.run's arguments."""
    _, rank, weights, groups, status, _ = its_arguments
    torch.set_num_threads(1)
    row, version = f"searcher {rank}", -1
    status.mark_ready(row)
    while not status.stop:
        status.beat(row)
        newest = copy_newest(weights, rank, version)
        if always or newest > version:
            version = newest
            status.set(row, "version", version)
            with contextlib.suppress(queue.Full):
                groups.put(dataclasses.replace(group, version=version), timeout=0.1)
        else:
            time.sleep(0.001)
    groups.cancel_join_thread()


send = partial(search, make_group(24, 121), True)
answer = partial(search, make_group(1, 1), False)


@contextlib.contextmanager
def nodes_of_ray(number: int, store: int = STORE, cores: set[int] | None = None) -> Iterator[Nodes]:
    """Start a head, which stands for this machine, and so many further nodes, on these cores."""
    settings = dict(num_cpus=1, object_store_memory=store)
    nodes = Nodes(initialize_head=True, head_node_args=settings | {"include_dashboard": False})
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or all_cores)
    for _ in range(number):
        nodes.add_node(**settings)
    os.sched_setaffinity(0, all_cores)
    nodes.wait_for_nodes()
    try:
        yield nodes
    finally:
        nodes.shutdown()


@contextlib.contextmanager
def searching(
    target: str, number: int, is_far: bool, parameters: int = 130_000
) -> Iterator[tuple[Supervisor, SharedWeights]]:
    """Start so many searchers, here or one on each of as many nodes, and wait for all of them."""
    here, target = 0 if is_far else number, f"cluster:{target}"
    sizes = [min(LAYER, parameters - first) for first in range(0, parameters, LAYER)]
    shapes = {f"layer {i}": (size,) for i, size in enumerate(sizes)}
    weights = SharedWeights(shapes, torch.bfloat16, readers=here + is_far)
    with contextlib.ExitStack() as stack:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory())
        Path(run_dir, "logs").mkdir()
        flags = ["arithmetic", *as_flags(output_dir=run_dir, searchers=here)]
        if is_far:
            store = max(STORE, 3 * parameters)  # bytes: of a version and a half
            flags += ["--ray", stack.enter_context(nodes_of_ray(number, store)).address]
        config = build_config(flags)
        places = find_places(config)
        names = [place.name for place in places]
        status = (cluster.ClusterStatus if is_far else StatusTable)(names)
        parts = config, searchers_of(places), weights, status, run_dir, target, print
        if is_far:
            joining.check(config)
            supervisor = cluster.Cluster(*parts, given=config)
        else:
            supervisor = Supervisor(*parts)
        try:
            publish(weights, 0)
            deadline = time.monotonic() + 120
            while len(heard(status)) < number:
                count_groups(supervisor, 0.1)
                if time.monotonic() > deadline:
                    sys.exit(f"of {number} searchers {len(heard(status))} have loaded in 120 s")
            yield supervisor, weights
        finally:
            status.stop = True
            supervisor.stop()


def publish(weights: SharedWeights, version: int) -> bool:
    """Publish zeros. Returns whether there was room for them."""
    zero = torch.zeros(1, dtype=torch.bfloat16)
    tensors = ((name, zero.expand(shape)) for name, shape in weights.shapes.items())
    return weights.publish(version, tensors)


def heard(status: StatusTable) -> list[str]:
    """List the searchers or nodes that have loaded."""
    return [name for name in status.searchers if status.get(name, "ready")]


def count_groups(supervisor: Supervisor, seconds: float) -> int:
    """Take the groups that come in so many seconds. Returns their number."""
    supervisor.check()
    count, deadline = 0, time.monotonic() + seconds
    while (rest := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            count += isinstance(supervisor.rollout_queue.get(timeout=rest), Group)
    return count


def groups_per_second(number: int, is_far: bool, seconds: float) -> float:
    """Measure how many groups the trainer's process can take."""
    with searching("send", number, is_far) as (supervisor, _):
        count_groups(supervisor, 3.0)  # to get going
        return count_groups(supervisor, seconds) / seconds


def seconds_of_a_version(parameters: int, is_far: bool) -> float:
    """Measure how long a version takes to a searcher: the median."""
    with searching("answer", 1, is_far, parameters) as (supervisor, weights):
        (row,), taken = heard(supervisor.status), []
        for version in range(1, TRANSFERS + 1):
            while not publish(weights, version):
                time.sleep(0.01)
            start = time.monotonic()
            while supervisor.status.get(row, "version") < version:
                count_groups(supervisor, 0.001)
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
        while process.poll() is None and not steps_of(output):
            time.sleep(1.0)
        with contextlib.suppress(OSError):  # its children have cores of their own by now
            for thread in os.listdir(f"/proc/{process.pid}/task"):
                os.sched_setaffinity(int(thread), {first})
        errors = process.communicate()[1]
        if process.returncode:
            sys.exit(f"a run failed: {errors.decode()}")
        steps = steps_of(output)
        steady = steps[len(steps) // 20 :]
        span = steady[-1]["seconds"] - steady[0]["seconds"]
        return {
            "steps/s": (steady[-1]["step"] - steady[0]["step"]) / span,
            "trainer busy": trainer_busy(str(output)),
            "responses/s": (steady[-1]["received"] - steady[0]["received"]) / span,
            "staleness": float(np.mean([line["staleness_mean"] for line in steady])),
        }


def main() -> None:
    quick = arguments(__doc__).quick
    # Ray's workers would run at niceness 15, and give way to what shares this machine with them.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    seconds, rows = 4.0 if quick else 10.0, []
    for number in NODES[:2] if quick else NODES:
        near, far = (groups_per_second(number, f, seconds) for f in (False, True))
        rows.append([str(number), f"{far:.0f}", f"{near:.0f}", f"{far / near:.2f}"])
        print(rows[-1], flush=True)
    header = ["nodes, searchers", "groups/s through Ray", "here", "their ratio"]
    parts, rows = [table(header, rows)], []
    for name, parameters in list(SIZES.items())[: 1 if quick else None]:
        near, far = (seconds_of_a_version(parameters, f) for f in (False, True))
        rows.append([name, f"{2 * parameters / 1e9:.2f}", f"{far:.2f}", f"{near:.3f}"])
        print(rows[-1], flush=True)
    header = ["parameters", "GB", "s through Ray", "s here"]
    parts.append(f"A version, median of {TRANSFERS}:\n\n" + table(header, rows))
    runs: dict[bool, list[dict[str, float]]] = defaultdict(list)
    for _ in range(2 if quick else ALTERNATIONS):
        for is_far in (False, True):
            runs[is_far].append(run(is_far))
            print(is_far, runs[is_far][-1], flush=True)
    ratios = [a["steps/s"] / b["steps/s"] for a, b in zip(runs[True], runs[False])]
    rows = [
        [name, *(mean_and_each([one[name] for one in runs[f]]) for f in (True, False))]
        for name in runs[True][0]
    ]
    rows.append(["steps/s, ratio of neighbours", mean_and_each(ratios), ""])
    title = f"{len(ratios)} alternations, arithmetic, {STEPS} steps; mean (each)"
    parts.append(f"{title}:\n\n" + table(["", "searcher on a node", "searcher here"], rows))
    save("cluster", quick, *parts)


if __name__ == "__main__":
    main()
