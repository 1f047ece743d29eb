"""The final evaluation, and --eval_only: all metrics of the task, in a process of its own."""

import dataclasses
import time
from multiprocessing.connection import Connection

from config import Config
from launch.evaluate import FinalEvaluation
from models.engine import Engine
from models.policy import check_finite
from models.tokens import load_tokenizer
from rollouts import make_generation
from runtime.record.answers import look_at
from runtime.responses.evaluation import EvaluationRun, mean_and_interval
from runtime.responses.scoring import make_scorer
from tasks import Task, load_task

MEMORY_BESIDE_MODELS = 0.4  # of a GPU's, for vLLM where a task has models for its evaluation
POLL_SECONDS = 0.005  # while only workers are busy


def evaluate_model(config: Config, connection: Connection) -> None:
    """Load config.model afresh and send its FinalEvaluation through `connection`.

    Whatever comes from there means stop. Raises ValueError when no response gets a score,
    UserError for a weight that is not finite.
    """
    task = load_task(config.task, **config.options)
    if type(task).evaluate is not Task.evaluate:  # there may be models in it
        memory = min(config.gpu_memory_utilization or 1.0, MEMORY_BESIDE_MODELS)
        config = dataclasses.replace(config, gpu_memory_utilization=memory)
    engine, scorer = Engine(config), make_scorer(config, task)
    engine.llm.apply_model(lambda model: check_finite(model, config))
    tokenizer, queries = load_tokenizer(config), task.queries("test")
    run = EvaluationRun(config, task, queries, tokenizer, config.steps, config.evaluation_samples)
    generation = make_generation(config, tokenizer, engine, scorer)
    for rollout in run.rollouts:
        generation.start(rollout)
    while not run.is_done and not connection.poll():
        if generation.is_idle:
            time.sleep(POLL_SECONDS)
        elif generated := generation.step(config.steps):
            scorer.add(generated)
        for rollout in scorer.take():
            run.record(rollout)
    scorer.close()
    if run.is_done:
        if task.score_timeout is not None:
            task.load()  # the workers had, this process has not yet
        connection.send(measure(task, run))


def measure(task: Task, run: EvaluationRun) -> FinalEvaluation:
    """Compute all metrics of the task on the scored responses. Raises ValueError for none."""
    if not run.scored:
        error = run.unscored[0].error
        raise ValueError(f"no response to a test query got a score: {error}") from error
    run.scored.sort(key=lambda rollout: rollout.index)  # they came in any order
    queries = [rollout.query for rollout in run.scored]
    texts = [rollout.texts[0] for rollout in run.scored]
    finished = [rollout.finished[0] for rollout in run.scored]
    scores = run.scores()
    values = task.evaluate(queries, texts, finished, scores)
    ids = [rollout.query.id for rollout in run.scored]
    metrics = {name: mean_and_interval(value, ids) for name, value in values.items()}
    counts = len(set(ids)), run.num_samples, run.long_prompts, len(run.unscored)
    answers = look_at(task, texts, scores.tolist(), finished)
    return FinalEvaluation(metrics, *counts, answers)
