"""What asynchrony gains: the arithmetic demo, asynchronous and synchronous, against the trainer alone and the searcher alone.

    python benchmarks/overlap.py                # thirteen minutes on 2 cores
    python benchmarks/overlap.py --quick        # one seed and fewer steps

asynchronous             make demo: half of the cores for the trainer, half for the searcher
synchronous              --synchronous on the same cores: trainer and searcher in turns
synchronous, all cores   the same, each with all cores while the other waits
trainer alone            an asynchronous run whose searcher is stopped (SIGSTOP) every other 3 s: the same trainer and buffer, with and without it
searcher alone           on the cores of the first; nobody publishes

Synchronous steps train on 256 responses of 32 fresh queries, as asynchronous ones do of replayed ones, so that t_search is the searcher's time
for those and t_train the trainer's: ideal = (t_search + t_train) / max(t_search, t_train), measured in the synchronous run itself.
Writes benchmarks/results/overlap.{md,png}; with --quick benchmarks/results/quick/.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from common import RESULTS, arguments, first_right, mean_and_values, save, table

import torch.multiprocessing

from runtime import processes
import tba
from buffer import Group
from config import Config
from runtime.command_line import build_config
from models.policy import weight_shapes
from runtime.board import Board
from runtime.pictures import COLORS
from runtime.timeline import read_lines, read_spans, trainer_busy
from runtime.supervisor import Supervisor
from tasks import load_task
from weights import SharedWeights

TARGET = 0.95  # of samples that are right
FOUND = 400  # groups of the searcher alone
PERIOD, SETTLED = 3.0, 0.5  # seconds that the searcher is stopped, and runs; of these not looked at


def run(directory: Path, name: str, *flags: str) -> Path:
    """A whole run. Returns where it wrote."""
    output = directory / name
    if code := tba.main(["arithmetic", "--output_dir", str(output), *flags]):
        sys.exit(f"the {name} run failed with exit code {code}")
    return output


def measure(run_dir: Path) -> dict[str, float]:
    """Steps per second, behind the first twentieth of them; seconds from the first step to TARGET; shares of the time by span."""
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
    reached = first_right(
        [(clock, count, line["reward"]) for clock, count, line in zip(ends, new, steps) if count],
        TARGET,
    )
    work = ("step", "search", "score", "reference")
    working = {
        process: sum(
            stop - start
            for name, start, stop in rows
            if name in work and begin <= start and stop <= end
        )
        for process, rows in spans.items()
    }
    return {
        "rate": (len(steady) - 1) / (steady[-1]["seconds"] - steady[0]["seconds"]),
        "reached": reached - first,
        "busy": trainer_busy(str(run_dir)),
        "t_train": working["trainer"] / len(steps),
        "t_search": working["searcher-0"] / len(steps),
    }


def beside_a_searcher(run_dir: Path, *flags: str) -> float:
    """Steps per second of an asynchronous run while its searcher runs, of those while that is stopped."""
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
    pairs = min(
        len(rates[False]), len(rates[True])
    )  # a window with the searcher, and the one without it that comes next
    if not pairs:
        sys.exit(
            f"the run was over before its searcher had been stopped for {PERIOD} s: give it more steps"
        )
    return float(np.mean(rates[False][:pairs]) / np.mean(rates[True][:pairs]))


def record(config: Config, directory: Path, count: int) -> tuple[list[Group], float]:
    """What a searcher alone finds, at its place in a run: so many groups, and how many a second it found behind the first half. Sets config.model."""
    (directory / "logs").mkdir(parents=True)
    config.model, config.output_dir, config.searchers = (
        str(load_task(config.task).base_model()),
        str(directory),
        1,
    )
    places = processes.places(config)
    board = Board([place.name for place in places])
    weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
    supervisor = Supervisor(config, places[1:], weights, board, str(directory))
    groups: list[Group] = []
    while len(groups) < count:
        item = supervisor.rollouts.get(timeout=120)
        if isinstance(item, Group):
            groups.append(item)
            if len(groups) == count // 2:
                half = time.monotonic()
    rate = (count - count // 2) / (time.monotonic() - half)
    board.stop = True
    supervisor.stop(time.monotonic() + 5.0)
    return groups, rate


def searcher_alone(seed: int, directory: Path) -> float:
    """Responses per second."""
    config = build_config(["arithmetic", "--seed", str(seed)])
    return record(config, directory, FOUND)[1] * config.samples_per_query


def steps_of(run_dir: str) -> list[dict]:
    return [line for line in read_lines(Path(run_dir) / "metrics.jsonl") if "loss" in line]


def main() -> None:
    quick = arguments(__doc__).quick
    seeds, steps, few = ((0,), 300, 40) if quick else ((0, 1, 2), 600, 80)
    split, results, beside, alone = processes.places, {}, [], []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for seed in seeds:  # in turns, since the machine may be faster now than then
            flags = ("--seed", str(seed), "--checkpoint_every", "0")
            synchronous = ("--synchronous", "--steps", str(few), "--eval_every", "0")
            for mode, more in (
                ("asynchronous", ("--steps", str(steps), "--eval_every", "0")),
                ("synchronous", synchronous),
            ):
                results.setdefault(mode, []).append(
                    measure(run(directory, f"{mode} {seed}", *flags, *more))
                )
            processes.places = lambda config: [place_on_all_cores(place) for place in split(config)]
            mode = "synchronous, all cores"
            results.setdefault(mode, []).append(
                measure(run(directory, f"{mode} {seed}", *flags, *synchronous))
            )
            processes.places = split
            beside.append(
                beside_a_searcher(
                    directory / f"beside {seed}",
                    *flags,
                    "--steps",
                    str(2 * steps),
                    "--eval_every",
                    "0",
                )
            )
            alone.append(searcher_alone(seed, directory / f"alone {seed}"))
        draw(
            {mode: directory / f"{mode} 0" for mode in results},
            (RESULTS / "quick" if quick else RESULTS) / "overlap.png",
        )

    def values(mode: str, key: str) -> np.ndarray:
        return np.array([result[key] for result in results[mode]])

    t_train, t_search = values("synchronous", "t_train"), values("synchronous", "t_search")
    ideal = (t_train + t_search) / np.maximum(t_train, t_search)
    gain = values("asynchronous", "rate") / values("synchronous", "rate")
    rows = [
        [
            mode,
            mean_and_values(values(mode, "rate")),
            mean_and_values(values(mode, "reached")),
            mean_and_values(values(mode, "busy")),
        ]
        for mode in results
    ]
    save(
        "overlap",
        quick,
        f"Mean, and the values of {len(seeds)} seeds.",
        table(
            [
                "",
                "steps/s",
                f"seconds from the first step to {TARGET} right samples",
                "trainer busy",
            ],
            rows,
        ),
        f"- asynchronous steps/s, of the trainer alone: {mean_and_values(beside)}\n"
        f"- asynchronous steps/s, of synchronous on the same cores: {mean_and_values(gain)}; ideal: {mean_and_values(ideal)}; of the ideal: {mean_and_values(gain / ideal)}\n"
        f"- a synchronous step: t_train {mean_and_values(t_train)} s, t_search {mean_and_values(t_search)} s\n"
        f"- the searcher alone: {mean_and_values(alone)} responses/s",
        "![timelines](overlap.png)",
    )


def place_on_all_cores(place: processes.Place) -> processes.Place:
    return processes.Place(place.name, place.gpu, sorted(os.sched_getaffinity(0)))


def draw(runs: dict[str, Path], path: Path, seconds: float = 1.0) -> None:
    """One second from the middle of each run."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

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
                    axis.barh(
                        y,
                        min(stop, begin + seconds) - max(start, begin),
                        left=max(start, begin) - begin,
                        color=COLORS.get(name, "black"),
                    )
        axis.set(yticks=range(len(spans)), yticklabels=list(spans), title=mode, xlim=(0, seconds))
        axis.invert_yaxis()
    axes[-1].set_xlabel("seconds")
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=COLORS.get(name, "black")) for name in sorted(used)],
        sorted(used),
        loc="outside right upper",
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
