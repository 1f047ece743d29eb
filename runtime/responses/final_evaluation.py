"""The final evaluation, and --eval_only: all metrics of the task, in a process of its own."""

import dataclasses
import time
from multiprocessing.connection import Connection

from config import Config
from models.engine import Engine
from models.policy import check_finite, load_tokenizer
from runtime.responses.evaluation import EvaluationRun, interval, mean_of
from runtime.responses.scoring import RewardScorer, decode
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
    engine, scorer = Engine(config), RewardScorer(config, task)
    engine.llm.apply_model(lambda model: check_finite(model, config))
    tokenizer, queries = load_tokenizer(config), task.queries("test")
    samples = config.evaluation_samples
    run = EvaluationRun(config, task, queries, tokenizer, config.steps, samples)
    rollouts = {rollout.request: rollout for rollout in run.rollouts}
    for rollout in run.rollouts:
        engine.add(rollout.request, rollout.prompt, rollout.version, **rollout.sampling)
    while not run.is_done:
        if connection.poll():
            scorer.close()
            return
        if engine.is_running:
            finished = [
                dataclasses.replace(
                    rollouts[output.request_id], texts=[text], finished=[is_finished]
                )
                for output in engine.step()
                for text, is_finished in zip(*decode(tokenizer, output.outputs))
            ]
            if finished:  # each alone: one without a score costs no other of its query
                scorer.add(finished)
        else:
            time.sleep(POLL_SECONDS)
        for rollout in scorer.take():
            run.record(rollout)
    if not run.scored:
        message = f"score() failed on every response to a test query: {run.error}"
        raise ValueError(message) from run.error
    run.scored.sort(key=lambda rollout: rollout.query.id)  # they came in any order
    if scorer.pool:
        task.load()  # the workers have, this process has not yet
    values = task.evaluate(
        [rollout.query for rollout in run.scored],
        [rollout.texts[0] for rollout in run.scored],
        [rollout.finished[0] for rollout in run.scored],
        run.scores(),
    )
    ids = [rollout.query.id for rollout in run.scored]
    metrics = {name: (mean_of(value), *interval(value, ids)) for name, value in values.items()}
    scorer.close()
    counts = len(set(ids)), samples, run.long_prompts, run.num_unscored
    connection.send(FinalEvaluation(metrics, *counts))
