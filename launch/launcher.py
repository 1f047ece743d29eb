"""Launch: checks what can be checked, says what is to happen, and lets the run go to its end."""

import dataclasses
import json
import signal
import sys
from pathlib import Path

from config import Config, UserError
from launch.checks import CheckedRun, check_run, lock
from launch.evaluate import final_evaluation
from launch.files import rewind, trainer_busy
from launch.places import evaluation_place
from launch.resume import drop_newer, has_begun, write_start
from launch.run import Run
from launch.supervisor import RunFailed
from runtime.checkpoints import checkpoint
from runtime.child import tolerate_failed_prints
from weights import num_elements


def launch(given: Config) -> int:
    """Train. Returns the exit code; raises UserError while nothing has started."""
    tolerate_failed_prints()
    checked = check_run(given)
    describe(checked)
    open_run_dir(checked)
    run = Run(checked)
    try:
        return supervise(run)
    except SystemExit as ended:  # by a second signal: nothing is waited for
        if run.tracking:
            run.tracking.finish(ended.code, seconds=0.0)
        raise


def describe(checked: CheckedRun) -> None:
    """Say what is about to happen, before it happens."""
    config, sizes, prompt = checked.config, checked.sizes, checked.prompt
    options = "".join(f", {name} {value}" for name, value in config.options.items())
    queries = f"{sizes['train']} queries to train on, {sizes['test']} to test on"
    print(f"task {config.task}{options}: {queries}")
    print(f"model {config.model}, {num_elements(checked.shapes) / 1e6:.1f} M parameters")
    if config.lora_rank:
        trained = f"{num_elements(checked.trained) / 1e6:.2f} M parameters are trained"
        print(f"LoRA of rank {config.lora_rank}: {trained}")
    for place in checked.places:
        print(f"{place.name} on {place}")
    mode = f"asynchronous, sync every {config.sync_period} steps"
    if config.lockstep:
        mode = "synchronous, on-policy"
        if config.constant_staleness:
            steps = "step" if config.constant_staleness == 1 else "steps"
            mode = f"{config.constant_staleness} {steps} stale"
    batch = f"{config.queries_per_batch} queries x {config.responses_per_query} responses"
    passes = ", each in two passes (--low_memory)" if config.low_memory == "on" else ""
    print(f"{config.steps} steps of {batch}, {mode}, seed {config.seed}{passes}")
    print(f"results will be in {config.output_dir}")
    shown = prompt if len(prompt) < 400 else f"{prompt[:200]} … {prompt[-200:]}"
    print(f"the first prompt, as the model reads it: {shown!r}", flush=True)


def open_run_dir(checked: CheckedRun) -> None:
    """Make the directory of the run, or bring the one to resume back to its checkpoint.

    config.json is what was asked, before it was resolved for this machine. Raises UserError for a
    directory that cannot be written.
    """
    run_dir, resume = Path(checked.config.output_dir), checked.resume
    try:
        if resume:
            print(f"going on from {resume}")
        if resume and checked.config.output_dir == checked.config.resume:
            rewind(str(run_dir), checkpoint.load_state(resume)["step"])
            drop_newer(resume)
        else:
            make_run_dir(run_dir)
        settings = dataclasses.asdict(checked.asked) | {"resume": "", "config": ""}
        unfinished = run_dir / "config.json.unfinished"
        unfinished.write_text(json.dumps(settings, indent=2))
        unfinished.rename(run_dir / "config.json")
        write_start(str(run_dir), bool(resume))
    except OSError as error:
        raise UserError(f"{str(run_dir)!r} cannot be written: {error}") from error


def make_run_dir(run_dir: Path) -> None:
    """Make the directory of a new run, and take it. Raises UserError where there is a run."""
    try:
        (run_dir / "logs").mkdir(parents=True)
    except FileExistsError:  # made since it was looked at
        raise UserError(
            f"--output_dir {str(run_dir)!r} already holds a run: give another one"
        ) from None
    lock(str(run_dir))


def supervise(run: Run) -> int:
    """Let a run go to its end, whatever that is, and report it. Returns the exit code."""
    config, exit_code = run.config, 1
    run_dir, interrupt = config.output_dir, run.interrupt
    with run.view as view:
        try:
            run.train()
            run.stop()  # the evaluation needs the cores and GPUs
            if not interrupt.signal:
                final_evaluation(config, evaluation_place(run.places), interrupt, view.say)
            exit_code = 0
        except RunFailed as failure:
            print(f"error: {failure}", file=sys.stderr)
            if config.lockstep:  # the trainer may wait for what will never come
                run.can_save = False
        finally:
            run.stop()
            exit_code = 128 + interrupt.signal if interrupt.signal else exit_code
        view.say("writing report.html …")
        report(run_dir)
    if exit_code:
        advice = f"; to go on: python tba.py --resume {run_dir}" if has_begun(run_dir) else ""
        cause = f"stopped by {signal.Signals(interrupt.signal).name}: " if interrupt.signal else ""
        print(f"{cause}partial results are in {run_dir}{advice}", file=sys.stderr)
    else:
        if busy := trainer_busy(run_dir):
            print(f"trainer busy: {busy:.3f} of the time between the first and the last step")
        if changes := view.evaluated():
            print(changes)
        print(f"results: {run_dir}/report.html")
    if run.tracking:  # last: it may take a while, and nothing else is to wait for it
        run.tracking.finish(exit_code)
    return exit_code


def report(run_dir: str) -> None:
    """Draw the pictures of a run, and write report.html."""
    from launch.display import html_report  # slow to import, and not wanted before

    try:
        html_report.write(run_dir)
    except Exception as error:  # whatever it is, the run's own result stands
        problem = f"{type(error).__name__}: {error}"
        print(f"report.html could not be written: {problem}", file=sys.stderr)
