"""The command line as a checked Config, read by tyro: the fields of Config are the flags.

Under the flags lie the settings of --config, of the run to --resume or of the task's preset, and
under those Config's defaults.
"""

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import tyro

from config import Config, UserError, find_path, settle
from launch.settings import check, check_types, field_names
from runtime.checkpoints import FORMAT
from tasks import Task, find_task, import_task, task_names

# What a run that is resumed may change: how long, how often, how fast. Everything else is part of
# what has been learnt.
CHANGEABLE = (
    "steps learning_rate max_grad_norm eval_every evaluation_samples evaluation_temperature "
    "checkpoint_every track output_dir searcher_timeout gpu_memory_utilization "
    "tokens_per_micro_batch trainer_processes low_memory plan plan_gpus"
).split()
PATHS = "output_dir", "resume", "config", "report"  # flags that are one
# Flags of which a command line may have one.
ALTERNATIVES = [
    ("report", "plan", "eval_only"),
    ("resume", "config"),
    ("config", "preset", "tiny"),
    ("synchronous", "constant_staleness"),
]
DESCRIPTION = "Trajectory Balance with Asynchrony on one machine. TASK comes first."
TASK_HELP = f"One of {', '.join(task_names())}, or the path of a .py file with a task of your own."
TASK = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TASK", help=TASK_HELP)]
USAGE = """\
usage: python tba.py TASK [--flag value …]

Tasks, or the path of a .py file with a task of your own:
{tasks}

To begin with:
  python tba.py arithmetic      # a tiny model learns sums in minutes, without a GPU
  python tba.py gsm8k --plan    # what RhoMath-1B needs, and whether it is there
  python tba.py jsonl --data rows.jsonl --match number --chat --model DIR_OR_HUB_ID

python tba.py TASK --help lists all flags"""


def usage() -> str:
    """Say how to begin: what a command line without arguments shows."""
    lines = []
    for name in task_names():
        summary = re.split(r"\. | \(|\.?(?:\n|$)", import_task(name).__doc__ or "")[0]
        lines.append(f"  {name:<16}  {shorten(summary, 80, placeholder=' …')}")
    return USAGE.format(tasks="\n".join(lines))


def build_config(arguments: list[str]) -> Config:
    """Make a checked Config of a command line. Raises UserError.

    What tyro finds itself (a wrong type, --help) it prints, and raises SystemExit.
    """
    for names in ALTERNATIVES:
        given = [f"--{name}" for name in names if find_value(arguments, name) is not None]
        if len(given) > 1:
            raise UserError(f"{given[0]} and {given[1]} are both given: give one of the two")
    if run_dir := find_value(arguments, "resume"):
        return resumed(arguments, str(find_path("--resume", run_dir)))
    if file := find_value(arguments, "config"):
        base = replace(read_config("--config", file), output_dir="", resume="")
    else:
        base = preset_config(arguments)
    config = settle(parse(arguments, base))
    check(config)
    return config


def find_value(arguments: list[str], name: str) -> str | None:
    """Return what follows a flag on the command line, "" if nothing does; None without the flag."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        flag, is_joined, value = argument.partition("=")
        if flag.replace("-", "_") == f"__{name}":
            found = value if is_joined else following
    return found


def preset_config(arguments: list[str]) -> Config:
    """The settings of the task's preset: --preset, --tiny, or the first of its file."""
    task = next((word for word in arguments[:1] if not word.startswith("-")), Config.task)
    presets = find_presets(task)
    is_tiny = find_value(arguments, "tiny") is not None and "tiny" in presets
    preset = "tiny" if is_tiny else find_value(arguments, "preset") or next(iter(presets))
    if preset not in presets:
        names = "this task has none" if "" in presets else f"it is one of {', '.join(presets)}"
        raise UserError(f"--preset is {preset!r}: {names} (task {task}: TASK comes first)")
    try:
        return Config(**{**presets[preset], "task": task, "preset": preset})
    except TypeError as error:  # a setting that Config does not have
        raise UserError(f"preset {preset!r} of task {task!r}: {error}") from error


def find_presets(name_or_path: str) -> dict[str, dict]:
    """Find the presets in a task's file; a single one without a name where there are none."""
    return getattr(import_task(name_or_path), "PRESETS", {}) or {"": {}}


def check_format(directory: str) -> None:
    """Raise UserError where a run's newest checkpoint is of another version of the project."""
    newest = max(Path(directory, "checkpoints").glob("step-[0-9]*/state.json"), default=None)
    with suppress(OSError, ValueError):  # one that is damaged is named later
        if newest and json.loads(newest.read_text()).get("format") != FORMAT:
            raise UserError(
                f"{str(newest.parent)!r} is of another version of this project: resume it with that"
            )


def resumed(arguments: list[str], directory: str) -> Config:
    """The settings of the run in that directory, changed by the flags. Raises UserError."""
    check_format(directory)
    saved = replace(read_config("--resume", directory), output_dir=directory, resume=directory)
    config = parse(arguments, saved)
    if config.model and find_path("--model", config.model).is_dir():
        config = replace(config, model=str(Path(config.model).resolve()))
    may_change = [*CHANGEABLE]
    if config.constant_staleness:
        may_change.remove("steps")  # the last batches are made for their number
    if saved.ray and config.ray:
        may_change += "ray", "searchers", "searchers_per_node"  # as many as there are
    before, after = (asdict(c) | c.options for c in (saved, config))
    for name, value in after.items():
        if value != before.get(name) and name not in (*may_change, "options"):
            raise UserError(
                f"--{name} is {value!r}, but the run to resume has {before.get(name)!r}: "
                f"only {', '.join(may_change)} may change"
            )
    # A share of the steps stays one of those that the run began with: beta must not go back.
    steps, stop = saved.in_steps(saved.beta_steps), saved.beta_stop_step
    stop = None if stop is None else saved.in_steps(stop)
    config = replace(config, beta_steps=steps, beta_stop_step=stop)
    check(config)
    return config


def read_config(flag: str, path: str) -> Config:
    """Make a Config of the file of --config, or of the run of --resume. Raises UserError."""
    file, what, advice = find_path(flag, path), "settings of a run", "the config.json of one"
    if flag == "--resume":
        file, what, advice = file / "config.json", "run that can be resumed", "the directory of one"
    try:
        settings = json.loads(file.read_text())
        if not isinstance(settings, dict) or not isinstance(settings.get("task"), str):
            raise ValueError("it names no task")
        if unknown := settings.keys() - set(field_names(Config)):
            raise ValueError(f"this version has no setting {min(unknown)!r}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # of an OSError without its number
        problem = f"holds no {what}: {file.name}: {reason}"
        raise UserError(f"{flag} {path!r} {problem}; give {advice}") from error
    return Config(**settings)


def parse(arguments: list[str], base: Config) -> Config:
    """Read the flags of Config and of the task over the settings in `base`. Raises UserError.

    For tyro each section of Config is a group of flags, and so are the task's own.
    """
    task = find_task(base.task)
    check_types(base, task)
    groups: dict[str, object] = {}
    # ObjectiveSettings is the group "objective"; reversed, they are in the order of --help.
    for section in reversed(Config.__bases__):
        values = {name: getattr(base, name) for name in field_names(section)}
        groups[section.__name__.removesuffix("Settings").lower()] = section(**values)
    if field_names(task):
        groups["task"] = own_settings(task, base.options)
    types = [(name, type(group)) for name, group in groups.items()]
    wrapper = make_dataclass("CommandLine", [("name", TASK), *types])
    presets = ", ".join(filter(None, find_presets(base.task))) or "none"
    parsed, unknown = tyro.cli(
        wrapper,
        args=arguments,
        default=wrapper(base.task, **groups),
        prog="python tba.py",
        description=f"{DESCRIPTION} Presets of {base.task}: {presets}.",
        use_underscores=True,
        return_unknown_args=True,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    if unknown:
        flag = unknown[0].partition("=")[0]  # without its value
        flags = [f"--{name}" for group in groups.values() for name in vars(group)]
        close = get_close_matches(flag, flags)
        advice = f"did you mean {' or '.join(close)}? " if close else ""
        problem = f"unknown argument {flag}: {advice}"
        raise UserError(f"{problem}python tba.py {base.task} --help lists all flags")
    if parsed.name != base.task and not base.resume:  # resumed() has its own words for that
        problem = f"the task is {parsed.name!r}, but the settings are for {base.task!r}"
        advice = "give a --config of that task" if parsed.process.config else "TASK comes first"
        raise UserError(f"{problem}: {advice}")
    given = {name: vars(getattr(parsed, name)) for name in groups}
    own = given.pop("task", {})
    plain = vars(own_settings(task, {})) if own else {}
    options = {k: v for k, v in own.items() if k in base.options or v != plain[k]}
    settings = {name: value for group in given.values() for name, value in group.items()}
    for name in filter(settings.get, PATHS):
        settings[name] = str(find_path(f"--{name}", settings[name]))
    return replace(base, task=parsed.name, **settings, options=options)


def own_settings(task: type[Task], options: dict) -> object:
    """Make a task's settings, without what the task does when it is made.

    A setting without a default is tyro.MISSING until it is given: tyro asks for it.
    """
    members = {"__post_init__": lambda self: None, "__doc__": task.__doc__}
    is_frozen = task.__dataclass_params__.frozen
    own = dataclass(frozen=is_frozen)(type(task.__name__, (task,), members))
    # Where there is a default or a way to make one, only the other is dataclasses.MISSING.
    required = [field.name for field in fields(task) if field.default is field.default_factory]
    return own(**dict.fromkeys(required, tyro.MISSING) | options)
