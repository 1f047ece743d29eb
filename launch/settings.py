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
# In the name of a setting that is a text, or holds some.
SECRET = re.compile(r"(key|token|secret|passw(or)?d|credential|auth)s?(_|$)", re.IGNORECASE)
# A setting, another that it must not exceed, and why.
LIMITS = [
    ("responses_per_query", "samples_per_query", "those trained on are some of a query's samples"),
    ("samples_per_query", "capacity_per_query", "the buffer must hold one group of a query"),
    ("trainer_processes", "queries_per_batch", "each takes whole queries, for log Z of a query"),
    ("searchers", "queries_per_batch", "in lockstep each generates a share of every batch"),
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
    ("search_ahead", "constant_staleness", "the trainer waits for each batch: set one to None"),
    ("search_ahead", "max_staleness", "the trainer may wait for what is young: give one of them"),
    ("search_ahead", "ray", "each node would be so far ahead: --search_ahead None"),
]


def check(config: Config) -> None:
    """Raise UserError for what can be seen to be wrong without loading anything."""
    plain = vars(Config())
    given = {name for name, value in vars(config).items() if value != plain[name]}
    for name, hint in get_type_hints(Config, include_extras=True).items():
        value = getattr(config, name)
        for part in find_parts(hint):
            if isinstance(part, Bound) and value is not None and not part.holds(value):
                raise UserError(f"--{name} is {value!r}: {part.words}")
            # An objective in a file of the user's own needs no extra.
            if isinstance(part, Extra) and name in given and not str(value).endswith(".py"):
                check_modules(f"--{name}{'' if value is True else f' {value}'}", part)
    for problem in find_conflicts(config, given):
        raise UserError(problem)


def find_parts(hint: Any) -> Iterator[Any]:
    """Yield what a type is made of, at any depth: sides of a union, annotations."""
    for part in get_args(hint):
        yield part
        yield from find_parts(part)


def check_modules(what: str, extra: Extra) -> None:
    """Raise UserError where this copy of the project lacks a module of an extra."""
    for module in extra.modules:
        path = f"{module.replace('.', '/')}.py"
        if not (EXTRAS / path).exists():
            raise UserError(f"{what} needs extras/{path}, which this copy of the project lacks")


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


def check_types(config: Config, task: type[Task]) -> None:
    """Raise UserError for a value of another type than its setting's: one from a file may be.

    And for a task's setting that is one of every run, or is named like a secret: settings are
    written to config.json, shown and given to trackers.
    """
    own = set(field_names(task))
    hints = {name: hint for name, hint in get_type_hints(task).items() if name in own}
    for name, hint in hints.items():
        what = f"task {config.task!r} has a setting {name!r}"
        if name in field_names(Config):
            raise UserError(f"{what}, which is one of every run: give it another name")
        has_text = str in (hint, *find_parts(hint)) and not hasattr(Task, name)
        if SECRET.search(name) and has_text:
            raise UserError(
                f"{what}, and settings are written to files: read a secret from the environment "
                "(os.environ), or give what is none another name"
            )
    options = config.options if isinstance(config.options, dict) else {}  # which is named below
    if unknown := options.keys() - own:
        raise UserError(f"task {config.task!r} has no setting {min(unknown)!r}")
    hints |= get_type_hints(Config)
    for name, value in (vars(config) | options).items():
        kind, sides = type(value), sides_of(hints[name])
        is_right = kind in sides or kind is int and float in sides
        if PLAIN_TYPES.issuperset(sides) and not is_right:
            words = " or ".join(side.__name__ for side in sides)
            raise UserError(f"--{name} is {value!r}: its type is {words}")


def sides_of(hint: Any) -> tuple:
    """Return the types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def field_names(settings: type) -> list[str]:
    """Return the fields of a dataclass, [] of anything else."""
    return [field.name for field in fields(settings)] if is_dataclass(settings) else []


def find_conflicts(config: Config, given: set[str]) -> Iterator[str]:
    """Yield what contradicts each other, and what to do. given: settings that are no default."""
    for name, limit, reason in LIMITS:
        value, most = getattr(config, name) or 0, getattr(config, limit)
        if value > most and (config.lockstep or name != "searchers"):
            yield f"--{name} is {value}, more than --{limit} {most}: {reason}"
    for name, other in NEEDS:
        if name in given and other not in given:
            problem = f"--{name} is {getattr(config, name)!r}, which does nothing without --{other}"
            yield f"{problem}: give that too, or --{name} {getattr(Config, name)!r}"
    for name, other, advice in EITHER:
        if {name, other} <= given:
            pair = " and ".join(f"--{each} {getattr(config, each)}" for each in (name, other))
            yield f"{pair} are both given: {advice}"
    if config.master_dtype == "bfloat16" != config.dtype:
        yield (
            f"--master_dtype bfloat16 needs --dtype bfloat16, and that is {config.dtype}: give "
            "--master_dtype float32 too, with a learning rate for it"
        )
    if config.lr_schedule == "warmup_stable_decay" and not config.decay_steps:
        yield "--lr_schedule warmup_stable_decay needs --decay_steps"
    decay_end = config.warmup_steps + config.decay_steps
    if config.lr_schedule == "linear" and decay_end < config.steps and config.decay_steps > 0:
        yield (
            f"--decay_steps is {config.decay_steps}: with --lr_schedule linear the rate would be 0 "
            f"from step {decay_end} on: give 0, for a decay as long as the run"
        )
    if config.beta_final is not None and not config.beta_steps and config.beta_stop_step is None:
        yield (
            f"--beta_final is {config.beta_final} but nothing says when: "
            "give --beta_steps or --beta_stop_step"
        )
    if config.searchers == 0 and not config.ray:
        yield "--searchers is 0: that is for --ray, where other nodes search"
    most, has_turns = config.max_episode_tokens, find_task(config.task).reply is not Task.reply
    if has_turns == (most is None):
        turns = "has episodes: give" if has_turns else "has no reply(), and so no use for"
        yield f"task {config.task!r} {turns} --max_episode_tokens"
    if most is not None and most <= config.max_prompt_tokens:
        yield (
            f"--max_episode_tokens {most} leaves no room for a turn beside --max_prompt_tokens "
            f"{config.max_prompt_tokens}: lower that, or raise the first"
        )
