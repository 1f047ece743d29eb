"""Measure what asynchrony gains on the arithmetic demo.

An asynchronous run is compared with a synchronous one, and with the trainer and the searcher alone.

    python benchmarks/overlap.py                # thirteen minutes on 2 cores
    python benchmarks/overlap.py --quick        # one seed and fewer steps

asynchronous             make demo: half of the cores for the trainer, half for the searcher
synchronous              --synchronous on the same cores: trainer and searcher in turns
synchronous, all cores   the same, each with all cores while the other waits
trainer alone            an asynchronous run whose searcher is stopped (SIGSTOP) every other 3 s:
                         the same trainer and buffer, with and without it
searcher alone           on the cores of the first; nobody publishes

Synchronous steps train on 256 responses of 32 fresh queries, asynchronous ones on as many replayed
ones. So t_search is the searcher's time for those, t_train the trainer's, and
ideal = (t_search + t_train) / max(t_search, t_train), measured in the synchronous run itself.
Writes benchmarks/results/overlap.{md,png}; with --quick benchmarks/results/quick/.
"""

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch.multiprocessing
from common import arguments, as_flags, first_right, mean_and_values, results_dir, save, table

import tba
from buffer import Group
from config import Config
from models.policy import weight_shapes
from runtime import launch
from runtime.command_line import build_config
from runtime.display.pictures import COLORS
from runtime.processes.places import Place, find_places
from runtime.processes.supervisor import Supervisor
from runtime.record.timeline import read_lines, read_spans, trainer_busy
from runtime.transport.board import Board
from tasks import load_task
from weights import SharedWeights

TARGET = 0.95  # of samples that are right
FOUND = 400  # groups of the searcher alone
PERIOD = 3.0  # seconds that the searcher is stopped, and then runs
SETTLED = 0.5  # seconds at the beginning of each period that are left out
WORK = ("step", "search", "score", "reference")  # spans of a process that works


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
    steps = steps_of(run_dir)
    steady = steps[len(steps) // 20 :]
    spans = read_spans(str(run_dir))
    begin, end = spans["trainer"][0][1], spans["trainer"][-1][2]
    first = next(start for name, start, _ in spans["trainer"] if name == "step")
    ends = [stop for name, _, stop in spans["trainer"] if name == "step"]
    config = json.loads((run_dir / "config.json").read_text())
    new = np.diff([0] + [line["received"] for line in steps])  # responses
    if config["synchronous"]:  # each step has a batch of its own
        new[:] = config["queries_per_batch"] * config["responses_per_query"]
    samples = [
        (clock, count, line["reward"]) for clock, count, line in zip(ends, new, steps) if count
    ]
    working = {
        process: sum(
            stop - start
            for name, start, stop in rows
            if name in WORK and begin <= start and stop <= end
        )
        for process, rows in spans.items()
    }
    return {
        "rate": (len(steady) - 1) / (steady[-1]["seconds"] - steady[0]["seconds"]),
        "reached": first_right(samples, TARGET) - first,
        "busy": trainer_busy(str(run_dir)),
        "t_train": working["trainer"] / len(steps),
        "t_search": working["searcher-0"] / len(steps),
    }


def beside_a_searcher(run_dir: Path, *flags: str) -> float:
    """Make an asynchronous run whose searcher is stopped every other period.

    Returns the steps per second while the searcher runs, as a share of those while it is stopped.
    """
    windows: list[tuple[bool, float, float]] = []  # stopped, begin, end
    over = threading.Event()

    def switch() -> None:
        while not steps_of(run_dir) and not over.wait(0.5):
            pass
        stopped, begin = False, time.monotonic()
        while not over.wait(PERIOD):
            windows.append((stopped, begin + SETTLED, time.monotonic()))
            for child in multiprocessing.active_children():
                if child.name == "searcher 0":
                    os.kill(child.pid, signal.SIGCONT if stopped else signal.SIGSTOP)
            stopped, begin = not stopped, time.monotonic()

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        run(run_dir.parent, run_dir.name, *flags)
    finally:
        over.set()
        thread.join()
    ends = np.array([end for name, _, end in read_spans(str(run_dir))["trainer"] if name == "step"])
    rates: dict[bool, list[float]] = {False: [], True: []}
    for stopped, begin, end in windows:
        if end < ends[-1]:
            rates[stopped].append(np.sum((begin < ends) & (ends <= end)) / (end - begin))
    # A pair is a window with the searcher, and the one without it that comes next.
    pairs = min(len(rates[False]), len(rates[True]))
    if not pairs:
        sys.exit(
            f"the run was over before its searcher had been stopped for {PERIOD} s: "
            "give it more steps"
        )
    return float(np.mean(rates[False][:pairs]) / np.mean(rates[True][:pairs]))


def record(config: Config, directory: Path, count: int) -> tuple[list[Group], float]:
    """Record what a searcher alone finds, at its place in a run, from the task's base model.

    Returns `count` groups, and how many a second it found after the first half of them.
    """
    (directory / "logs").mkdir(parents=True)
    model = str(load_task(config.task).base_model())
    config = dataclasses.replace(config, model=model, output_dir=str(directory), searchers=1)
    places = find_places(config)
    board = Board([place.name for place in places])
    weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
    supervisor = Supervisor(config, places[1:], weights, board, str(directory), "searcher:run")
    groups: list[Group] = []
    while len(groups) < count:
        item = supervisor.rollout_queue.get(timeout=120)
        if isinstance(item, Group):
            groups.append(item)
            if len(groups) == count // 2:
                half = time.monotonic()
    rate = (count - count // 2) / (time.monotonic() - half)
    board.stop = True
    supervisor.stop()
    return groups, rate


def searcher_alone(seed: int, directory: Path) -> float:
    """Measure the responses per second that a searcher alone finds."""
    config = build_config(["arithmetic", *as_flags(seed=seed)])
    return record(config, directory, FOUND)[1] * config.samples_per_query


def steps_of(run_dir: Path | str) -> list[dict]:
    """Read the lines of metrics.jsonl that are of a step."""
    return [line for line in read_lines(Path(run_dir) / "metrics.jsonl") if "loss" in line]


def main() -> None:
    quick = arguments(__doc__).quick
    seeds, steps, few = ((0,), 300, 40) if quick else ((0, 1, 2), 600, 80)
    split, beside, alone = launch.find_places, [], []
    results: dict[str, list[dict[str, float]]] = {}  # mode -> measure() of each seed
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        def on_all_cores(config: Config) -> list[Place]:
            return [place_on_all_cores(place) for place in split(config)]

        def compare(mode: str, seed: int, flags: list[str]) -> None:
            run_dir = run(directory, f"{mode} {seed}", *flags)
            results.setdefault(mode, []).append(measure(run_dir))

        for seed in seeds:  # in turns, since the machine may be faster now than then
            flags = as_flags(seed=seed, checkpoint_every=0)
            synchronous = [*flags, "--synchronous", *as_flags(steps=few, eval_every=0)]
            compare("asynchronous", seed, [*flags, *as_flags(steps=steps, eval_every=0)])
            compare("synchronous", seed, synchronous)
            launch.find_places = on_all_cores
            compare("synchronous, all cores", seed, synchronous)
            launch.find_places = split
            longer = [*flags, *as_flags(steps=2 * steps, eval_every=0)]
            beside.append(beside_a_searcher(directory / f"beside {seed}", *longer))
            alone.append(searcher_alone(seed, directory / f"alone {seed}"))
        runs = {mode: directory / f"{mode} 0" for mode in results}
        draw(runs, results_dir(quick) / "overlap.png")
    report(quick, len(seeds), results, beside, alone)


def report(
    quick: bool,
    num_seeds: int,
    results: dict[str, list[dict[str, float]]],
    beside: list[float],
    alone: list[float],
) -> None:
    """Save the table and the ratios. results: of measure(), by mode; lists: a value per seed."""

    def values(mode: str, key: str) -> np.ndarray:
        return np.array([result[key] for result in results[mode]])

    t_train, t_search = values("synchronous", "t_train"), values("synchronous", "t_search")
    ideal = (t_train + t_search) / np.maximum(t_train, t_search)
    gain = values("asynchronous", "rate") / values("synchronous", "rate")
    header = [
        "",
        "steps/s",
        f"seconds from the first step to {TARGET} right samples",
        "trainer busy",
    ]
    rows = [
        [mode, *(mean_and_values(values(mode, key)) for key in ("rate", "reached", "busy"))]
        for mode in results
    ]
    save(
        "overlap",
        quick,
        f"Mean, and the values of {num_seeds} seeds.",
        table(header, rows),
        f"- asynchronous steps/s, of the trainer alone: {mean_and_values(beside)}\n"
        "- asynchronous steps/s, of synchronous on the same cores: "
        f"{mean_and_values(gain)}; ideal: {mean_and_values(ideal)}; "
        f"of the ideal: {mean_and_values(gain / ideal)}\n"
        f"- a synchronous step: t_train {mean_and_values(t_train)} s, "
        f"t_search {mean_and_values(t_search)} s\n"
        f"- the searcher alone: {mean_and_values(alone)} responses/s",
        "![timelines](overlap.png)",
    )


def place_on_all_cores(place: Place) -> Place:
    """Give a process all cores."""
    return Place(place.name, place.gpu, sorted(os.sched_getaffinity(0)))


def draw(runs: dict[str, Path], path: Path, seconds: float = 1.0) -> None:
    """Draw the timeline of some seconds from the middle of each run."""
    plt.switch_backend("agg")
    figure, axes = plt.subplots(
        len(runs), 1, figsize=(10, 1.3 * len(runs)), sharex=True, constrained_layout=True
    )
    used = set()
    for axis, (mode, run_dir) in zip(axes, runs.items()):
        spans = read_spans(str(run_dir))
        steps = [start for name, start, _ in spans["trainer"] if name == "step"]
        begin = steps[len(steps) // 2]
        for y, rows in enumerate(spans.values()):
            for name, start, stop in rows:
                if stop > begin and start < begin + seconds:
                    used.add(name)
                    left = max(start, begin)
                    width = min(stop, begin + seconds) - left
                    axis.barh(y, width, left=left - begin, color=COLORS.get(name, "black"))
        axis.set(yticks=range(len(spans)), yticklabels=list(spans), title=mode, xlim=(0, seconds))
        axis.invert_yaxis()
    axes[-1].set_xlabel("seconds")
    names = sorted(used)
    patches = [plt.Rectangle((0, 0), 1, 1, color=COLORS.get(name, "black")) for name in names]
    figure.legend(patches, names, loc="outside right upper")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
