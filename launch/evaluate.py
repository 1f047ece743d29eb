"""Evaluates a saved model by all metrics of its task: at the end of a run, or alone (--eval_only).

It is done in a process of its own.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch.multiprocessing

from config import Config
from launch import checks, children
from launch.places import MEMORY_ALONE, Place, evaluation_place, find_places
from launch.supervisor import STOP_SECONDS, RunFailed
from models.architecture import weight_shapes
from models.policy import check_finite
from models.tokens import load_tokenizer
from runtime.record.lines import Lines
from runtime.responses import final_metrics
from runtime.responses.evaluation import EvaluationRun
from runtime.responses.samples import extract_all
from runtime.responses.scoring import make_scorer
from runtime.transport.messages import Evaluation
from runtime.transport.status import Watchdog
from tasks import Task, load_models, load_task

EVALUATION_SECONDS = 3600.0  # for each response to all queries, the engine's start included
MEMORY_BESIDE_MODELS = 0.4  # of a GPU's, for vLLM where a task has models for its evaluation
POLL_SECONDS = 0.005  # while only workers are busy


def evaluate_only(config: Config) -> int:
    """Evaluate --model without a run (--eval_only). Returns the exit code; raises UserError."""
    task, _, queries, _ = checks.load_data(config)
    prompts = [query.prompt for query in queries["test"]]
    config = checks.check_model(config, task)
    weight_shapes(config)  # raises UserError for a model that cannot be used
    tokenizer, _ = checks.check_tokenizer(config, prompts)
    checks.check_lengths(config, {"test": prompts}, tokenizer)
    name, config = config.model, checks.fetch(config, task, queries["test"][0])
    interrupt = children.Interrupt()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "logs").mkdir()
        # Nothing trains: a preset's trainer processes need no GPUs.
        alone = dict(trainer_processes=1, searchers=1, ray="")
        config = dataclasses.replace(config, output_dir=directory, **alone)
        print(f"evaluating {name} …", file=sys.stderr)
        try:
            result = evaluate(config, evaluation_place(find_places(config)), interrupt)
        except RunFailed as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    if not result:
        print("interrupted", file=sys.stderr)
        return 128 + interrupt.signal
    print(*result.describe(), result.answers, sep="\n")
    facts = dataclasses.asdict(result) | {"model": name}
    del facts["version"]
    print(json.dumps(facts))  # for a program
    return 0


def final_evaluation(
    config: Config, place: Place, interrupt: children.Interrupt, say: Callable[[str], None]
) -> None:
    """Load the saved model into an engine of its own and evaluate it there."""
    say("evaluating the saved model …")
    model = str(Path(config.output_dir, "model").resolve())
    result = evaluate(dataclasses.replace(config, model=model), place, interrupt)
    if not result:
        return
    line = result.line(config.base_model, prefix="final_")
    Lines(Path(config.output_dir, "metrics.jsonl")).write(line)
    for text in result.describe():
        say(f"final {text} (saved model, reloaded)")
    say(str(result.answers))


def evaluate(config: Config, place: Place, interrupt: children.Interrupt) -> Evaluation | None:
    """Evaluate config.model in a process of its own. None: interrupted. Raises RunFailed."""
    if place.gpu is None:  # all others have ended
        place = dataclasses.replace(place, cores=sorted(os.sched_getaffinity(0)))
    else:
        memory = config.gpu_memory_utilization or MEMORY_ALONE
        # The trainer has ended: vLLM may measure what is free.
        config = dataclasses.replace(config, gpu_memory_utilization=memory, kv_cache_bytes=None)
    place = dataclasses.replace(place, name="evaluation")
    connection, other_end = torch.multiprocessing.get_context("spawn").Pipe()
    target = "launch.evaluate:evaluate_model"
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


def evaluate_model(config: Config, connection: Connection) -> None:
    """Load config.model afresh and send its Evaluation through `connection`.

    Whatever it gets from there means stop. Raises ValueError when no response gets a score,
    UserError for a weight that is not finite.
    """
    from models.engine import Engine, make_generation  # in this process alone: it imports vLLM

    task = load_task(config.task, **config.options)
    if type(task).evaluate is not Task.evaluate:  # there may be models in it
        memory = min(config.gpu_memory_utilization or 1.0, MEMORY_BESIDE_MODELS)
        config = dataclasses.replace(config, gpu_memory_utilization=memory)
    engine, scorer = Engine(config), make_scorer(config, task)
    engine.llm.apply_model(lambda model: check_finite(model, config))
    tokenizer, queries = load_tokenizer(config), task.queries("test")
    run = EvaluationRun(config, task, queries, tokenizer, config.steps, config.evaluation_samples)
    generation = make_generation(config, tokenizer, engine, scorer)
    for group in run.groups:
        generation.start(group)
    while not run.is_done and not connection.poll():
        if generation.is_idle:
            time.sleep(POLL_SECONDS)
        elif generated := generation.step():
            scorer.add(generated)
        for group in scorer.take():
            run.record(group)
    if not run.is_done:
        return
    if not run.scored:
        error = run.unscored[0].error
        raise ValueError(f"no response to a test query got a score: {error}") from error
    if task.score_timeout is not None:
        scorer.close()  # the workers had models, this process has none yet
        load_models(task)
    result = run.result(partial(final_metrics.evaluate, task))
    if run.num_samples > 1:
        ids, scores = zip(*((g.query_id, float(g.rewards[0])) for g in run.scored))
        answers = extract_all(task, [group.texts[0] for group in run.scored])
        result.metrics |= final_metrics.over_queries(ids, np.array(scores), answers)
    connection.send(result)
