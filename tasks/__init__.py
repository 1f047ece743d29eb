"""A task: queries, their prompts, and a reward. One file a task, here or anywhere; it defines one subclass of Task."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config import UserError


@dataclass(frozen=True)
class Query:
    id: int
    prompt: str
    answer: Any  # whatever the task's score needs


class Task:
    """A task with options of its own is a dataclass: its fields, each with its help in a string under it, are flags, as those of Config are. A task
    is made in every process: keep it cheap."""

    metric = "score"  # what the mean of score() over the test queries is called
    score_timeout: float | None = (
        None  # seconds for the responses to one query; score() then runs in worker processes, and that long at most
    )
    evaluation_sampling: dict = {
        "temperature": 0.0
    }  # how the responses to test queries are sampled, as vllm.SamplingParams has it

    def prepare(self) -> None:
        """Called once, by the command line, before anything starts: fetches what load() needs. Raises UserError for what cannot be used."""

    def load(self) -> None:
        """Called once in each process that calls score() or evaluate(), before it does: puts the models that they need on this process's device."""

    def sampling(self, rng: np.random.Generator) -> dict:
        """How the responses to a query are sampled, where that is not the policy at --temperature: of vllm.SamplingParams what differs."""
        return {}

    def queries(self, split: str) -> Sequence[Query]:
        """The queries of "train" or "test". Ids are unique within a split. Raises UserError for data that cannot be used."""
        raise NotImplementedError

    def score(
        self, queries: list[Query], responses: list[str], finished: list[bool]
    ) -> list[float]:
        """The reward of each response to the query beside it; finished is False where the length limit cut it off."""
        raise NotImplementedError

    def evaluate(
        self, queries: list[Query], responses: list[str], finished: list[bool], scores: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Metrics of responses to N test queries, one to each; scores: (N,) what score() gave for them. (N,) values per response, of which the mean
        is the metric, or (N, N) values per pair of responses, of which the mean over all pairs is."""
        return {self.metric: scores}

    def extract(self, response: str) -> str | None:
        """What score() takes for the answer in a response; shown in samples.jsonl."""
        return None

    def base_model(self) -> str:
        """The model to start from when --model is not given: a local directory or a hub id."""
        raise UserError(
            "this task brings no model of its own: give --model, a local directory or a hub id"
        )


def load_task(name_or_path: str, **options) -> Task:
    """The task of that name in tasks/, or the one in a .py file. Raises UserError."""
    return find_task(name_or_path)(**options)


def find_task(name_or_path: str) -> type[Task]:
    """Its class. Raises UserError."""
    names = sorted(
        path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_")
    )
    if name_or_path.endswith(".py"):
        if not Path(name_or_path).is_file():
            raise UserError(f"task file {name_or_path!r} does not exist")
        spec = importlib.util.spec_from_file_location(
            f"task file {name_or_path}", name_or_path
        )  # a name that no other module has
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise UserError(
                f"task file {name_or_path!r} fails to import: {type(error).__name__}: {error}"
            ) from error
    elif name_or_path in names:
        module = importlib.import_module(f"tasks.{name_or_path}")
    else:
        raise UserError(
            f"unknown task {name_or_path!r}: the tasks are {', '.join(names)}, or give the path of a .py file"
        )
    classes = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and issubclass(c, Task) and c.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise UserError(
            f"task {name_or_path!r} defines {len(classes)} subclasses of Task: it must define one"
        )
    for method in ("queries", "score"):
        if getattr(classes[0], method) is getattr(Task, method):
            raise UserError(f"task {name_or_path!r} has no method {method}")
    return classes[0]
