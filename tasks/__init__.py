"""A task: queries, their prompts, and a reward. One file a task, here or anywhere.

The file defines one subclass of Task. It may have presets too: PRESETS = {name: {setting: value}},
the settings of Config that differ from its defaults; the first is the one without --preset.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from config import Config, UserError, import_file, users_code

# Of SamplingParams, what says where a response ends.
ENDS = "max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"
Messages = list[dict[str, str]]  # a chat: {"role": …, "content": …} each


@dataclass(frozen=True)
class Query:
    """What is asked of the policy.

    prompt: a text as it is, or messages for the model's chat template. answer: whatever the task's
    score needs; it is shown as the wanted answer.
    """

    id: int
    prompt: str | Messages
    answer: Any


@dataclass(frozen=True)
class LazyQueries(Sequence):
    """A sequence of `size` queries, each made by make(index) when it is read. Its id is its index.

    make() must give the same query in every process. All prompts are texts, or messages of the same
    roles: checks at the start read only some.
    """

    size: int
    make: Callable[[int], Query]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Query:
        index = range(self.size)[index]
        with users_code("LazyQueries.make()"):
            return self.make(index)


class Task:
    """Base class of all tasks. Override queries(), and score(), is_right() or extract().

    A task with options is a dataclass: its fields, each with its help in a string under it, are
    flags, as those of Config are. A task is made in every process, and by the command line before
    anything slow is imported: import models where they are used.
    """

    # What the mean of score() over the test queries is called.
    metric = "score"
    # What to do where extract() finds an answer in no response of the first groups.
    if_unanswered: str = "see extract() of the task, and samples.jsonl"
    # Seconds for a response; score() then runs in worker processes, on one response a call.
    score_timeout: float | None = None
    # The reward of a response that takes longer, or kills its worker. None: its query is dropped.
    late_score: float | None = None
    # Whether a response that the length limit cut off gets an end-of-sequence token all the same:
    # log pi_ref of that token then lowers its log-reward. score() still sees an unfinished one.
    append_eos: bool = False
    # Special tokens that score() is to see: the text of a response has no others.
    keep_special_tokens: Sequence[str] = ()
    # Whether the end-of-sequence token is in no loss where the tokenizer has no padding token.
    pad_is_eos: bool = False
    # Whether the default score() asks is_right() of a response that was cut off, too.
    grade_unfinished: bool = False
    # How the responses to test queries are sampled, as vllm.SamplingParams has it, unless a flag
    # (--evaluation_samples, --evaluation_temperature) says otherwise.
    evaluation_sampling: dict = {"temperature": 0.0}

    def prepare(self) -> None:
        """Fetch what load() needs, once, before anything starts. Raises UserError."""

    def models(self) -> list[str]:
        """The models that a searcher may hold at once: the plan is made before prepare()."""
        return []

    def load(self) -> None:
        """Put the models that score() and evaluate() need on this process's device.

        Called once in each process that calls one of them, before it does.
        """

    def sampling(self, rng: np.random.Generator) -> dict:
        """What differs, of vllm.SamplingParams, from the policy at --temperature for one query."""
        return {}

    def queries(self, split: str) -> Sequence[Query]:
        """The queries of "train" or "test": a list, or LazyQueries. Ids are unique within a split.

        Raises UserError for data that cannot be used.
        """
        raise NotImplementedError

    def score(
        self, queries: list[Query], responses: list[str], finished: list[bool]
    ) -> list[float]:
        """The reward of each response to the query beside it; by default 1 if it is right, else 0.

        finished is False where the length limit cut the response off: by default it is wrong.
        With reply(), a response is the list of the model's turns here, in evaluate() and extract();
        finished is True where reply() ended the episode.
        """
        return [
            float((done or self.grade_unfinished) and self.is_right(response, query.answer))
            for query, response, done in zip(queries, responses, finished)
        ]

    def is_right(self, response: str, answer: Any) -> bool:
        """Whether a response has the answer of its query, for the default score()."""
        return self.extract(response) == answer

    def reference_logprobs(self, logprobs: np.ndarray) -> np.ndarray:
        """Change log pi_ref of a response's tokens, (T,), as its log-reward is to have it."""
        return logprobs

    def reply(self, query: Query, turns: list[str]) -> str | None:
        """What the environment says after the latest of the model's turns; None ends the episode.

        A task that defines this has episodes of several turns. The same turns must give the same
        reply, in any process: then trajectory balance may learn from old episodes. It runs where
        score() does, within score_timeout.
        """

    def evaluate(
        self, queries: list[Query], responses: list[str], finished: list[bool], scores: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Metrics of responses to N test queries, one to each, by name.

        scores: (N,) what score() gave for them. A metric is the mean of (N,) values of responses,
        or of (N, N) values of pairs of responses.
        """
        return {self.metric: scores}

    def extract(self, response: str) -> str | None:
        """What score() takes for the answer in a response; shown beside the wanted one."""
        return None

    def base_model(self) -> str:
        """The model to start from when --model is not given: a local directory or a hub id."""
        raise UserError("this task brings no model: give --model, a local directory or a hub id")


def sampling_for_tests(config: Config, task: Task) -> dict:
    """Return how responses to test queries are sampled, as vllm.SamplingParams has it, unseeded.

    They end where those to other queries do: by the task's sampling().
    """
    sampling = {"temperature": 0.0, "max_tokens": config.max_response_tokens}
    of_others = task.sampling(np.random.default_rng(0))
    sampling |= {name: value for name, value in of_others.items() if name in ENDS}
    sampling |= task.evaluation_sampling
    if config.evaluation_temperature is not None:
        sampling["temperature"] = config.evaluation_temperature
    return sampling


def load_task(name_or_path: str, **options) -> Task:
    """Make the task of that name in tasks/, or the one in a .py file. Raises UserError."""
    task = find_task(name_or_path)
    with users_code(f"making task {name_or_path!r}"):
        return task(**options)


def load_models(task: Task) -> None:
    """Call load() of a task. Raises UserError."""
    with users_code("load()"):
        task.load()


def find_task(name_or_path: str) -> type[Task]:
    """Find the class of a task. Raises UserError."""
    module = import_task(name_or_path)
    kinds = filter(inspect.isclass, vars(module).values())
    own = [kind for kind in kinds if issubclass(kind, Task) and kind.__module__ == module.__name__]
    name = f"task {name_or_path!r}"
    if len(own) != 1:
        raise UserError(f"{name} defines {len(own)} subclasses of Task: it must define one")
    for methods in ["queries"], ["score", "is_right", "extract"]:
        if all(getattr(own[0], method) is getattr(Task, method) for method in methods):
            raise UserError(f"{name} has no method {' or '.join(methods)}")
    for method in filter(inspect.isfunction, vars(Task).values()):  # others it may await itself
        if inspect.iscoroutinefunction(getattr(own[0], method.__name__)):
            raise UserError(f"{name}: {method.__name__}() is async, and nothing awaits it")
    return own[0]


def import_task(name_or_path: str) -> ModuleType:
    """Import the module of a task. Raises UserError."""
    if name_or_path.endswith(".py"):
        return import_file("task", name_or_path)
    if name_or_path not in task_names():
        known = f"the tasks are {', '.join(task_names())}, or give the path of a .py file"
        raise UserError(f"unknown task {name_or_path!r}: {known}")
    return importlib.import_module(f"tasks.{name_or_path}")


def task_names() -> list[str]:
    """The tasks in this directory."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(path.stem for path in files if path.stem != "__init__")
