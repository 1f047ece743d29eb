"""The final evaluation, and --eval_only: all metrics of the task, in a process of its own."""

import dataclasses
import time
from multiprocessing.connection import Connection

import numpy as np

from config import Config
from models.engine import Engine
from models.policy import check_finite, load_tokenizer
from runtime.responses.bootstrap import interval, mean_of
from runtime.responses.evaluation import EvaluationRun
from runtime.responses.scoring import Scorer
from runtime.transport.messages import FinalEvaluation
from tasks import Task, load_task

MEMORY_BESIDE_MODELS = 0.4  # of a GPU's, for vLLM where a task has models for its evaluation
POLL_SECONDS = 0.005  # while only workers are busy


def evaluate_model(config: Config, connection: Connection) -> None:
    """Load config.model afresh and send its FinalEvaluation through `connection`.

    Whatever comes from there means stop. Raises ValueError when score() fails on every response,
    UserError for a weight that is not finite.
    """
    task = load_task(config.task, **config.options)
    if type(task).evaluate is not Task.evaluate:  # there may be models in it
        memory = min(config.gpu_memory_utilization or 1.0, MEMORY_BESIDE_MODELS)
        config = dataclasses.replace(config, gpu_memory_utilization=memory)
    engine, scorer = Engine(config), Scorer(config, task)
    engine.llm.apply_model(lambda model: check_finite(model, config))
    tokenizer, queries = load_tokenizer(config), task.queries("test")
    samples = config.evaluation_samples
    run = EvaluationRun(engine, scorer, queries, tokenizer, config, config.steps, samples)
    while not run.is_done:
        if connection.poll():
            scorer.close()
            return
        if engine.is_running:
            run.finish(engine.step())
        else:
            time.sleep(POLL_SECONDS)
        for response, rewards in scorer.take():
            run.record(response, rewards)
    scored = [(response, score) for response, score in run.scored if score is not None]
    if not scored:
        message = f"score() failed on every response to a test query: {run.error}"
        raise ValueError(message) from run.error
    scored.sort(key=lambda pair: pair[0].query.id)  # they came in any order
    if scorer.pool:
        task.load()  # the workers have, this process has not yet
    values = task.evaluate(
        [response.query for response, _ in scored],
        [response.texts[0] for response, _ in scored],
        [response.finished[0] for response, _ in scored],
        np.array([score for _, score in scored]),
    )
    ids = [response.query.id for response, _ in scored]
    metrics = {name: (mean_of(value), *interval(value, ids)) for name, value in values.items()}
    scorer.close()
    unscored = len(run.scored) - len(scored)
    counts = len(set(ids)), samples, run.long_prompts, unscored
    connection.send(FinalEvaluation(metrics, *counts))
