"""What can be said of the settings before anything is loaded: UserError, in one line."""

import re
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from config import Bound, Config, Extra, UserError
from tasks import Task, find_task

EXTRAS = Path(__file__).parents[1] / "extras"
PLAIN_TYPES = {int, float, bool, str, dict, types.NoneType}  # of a setting; a task may have others
SECRET = re.compile(r"(key|token|secret|password)s?(_|$)", re.IGNORECASE)  # in a setting's name
# A setting, another that it must not exceed, and why.
LIMITS = [
    ("responses_per_query", "samples_per_query", "those trained on are some of a query's samples"),
    ("samples_per_query", "capacity_per_query", "the buffer must hold one group of a query"),
    ("trainer_processes", "queries_per_batch", "each takes whole queries, for log Z of a query"),
]
# A setting, and another without which it does nothing.
NEEDS = [
    ("reward_temperature", "reward_temperature_steps"),
    ("reference_temperature", "reference_temperature_steps"),
    ("reference_reset_period", "constant_staleness"),
    ("lora_alpha", "lora_rank"),
    ("searchers_per_node", "ray"),
    ("plan_gpus", "plan"),
]
# Two settings of which a run may have one, and what to do.
EITHER = [
    ("lora_rank", "trainer_processes", "adapters are not sharded, give one of the two"),
    ("ray", "constant_staleness", "further nodes search freely, leave out --synchronous too"),
    ("max_staleness", "constant_staleness", "the first is for the buffer, the other has none"),
]


def check(config: Config) -> None:
    """Raise UserError for what can be seen to be wrong without loading anything."""
    for name, bound in find_annotations(Bound):
        value = getattr(config, name)
        if value is not None and not bound.holds(value):
            raise UserError(f"--{name} is {value!r}: {bound.words}")
    if problem := find_lacking_extra(config) or find_conflict(config):
        raise UserError(problem)


def find_annotations(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the name of each setting with an annotation of this kind, and the annotation."""
    for name, hint in get_type_hints(Config, include_extras=True).items():
        yield from ((name, part) for part in find_parts(hint) if isinstance(part, kind))


def find_parts(hint: Any) -> Iterator[Any]:
    """Yield what a type is made of, at any depth: sides of a union, annotations."""
    for part in get_args(hint):
        yield part
        yield from find_parts(part)


def find_lacking_extra(config: Config) -> str | None:
    """Say which flag needs a module of extras/ that this copy of the project lacks, if one does."""
    for name, extra in find_annotations(Extra):
        value = getattr(config, name)
        # An objective in a file of the user's own needs none.
        is_on = value != getattr(Config, name) and not str(value).endswith(".py")
        if is_on and (lacking := find_lacking_module(extra)):
            return f"--{name}{'' if value is True else f' {value}'} {lacking}"
    return None


def find_lacking_module(extra: Extra) -> str | None:
    """Say which module of an extra this copy of the project lacks, if one."""
    files = [EXTRAS / f"{module.replace('.', '/')}.py" for module in extra.modules]
    lacking = [file.relative_to(EXTRAS.parent) for file in files if not file.exists()]
    return f"needs {lacking[0]}, which this copy of the project lacks" if lacking else None


def check_extras(config: Config) -> None:
    """Raise UserError where the library or the machines that an extra needs are not there."""
    if config.lora_rank:
        from extras import lora

        lora.check(config)
    if config.track:
        from extras import tracking

        tracking.check(config)
    if config.ray:
        from extras.nodes import joining

        joining.check(config)


def check_task_settings(name: str, task: type[Task]) -> None:
    """Raise UserError for a task's setting that is one of every run, or named like a secret.

    Settings are written to config.json, shown and given to trackers.
    """
    hints = get_type_hints(task)
    for setting in field_names(task):
        what = f"task {name!r} has a setting {setting!r}"
        if setting in field_names(Config):
            raise UserError(f"{what}, which is one of every run: give it another name")
        if SECRET.search(setting) and str in sides_of(hints[setting]):  # a number of tokens is none
            raise UserError(
                f"{what}, and settings are written to files: read a secret from the environment "
                "(os.environ), or give what is none another name"
            )


def check_types(values: dict[str, object], owner: type) -> None:
    """Raise UserError for a value that is not of its type in `owner`: one from a file may be."""
    for name, hint in get_type_hints(owner).items():
        sides = sides_of(hint)
        if name not in values or not PLAIN_TYPES.issuperset(sides):
            continue
        kind = type(values[name])
        if kind not in sides and not (kind is int and float in sides):
            words = " or ".join(side.__name__ for side in sides)
            raise UserError(f"--{name} is {values[name]!r}: its type is {words}")


def sides_of(hint: Any) -> tuple:
    """Return the types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def field_names(settings: type | None) -> list[str]:
    """Return the fields of a dataclass, [] of anything else."""
    return [field.name for field in fields(settings)] if is_dataclass(settings) else []


def find_conflict(config: Config) -> str | None:
    """Say which settings contradict each other, and what to do; None if none do."""

    def is_set(name: str) -> bool:
        return getattr(config, name) != getattr(Config, name)

    for name, limit, reason in LIMITS:
        value, most = getattr(config, name), getattr(config, limit)
        if value > most:
            return f"--{name} is {value}, more than --{limit} {most}: {reason}"
    for name, other in NEEDS:
        if is_set(name) and not is_set(other):
            problem = f"--{name} is {getattr(config, name)!r}, which does nothing without --{other}"
            return f"{problem}: give that too, or --{name} {getattr(Config, name)!r}"
    for name, other, advice in EITHER:
        if is_set(name) and is_set(other):
            pair = " and ".join(f"--{each} {getattr(config, each)}" for each in (name, other))
            return f"{pair} are both given: {advice}"
    return next((problem for is_there, problem in other_conflicts(config) if is_there), None)


def other_conflicts(config: Config) -> list[tuple[bool, str]]:
    """Return what the tables cannot say: whether it is there, and what is wrong then."""
    most, has_turns = config.max_episode_tokens, find_task(config.task).reply is not Task.reply
    turns = "has episodes: give" if has_turns else "has no reply(), and so no use for"
    decay_end = config.warmup_steps + config.decay_steps
    has_no_end = not config.beta_steps and config.beta_stop_step is None
    return [
        (
            config.master_dtype == "bfloat16" != config.dtype,
            f"--master_dtype bfloat16 needs --dtype bfloat16, and that is {config.dtype}: give "
            "--master_dtype float32 too, with a learning rate for it",
        ),
        (
            config.lr_schedule == "warmup_stable_decay" and not config.decay_steps,
            "--lr_schedule warmup_stable_decay needs --decay_steps",
        ),
        (
            config.lr_schedule == "linear" and decay_end < config.steps and config.decay_steps > 0,
            f"--decay_steps is {config.decay_steps}: with --lr_schedule linear the rate would be 0 "
            f"from step {decay_end} on: give 0, for a decay as long as the run",
        ),
        (
            config.beta_final is not None and has_no_end,
            f"--beta_final is {config.beta_final} but nothing says when: "
            "give --beta_steps or --beta_stop_step",
        ),
        (
            config.searchers == 0 and not config.ray,
            "--searchers is 0: that is for --ray, where other nodes search",
        ),
        (
            config.lockstep and (config.searchers or 0) > config.queries_per_batch,
            f"--searchers is {config.searchers}, more than --queries_per_batch "
            f"{config.queries_per_batch}: in a run of constant staleness "
            "each searcher generates a share of every batch",
        ),
        (
            has_turns == (most is None),
            f"task {config.task!r} {turns} --max_episode_tokens",
        ),
        (
            most is not None and most <= config.max_prompt_tokens,
            f"--max_episode_tokens {most} leaves no room for a turn beside --max_prompt_tokens "
            f"{config.max_prompt_tokens}: lower that, or raise the first",
        ),
    ]
