"""What can be said of the settings before anything is loaded: UserError, in one line."""

import types
from collections.abc import Iterator
from dataclasses import fields
from typing import Union, get_args, get_origin, get_type_hints

from config import Bound, Config, UserError, extra, has_extra
from tasks import Task, find_task

CHECKED = "lora", "tracking", "nodes.joining"  # extras that need a library, or other machines
PLAIN_TYPES = {int, float, bool, str, dict, types.NoneType}  # of a setting; a task may have others


def check(config: Config) -> None:
    """Raise UserError for what can be seen to be wrong without loading anything."""
    hints = get_type_hints(Config, include_extras=True)
    for setting in fields(Config):
        value, bound = getattr(config, setting.name), find_bound(hints[setting.name])
        if value is not None and bound and not bound.holds(value):
            shown = repr(value) if isinstance(value, str) else value
            raise UserError(f"--{setting.name} is {shown}: {bound.words}")
    for name, flag in wanted_extras(config):
        find_extra(name, flag)
    check_batch(config)
    check_schedules(config)
    check_modes(config)
    check_episodes(config)


def wanted_extras(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the modules of extras/ that these settings turn on, each with its flag."""
    if config.loss != "tb" and not config.loss.endswith(".py"):
        yield "objectives", f"--loss {config.loss}"
    if config.lockstep:
        yield "lockstep", "--synchronous" if config.synchronous else "--constant_staleness"
    if config.max_episode_tokens is not None:
        yield "episodes", f"--max_episode_tokens {config.max_episode_tokens}"
    if config.reference_reset_period:
        yield "reference_resets", f"--reference_reset_period {config.reference_reset_period}"
    if config.low_memory == "on":
        yield "low_memory", "--low_memory on"
    if config.lora_rank:
        yield "lora", f"--lora_rank {config.lora_rank}"
    if config.trainer_processes > 1:
        yield "sharding", f"--trainer_processes {config.trainer_processes}"
    if config.track:
        yield "tracking", f"--track {config.track}"
    if config.ray:
        yield "nodes.joining", f"--ray {config.ray}"


def find_extra(name: str, flag: str) -> None:
    """Raise UserError where this copy of the project lacks the module of extras/ for a flag."""
    if not has_extra(name):
        module = f"extras/{name.replace('.', '/')}"
        raise UserError(f"{flag} needs {module}, which this copy of the project lacks")


def check_scorer(config: Config, task: Task) -> None:
    """Raise UserError where a task wants worker processes to score in, and there is no such extra.

    wanted_extras() does not know: a task's own setting may decide it.
    """
    if task.score_timeout is not None:
        find_extra("score_workers", f"task {config.task}, as it has a score_timeout,")


def check_extras(config: Config) -> None:
    """Raise UserError where the library or the machines that one of them needs are not there."""
    for name, _ in wanted_extras(config):
        if name in CHECKED:
            extra(name).check(config)


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


def find_bound(hint: type) -> Bound | None:
    """The bound in a type: in its annotation, or in that of one side of `… | None`."""
    for side in (hint, *get_args(hint)):
        if annotations := getattr(side, "__metadata__", ()):
            return annotations[0]
    return None


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
    if config.reference_reset_period % config.sync_period:
        raise UserError(
            f"--reference_reset_period is {config.reference_reset_period}, no multiple of "
            f"--sync_period {config.sync_period}: the reference policy is reset at a sync"
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
