"""Launch: checks what can be checked, starts the processes of a run, watches and ends them."""

import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import torch
import torch.multiprocessing

from config import Config, UserError
from models.device import compute_dtype, device, onednn_multiplies
from models.hub import fetch_model, find_model, identify_weights
from models.lora import check_peft, trained_shapes
from models.policy import weight_shapes
from models.sharding import connect
from runtime import preflight
from runtime.checkpoints import checkpoint
from runtime.command_line import mask
from runtime.display.tracking import Tracking, check_tracker
from runtime.planning.plan import check_plan
from runtime.processes import children
from runtime.processes.output import tolerate_failed_prints
from runtime.processes.places import (
    MEMORY_ALONE,
    Place,
    evaluation_place,
    find_places,
    is_gpu_shared,
    resolve,
    searchers_of,
    trainers_of,
)
from runtime.processes.supervisor import RunFailed, Supervisor
from runtime.provenance import write_start
from runtime.record.report import rewind
from runtime.record.timeline import Lines, trainer_busy
from runtime.transport.board import Board, Watchdog
from runtime.transport.messages import FinalEvaluation, describe_left_out
from tasks import Task
from weights import SharedWeights, num_elements

SAVE_SECONDS = 10.0  # grace period for the trainer's checkpoint and model at a shutdown ...
SAVE_BYTES_PER_SECOND = 100e6  # ... and this much more for a large model
STOP_SECONDS = 2.0  # grace period for the searchers
EVALUATION_SECONDS = 3600.0  # for the final evaluation, the start of its engine included
POLL_SECONDS = 0.05
SPARE_SECONDS = 30.0  # that a collective outlives --searcher_timeout: this process says what hangs
EXIT_SECONDS = 10.0  # for a trainer process that has raised to end
STACK_SECONDS = 0.5  # for each to write where it is


class Interrupt:
    """The signal that asked the run to end, if one did. A second one ends it at once.

    But not a second SIGHUP: of a closed terminal both the shell and the kernel send one.

    SystemExit, not os._exit: the queues' semaphores are unlinked on the way out.
    """

    def __init__(self):
        self.signal = 0
        # Python's own process that unlinks semaphores must not hear of the end: it comes last.
        signal.pthread_sigmask(signal.SIG_BLOCK, children.SIGNALS)
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, children.SIGNALS)
        for number in children.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                signal.signal(number, self)

    def __call__(self, number: int, frame) -> None:
        if self.signal and number != signal.SIGHUP:
            for child in torch.multiprocessing.active_children():
                child.kill()
            raise SystemExit(128 + number)
        self.signal = self.signal or number


class Run:
    """The processes of a run, once its directory is there.

    resume: the checkpoint to go on from. dtype: what the searchers compute in. given: the
    configuration as the user gave it, for other nodes.
    """

    def __init__(
        self,
        config: Config,
        places: list[Place],
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        resume: str | None,
        given: Config,
    ):
        self.config, self.places, self.resume = config, places, resume
        self.interrupt = Interrupt()
        resets = config.reference_reset_period > 0
        searchers = searchers_of(places)
        readers = len(searchers) + bool(config.ray)
        self.weights = SharedWeights(shapes, dtype, readers, reference=resets)
        if config.ray:
            from runtime.nodes.cluster import Cluster, ClusterBoard  # Ray is not wanted otherwise

            self.board = ClusterBoard(places)
        else:
            self.board = Board([place.name for place in places])
        self.trainers: list[torch.multiprocessing.Process] = []  # by rank
        if resume:
            self.board.load_state_dict(checkpoint.load_state(resume)["board"])
        self.parameters, self.can_save = num_elements(shapes), True
        self.longest_silence = 0.0  # of the trainer, which gives a sign of life after each step
        where = searchers, self.weights, self.board, config.output_dir, "searcher:run"
        if config.ray:
            self.supervisor = Cluster(config, *where, given)
        else:
            self.supervisor = Supervisor(config, *where)
        self.tracking = Tracking(config) if config.track else None

    def train(self) -> None:
        """Start the trainer, and watch over all until it has ended. Raises RunFailed."""
        if is_gpu_shared(self.places):
            # vLLM measures what memory is free: the trainer must not load meanwhile.
            first = self.board.searchers[0]
            self.watch(until=lambda: self.board.get(first, "ready") == 1)
        self.start_trainer()
        self.watch(until=lambda: self.trainers[0].exitcode == 0)
        if self.interrupt.signal and (seconds := self.grace_seconds()):
            saving = f"to finish a step and to save may take up to {seconds:.0f} s"
            print(f"the run ends: {saving}; a second Ctrl-C ends it at once", file=sys.stderr)

    def start_trainer(self) -> None:
        """Start the trainer, and its further processes where it has any."""
        config, board, run_dir = self.config, self.board, self.config.output_dir
        rollout_queue = self.supervisor.rollout_queue
        ranks = connect(config.trainer_processes, config.searcher_timeout + SPARE_SECONDS)
        for place, rank in zip(trainers_of(self.places), ranks):
            target, arguments = "runtime.follower:run", (config, rank, board, place.name)
            if rank.rank == 0:
                target = "trainer:run"
                arguments = config, self.weights, rollout_queue, board, run_dir, self.resume, rank
            board.beat(place.name)  # being started is a sign of life
            self.trainers.append(children.start(place, target, arguments, run_dir))
        for rank in ranks:
            for connection in rank.connections:  # theirs alone now: the end of one shows
                connection.close()

    def watch(self, until: Callable[[], bool]) -> None:
        """Return when `until` holds or a signal asks the run to end.

        Raises RunFailed when the trainer dies or goes silent, or a searcher for good.
        """
        while not self.interrupt.signal and not until():
            time.sleep(POLL_SECONDS)
            self.supervisor.check()
            self.check_trainer()
            if self.tracking:
                self.tracking.check(self.supervisor.say)

    def check_trainer(self) -> None:
        """Raise RunFailed when a trainer process has died, or gives no sign of life."""
        board, timeout = self.board, self.config.searcher_timeout
        dead = [p for p in self.trainers if p.exitcode or board.get(p.name, "failed")]
        alive = [process for process in self.trainers if process.exitcode is None]
        if board.get("trainer", "ready"):  # a step is one silence, a pause of the run is none
            silence = board.watchdogs["trainer"].look(board.get("trainer", "beat"))
            self.longest_silence = max(self.longest_silence, silence)
        if dead:
            problem = self.describe_death(dead)
        elif any(board.is_silent(process.name, timeout) for process in alive):
            problem = self.describe_silence(alive)
        else:
            return
        if dead or len(self.trainers) > 1:
            self.can_save = False
        raise RunFailed(problem)

    def describe_death(self, dead: list[torch.multiprocessing.Process]) -> str:
        """Say which trainer process died first: that ends the others. Shows its log.

        dead: those that were seen to be. One that was killed may be seen later than those that it
        took along: its connections close before it ends.
        """
        time.sleep(STACK_SECONDS)
        dead = [*dead, *(process for process in self.trainers if process.exitcode)]
        # One that was killed has raised nothing.
        first = min(dead, key=lambda process: self.board.get(process.name, "failed"))
        first.join(EXIT_SECONDS)  # its log has its traceback then
        if first.exitcode == children.NOT_SAVED:
            return "the trainer could not save the model"
        log = children.log_tail(self.config.output_dir, first.name)
        how = "failed, and does not end"
        if first.exitcode is not None:
            how = f"ended with exit code {first.exitcode}"
        return f"{in_words(first.name)} {how}\n{log}"

    def describe_silence(self, alive: list[torch.multiprocessing.Process]) -> str:
        """Say which trainer process is stopped; if none is, show where each of them is."""
        silence = max(self.board.silence(process.name) for process in alive)
        what = f"no sign of life for {silence:.0f} s (--searcher_timeout)"
        for process in alive:
            if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                log = children.log_tail(self.config.output_dir, process.name)
                return f"{in_words(process.name)} is stopped: {what}\n{log}"
            os.kill(process.pid, children.SHOW_STACK)
        time.sleep(STACK_SECONDS)
        logs = [children.log_tail(self.config.output_dir, process.name) for process in alive]
        return "\n".join([f"the trainer gave {what}", *logs])

    def grace_seconds(self) -> float:
        """Seconds that the trainer has to end; 0 if there is nothing for which to wait."""
        if not self.can_save or not self.board.get("trainer", "ready"):
            return 0.0
        save_seconds = self.board.get("trainer", "save_seconds")
        return allow(self.parameters, self.longest_silence, save_seconds)

    def stop(self) -> None:
        """End all processes. The trainer has time to save; what is still loading is killed."""
        self.board.end = True
        if self.trainers:
            trainer, *others = self.trainers
            seconds = self.grace_seconds() if trainer.exitcode is None else 0.0
            trainer.join(seconds)
            if seconds and trainer.exitcode is None:
                problem = f"the trainer did not save and end within {seconds:.0f} s: it is killed"
                print(problem, file=sys.stderr)
            elif seconds and trainer.exitcode > 0:
                print(f"error: {self.describe_death([trainer])}", file=sys.stderr)
            children.kill(trainer)
            for process in others:  # they end with it by themselves, unless one hangs
                process.join(STOP_SECONDS if trainer.exitcode == 0 else 0.0)
                children.kill(process)
            if sys.stdout.isatty():
                # The live view hides the cursor; a trainer that was killed cannot bring it back.
                print("\x1b[?25h", end="", flush=True)
        self.board.stop = True
        self.supervisor.stop(time.monotonic() + STOP_SECONDS)


def allow(parameters: int, step_seconds: float, save_seconds: float) -> float:
    """Seconds for a trainer to finish its step and to save, by the slowest that were seen."""
    # A checkpoint holds fp32 weights and two moments at most, the one before may be under way;
    # the buffer and the model come with it.
    by_size = SAVE_SECONDS + 32 * parameters / SAVE_BYTES_PER_SECOND
    return max(by_size, 3 * save_seconds) + 3 * step_seconds


def in_words(name: str) -> str:
    """Name a trainer process in a sentence."""
    return "the trainer" if name == "trainer" else name


def run(config: Config) -> int:
    """Train. Returns the exit code; raises UserError while nothing has started."""
    tolerate_failed_prints()
    given = config
    preflight.check_machine()
    check_peft(config)
    check_tracker(config)
    if config.ray:
        from runtime.nodes import cluster  # Ray is not wanted otherwise

        cluster.connect(config)
    task, sizes, chats = preflight.load_data(config)
    resume = preflight.find_checkpoint(config) if config.resume else None
    if not (resume and config.output_dir == config.resume):
        config = dataclasses.replace(config, output_dir=preflight.find_run_dir(config))
    began = checkpoint.load_state(resume).get("base_model") if resume else None
    config = check_model(config, task, began)
    # As asked for: what follows resolves it for this machine.
    settings = dataclasses.asdict(config) | {"resume": "", "config": ""}
    settings["options"] = mask(config.options)
    if resume and config.searchers is None and not config.ray:
        # Their shares of the queries, and the cursors in those, are part of the checkpoint.
        searchers = len(checkpoint.load_state(resume)["board"])
        config = dataclasses.replace(config, searchers=searchers)
    places = find_places(config)
    config = resolve(config, places)
    shapes = weight_shapes(config)
    preflight.check_tokenizer(config, chats)
    config, dtype = check_plan(config, task, places), compute_dtype(config)
    trained = trained_shapes(config)
    describe(config, places, sizes, num_elements(shapes), num_elements(trained))
    if resume and (mismatch := checkpoint.shape_mismatch(resume, trained)):
        raise UserError(
            f"--resume {config.resume!r}: --model {config.model!r} has changed since: {mismatch}"
        )
    config = fetch(config, task)
    if began not in (None, identify_weights(config.model)):
        raise UserError(
            f"--resume {config.resume!r} began with other weights in --model {config.model!r}: put "
            "back what was there"
        )
    try:
        open_run_dir(config, resume, settings)
        write_start(config.output_dir, given)
    except OSError as error:
        raise UserError(f"{config.output_dir!r} cannot be written: {error}") from error
    return supervise(Run(config, places, shapes, dtype, resume, given), task.metric)


def check_model(config: Config, task: Task, revision: str | None = None) -> Config:
    """Check the objective and the models; the configuration with the model's name or path.

    revision: of the hub, that a run to resume began with: its branch may have moved.
    """
    preflight.check_loss(config)
    preflight.check_sampling(config, task)
    if device().type == "cpu" and not onednn_multiplies(compute_dtype(config)):
        print("bfloat16 is slow here: this processor does not multiply in it", file=sys.stderr)
    model = find_model("--model", config.model or task.base_model())
    if revision and not Path(model).is_dir():
        model = f"{model.partition('@')[0]}@{revision}"
    fetch_model("--model", model, weights=False)  # enough for the checks
    task.prepare()
    return dataclasses.replace(config, model=model)


def fetch(config: Config, task: Task) -> Config:
    """Fetch the whole policy; the configuration with its directory. Raises UserError.

    Processes that start from now on do not ask the hub: it might have something else by then.
    """
    config = dataclasses.replace(config, model=fetch_model("--model", config.model))
    if not task.asks_hub_in_load:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return config


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


def open_run_dir(config: Config, resume: str | None, settings: dict) -> None:
    """Make the directory of the run, or bring the one to resume back to its checkpoint."""
    run_dir = Path(config.output_dir)
    if resume:
        print(f"going on from {resume}")
    if resume and config.output_dir == config.resume:
        rewind(config.output_dir, checkpoint.load_state(resume)["step"])
        checkpoint.drop_newer(resume)
    else:
        try:
            (run_dir / "logs").mkdir(parents=True)
        except FileExistsError:  # made since it was looked at
            raise UserError(
                f"--output_dir {config.output_dir!r} already holds a run: give another one"
            ) from None
        preflight.lock(config.output_dir)
    unfinished = run_dir / "config.json.unfinished"
    unfinished.write_text(json.dumps(settings, indent=2))
    unfinished.rename(run_dir / "config.json")


def supervise(run: Run, metric: str) -> int:
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
        print(f"error: {failure}", file=sys.stderr)
        if config.lockstep:  # the trainer may wait for what will never come
            run.can_save = False
    finally:
        run.stop()
        exit_code = 128 + interrupt.signal if interrupt.signal else exit_code
    report(run_dir, metric)
    if exit_code:
        has_begun = checkpoint.has_begun(run_dir)
        advice = f"; to go on: python tba.py --resume {run_dir}" if has_begun else ""
        cause = ""
        if interrupt.signal:
            cause = f"stopped by {signal.Signals(interrupt.signal).name}: "
        print(f"{cause}partial results are in {run_dir}{advice}", file=sys.stderr)
    else:
        if busy := trainer_busy(run_dir):
            print(f"trainer busy: {busy:.3f} of the time between the first and the last step")
        print(f"results: {run_dir}")
    if run.tracking:  # last: it may take a while, and nothing else is to wait for it
        run.tracking.finish(exit_code)
    return exit_code


def report(run_dir: str, metric: str) -> None:
    """Draw the pictures of a run, and write report.html."""
    from runtime.display import html_report, pictures  # slow to import, and not wanted before

    draw, write = partial(pictures.draw, run_dir, metric), partial(html_report.write, run_dir)
    for name, make in {"the pictures": draw, "report.html": write}.items():
        try:
            make()
        except Exception as error:  # whatever it is, the run's own result stands
            problem = f"{type(error).__name__}: {error}"
            print(f"{name} could not be written: {problem}", file=sys.stderr)


def final_evaluation(config: Config, place: Place, interrupt: Interrupt) -> None:
    """Load the saved model afresh into an engine of its own and evaluate it there."""
    model = str(Path(config.output_dir, "model").resolve())
    result = evaluate(dataclasses.replace(config, model=model), place, interrupt)
    if not result:
        return
    line = {"base_model": identify_weights(config.model)}
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


def evaluate_only(config: Config) -> int:
    """--eval_only. Returns the exit code; raises UserError."""
    task, _, chats = preflight.load_data(config)
    config = check_model(config, task)
    weight_shapes(config)  # raises UserError for a model that cannot be used
    preflight.check_tokenizer(config, chats)
    name, config = config.model, fetch(config, task)
    interrupt = Interrupt()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "logs").mkdir()
        # Nothing trains: a preset's trainer processes need no GPUs.
        alone = dict(trainer_processes=1, searchers=1)
        config = dataclasses.replace(config, output_dir=directory, **alone)
        try:
            result = evaluate(config, evaluation_place(find_places(config)), interrupt)
        except RunFailed as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    if not result:
        print("interrupted", file=sys.stderr)
        return 128 + interrupt.signal
    as_json = dataclasses.asdict(result) | {"model": name}
    print(json.dumps(as_json) if config.json else result)
    return 0


def evaluate(config: Config, place: Place, interrupt: Interrupt) -> FinalEvaluation | None:
    """Evaluate config.model in a process of its own. None: interrupted. Raises RunFailed."""
    if place.gpu is None:  # all others have ended
        place = dataclasses.replace(place, cores=sorted(os.sched_getaffinity(0)))
    else:
        memory = config.gpu_memory_utilization or MEMORY_ALONE
        config = dataclasses.replace(config, gpu_memory_utilization=memory)
    place = dataclasses.replace(place, name="evaluation")
    connection, other_end = torch.multiprocessing.get_context("spawn").Pipe()
    target = "runtime.responses.final_evaluation:evaluate_model"
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
