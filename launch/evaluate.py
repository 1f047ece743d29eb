"""The evaluation of a saved model, in a process of its own: at the end of a run, or alone."""

import dataclasses
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch.multiprocessing

from config import Config
from launch import children
from launch.checks import preflight
from launch.places import MEMORY_ALONE, Place, evaluation_place, find_places
from launch.run import Interrupt
from launch.supervisor import STOP_SECONDS, RunFailed
from models.architecture import weight_shapes
from runtime.record.timeline import Lines
from runtime.transport.board import Watchdog
from runtime.transport.messages import Answers, describe_left_out

EVALUATION_SECONDS = 3600.0  # for an evaluation, the start of its engine included


@dataclass
class FinalEvaluation:
    """All metrics of the task; from the process that evaluates."""

    metrics: dict[str, tuple[float, float, float]]  # name -> value, ends of its 95 % interval
    queries: int
    samples: int  # responses to each
    long_prompts: int
    unscored: int
    answers: Answers

    def __str__(self) -> str:
        """A table, and a look at the responses."""
        width = max(map(len, self.metrics))
        lines = [f"{'metric':{width}}     value   95 % interval"]
        for name, (value, low, high) in self.metrics.items():
            lines.append(f"{name:{width}}  {value:8.4f}   {low:.4f} to {high:.4f}")
        left_out = describe_left_out(self.long_prompts, self.unscored)
        return "\n".join([*lines, f"on {self.counted}{left_out}", str(self.answers)])

    @property
    def counted(self) -> str:
        """Say what the metrics are means over."""
        samples = f", {self.samples} samples each" if self.samples > 1 else ""
        return f"{self.queries} test queries{samples}"


def evaluate_only(config: Config) -> int:
    """--eval_only. Returns the exit code; raises UserError."""
    task, _, prompts, _ = preflight.load_data(config)
    config = preflight.check_model(config, task)
    weight_shapes(config)  # raises UserError for a model that cannot be used
    preflight.check_tokenizer(config, prompts)
    name, config = config.model, preflight.fetch(config, task)
    interrupt = Interrupt()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "logs").mkdir()
        # Nothing trains: a preset's trainer processes need no GPUs.
        config = dataclasses.replace(config, output_dir=directory, trainer_processes=1, searchers=1)
        try:
            result = evaluate(config, evaluation_place(find_places(config)), interrupt)
        except RunFailed as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    if not result:
        print("interrupted", file=sys.stderr)
        return 128 + interrupt.signal
    print(result)
    print(json.dumps(dataclasses.asdict(result) | {"model": name}))  # for a program
    return 0


def final_evaluation(config: Config, place: Place, interrupt: Interrupt) -> None:
    """Load the saved model afresh into an engine of its own and evaluate it there."""
    model = str(Path(config.output_dir, "model").resolve())
    result = evaluate(dataclasses.replace(config, model=model), place, interrupt)
    if not result:
        return
    line = {"base_model": config.base_model}
    for name, (value, low, high) in result.metrics.items():
        line |= {f"final_{name}": value, f"final_{name}_interval": (low, high)}
    Lines(Path(config.output_dir, "metrics.jsonl")).write({"step": config.steps} | line)
    left_out = describe_left_out(result.long_prompts, result.unscored)
    for name, (value, low, high) in result.metrics.items():
        interval = f"95 % interval {low:.4f} to {high:.4f}"
        print(
            f"final {name}: {value:.2f} ({value:.4f}, {interval}, on {result.counted}{left_out})"
            f"; the saved model, loaded afresh",
            flush=True,
        )
    print(result.answers, flush=True)


def evaluate(config: Config, place: Place, interrupt: Interrupt) -> FinalEvaluation | None:
    """Evaluate config.model in a process of its own. None: interrupted. Raises RunFailed."""
    if place.gpu is None:  # all others have ended
        place = dataclasses.replace(place, cores=sorted(os.sched_getaffinity(0)))
    else:
        memory = config.gpu_memory_utilization or MEMORY_ALONE
        # The trainer has ended: vLLM may measure what is free.
        own = dict(gpu_memory_utilization=memory, kv_cache_bytes=None)
        config = dataclasses.replace(config, **own)
    place = dataclasses.replace(place, name="evaluation")
    connection, other_end = torch.multiprocessing.get_context("spawn").Pipe()
    target = "launch.final_evaluation:evaluate_model"
    child = children.start(place, target, (config, other_end), config.output_dir)
    other_end.close()
    seconds = EVALUATION_SECONDS * config.evaluation_samples
    watchdog = Watchdog()
    try:
        while not connection.poll(0.1):
            if interrupt.signal:
                connection.send("stop")
                child.join(STOP_SECONDS)
                return None
            if watchdog.look(None) > seconds:
                raise RunFailed(f"the evaluation took longer than {seconds:.0f} s")
        result = connection.recv()
        child.join(10.0)
        return result
    except EOFError:
        child.join()
        log = children.log_tail(config.output_dir, "evaluation")
        raise RunFailed(f"the evaluation ended with exit code {child.exitcode}\n{log}") from None
    finally:
        children.kill(child)
