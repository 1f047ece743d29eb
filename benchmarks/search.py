"""How fast a searcher generates: against vLLM alone, streaming and in batches with a barrier, on responses of the lengths of GSM8K's solutions.

    python benchmarks/search.py --data_dir DIR      # 12 minutes on 2 cores; GSM8K from the hub without the flag
    python benchmarks/search.py --quick             # in four minutes, less steady

searcher      Searcher.search() itself: generation, scores, reference log-probabilities, groups into the queue; another process empties that
streaming     the same engine and requests and nothing else: a group of 24 joins as soon as there is room
barrier       the same engine, as many groups as there is room for, the next when all have finished: what llm.generate does
loading       streaming, with new weights every 100, 10, 1 engine steps

Tokens per second, each behind a time to get going. The model is small and counts its tokens: it ends as often as the solutions do
(common.counting_model). Writes benchmarks/results/search.md; with --quick benchmarks/results/quick/.
"""

import itertools
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import arguments, counting_model, gsm8k, save, table

import torch

from runtime import processes
from buffer import Group
from config import Config
from models.engine import ENGINE_ROWS
from models.policy import weight_shapes
from runtime.board import Board
from runtime.timeline import read_spans
from searcher import Searcher
from weights import SharedWeights, num_elements

SAMPLES, LIMIT = 24, 512
LOAD_EVERY = (100, 10, 1)  # engine steps


class Measurement:
    """In a process of its own: the searcher, and its engine without it."""

    def __init__(self, config: Config, found, run_dir: str, warm_up: float, seconds: float):
        self.config, self.run_dir, self.warm_up, self.seconds = config, run_dir, warm_up, seconds
        self.weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
        self.board = Board(["trainer", "searcher 0"])
        self.searcher = Searcher(
            config, 0, 0, "searcher 0", self.weights, found, self.board, run_dir
        )
        self.searcher.evaluation.started_version = 0  # no evaluation of the base model
        self.engine = self.searcher.engine
        self.prompts = [
            self.searcher.tokenizer(query.prompt).input_ids
            for query in self.searcher.workload.queries
        ]
        self.sampling = dict(
            n=SAMPLES, temperature=config.temperature, max_tokens=config.max_response_tokens
        )
        self.requests, self.tokens = 0, 0
        self.engine_step, self.engine.step = self.engine.step, self.step

    def step(self) -> list:
        """The engine's, counted: each response that it has room for gets one token."""
        self.tokens += min(self.engine.rows, ENGINE_ROWS)
        return self.engine_step()

    def searching(self) -> dict[str, float]:
        """Tokens per second, and the share of the time that each kind of its spans takes."""
        marks = []

        def watch() -> None:
            for pause in (self.warm_up, self.seconds):
                time.sleep(pause)
                marks.append((time.monotonic(), self.tokens))
            self.board.stop = True

        threading.Thread(target=watch).start()
        self.searcher.search()
        self.board.stop = False
        (begin, before), (end, after) = marks
        shares = {}
        for name, start, stop in read_spans(self.run_dir)["searcher-0"]:
            shares[name] = shares.get(name, 0.0) + max(0.0, min(stop, end) - max(start, begin)) / (
                end - begin
            )
        return {"rate": (after - before) / (end - begin)} | shares

    def streaming(self, load_every: int = 0) -> float:
        """Tokens per second."""
        tensors, steps = dict(self.searcher.reference.model.named_parameters()), itertools.count(1)

        def step() -> None:
            while self.engine.rows < ENGINE_ROWS:
                self.add()
            if load_every and next(steps) % load_every == 0:
                self.engine.load(tensors.items())
            self.step()

        return self.rate(step)

    def barrier(self) -> float:
        """Tokens per second."""

        def batch() -> None:
            for _ in range(ENGINE_ROWS // SAMPLES):
                self.add()
            while self.engine.is_running:
                self.step()

        return self.rate(batch)

    def add(self) -> None:
        self.requests += 1
        self.engine.add(
            f"bare {self.requests}",
            self.prompts[self.requests % len(self.prompts)],
            0,
            **self.sampling,
        )

    def rate(self, work: Callable[[], None]) -> float:
        """Tokens per second of work(), again and again."""
        while self.engine.is_running:  # what the measurement before left there
            self.engine_step()
        start = time.monotonic()
        while time.monotonic() - start < self.warm_up:
            work()
        begin, before = time.monotonic(), self.tokens
        while time.monotonic() - begin < self.seconds:
            work()
        return (self.tokens - before) / (time.monotonic() - begin)


def measure(config: Config, found, results, run_dir: str, warm_up: float, seconds: float) -> None:
    m = Measurement(config, found, run_dir, warm_up, seconds)
    rates: dict[str, list[float]] = {}
    shares = []
    for _ in range(2):  # in turns, since the machine may be faster now than then
        shares.append(m.searching())
        rates.setdefault("searcher", []).append(shares[-1].pop("rate"))
        rates.setdefault("streaming", []).append(m.streaming())
        rates.setdefault("barrier", []).append(m.barrier())
        for every in LOAD_EVERY:
            rates.setdefault(f"loading every {every}", []).append(m.streaming(every))
    results.put((rates, shares))
    found.cancel_join_thread()


def main() -> None:
    options = arguments(__doc__, ("--data_dir", ""))
    warm_up, seconds = (10.0, 10.0) if options.quick else (20.0, 30.0)
    _, solutions, tokenizer = gsm8k(options.data_dir, 1024)
    lengths = [min(len(ids) + 1, LIMIT) for ids in tokenizer(solutions).input_ids]
    spawn = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "logs").mkdir()
        counting_model(Path(directory) / "model", lengths, tokenizer, layers=1, intermediate=512)
        config = Config(
            task="gsm8k",
            options={"data_dir": options.data_dir},
            model=f"{directory}/model",
            samples_per_query=SAMPLES,
            searchers=1,
            temperature=1.0,
            max_prompt_tokens=512,
            max_response_tokens=LIMIT,
        )
        parameters = num_elements(weight_shapes(config))
        found, results = spawn.Queue(256), spawn.Queue()
        place = processes.Place("searcher 0", None, sorted(os.sched_getaffinity(0)))
        child = processes.start(
            place,
            "search:measure",
            (config, found, results, directory, warm_up, seconds),
            directory,
        )
        groups: list[Group] = []
        while results.empty() and child.is_alive():
            try:
                groups.append(found.get(timeout=0.5))
            except queue.Empty:
                pass
        if results.empty():
            sys.exit(processes.log_tail(directory, "searcher 0"))
        rates, shares = results.get()
        processes.kill(child)
    mean = {name: float(np.mean(values)) for name, values in rates.items()}
    found_lengths = np.concatenate([group.lengths for group in groups])
    save(
        "search",
        options.quick,
        f"Responses of {np.mean(lengths):.0f} ± {np.std(lengths):.0f} tokens wanted, {found_lengths.mean():.0f} ± {found_lengths.std():.0f} found; "
        f"{ENGINE_ROWS} at a time, {SAMPLES} a group; {parameters / 1e6:.1f} M parameters.",
        table(
            ["", "tokens/s", "of streaming"],
            [
                [
                    name,
                    " ".join(f"{value:.0f}" for value in values),
                    f"{mean[name] / mean['streaming']:.2f}",
                ]
                for name, values in rates.items()
            ],
        ),
        "The searcher's time: "
        + ", ".join(
            f"{name} {np.mean([s.get(name, 0.0) for s in shares]):.3f}"
            for name in sorted(shares[0])
        )
        + ".",
        f"Searcher against the barrier: {mean['searcher'] / mean['barrier']:.2f}; streaming against it: {mean['streaming'] / mean['barrier']:.2f}.",
    )


if __name__ == "__main__":
    sys.exit(main())
