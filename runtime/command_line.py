"""The command line as a checked Config: defaults, the task's preset over them, flags over that."""

import argparse
import ast
import difflib
import inspect
import json
import textwrap
import typing
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from config import Config, UserError, check
from tasks import find_presets, find_task, task_names

# What a run that is resumed may change: how long, how often, how fast. Everything else is part of
# what has been learnt.
CHANGEABLE = (
    "steps",
    "learning_rate",
    "max_grad_norm",
    "eval_every",
    "checkpoint_every",
    "output_dir",
    "searcher_timeout",
    "gpu_memory_utilization",
)


def build_config(arguments: list[str]) -> Config:
    """Make a checked Config of a command line. Raises UserError."""
    flags, options = _parse(arguments)
    if "resume" in flags:
        return _resumed(flags, options)
    presets = find_presets(flags.get("task", Config.task))
    if options.get("tiny") and flags.setdefault("preset", "tiny") != "tiny":
        raise UserError(
            f"--preset is {flags['preset']!r}, but --tiny is a preset of its own: "
            "give one of the two"
        )
    preset = flags.get("preset", next(iter(presets)))
    if preset not in presets:
        choices = "this task has none" if "" in presets else f"it is one of {', '.join(presets)}"
        raise UserError(f"--preset is {preset!r}: {choices}")
    options = presets[preset].get("options", {}) | options
    config = Config(**{**presets[preset], **flags, "preset": preset, "options": options})
    if config.synchronous:
        if flags.get("constant_staleness"):  # a preset's gives way
            raise UserError(
                f"--constant_staleness is {config.constant_staleness}, but --synchronous makes it "
                "0: give one of the two"
            )
        config.constant_staleness = 0
    config.settle()
    check(config)
    return config


def _resumed(flags: dict, options: dict) -> Config:
    """The settings of the run in flags["resume"], changed by the other flags. Raises UserError."""
    directory = flags["resume"]
    try:
        config = Config(**json.loads((Path(directory) / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"--resume {directory!r} holds no run that can be resumed: "
            f"{type(error).__name__}: {error}"
        ) from error
    config.output_dir = directory
    settings = vars(config) | config.options
    for name, value in (flags | options).items():
        if name == "model" and Path(value).is_dir():
            value = str(Path(value).resolve())
        if name not in ("resume", *CHANGEABLE) and value != settings.get(name):
            raise UserError(
                f"--{name} is {value!r}, but the run to resume has {settings.get(name)!r}: "
                f"only {', '.join(CHANGEABLE)} may change"
            )
        if name == "steps" and value != config.steps and config.constant_staleness:
            raise UserError(
                f"--steps is {value}, but the run to resume has {config.steps}: with "
                "--constant_staleness its last batches are made for that"
            )
        if name in flags:
            setattr(config, name, value)
    check(config)
    return config


def _parse(arguments: list[str]) -> tuple[dict, dict]:
    """The flags that are given: a run's, and the task's own.

    Those are known once it is known which task it is.
    """
    help_wanted = {"-h", "--help"} & set(arguments)
    without_help = [argument for argument in arguments if argument not in help_wanted]
    first, rest = _parser(None).parse_known_args(without_help)
    task = _find_task_name(arguments, first, rest)
    settings = find_task(task) if rest or help_wanted else None
    own = set(_fields(settings))
    if clash := own & set(_fields(Config)):
        raise UserError(
            f"task {task!r} has a setting {min(clash)!r}, which is one of every run: "
            "give it another name"
        )
    parser = _parser(settings)
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        nearest = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        advice = f"did you mean {nearest[0]}?" if nearest else "see python tba.py --help"
        raise UserError(f"unknown argument {unknown[0]!r}: {advice}")
    of_run = {name: value for name, value in vars(flags).items() if name not in own}
    of_task = {name: value for name, value in vars(flags).items() if name in own}
    return of_run, of_task


def _find_task_name(arguments: list[str], first: argparse.Namespace, rest: list[str]) -> str:
    """The task on the command line, or of the run to resume.

    TASK comes first: behind a flag that is not known yet stands that flag's value.
    """
    if arguments and not arguments[0].startswith("-"):
        return arguments[0]
    task = Config.task if rest else getattr(first, "task", Config.task)
    if "resume" in first:
        with suppress(OSError, ValueError):  # _resumed will say what is wrong
            task = json.loads((Path(first.resume) / "config.json").read_text()).get("task", task)
    return task


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)


def _parser(task: type | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python tba.py",
        usage="python tba.py [TASK] [--flag value ...]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Trajectory Balance with Asynchrony on one machine.",
        epilog=f"Tasks: {', '.join(task_names())}; the presets of a task stand in its file.",
    )
    _add_flags(parser, Config, parser)
    if _fields(task):
        _add_flags(parser, task, parser.add_argument_group(f"The task's own ({task.__name__})"))
    return parser


def _fields(settings: type | None) -> dict:
    return getattr(settings, "__dataclass_fields__", {})


def _add_flags(
    parser: argparse.ArgumentParser, settings: type, group: argparse._ActionsContainer
) -> None:
    """Add the fields of a dataclass as flags, in groups.

    Read off its source: a comment starts a group, a field is a flag, the string under it its help.
    """
    source = textwrap.dedent(inspect.getsource(settings))
    types, lines = typing.get_type_hints(settings), source.splitlines()
    body, end = ast.parse(source).body[0].body, 0
    for field, text in pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)):
            continue
        for line in lines[end : field.lineno]:
            if line.startswith("    # "):
                group = parser.add_argument_group(line.removeprefix("    # "))
        end = text.end_lineno
        name = field.target.id
        _add_flag(group, name, types[name], getattr(settings, name, None), text.value.value)


def _add_flag(
    group: argparse._ActionsContainer, name: str, kind: type, default: object, text: str
) -> None:
    text = " ".join(text.split()).replace("%", "%%")
    if default not in ("", None, False):
        text += f" (default {default})"
    if name == "task":
        group.add_argument("task", nargs="?", metavar="TASK", help=text)
    elif kind is bool:
        group.add_argument(f"--{name}", action="store_true", help=text)
    elif kind is not dict:
        sides = typing.get_args(kind) or [kind]
        kind = next(side for side in sides if side is not type(None))
        group.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=text)
