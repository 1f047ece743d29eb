"""Measure what asynchrony gains on the arithmetic demo, or what the trainer's side takes.

    python benchmarks/overlap.py                # the first: thirteen minutes on 2 cores
    python benchmarks/overlap.py --scaling      # the second: eight minutes
    python benchmarks/overlap.py --quick        # one seed and fewer steps; fewer rates, shorter

asynchronous             make demo: half of the cores for the trainer, half for the searcher
synchronous              --synchronous on the same cores: trainer and searcher in turns
synchronous, all cores   the same, each with all cores while the other waits
trainer alone            an asynchronous run whose searcher is stopped (SIGSTOP) every other 3 s
searcher alone           on the cores of the first; nobody publishes

A synchronous step trains on 256 fresh responses, an asynchronous one on as many replayed ones. So
t_search is the searcher's time for those, t_train the trainer's, and the ideal
(t_search + t_train) / max(t_search, t_train), measured in the synchronous run itself.

--scaling offers trainer, supervisor, queues, buffer and weights the groups of 1, 2, 4, 8 searchers,
and more groups a second. Real searchers would wait for each other where they outnumber the cores:
each replays recorded groups at a set rate, copies out every version of the weights, and waits where
its queue is full. Short groups are the demo's, 12 responses of 4 tokens, long ones 24 of 121.
"""

import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.multiprocessing
from common import arguments, as_flags, make_group, mean_and_each, reached, save, steps_of, table_of

import tba
from config import Config
from launch import checks, children
from launch.command_line import build_config
from launch.files import read_spans, trainer_busy
from launch.places import Place, find_places
from launch.supervisor import Supervisor
from models.architecture import weight_shapes
from rollouts import Group
from runtime.transport.status import StatusTable
from tasks import load_task
from weights import SharedWeights

TARGET = 0.95  # of samples that are right
PERIOD = 3.0  # seconds that the searcher is stopped, and then runs
SETTLED = 0.5  # seconds at the beginning of each period that are left out
WORK = ("step", "search", "score", "reference")  # spans of a process that works
SEARCHERS = (1, 2, 4, 8)
OFFERED = (100, 400, 1600, 6400)  # groups per second, of four searchers together
LONG = dict(queries_per_batch=2, responses_per_query=4, samples_per_query=24)
LONG |= dict(max_prompt_tokens=7, max_response_tokens=121, tokens_per_micro_batch=1000)


def run(directory: Path, name: str, *flags: str) -> Path:
    """Make a whole run. Returns its directory."""
    output = directory / name
    if code := tba.main(["arithmetic", "--output_dir", str(output), *flags]):
        sys.exit(f"the {name} run failed with exit code {code}")
    return output


def measure(run_dir: Path) -> dict[str, float]:
    """Measure a run that has ended.

    rate: steps per second, after the first twentieth of them; reached: seconds from the first step
    to TARGET; busy: the trainer's share of the time; t_train, t_search: seconds of work per step.
    """
    steps, spans = steps_of(run_dir), read_spans(str(run_dir))
    steady = steps[len(steps) // 20 :]
    begin, end = spans["trainer"][0][1], spans["trainer"][-1][2]
    first = next(start for name, start, _ in spans["trainer"] if name == "step")

    def work(process: str) -> float:
        inside = [s for s in spans[process] if s[0] in WORK and begin <= s[1] and s[2] <= end]
        return sum(stop - start for _, start, stop in inside) / len(steps)

    return {
        "rate": (len(steady) - 1) / (steady[-1]["seconds"] - steady[0]["seconds"]),
        "reached": reached(run_dir, TARGET) - first,
        "busy": trainer_busy(str(run_dir)),
        "t_train": work("trainer"),
        "t_search": work("searcher-0"),
    }


def beside_a_searcher(run_dir: Path, *flags: str) -> float:
    """Make an asynchronous run whose searcher is stopped every other period.

    Returns the steps per second while the searcher runs, as a share of those while it is stopped.
    """
    over, switches = threading.Event(), []  # when, and whether the searcher is stopped since

    def switch() -> None:
        while not steps_of(run_dir) and not over.wait(0.5):
            pass
        switches.append((time.monotonic(), False))
        while not over.wait(PERIOD):
            is_stopped = not switches[-1][1]
            for child in multiprocessing.active_children():
                if child.name == "searcher 0":
                    os.kill(child.pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)
            switches.append((time.monotonic(), is_stopped))

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        run(run_dir.parent, run_dir.name, *flags)
    finally:
        over.set()
        thread.join()
    ends = np.array([end for name, _, end in read_spans(str(run_dir))["trainer"] if name == "step"])
    rates: dict[bool, list[float]] = {False: [], True: []}
    for (begin, is_stopped), (end, _) in zip(switches, switches[1:]):
        if end < ends[-1]:
            num_steps = np.sum((begin + SETTLED < ends) & (ends <= end))
            rates[is_stopped].append(num_steps / (end - begin - SETTLED))
    # A pair is a period with the searcher, and the one without it that comes next.
    pairs = min(map(len, rates.values()))
    if not pairs:
        sys.exit(f"the run ended before its searcher was stopped for {PERIOD} s: use more steps")
    return float(np.mean(rates[False][:pairs]) / np.mean(rates[True][:pairs]))


def start(
    config: Config, run_dir: Path, target: str
) -> tuple[list[Place], SharedWeights, Supervisor]:
    """Start the searchers of a run without its trainer. target: what their processes do."""
    (run_dir / "logs").mkdir(parents=True)
    places = find_places(config)
    weights = SharedWeights(weight_shapes(config), torch.float32, readers=config.searchers)
    status = StatusTable([place.name for place in places])
    supervisor = Supervisor(config, places[1:], weights, status, str(run_dir), target, print)
    return places, weights, supervisor


def record(config: Config, run_dir: Path, count: int) -> tuple[list[Group], float]:
    """Record what a searcher alone finds, at its place in a run, from the task's base model.

    Returns `count` groups, and how many a second it found after the first half of them.
    """
    model = str(load_task(config.task).base_model())
    config = replace(config, model=model, output_dir=str(run_dir), searchers=1)
    _, _, supervisor = start(config, run_dir, "searcher:run")
    groups, ends = [], []
    try:
        while len(groups) < count:
            item = supervisor.rollout_queue.get(timeout=120)
            if isinstance(item, Group):
                groups.append(item)
                ends.append(time.monotonic())
        return groups, (count - count // 2) / (ends[-1] - ends[count // 2 - 1])
    finally:
        supervisor.status.stop = True
        supervisor.stop()


def overlap(quick: bool) -> None:
    """Compare the runs, and save the results."""
    seeds, steps, few = ((0,), 300, 80) if quick else ((0, 1, 2), 600, 80)
    split, beside, alone = checks.find_places, [], []
    results = defaultdict(lambda: defaultdict(list))  # mode -> figure -> a value of each seed

    def on_all_cores(config: Config) -> list[Place]:
        cores = sorted(os.sched_getaffinity(0))
        return [Place(place.name, place.gpu, cores) for place in split(config)]

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for seed in seeds:  # in turns, since the machine may be faster now than then
            flags = as_flags(seed=seed, checkpoint_every=0, eval_every=0)
            synchronous = [*flags, "--synchronous", *as_flags(steps=few)]
            for mode, find, settings in (
                ("asynchronous", split, [*flags, *as_flags(steps=steps)]),
                ("synchronous", split, synchronous),
                ("synchronous, all cores", on_all_cores, synchronous),
            ):
                checks.find_places = find
                for figure, value in measure(run(directory, f"{mode} {seed}", *settings)).items():
                    results[mode][figure].append(value)
            checks.find_places = split
            longer = [*flags, *as_flags(steps=1200)]
            beside.append(beside_a_searcher(directory / f"beside {seed}", *longer))
            config = build_config(["arithmetic", *as_flags(seed=seed)])
            groups = record(config, directory / f"alone {seed}", 400)[1]  # a second
            alone.append(groups * config.samples_per_query)
    t_train, t_search = (np.array(results["synchronous"][k]) for k in ("t_train", "t_search"))
    ideal = (t_train + t_search) / np.maximum(t_train, t_search)
    gain = np.divide(results["asynchronous"]["rate"], results["synchronous"]["rate"])
    reached = f"seconds from the first step to {TARGET} right samples"
    titles = {"rate": "steps/s", "reached": reached, "busy": "trainer busy"}
    rows = [
        {"": mode} | {title: mean_and_each(of_mode[key]) for key, title in titles.items()}
        for mode, of_mode in results.items()
    ]
    save(
        "overlap",
        quick,
        f"Mean, and the values of {len(seeds)} seeds.",
        table_of(rows),
        f"- asynchronous steps/s, of the trainer alone: {mean_and_each(beside)}\n"
        "- asynchronous steps/s, of synchronous on the same cores: "
        f"{mean_and_each(gain)}; ideal: {mean_and_each(ideal)}; "
        f"of the ideal: {mean_and_each(gain / ideal)}\n"
        f"- a synchronous step: t_train {mean_and_each(t_train)} s, "
        f"t_search {mean_and_each(t_search)} s\n"
        f"- the searcher alone: {mean_and_each(alone)} responses/s",
    )


def replay(*arguments) -> None:
    """Send recorded groups at a set rate: a process, with the arguments of searcher.run.

    The status table's "busy" is here the seconds in which it waited for its queue.
    """
    config, rank, weights, groups, status, run_dir = arguments
    torch.set_num_threads(1)
    recorded, rate = pickle.loads(Path(run_dir, "recorded.pkl").read_bytes())
    name, version, sent, begin = f"searcher {rank}", -1, 0, None
    status.mark_ready(name)
    while not status.stop:
        status.beat(name)
        version = copy_newest(weights, rank, version)
        now = time.monotonic()
        if begin is None:
            begin = now if version >= 0 and status.get("trainer", "ready") else None
        elif sent < (now - begin) * rate:
            group = recorded[(sent * config.searchers + rank) % len(recorded)]
            try:
                groups.put_nowait(replace(group, version=version, last_version=version))
                sent += 1
            except queue.Full:
                time.sleep(0.005)
                waited = time.monotonic() - now
                status.add(name, "busy", waited)
                begin += waited
            continue
        time.sleep(0.001)
    groups.cancel_join_thread()


def copy_newest(weights: SharedWeights, pin: int, version: int) -> int:
    """Copy the newest weights if they are newer than `version`. Returns their version."""
    if weights.version > version:
        with weights.read(pin) as (version, tensors):
            for tensor in tensors.values():
                tensor.clone()
    return version


def measure_trainer(
    config: Config, recorded: list[Group], rate: float, seconds: float
) -> dict[str, str]:
    """Measure the trainer's side. rate: groups per second that each searcher offers."""
    with tempfile.TemporaryDirectory() as run_dir:
        config = replace(config, output_dir=run_dir)
        Path(run_dir, "recorded.pkl").write_bytes(pickle.dumps((recorded, rate)))
        places, weights, supervisor = start(config, Path(run_dir), "overlap:replay")
        status = supervisor.status
        trainer_arguments = config, weights, supervisor.rollout_queue, status, run_dir, None
        trainer = children.start(places[0], "trainer:run", trainer_arguments, run_dir)
        try:
            deadline = time.monotonic() + 300
            while len(steps_of(run_dir)) < 20:
                time.sleep(0.2)
                supervisor.check()
                if trainer.exitcode or time.monotonic() > deadline:
                    sys.exit(children.log_tail(run_dir, "trainer"))
            time.sleep(2.0)  # to get going
            first, blocked = steps_of(run_dir)[-1], status.total("busy")
            time.sleep(seconds)
            steps, blocked = steps_of(run_dir), status.total("busy") - blocked
        finally:
            status.stop = True
            children.kill(trainer)
            supervisor.stop()
    steps = [line for line in steps if line["step"] >= first["step"]]
    span = steps[-1]["seconds"] - first["seconds"]
    responses = (steps[-1]["received"] - first["received"]) / span
    groups = responses / config.samples_per_query
    size = np.mean([len(pickle.dumps(group)) for group in recorded])  # bytes
    return {
        "responses/s received": f"{responses:.0f}",
        "groups/s received": f"{groups:.0f}",
        "MB/s": f"{groups * size / 1e6:.2f}",
        "steps/s": f"{(len(steps) - 1) / span:.1f}",
        "queue, groups (mean)": f"{np.mean([line['queue_depth'] for line in steps]):.1f}",
        "staleness, steps (mean)": f"{np.mean([line['staleness_mean'] for line in steps]):.1f}",
        "searchers blocked, share of time": f"{blocked / config.searchers / span:.3f}",
    }


def scaling(quick: bool) -> None:
    """Measure the trainer's side with more searchers and at higher rates, and save the results."""
    seconds = 4.0 if quick else 10.0
    endless = as_flags(steps=1000000, eval_every=0, checkpoint_every=0, initial_responses=400)
    model = str(load_task("arithmetic").base_model())
    config = replace(build_config(["arithmetic", *endless]), model=model)
    with tempfile.TemporaryDirectory() as directory:
        short, rate = record(config, Path(directory, "record"), 200)
    random = make_group(24, 121, range(2, 14))
    long = [replace(random, query_id=group.query_id, prompt=group.prompt) for group in short]
    kinds = {"short": (config, short), "long": (replace(config, **LONG), long)}
    counts, rates = (SEARCHERS[::3], OFFERED[1::2]) if quick else (SEARCHERS, OFFERED)
    measured = [("short", count, count * rate) for count in counts]
    measured += [(kind, 4, offered) for kind in kinds for offered in rates]
    rows = []
    for kind, count, offered in measured:
        config, groups = kinds[kind]
        row = {"groups": kind, "searchers": str(count), "groups/s offered": f"{offered:.0f}"}
        config = replace(config, searchers=count)
        rows.append(row | measure_trainer(config, groups, offered / count, seconds))
        print(rows[-1], flush=True)
    caption = f"A real searcher found {rate:.0f} short groups/s on one core, as the first rows do."
    save("scaling", quick, caption, table_of(rows), command="overlap.py --scaling")


def main() -> None:
    options = arguments(__doc__, ("--scaling", False))
    (scaling if options.scaling else overlap)(options.quick)


if __name__ == "__main__":
    sys.exit(main())
