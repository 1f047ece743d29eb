"""A task: queries, their prompts, and a reward. One file a task, here or anywhere; it defines one subclass of Task."""

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import UserError


@dataclass(frozen=True)
class Query:
    id: int
    prompt: str
    answer: Any  # whatever the task's score needs


class Task:
    """Options that a task takes are keyword arguments of its __init__ (`data_dir`). It is made in every process: keep it cheap."""

    metric = "score"  # what the mean of score() over the test queries is called
    score_timeout: float | None = None  # seconds for the responses to one query; score() then runs in worker processes, and that long at most

    def queries(self, split: str) -> Sequence[Query]:
        """The queries of "train" or "test". Ids are unique within a split. Raises UserError for data that cannot be used."""
        raise NotImplementedError

    def score(self, queries: list[Query], responses: list[str], finished: list[bool]) -> list[float]:
        """The reward of each response to the query beside it; finished is False where the length limit cut it off."""
        raise NotImplementedError

    def extract(self, response: str) -> str | None:
        """What score() takes for the answer in a response; shown in samples.jsonl."""
        return None

    def base_model(self) -> str:
        """The model to start from when --model is not given: a local directory or a hub id."""
        raise UserError("this task brings no model of its own: give --model, a local directory or a hub id")


def load_task(name_or_path: str, **options) -> Task:
    """The task of that name in tasks/, or the one in a .py file. Raises UserError."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    if name_or_path.endswith(".py"):
        if not Path(name_or_path).is_file():
            raise UserError(f"task file {name_or_path!r} does not exist")
        spec = importlib.util.spec_from_file_location(Path(name_or_path).stem, name_or_path)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise UserError(f"task file {name_or_path!r} fails to import: {type(error).__name__}: {error}") from error
    elif name_or_path in names:
        module = importlib.import_module(f"tasks.{name_or_path}")
    else:
        raise UserError(f"unknown task {name_or_path!r}: the tasks are {', '.join(names)}, or give the path of a .py file")
    classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, Task) and c.__module__ == module.__name__]
    if len(classes) != 1:
        raise UserError(f"task {name_or_path!r} defines {len(classes)} subclasses of Task: it must define one")
    for method in ("queries", "score"):
        if getattr(classes[0], method) is getattr(Task, method):
            raise UserError(f"task {name_or_path!r} has no method {method}")
    known = inspect.signature(classes[0]).parameters
    if unknown := sorted(set(options) - set(known)):
        raise UserError(f"task {name_or_path!r} takes no --{unknown[0]}")
    return classes[0](**options)
