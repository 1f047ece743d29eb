"""Trajectory Balance with Asynchrony, on one machine: the command line. It starts the processes, watches them, and ends them.

    python tba.py                       # the arithmetic demo, no GPU needed
    python tba.py gsm8k                 # RhoMath-1B on GSM8K: the trainer on GPU 0, a searcher on each other GPU
    python tba.py gsm8k --eval_only --model runs/…/model
    python tba.py --help

Spawned children import this file: nothing slow (torch, vllm) is imported at its top.
"""

import dataclasses
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import preflight
from config import Config, UserError, build_config

# What torch, transformers and vLLM make while they are imported stays: to look for garbage among it took a fifth of the start.
gc.set_threshold(100_000)

SAVE_SECONDS = 10.0  # that a trainer which is told to end has for its checkpoint and its model
SAVE_BYTES_PER_SECOND = 100e6  # ... and this much more for a large one
MEMORY_ALONE, MEMORY_BESIDE_TRAINER = 0.75, 0.3  # of a GPU's, for vLLM
EVALUATION_SECONDS = 3600.0  # for the final evaluation, the start of its engine included


class Interrupt:
    """The signal that asked the run to end, if one did. A second one ends it at once."""

    def __init__(self):
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self)

    def __call__(self, number: int, frame) -> None:
        if self.signal:
            os._exit(128 + number)  # the children die with this process
        self.signal = number


def main(arguments: list[str]) -> int:
    try:
        config = build_config(arguments)
        task, sizes = preflight.load_data(config)
        resume = preflight.find_checkpoint(config) if config.resume else None
        if not config.eval_only and not (resume and config.output_dir == config.resume):
            config.output_dir = preflight.find_run_dir(config)
        preflight.check_loss(config)
        config.model = preflight.find_model("--model", config.model or task.base_model())
        task.prepare()
        if config.eval_only:
            return evaluate_only(config)
        return run(config, task.metric, sizes, resume)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted before the run began: nothing was written", file=sys.stderr)
        return 128 + signal.SIGINT


def run(config: Config, metric: str, sizes: dict[str, int], resume: str | None) -> int:
    """Everything behind the checks of the command line. resume: the checkpoint to go on from. Returns the exit code; raises UserError while
    nothing has started."""
    import torch.multiprocessing

    import checkpoint
    import processes
    import report
    from policy import weight_shapes
    from supervisor import RunFailed, Supervisor
    from weights import SharedWeights, check_shared_memory, elements

    places = processes.places(config)
    config.searchers = len(places) - 1
    cuda = places[0].gpu is not None
    one_gpu = cuda and places[0].gpu == places[1].gpu
    if cuda and config.gpu_memory_utilization is None:
        config.gpu_memory_utilization = MEMORY_BESIDE_TRAINER if one_gpu else MEMORY_ALONE
    shapes = weight_shapes(config)
    dtype = torch.bfloat16 if cuda else torch.float32  # what vLLM computes in
    resets = config.reference_reset_period > 0
    try:
        check_shared_memory(SharedWeights.required_bytes(shapes, dtype, resets))
    except MemoryError as error:
        raise UserError(str(error)) from error
    options = "".join(f", {name} {value}" for name, value in config.options.items())
    print(
        f"task {config.task}{options}: {sizes['train']} queries to train on, {sizes['test']} to test on"
    )
    print(f"model {config.model}, {elements(shapes) / 1e6:.1f} M parameters")
    describe(config, places)

    run_dir = config.output_dir
    if resume:
        state = checkpoint.load_state(resume)
        if fault := checkpoint.misfit(resume, shapes):
            raise UserError(
                f"--resume {config.resume!r}: --model {config.model!r} has changed since: {fault}"
            )
        print(f"going on from {resume}")
    settings = dataclasses.asdict(config) | {
        "resume": ""
    }  # with the model by the name that it has for the user
    config.model = preflight.fetch_model("--model", config.model)
    if resume and run_dir == config.resume:
        report.rewind(run_dir, state["step"])
        checkpoint.drop_newer(resume)
    else:
        try:
            (Path(run_dir) / "logs").mkdir(parents=True)
        except FileExistsError:  # made since it was looked at
            raise UserError(
                f"--output_dir {run_dir!r} already holds a run: give another one"
            ) from None
        preflight.lock(run_dir)
    (Path(run_dir) / "config.json").write_text(json.dumps(settings, indent=2))
    interrupt = Interrupt()
    weights = SharedWeights(shapes, dtype, readers=config.searchers, reference=resets)
    board = processes.Board([place.name for place in places])
    if resume:
        board.load_state_dict(state["board"])
    # fp32 weights and two moments, the buffer with them, and the model
    save_seconds = SAVE_SECONDS + 20 * elements(shapes) / SAVE_BYTES_PER_SECOND
    supervisor = Supervisor(config, places[1:], weights, board, run_dir)
    trainer, failed = None, False
    try:
        if one_gpu:  # vLLM measures what memory is free: the trainer must not load meanwhile
            watch(
                supervisor,
                None,
                board,
                config,
                interrupt,
                until=lambda: board.get("searcher 0", "ready"),
            )
        board.beat("trainer")  # being started is a sign of life
        trainer = processes.start(
            places[0],
            "trainer:run",
            (config, weights, supervisor.found, board, run_dir, resume),
            run_dir,
        )
        watch(
            supervisor,
            trainer,
            board,
            config,
            interrupt,
            until=lambda: not trainer.is_alive() and trainer.exitcode == 0,
        )
        stop(supervisor, trainer, board, save_seconds)  # the evaluation needs the cores and GPUs
        if not interrupt.signal:
            final_evaluation(config, places[1], interrupt)
    except RunFailed as failure:
        failed = True
        print(f"error: {failure}", file=sys.stderr)
        if config.lockstep:  # the trainer may wait for what will never come
            save_seconds = 0.0
    finally:
        stop(supervisor, trainer, board, save_seconds)
        report.draw(run_dir, metric)
    if failed or interrupt.signal:
        cause = f"stopped by {signal.Signals(interrupt.signal).name}: " if interrupt.signal else ""
        advice = (
            f"; to go on: python tba.py --resume {run_dir}" if checkpoint.all_of(run_dir) else ""
        )
        print(f"{cause}partial results are in {run_dir}{advice}", file=sys.stderr)
        return 128 + interrupt.signal if interrupt.signal else 1
    if busy := report.trainer_busy(run_dir):
        print(f"trainer busy: {busy:.3f} of the time between the first and the last step")
    print(f"results: {run_dir}")
    return 0


def describe(config: Config, places: list) -> None:
    """What is about to happen, before it happens."""
    for place in places:
        print(f"{place.name} on {place}")
    mode = f"asynchronous, sync every {config.sync_period} steps"
    if config.lockstep:
        mode = (
            f"each trained on {config.constant_staleness} steps after its version"
            if config.constant_staleness
            else "synchronous, on-policy"
        )
    print(
        f"{config.steps} steps of {config.queries_per_batch} queries x {config.responses_per_query} responses, {mode}, seed {config.seed}"
    )
    print(f"results will be in {config.output_dir}", flush=True)


def watch(
    supervisor, trainer, board, config: Config, interrupt: Interrupt, until: Callable[[], bool]
) -> None:
    """Returns when `until` holds or a signal asks the run to end. Raises RunFailed when the trainer dies or goes silent, or a searcher for good."""
    from processes import log_tail
    from supervisor import RunFailed

    while not interrupt.signal and not until():
        time.sleep(0.05)
        supervisor.check()
        if trainer and trainer.exitcode:
            raise RunFailed(
                f"the trainer ended with exit code {trainer.exitcode}\n{log_tail(config.output_dir, 'trainer')}"
            )
        if trainer and board.is_silent("trainer", config.searcher_timeout):
            raise RunFailed(
                f"the trainer gave no sign of life for {board.silence('trainer'):.0f} s (--searcher_timeout)"
            )


def stop(supervisor, trainer, board, save_seconds: float) -> None:
    """All down. The trainer has time to write its checkpoint; what is still loading, or takes too long, is killed."""
    import processes

    board.end = True
    if trainer:
        trainer.join(save_seconds if board.get("trainer", "ready") else 0.0)
        processes.kill(trainer)
        if sys.stdout.isatty():
            print(
                "\x1b[?25h", end="", flush=True
            )  # the live view hides the cursor; a trainer that was killed cannot bring it back
    board.stop = True
    supervisor.stop(time.monotonic() + 2.0)


def final_evaluation(config: Config, place, interrupt: Interrupt) -> None:
    """Loads the saved model afresh into an engine of its own and evaluates it there."""
    from evaluation import left_out

    if not (
        result := evaluate(
            dataclasses.replace(config, model=str(Path(config.output_dir, "model").resolve())),
            place,
            interrupt,
        )
    ):
        return
    with open(Path(config.output_dir, "metrics.jsonl"), "a") as file:
        print(
            json.dumps(
                {"step": config.steps}
                | {f"final_{name}": value for name, (value, _, _) in result.metrics.items()}
            ),
            file=file,
        )
    for name, (value, low, high) in result.metrics.items():
        print(
            f"final {name}: {value:.2f} ({value:.4f}, 95 % interval {low:.4f} to {high:.4f}, on {result.queries} test queries{left_out(result)}); "
            "the saved model, loaded afresh",
            flush=True,
        )


def evaluate_only(config: Config) -> int:
    """--eval_only. Returns the exit code."""
    import processes
    from policy import weight_shapes
    from supervisor import RunFailed

    weight_shapes(config)  # raises UserError for a model that cannot be used
    config.model = preflight.fetch_model("--model", config.model)
    interrupt = Interrupt()
    with tempfile.TemporaryDirectory() as directory:
        config.output_dir = directory
        Path(directory, "logs").mkdir()
        try:
            result = evaluate(config, processes.places(config)[1], interrupt)
        except RunFailed as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    if not result:
        print("interrupted", file=sys.stderr)
        return 128 + interrupt.signal
    print(
        json.dumps(dataclasses.asdict(result) | {"model": config.model}) if config.json else result
    )
    return 0


def evaluate(config: Config, place, interrupt: Interrupt):
    """The FinalEvaluation of config.model, by a process of its own. None: interrupted. Raises RunFailed."""
    import torch.multiprocessing

    import processes
    from supervisor import RunFailed

    if place.gpu is None:
        place = dataclasses.replace(
            place, cores=sorted(os.sched_getaffinity(0))
        )  # all others have ended
    else:
        config = dataclasses.replace(
            config, gpu_memory_utilization=config.gpu_memory_utilization or MEMORY_ALONE
        )
    place = dataclasses.replace(place, name="evaluation")
    receiver, sender = torch.multiprocessing.get_context("spawn").Pipe(duplex=False)
    child = processes.start(place, "evaluation:evaluate_model", (config, sender), config.output_dir)
    sender.close()
    deadline = time.monotonic() + EVALUATION_SECONDS
    try:
        while not receiver.poll(0.1):
            if interrupt.signal:
                return None
            if time.monotonic() > deadline:
                raise RunFailed(f"the evaluation took longer than {EVALUATION_SECONDS:.0f} s")
        result = receiver.recv()
        child.join(10.0)
        return result
    except EOFError:
        child.join()
        tail = processes.log_tail(config.output_dir, "evaluation")
        raise RunFailed(f"the evaluation ended with exit code {child.exitcode}\n{tail}") from None
    finally:
        processes.kill(child)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
