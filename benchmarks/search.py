"""Measure how fast a searcher generates, against vLLM alone.

vLLM alone is measured streaming and in batches with a barrier. Responses have the lengths of
GSM8K's solutions.

    python benchmarks/search.py --data_dir DIR      # 15 minutes on 2 cores
    python benchmarks/search.py --quick             # in eight minutes, less steady

GSM8K comes from the hub without --data_dir.

searcher      Searcher.search() itself: generation, scores, reference log-probabilities, groups into
              the queue; another process empties that
no reference  the same, as it is for an objective that reads no reference log-probabilities
streaming     the same engine and requests and nothing else: a group of 24 joins as soon as there is
              room
barrier       the same engine, as many groups as there is room for, the next when all have finished:
              what llm.generate does
loading       streaming, with new weights every 100, 10, 1 engine steps
episodes      turns of 32 to 96 tokens, each answered at once with 32, until 900 are there; also
              with another version of the weights every 1000, 100, 10 engine steps, without its
              load: vLLM reads each episode in flight anew

Each figure is tokens per second, after a time to get going. The model is small and counts its
tokens: its responses end as often as the solutions do (common.counting_model).
Writes benchmarks/results/search.md; with --quick benchmarks/results/quick/.
"""

import contextlib
import dataclasses
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
import torch
import torch.multiprocessing
from common import arguments, counting_model, gsm8k, save, table

from buffer import Group
from config import Config
from models.engine import ENGINE_ROWS
from models.policy import weight_shapes
from runtime.modes.reference import Reference
from runtime.processes import children
from runtime.record.timeline import read_spans
from runtime.transport.board import Board
from searcher import Searcher
from weights import SharedWeights, num_elements

SAMPLES, LIMIT = 24, 512
LOAD_EVERY = (100, 10, 1)  # engine steps
TURN, REPLY, EPISODE = (32, 97), [5] * 32, 900  # tokens: from, to; ids; a turn may go beyond
PUBLISH_EVERY = (0, 1000, 100, 10)  # engine steps


class Measurement:
    """Measures, in a process of its own, the searcher, and its engine without it."""

    def __init__(
        self,
        config: Config,
        found: torch.multiprocessing.Queue,
        run_dir: str,
        warm_up: float,
        seconds: float,
    ):
        self.config, self.run_dir, self.warm_up, self.seconds = config, run_dir, warm_up, seconds
        self.weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
        self.board = Board(["trainer", "searcher 0"])
        self.searcher = Searcher(
            config, 0, 0, "searcher 0", self.weights, found, self.board, run_dir
        )
        self.searcher.evaluation.started_version = 0  # no evaluation of the base model
        self.engine, self.reference = self.searcher.engine, self.searcher.reference
        queries = self.searcher.workload.queries
        self.prompts = [self.searcher.tokenizer(query.prompt).input_ids for query in queries]
        self.sampling = dict(
            n=SAMPLES, temperature=config.temperature, max_tokens=config.max_response_tokens
        )
        self.requests, self.tokens = 0, 0
        self.engine_step, self.engine.step = self.engine.step, self.step

    def step(self) -> list:
        """Make the engine's step, and count: each response that it has room for gets one token."""
        self.tokens += min(self.engine.rows, ENGINE_ROWS)
        return self.engine_step()

    def searching(self, reference: Reference) -> dict[str, float]:
        """Measure the searcher: tokens per second, and each kind of span's share of the time."""
        self.drain()
        self.searcher.reference, marks = reference, []

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
            overlap = max(0.0, min(stop, end) - max(start, begin))
            shares[name] = shares.get(name, 0.0) + overlap / (end - begin)
        return {"rate": (after - before) / (end - begin)} | shares

    def streaming(self, load_every: int = 0) -> float:
        """Measure tokens per second where queries join as others leave.

        load_every: engine steps between two loads of new weights; 0: none are loaded.
        """
        tensors, steps = dict(self.reference.model.named_parameters()), itertools.count(1)

        def step() -> None:
            while self.engine.rows < ENGINE_ROWS:
                self.add()
            if load_every and next(steps) % load_every == 0:
                self.engine.load(tensors.items())
            self.step()

        return self.rate(step)

    def barrier(self) -> float:
        """Measure tokens per second where a batch starts when the one before has finished."""

        def batch() -> None:
            for _ in range(ENGINE_ROWS // SAMPLES):
                self.add()
            while self.engine.rows:
                self.step()

        return self.rate(batch)

    def episodes(self, publish_every: int) -> float:
        """Measure sampled tokens per second of episodes.

        publish_every: engine steps between two versions of the weights; 0: there is one.
        """
        version, steps, rng = 0, itertools.count(1), np.random.default_rng(0)
        prompts: dict[str, list[int]] = {}

        def begin_turn(prompt: list[int]) -> None:
            self.requests += 1
            request = f"turn {self.requests}"
            if len(prompt) >= EPISODE:
                prompt = self.prompts[self.requests % len(self.prompts)]
            prompts[request], length = prompt, int(rng.integers(*TURN))
            self.engine.add(request, prompt, version, max_tokens=length, ignore_eos=True)

        def step() -> None:
            nonlocal version
            while self.engine.rows < ENGINE_ROWS:
                begin_turn(self.prompts[self.requests % len(self.prompts)])
            version += bool(publish_every and next(steps) % publish_every == 0)
            for output in self.engine_step():
                turn = list(output.outputs[0].token_ids)
                self.tokens += len(turn)
                begin_turn(prompts.pop(output.request_id) + turn + REPLY)

        return self.rate(step)

    def add(self) -> None:
        """Start a query in the engine."""
        self.requests += 1
        prompt = self.prompts[self.requests % len(self.prompts)]
        self.engine.add(f"bare {self.requests}", prompt, 0, **self.sampling)

    def drain(self) -> None:
        """Finish what the measurement before left in the engine."""
        while self.engine.rows:
            self.engine_step()

    def rate(self, work: Callable[[], None]) -> float:
        """Measure tokens per second of work(), again and again."""
        self.drain()
        start = time.monotonic()
        while time.monotonic() - start < self.warm_up:
            work()
        begin, before = time.monotonic(), self.tokens
        while time.monotonic() - begin < self.seconds:
            work()
        return (self.tokens - before) / (time.monotonic() - begin)


def measure(
    config: Config,
    found: torch.multiprocessing.Queue,
    results: torch.multiprocessing.Queue,
    run_dir: str,
    warm_up: float,
    seconds: float,
) -> None:
    """Make all measurements twice: a process.

    results: gets (tokens per second by name, shares of the searcher's time), a value or a dict for
    each of the two times.
    """
    m = Measurement(config, found, run_dir, warm_up, seconds)
    no_reference = Reference(dataclasses.replace(config, loss="kimi_k2"), m.weights, pin=0)
    rates: dict[str, list[float]] = {}
    shares = []
    for _ in range(2):  # in turns, since the machine may be faster now than then
        shares.append(m.searching(m.reference))
        rates.setdefault("searcher", []).append(shares[-1].pop("rate"))
        rates.setdefault("no reference", []).append(m.searching(no_reference)["rate"])
        rates.setdefault("streaming", []).append(m.streaming())
        rates.setdefault("barrier", []).append(m.barrier())
        for every in LOAD_EVERY:
            rates.setdefault(f"loading every {every}", []).append(m.streaming(every))
        for every in PUBLISH_EVERY:
            name = f"episodes, a version every {every}" if every else "episodes"
            rates.setdefault(name, []).append(m.episodes(every))
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
        place = children.Place("searcher 0", None, sorted(os.sched_getaffinity(0)))
        measure_arguments = config, found, results, directory, warm_up, seconds
        child = children.start(place, "search:measure", measure_arguments, directory)
        groups: list[Group] = []
        while results.empty() and child.is_alive():
            with contextlib.suppress(queue.Empty):
                groups.append(found.get(timeout=0.5))
        if results.empty():
            sys.exit(children.log_tail(directory, "searcher 0"))
        rates, shares = results.get()
        children.kill(child)
    report(options.quick, lengths, groups, parameters, rates, shares)


def report(
    quick: bool,
    lengths: list[int],
    groups: list[Group],
    parameters: int,
    rates: dict[str, list[float]],
    shares: list[dict[str, float]],
) -> None:
    """Save the results. rates, shares: of measure(); lengths: those that were wanted, in tokens."""
    mean = {name: float(np.mean(values)) for name, values in rates.items()}
    found_lengths = np.concatenate([group.lengths for group in groups])
    rows = []
    for name, values in rates.items():
        shown = " ".join(f"{value:.0f}" for value in values)
        rows.append([name, shown, f"{mean[name] / mean['streaming']:.2f}"])
    mean_shares = {
        name: np.mean([share.get(name, 0.0) for share in shares]) for name in sorted(shares[0])
    }
    shown_shares = ", ".join(f"{name} {share:.3f}" for name, share in mean_shares.items())
    save(
        "search",
        quick,
        f"Responses of {np.mean(lengths):.0f} ± {np.std(lengths):.0f} tokens wanted, "
        f"{found_lengths.mean():.0f} ± {found_lengths.std():.0f} found; "
        f"{ENGINE_ROWS} at a time, {SAMPLES} a group; {parameters / 1e6:.1f} M parameters.",
        table(["", "tokens/s", "of streaming"], rows),
        f"The searcher's time: {shown_shares}.",
        f"Searcher against the barrier: {mean['searcher'] / mean['barrier']:.2f}; "
        f"streaming against it: {mean['streaming'] / mean['barrier']:.2f}.",
    )


if __name__ == "__main__":
    sys.exit(main())
