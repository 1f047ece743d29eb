"""How the trainer's side takes 1, 2, 4, 8 searchers, and at what rate of groups it is full.

    python benchmarks/scaling.py                # eight minutes on 2 cores
    python benchmarks/scaling.py --quick        # fewer rates, shorter

Trainer, supervisor, queues, buffer and weights are the real ones, processes as in a run. The searchers are not: where they outnumber the cores, real
ones would only wait for each other. Instead each replays recorded groups of the arithmetic demo at a set rate, copies out every version of the weights that
it sees, and waits, as a searcher does, when its queue is full.
short: the groups as they are, 12 responses of 4 tokens, trained on as in the demo. long: 24 responses of 121 tokens, as GSM8K's, trained on 8 rows a step.
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
from common import arguments, save, table
from overlap import record, steps_of

import torch

from runtime import processes
from buffer import Group
from config import Config
from runtime.command_line import build_config
from models.policy import weight_shapes
from runtime.board import Board
from runtime.supervisor import Supervisor
from weights import SharedWeights

SEARCHERS = (1, 2, 4, 8)
OFFERED = (100, 400, 1600, 6400)  # groups per second, of four searchers together
SETTINGS = {
    "short": ["arithmetic", "--initial_responses", "400"],
    "long": [
        "arithmetic",
        "--initial_responses",
        "400",
        "--queries_per_batch",
        "2",
        "--queries_per_micro_batch",
        "2",
        "--responses_per_query",
        "4",
        "--samples_per_query",
        "24",
        "--max_prompt_tokens",
        "7",
        "--max_response_tokens",
        "121",
    ],
}


def replay(
    config: Config,
    share: int,
    pin: int,
    name: str,
    weights: SharedWeights,
    groups,
    board: Board,
    run_dir: str,
) -> None:
    """A process, in the place of searcher:run."""
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
                continue
            except queue.Full:
                pass
            time.sleep(0.005)
            board.add(
                name, "busy", time.monotonic() - began
            )  # here: seconds in which it waited for its queue
            start += time.monotonic() - began
            continue
        time.sleep(0.001)
    groups.cancel_join_thread()


def measure(
    config: Config, recorded: list[Group], searchers: int, rate: float, seconds: float
) -> dict[str, float]:
    """`rate`: groups per second that each searcher offers."""
    with tempfile.TemporaryDirectory() as run_dir:
        Path(run_dir, "logs").mkdir()
        Path(run_dir, "recorded.pkl").write_bytes(pickle.dumps((recorded, rate)))
        config = dataclasses.replace(config, searchers=searchers, output_dir=run_dir)
        places = processes.places(config)
        weights = SharedWeights(weight_shapes(config), torch.float32, readers=searchers)
        board = Board([place.name for place in places])
        start = processes.start
        processes.start = lambda place, target, *rest: start(place, "scaling:replay", *rest)
        supervisor = Supervisor(config, places[1:], weights, board, run_dir)
        processes.start = start
        trainer = start(
            places[0],
            "trainer:run",
            (config, weights, supervisor.rollouts, board, run_dir, None),
            run_dir,
        )
        deadline = time.monotonic() + 300
        while len(steps_of(run_dir)) < 20:
            time.sleep(0.2)
            supervisor.check()
            if trainer.exitcode or time.monotonic() > deadline:
                sys.exit(
                    f"the trainer did not come to step 20:\n{processes.log_tail(run_dir, 'trainer')}"
                )
        time.sleep(2.0)  # to get going
        first, blocked = steps_of(run_dir)[-1], board.total("busy")
        time.sleep(seconds)
        steps, blocked = steps_of(run_dir), board.total("busy") - blocked
        board.stop = True
        processes.kill(trainer)
        supervisor.stop(time.monotonic() + 2.0)
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
    """24 responses of 121 tokens."""
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


def main() -> None:
    quick = arguments(__doc__).quick
    seconds = 4.0 if quick else 10.0
    parts = []
    with tempfile.TemporaryDirectory() as directory:
        config = build_config(SETTINGS["short"])
        recorded, rate = record(config, Path(directory, "record"), 200)
        model = config.model
    rng = np.random.default_rng(0)
    for kind in SETTINGS:
        config = build_config(
            [*SETTINGS[kind], "--steps", "1000000", "--eval_every", "0", "--checkpoint_every", "0"]
        )
        config.model = model
        groups = recorded if kind == "short" else [longer(group, rng) for group in recorded]
        if kind == "short":
            lines = []
            for searchers in SEARCHERS[::3] if quick else SEARCHERS:
                m = measure(config, groups, searchers, rate, seconds)
                cells = (
                    f"{m['steps']:.1f}",
                    f"{m['responses']:.0f}",
                    f"{m['queue']:.1f}",
                    f"{m['staleness']:.1f}",
                    f"{m['blocked']:.3f}",
                )
                lines.append([str(searchers), *cells])
                print(lines[-1], flush=True)
            header = [
                "searchers",
                "steps/s",
                "responses/s received",
                "queue, groups (mean)",
                "staleness, steps (mean)",
                "searchers blocked, share of time",
            ]
            parts.append(
                f"Searchers that find {rate:.0f} groups/s each, what a real one found on one core ({kind} groups):\n\n"
                + table(header, lines)
            )
        lines = []
        for offered in OFFERED[1::2] if quick else OFFERED:
            m = measure(config, groups, 4, offered / 4, seconds)
            cells = (
                f"{m['groups']:.0f}",
                f"{m['megabytes']:.2f}",
                f"{m['steps']:.1f}",
                f"{m['queue']:.1f}",
                f"{m['blocked']:.3f}",
            )
            lines.append([str(offered), *cells])
            print(lines[-1], flush=True)
        header = [
            "groups/s offered",
            "groups/s received",
            "MB/s",
            "steps/s",
            "queue, groups (mean)",
            "searchers blocked, share of time",
        ]
        parts.append(f"Four searchers, {kind} groups:\n\n" + table(header, lines))
    save("scaling", quick, *parts)


if __name__ == "__main__":
    sys.exit(main())
