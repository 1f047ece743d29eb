"""Launch: checks what can be checked, says what is to happen, and lets the run go to its end."""

import dataclasses
import json
import signal
import sys
from pathlib import Path

from config import Config, UserError
from launch import resuming
from launch.checks import preflight
from launch.checks.settings import check_extras
from launch.command_line import mask
from launch.evaluate import final_evaluation
from launch.files import rewind, trainer_busy
from launch.places import Place, evaluation_place, find_places, resolve
from launch.planning.plan import check_plan
from launch.provenance import write_start
from launch.run import Run
from launch.supervisor import RunFailed
from models.architecture import trained_shapes, weight_shapes
from models.device import compute_dtype
from runtime.checkpoints import checkpoint
from runtime.child import tolerate_failed_prints
from tasks import find_task
from weights import num_elements


def launch(config: Config) -> int:
    """Train. Returns the exit code; raises UserError while nothing has started."""
    tolerate_failed_prints()
    given = config  # further nodes find their own model by it
    preflight.check_machine()
    check_extras(config)
    resume = preflight.find_checkpoint(config) if config.resume else None
    state = checkpoint.load_state(resume) if resume else {}
    if resume and "data_digest" not in state:
        earlier = find_task(config.task).earlier_options
        config = given = dataclasses.replace(config, options=earlier | config.options)
    task, sizes, prompts, digest = preflight.load_data(config)
    if not (resume and config.output_dir == config.resume):
        config = dataclasses.replace(config, output_dir=preflight.find_run_dir(config))
    began = state.get("base_model")
    config = asked = preflight.check_model(config, task, began)
    if resume and config.searchers is None and not config.ray:
        # Their shares of the queries, and the cursors in those, are part of the checkpoint.
        config = dataclasses.replace(config, searchers=len(state["board"]))
    places = find_places(config)
    config = resolve(config, places)
    shapes = weight_shapes(config)
    prompt = preflight.check_tokenizer(config, prompts)
    config, dtype = check_plan(config, task, places), compute_dtype(config)
    trained = trained_shapes(config)
    if resume and (mismatch := resuming.shape_mismatch(resume, trained)):
        raise UserError(
            f"--resume {config.resume!r}: --model {config.model!r} has changed since: {mismatch}"
        )
    config = preflight.fetch(config, task, began)
    config = dataclasses.replace(config, data_digest=f"{digest} {prompt}")
    before = state.get("data_digest", config.data_digest)
    if before != config.data_digest:  # other prompts alone: a chat template may write the date
        rows, _, was = before.partition(" ")
        what = "rows of the task" if rows != digest else f"first prompt, {was!r:.200},"
        print(f"warning: the {what} changed since that checkpoint", file=sys.stderr)
    describe(config, places, sizes, num_elements(shapes), num_elements(trained))
    shown = prompt if len(prompt) < 400 else f"{prompt[:200]} … {prompt[-200:]}"
    print(f"the first prompt, as the model reads it: {shown!r}", flush=True)
    try:
        open_run_dir(config, resume, asked)
        write_start(config.output_dir, given)
    except OSError as error:
        raise UserError(f"{config.output_dir!r} cannot be written: {error}") from error
    return supervise(Run(config, places, shapes, dtype, resume, given))


def describe(
    config: Config, places: list[Place], sizes: dict[str, int], parameters: int, trained: int
) -> None:
    """Say what is about to happen, before it happens. parameters, trained: how many."""
    options = "".join(f", {name} {value}" for name, value in mask(config.options).items())
    queries = f"{sizes['train']} queries to train on, {sizes['test']} to test on"
    print(f"task {config.task}{options}: {queries}")
    print(f"model {config.model}, {parameters / 1e6:.1f} M parameters")
    if config.lora_rank:
        print(f"LoRA of rank {config.lora_rank}: {trained / 1e6:.2f} M parameters are trained")
    for place in places:
        print(f"{place.name} on {place}")
    mode = f"asynchronous, sync every {config.sync_period} steps"
    if config.lockstep:
        mode = "synchronous, on-policy"
        if config.constant_staleness:
            mode = f"each trained on {config.constant_staleness} steps after its version"
    batch = f"{config.queries_per_batch} queries x {config.responses_per_query} responses"
    passes = ", each in two passes (--low_memory)" if config.low_memory == "on" else ""
    print(f"{config.steps} steps of {batch}, {mode}, seed {config.seed}{passes}")
    print(f"results will be in {config.output_dir}", flush=True)


def open_run_dir(config: Config, resume: str | None, asked: Config) -> None:
    """Make the directory of the run, or bring the one to resume back to its checkpoint.

    asked: what config.json says, the settings before they were resolved for this machine.
    """
    run_dir = Path(config.output_dir)
    if resume:
        print(f"going on from {resume}")
    if resume and config.output_dir == config.resume:
        rewind(config.output_dir, checkpoint.load_state(resume)["step"])
        resuming.drop_newer(resume)
    else:
        try:
            (run_dir / "logs").mkdir(parents=True)
        except FileExistsError:  # made since it was looked at
            raise UserError(
                f"--output_dir {config.output_dir!r} already holds a run: give another one"
            ) from None
        preflight.lock(config.output_dir)
    settings = dataclasses.asdict(asked) | {"resume": "", "config": ""}
    settings["options"] = mask(asked.options)
    unfinished = run_dir / "config.json.unfinished"
    unfinished.write_text(json.dumps(settings, indent=2))
    unfinished.rename(run_dir / "config.json")


def supervise(run: Run) -> int:
    """Let a run go to its end, whatever that is, and report it. Returns the exit code."""
    config, exit_code = run.config, 1
    run_dir, interrupt = config.output_dir, run.interrupt
    try:
        run.train()
        run.stop()  # the evaluation needs the cores and GPUs
        if not interrupt.signal:
            final_evaluation(config, evaluation_place(run.places), interrupt)
        exit_code = 0
    except RunFailed as failure:
        run.terminal.close()
        print(f"error: {failure}", file=sys.stderr)
        if config.lockstep:  # the trainer may wait for what will never come
            run.can_save = False
    finally:
        run.stop()
        exit_code = 128 + interrupt.signal if interrupt.signal else exit_code
    report(run_dir)
    if exit_code:
        has_begun = resuming.has_begun(run_dir)
        advice = f"; to go on: python tba.py --resume {run_dir}" if has_begun else ""
        cause = f"stopped by {signal.Signals(interrupt.signal).name}: " if interrupt.signal else ""
        print(f"{cause}partial results are in {run_dir}{advice}", file=sys.stderr)
    else:
        if busy := trainer_busy(run_dir):
            print(f"trainer busy: {busy:.3f} of the time between the first and the last step")
        print(f"results: {run_dir}")
    if run.tracking:  # last: it may take a while, and nothing else is to wait for it
        run.tracking.finish(exit_code)
    return exit_code


def report(run_dir: str) -> None:
    """Draw the pictures of a run, and write report.html."""
    from launch.display import (
        html_report,  # slow to import, and not wanted before
        pictures,  # slow to import, and not wanted before
    )

    for name, make in {"the pictures": pictures.draw, "report.html": html_report.write}.items():
        try:
            make(run_dir)
        except Exception as error:  # whatever it is, the run's own result stands
            problem = f"{type(error).__name__}: {error}"
            print(f"{name} could not be written: {problem}", file=sys.stderr)
