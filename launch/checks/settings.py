"""What can be said of the settings before anything is loaded: UserError, in one line."""

import types
from contextlib import suppress
from dataclasses import fields
from importlib.util import find_spec
from typing import Any, Union, get_args, get_origin, get_type_hints

from config import Bound, Config, Extra, UserError
from tasks import Task, find_task

PLAIN_TYPES = {int, float, bool, str, dict, types.NoneType}  # of a setting; a task may have others


def check(config: Config) -> None:
    """Raise UserError for what can be seen to be wrong without loading anything."""
    hints = get_type_hints(Config, include_extras=True)
    for setting in fields(Config):
        value, bound = getattr(config, setting.name), find_annotation(hints[setting.name], Bound)
        if value is not None and bound and not bound.holds(value):
            shown = repr(value) if isinstance(value, str) else value
            raise UserError(f"--{setting.name} is {shown}: {bound.words}")
    if lacking := find_lacking_extra(config):
        raise UserError(lacking)
    check_batch(config)
    check_schedules(config)
    check_modes(config)
    check_episodes(config)


def find_lacking_extra(config: Config) -> str | None:
    """Say which flag needs a module of extras/ that this copy of the project lacks, if one does."""
    hints = get_type_hints(Config, include_extras=True)
    for setting in fields(Config):
        value, extra = getattr(config, setting.name), find_annotation(hints[setting.name], Extra)
        # An objective in a file of the user's own needs none.
        is_on = value != setting.default and not str(value).endswith(".py")
        if extra and is_on and (lacking := find_lacking_module(extra)):
            flag = f"--{setting.name}" if value is True else f"--{setting.name} {value}"
            return f"{flag} {lacking}"
    return None


def find_lacking_module(extra: Extra) -> str | None:
    """Say which module of an extra this copy of the project lacks, if one."""
    for module in extra.modules:
        found = None
        with suppress(ModuleNotFoundError):  # of its package
            found = find_spec(f"extras.{module}")
        if found is None:
            name = module.replace(".", "/")
            return f"needs extras/{name}, which this copy of the project lacks"
    return None


def check_scorer(config: Config, task: Task) -> None:
    """Raise UserError where a task wants worker processes to score in, and there is no such extra.

    A task's own setting may decide that: so it is no matter of flags.
    """
    if task.score_timeout is not None and (lacking := find_lacking_module(Extra("score_workers"))):
        raise UserError(f"task {config.task}, as it has a score_timeout, {lacking}")


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


def check_types(values: dict[str, object], owner: type) -> None:
    """Raise UserError for a value that is not of its type in `owner`: one from a file may be."""
    for name, hint in get_type_hints(owner).items():
        is_union = get_origin(hint) in (Union, types.UnionType)
        sides = get_args(hint) if is_union else (hint,)
        if name not in values or not PLAIN_TYPES.issuperset(sides):
            continue
        kind = type(values[name])
        if kind not in sides and not (kind is int and float in sides):
            words = " or ".join(side.__name__ for side in sides)
            raise UserError(f"--{name} is {values[name]!r}: its type is {words}")


def find_annotation(hint: type, kind: type) -> Any:
    """Return what is of this kind in a type's annotations, or in those of a side of `… | None`."""
    for annotation in getattr(hint, "__metadata__", ()):
        if isinstance(annotation, kind):
            return annotation
    return next(filter(None, (find_annotation(side, kind) for side in get_args(hint))), None)


def check_batch(config: Config) -> None:
    """B, K, S and the buffer, against each other."""
    if config.responses_per_query > config.samples_per_query:
        raise UserError(
            f"--responses_per_query is {config.responses_per_query}, more than "
            f"--samples_per_query {config.samples_per_query}: "
            "a query needs at least as many samples as it is trained with"
        )
    if config.samples_per_query > config.capacity_per_query:
        raise UserError(
            f"--capacity_per_query is {config.capacity_per_query}, less than "
            f"--samples_per_query {config.samples_per_query}: "
            "the buffer must hold one group of a query"
        )
    if config.trainer_processes > config.queries_per_batch:
        raise UserError(
            f"--trainer_processes is {config.trainer_processes}, more than --queries_per_batch "
            f"{config.queries_per_batch}: each takes whole queries, for log Z of a query"
        )


def check_episodes(config: Config) -> None:
    """Episodes need a bound that leaves room for a turn; there are some if the task has reply()."""
    most, has_turns = config.max_episode_tokens, find_task(config.task).reply is not Task.reply
    if has_turns == (most is None):
        problem = "has episodes: give" if has_turns else "has no reply(), and so no use for"
        raise UserError(f"task {config.task!r} {problem} --max_episode_tokens")
    if has_turns and most <= config.max_prompt_tokens:
        raise UserError(
            f"--max_episode_tokens {most} leaves no room for a turn beside --max_prompt_tokens "
            f"{config.max_prompt_tokens}: lower that, or raise the first"
        )


def check_schedules(config: Config) -> None:
    """A schedule that has an end needs a length."""
    if config.lr_schedule == "warmup_stable_decay" and not config.decay_steps:
        raise UserError("--lr_schedule warmup_stable_decay needs --decay_steps")
    end = config.warmup_steps + config.decay_steps
    if config.lr_schedule == "linear" and config.decay_steps and end < config.steps:
        raise UserError(
            f"--decay_steps is {config.decay_steps}: with --lr_schedule linear the rate would be 0 "
            f"from step {end} on: give 0, for a decay as long as the run"
        )
    if config.beta_final is not None and not config.beta_steps and config.beta_stop_step is None:
        raise UserError(
            f"--beta_final is {config.beta_final} but nothing says when: "
            "give --beta_steps or --beta_stop_step"
        )
    for name, what in (("reward_temperature", "how long"), ("reference_temperature", "when")):
        value = getattr(config, name)
        if value != 1 and not getattr(config, f"{name}_steps"):
            raise UserError(f"--{name} is {value} but nothing says {what}: give --{name}_steps")
    if config.reference_reset_period and not config.lockstep:
        raise UserError(
            f"--reference_reset_period {config.reference_reset_period} is for runs of constant "
            "staleness: give --constant_staleness too"
        )


def check_modes(config: Config) -> None:
    """Settings that only one way of running has."""
    if config.master_dtype == "bfloat16" and config.dtype != "bfloat16":
        raise UserError(
            f"--master_dtype bfloat16 needs --dtype bfloat16, and that is {config.dtype}: give "
            "--master_dtype float32 too, with a learning rate for it"
        )
    if config.lora_alpha is not None and not config.lora_rank:
        raise UserError(
            f"--lora_alpha is {config.lora_alpha}, but --lora_rank 0 trains all weights: "
            "give a rank, or --lora_alpha None"
        )
    if config.lora_rank and config.trainer_processes > 1:
        raise UserError(
            f"--lora_rank {config.lora_rank} and --trainer_processes {config.trainer_processes} "
            "are both given, and adapters are not sharded: give one of the two"
        )
    if config.searchers == 0 and not config.ray:
        raise UserError("--searchers is 0: that is for --ray, where other nodes search")
    if config.searchers_per_node and not config.ray:
        raise UserError(f"--searchers_per_node {config.searchers_per_node} is for --ray")
    if config.ray and config.lockstep:
        raise UserError(
            f"--ray {config.ray} is for free-running search: leave out --synchronous and "
            "--constant_staleness"
        )
    modes = [name for name in ("report", "plan", "eval_only") if getattr(config, name)]
    if len(modes) > 1:
        raise UserError(f"--{modes[0]} and --{modes[1]} are both given: give one of the two")
    if config.plan_gpus and not config.plan:
        raise UserError(f"--plan_gpus {config.plan_gpus} is for --plan: a run takes what is there")
    if config.lockstep and config.max_staleness is not None:
        raise UserError(
            f"--max_staleness {config.max_staleness} is for the buffer, which a run of constant "
            "staleness does not use: leave it out"
        )
    if config.lockstep and config.searchers and config.searchers > config.queries_per_batch:
        raise UserError(
            f"--searchers is {config.searchers}, more than "
            f"--queries_per_batch {config.queries_per_batch}: in a run of constant staleness "
            "each searcher generates a share of every batch"
        )
