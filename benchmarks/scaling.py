"""Measure how the trainer's side takes 1, 2, 4, 8 searchers, and at what rate of groups it is full.

    python benchmarks/scaling.py                # eight minutes on 2 cores
    python benchmarks/scaling.py --quick        # fewer rates, shorter

Trainer, supervisor, queues, buffer and weights are the real ones, processes as in a run. The
searchers are not: where they outnumber the cores, real ones would only wait for each other. Instead
each replays recorded groups of the arithmetic demo at a set rate, copies out every version of the
weights that it sees, and waits, as a searcher does, when its queue is full.

short    the groups as they are, 12 responses of 4 tokens, trained on as in the demo
long     24 responses of 121 tokens, as GSM8K's, trained on 8 rows a step

Writes benchmarks/results/scaling.md; with --quick benchmarks/results/quick/.
"""

import dataclasses
import pickle
import queue
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing
from common import arguments, as_flags, save, table
from overlap import record, steps_of

from buffer import Group
from config import Config
from models.policy import weight_shapes
from runtime.command_line import build_config
from runtime.processes import children
from runtime.processes.places import find_places
from runtime.processes.supervisor import Supervisor
from runtime.transport.board import Board
from tasks import load_task
from weights import SharedWeights

SEARCHERS = (1, 2, 4, 8)
OFFERED = (100, 400, 1600, 6400)  # groups per second, of four searchers together
SETTINGS = {
    "short": ["arithmetic", *as_flags(initial_responses=400)],
    "long": [
        "arithmetic",
        *as_flags(
            initial_responses=400,
            queries_per_batch=2,
            tokens_per_micro_batch=1000,
            responses_per_query=4,
            samples_per_query=24,
            max_prompt_tokens=7,
            max_response_tokens=121,
        ),
    ],
}
# Of the tables: the key in measure()'s result, the title, the format.
SEARCHERS_COLUMNS = (
    ("steps", "steps/s", ".1f"),
    ("responses", "responses/s received", ".0f"),
    ("queue", "queue, groups (mean)", ".1f"),
    ("staleness", "staleness, steps (mean)", ".1f"),
    ("blocked", "searchers blocked, share of time", ".3f"),
)
OFFERED_COLUMNS = (
    ("groups", "groups/s received", ".0f"),
    ("megabytes", "MB/s", ".2f"),
    ("steps", "steps/s", ".1f"),
    ("queue", "queue, groups (mean)", ".1f"),
    ("blocked", "searchers blocked, share of time", ".3f"),
)


def replay(
    config: Config,
    share: int,
    pin: int,
    name: str,
    weights: SharedWeights,
    groups: torch.multiprocessing.Queue,
    board: Board,
    run_dir: str,
) -> None:
    """Send recorded groups at a set rate: a process, in the place of searcher:run.

    The board's "busy" is here the seconds in which it waited for its queue.
    """
    torch.set_num_threads(1)
    recorded, rate = pickle.loads(Path(run_dir, "recorded.pkl").read_bytes())
    version, sent, start = 0, 0, None
    board.loaded(name)
    while not board.stop:
        board.beat(name)
        if weights.version > version:
            with weights.read(pin) as (version, tensors):
                for tensor in tensors.values():
                    tensor.clone()
        if start is None:
            start = time.monotonic() if board.get("trainer", "ready") else None
        elif sent < (time.monotonic() - start) * rate:
            began = time.monotonic()
            try:
                group = recorded[(sent * config.searchers + share) % len(recorded)]
                groups.put_nowait(dataclasses.replace(group, version=version, last_version=version))
                sent += 1
            except queue.Full:
                time.sleep(0.005)
                board.add(name, "busy", time.monotonic() - began)
                start += time.monotonic() - began
            continue
        time.sleep(0.001)
    groups.cancel_join_thread()


def measure(
    config: Config, recorded: list[Group], searchers: int, rate: float, seconds: float
) -> dict[str, float]:
    """Measure the trainer's side. rate: groups per second that each searcher offers."""
    with tempfile.TemporaryDirectory() as run_dir:
        Path(run_dir, "logs").mkdir()
        Path(run_dir, "recorded.pkl").write_bytes(pickle.dumps((recorded, rate)))
        config = dataclasses.replace(config, searchers=searchers, output_dir=run_dir)
        places = find_places(config)
        weights = SharedWeights(weight_shapes(config), torch.float32, readers=searchers)
        board = Board([place.name for place in places])
        supervisor = Supervisor(config, places[1:], weights, board, run_dir, "scaling:replay")
        trainer_arguments = config, weights, supervisor.rollout_queue, board, run_dir, None
        trainer = children.start(places[0], "trainer:run", trainer_arguments, run_dir)
        deadline = time.monotonic() + 300
        while len(steps_of(run_dir)) < 20:
            time.sleep(0.2)
            supervisor.check()
            if trainer.exitcode or time.monotonic() > deadline:
                log = children.log_tail(run_dir, "trainer")
                sys.exit(f"the trainer did not come to step 20:\n{log}")
        time.sleep(2.0)  # to get going
        first, blocked = steps_of(run_dir)[-1], board.total("busy")
        time.sleep(seconds)
        steps, blocked = steps_of(run_dir), board.total("busy") - blocked
        board.stop = True
        children.kill(trainer)
        supervisor.stop()
    steps = [line for line in steps if line["step"] >= first["step"]]
    span = steps[-1]["seconds"] - first["seconds"]
    responses = (steps[-1]["received"] - first["received"]) / span
    groups = responses / config.samples_per_query
    return {
        "steps": (len(steps) - 1) / span,
        "responses": responses,
        "groups": groups,
        "blocked": blocked / searchers / span,
        "megabytes": groups * np.mean([len(pickle.dumps(group)) for group in recorded]) / 1e6,
        "queue": float(np.mean([line["queue_depth"] for line in steps])),
        "staleness": float(np.mean([line["staleness_mean"] for line in steps])),
    }


def longer(group: Group, rng: np.random.Generator) -> Group:
    """Make a group of 24 random responses of 121 tokens."""
    tokens = rng.integers(2, 14, 24 * 121, dtype=np.int32)
    return dataclasses.replace(
        group,
        lengths=np.full(24, 121, np.int32),
        tokens=tokens,
        ref_logprobs=np.full(len(tokens), -2.5, np.float32),
        behavior_logprobs=np.full(len(tokens), -2.5, np.float32),
        rewards=rng.integers(0, 2, 24).astype(np.float32),
        finished=np.ones(24, bool),
    )


def row(name: int, measured: dict[str, float], columns: tuple[tuple[str, str, str], ...]) -> list:
    """Print and return a row of a table."""
    cells = [str(name), *(f"{measured[key]:{form}}" for key, _, form in columns)]
    print(cells, flush=True)
    return cells


def main() -> None:
    quick = arguments(__doc__).quick
    seconds = 4.0 if quick else 10.0
    parts = []
    with tempfile.TemporaryDirectory() as directory:
        config = build_config(SETTINGS["short"])
        recorded, rate = record(config, Path(directory, "record"), 200)
    model = str(load_task(config.task).base_model())
    rng = np.random.default_rng(0)
    for kind, settings in SETTINGS.items():
        endless = as_flags(steps=1000000, eval_every=0, checkpoint_every=0)
        config = dataclasses.replace(build_config([*settings, *endless]), model=model)
        groups = recorded if kind == "short" else [longer(group, rng) for group in recorded]
        if kind == "short":
            lines = []
            for searchers in SEARCHERS[::3] if quick else SEARCHERS:
                measured = measure(config, groups, searchers, rate, seconds)
                lines.append(row(searchers, measured, SEARCHERS_COLUMNS))
            header = ["searchers", *(title for _, title, _ in SEARCHERS_COLUMNS)]
            parts.append(
                f"Searchers that find {rate:.0f} groups/s each, what a real one found on one core "
                f"({kind} groups):\n\n{table(header, lines)}"
            )
        lines = []
        for offered in OFFERED[1::2] if quick else OFFERED:
            measured = measure(config, groups, 4, offered / 4, seconds)
            lines.append(row(offered, measured, OFFERED_COLUMNS))
        header = ["groups/s offered", *(title for _, title, _ in OFFERED_COLUMNS)]
        parts.append(f"Four searchers, {kind} groups:\n\n" + table(header, lines))
    save("scaling", quick, *parts)


if __name__ == "__main__":
    sys.exit(main())
