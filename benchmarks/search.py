"""Measure how fast a searcher generates, in tokens per second, against vLLM alone.

    python benchmarks/search.py --data_dir DIR      # 15 minutes on 2 cores
    python benchmarks/search.py --quick             # in eight minutes, less steady

GSM8K, from the hub without --data_dir, gives the lengths of responses, which the model counts out.

searcher      Searcher.search() itself: generation, scores, reference log-probabilities, groups into
              the queue; another process empties that
no reference  the same, as it is for an objective that reads no reference log-probabilities
streaming     the same engine alone: a group of 24 joins as soon as there is room
barrier       as many groups as there is room for, the next when all have finished, as llm.generate
loading       streaming, with new weights every 100, 10, 1 engine steps
episodes      turns of 32 to 96 tokens, each answered at once with 32, until 900 are there; also
              with another version of the weights every 1000, 100, 10 engine steps, without its
              load: vLLM reads each episode in flight anew
"""

import contextlib
import itertools
import os
import queue
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing
from common import arguments, counting_model, gsm8k, save, table

from config import Config
from launch import children
from launch.files import read_spans
from launch.places import Place
from models.architecture import weight_shapes
from models.engine import ENGINE_ROWS
from runtime.transport.status import StatusTable
from searcher import Searcher
from weights import SharedWeights, num_elements

SAMPLES, LIMIT = 24, 512
TURN, REPLY, EPISODE = (32, 97), [5] * 32, 900  # tokens: from, to; ids; a turn may go beyond


class Measurement:
    """Measures the searcher, and its engine alone. seconds: to get going, and to measure."""

    def __init__(self, config: Config, found: Queue, seconds: tuple[float, float]):
        self.config, self.seconds, self.tokens, self.requests = config, seconds, 0, 0
        weights = SharedWeights(weight_shapes(config), torch.float32, readers=1)
        self.status = StatusTable(["trainer", "searcher 0"])
        self.searcher = Searcher(config, 0, weights, found, self.status, config.output_dir)
        self.searcher.evaluation.started_version = 0  # no evaluation of the base model
        self.engine, self.reference = self.searcher.engine, self.searcher.reference
        queries = self.searcher.share.queries
        prompts = [self.searcher.tokenizer(query.prompt).input_ids for query in queries]
        self.prompts = itertools.cycle(prompts)
        self.engine_step, self.engine.step = self.engine.step, self.step

    def step(self) -> list:
        """Make the engine's step, and count: each response that it has room for gets one token."""
        self.tokens += min(self.engine.rows, ENGINE_ROWS)
        return self.engine_step()

    def add(self, prompt: list[int] | None = None, **sampling: object) -> str:
        """Start a request in the engine, by default a whole group of the next query."""
        self.requests += 1
        request = f"bare {self.requests}"
        group = dict(n=SAMPLES, temperature=self.config.temperature, max_tokens=LIMIT)
        self.engine.add(request, prompt or next(self.prompts), **(sampling or group))
        return request

    def searching(self, reference: torch.nn.Module | None, shares: dict[str, float]) -> float:
        """Measure the searcher. Adds each kind of span's share of the time to `shares`."""
        self.drain()
        self.searcher.reference, marks = reference, []

        def watch() -> None:
            for pause in self.seconds:
                time.sleep(pause)
                marks.append((time.monotonic(), self.tokens))
            self.status.stop = True

        threading.Thread(target=watch).start()
        self.searcher.search()
        self.status.stop = False
        (begin, before), (end, after) = marks
        for name, start, stop in read_spans(self.config.output_dir)["searcher-0"]:
            shares[name] += max(0.0, min(stop, end) - max(start, begin)) / (end - begin)
        return (after - before) / (end - begin)

    def streaming(self, load_every: int = 0) -> float:
        """Measure where queries join as others leave. load_every: engine steps; 0: no loads."""
        tensors, steps = dict(self.reference.named_parameters()), itertools.count(1)

        def step() -> None:
            while self.engine.rows < ENGINE_ROWS:
                self.add()
            if load_every and next(steps) % load_every == 0:
                self.engine.load(0, tensors.items())
            self.step()

        return self.rate(step)

    def barrier(self) -> float:
        """Measure where a batch starts when the one before has finished."""

        def batch() -> None:
            for _ in range(ENGINE_ROWS // SAMPLES):
                self.add()
            while self.engine.rows:
                self.step()

        return self.rate(batch)

    def episodes(self, publish_every: int = 0) -> float:
        """Measure episodes. publish_every: engine steps between two versions; 0: there is one."""
        steps, rng = itertools.count(1), np.random.default_rng(0)
        prompts: dict[str, list[int]] = {}

        def begin_turn(prompt: list[int]) -> None:
            prompt = next(self.prompts) if len(prompt) >= EPISODE else prompt
            limits = dict(max_tokens=int(rng.integers(*TURN)), ignore_eos=True)
            prompts[self.add(prompt, **limits)] = prompt

        def step() -> None:
            while self.engine.rows < ENGINE_ROWS:
                begin_turn(next(self.prompts))
            if publish_every and next(steps) % publish_every == 0:
                self.engine.set_version(self.engine.version + 1)
            for output in self.engine_step():
                turn = list(output.outputs[0].token_ids)
                self.tokens += len(turn)
                begin_turn(prompts.pop(output.request_id) + turn + REPLY)

        return self.rate(step)

    def drain(self) -> None:
        """Finish what the measurement before left in the engine."""
        while self.engine.rows:
            self.engine_step()

    def rate(self, work: Callable[[], None]) -> float:
        """Measure tokens per second of work(), again and again."""
        self.drain()
        for seconds in self.seconds:
            begin, before = time.monotonic(), self.tokens
            while time.monotonic() - begin < seconds:
                work()
        return (self.tokens - before) / (time.monotonic() - begin)


def measure(config: Config, found: Queue, results: Queue, seconds: tuple[float, float]) -> None:
    """Measure everything twice: a process.

    Sends tokens per second by name, and shares of the searcher's time, as sums of the two times.
    """
    m = Measurement(config, found, seconds)
    rates, shares = defaultdict(list), defaultdict(float)
    kinds = {
        "searcher": lambda: m.searching(m.reference, shares),
        "no reference": lambda: m.searching(None, defaultdict(float)),
        "streaming": m.streaming,
        "barrier": m.barrier,
    }
    kinds |= {f"loading every {every}": partial(m.streaming, every) for every in (100, 10, 1)}
    kinds |= {"episodes": m.episodes}
    for every in (1000, 100, 10):
        kinds[f"episodes, a version every {every}"] = partial(m.episodes, every)
    for _ in range(2):  # in turns, since the machine may be faster now than then
        for name, kind in kinds.items():
            rates[name].append(kind())
    results.put((dict(rates), dict(shares)))
    found.cancel_join_thread()


def main() -> None:
    options = arguments(__doc__, ("--data_dir", ""))
    seconds = (10.0, 10.0) if options.quick else (20.0, 30.0)
    _, solutions, tokenizer = gsm8k(options.data_dir, 1024)
    lengths = [min(len(ids) + 1, LIMIT) for ids in tokenizer(solutions).input_ids]
    spawn = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "logs").mkdir()
        counting_model(Path(directory) / "model", lengths, tokenizer, intermediate=512)
        task = dict(task="gsm8k", options={"data_dir": options.data_dir}, searchers=1)
        where = dict(model=f"{directory}/model", output_dir=directory)
        config = Config(**task, **where, samples_per_query=SAMPLES, temperature=1.0)
        parameters = num_elements(weight_shapes(config))
        found, results = spawn.Queue(256), spawn.Queue()
        place = Place("searcher 0", None, sorted(os.sched_getaffinity(0)))
        settings = config, found, results, seconds
        child = children.start(place, "search:measure", settings, directory)
        while results.empty() and child.is_alive():
            with contextlib.suppress(queue.Empty):
                found.get(timeout=0.5)
        if results.empty():
            sys.exit(children.log_tail(directory, "searcher 0"))
        rates, shares = results.get()
        children.kill(child)
    mean = {name: np.mean(values) for name, values in rates.items()}
    rows = [
        [name, " ".join(f"{rate:.0f}" for rate in own), f"{mean[name] / mean['streaming']:.2f}"]
        for name, own in rates.items()
    ]
    shown = ", ".join(f"{name} {shares[name] / 2:.3f}" for name in sorted(shares))
    save(
        "search",
        options.quick,
        f"Responses of {np.mean(lengths):.0f} ± {np.std(lengths):.0f} tokens; {ENGINE_ROWS} at a "
        f"time, {SAMPLES} a group; {parameters / 1e6:.1f} M parameters.",
        table(["", "tokens/s", "of streaming"], rows),
        f"The searcher's time: {shown}.",
        f"Searcher against the barrier: {mean['searcher'] / mean['barrier']:.2f}; "
        f"streaming against it: {mean['streaming'] / mean['barrier']:.2f}.",
    )


if __name__ == "__main__":
    sys.exit(main())
