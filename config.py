"""Config: every setting of a run.

A field is a flag (`--queries_per_batch 7`), the string under it is its help text. `build_config` turns a command line into a checked Config.
"""

import argparse
import difflib
import inspect
import json
import re
import typing
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from presets import PRESETS


class UserError(Exception):
    """Something the user can put right. Shown as one line; exit code 2."""


@dataclass
class Config:
    # What to learn
    task: str = "arithmetic"
    """A name in tasks/ or the path of a .py file with a task of your own."""
    preset: str = ""
    """Which of the task's presets the flags change. Empty: its first."""
    model: str = ""
    """Policy and reference policy at the start: a local directory or a hub id. Empty: the one the task brings or its preset names."""
    options: dict = field(default_factory=dict)
    """The task's own settings, by name: flags too, see python tba.py TASK --help."""
    output_dir: str = ""
    """Where the run writes. Empty: runs/<task>-<time>."""
    seed: int = 0
    """Seeds the order of queries, the sampling of responses and the draws from the buffer."""
    trust_remote_code: bool = False
    """Let the model's repository run its own code."""

    # The objective
    loss: str = "tb"
    """The objective, a key of LOSSES in loss.py: tb, or one of those it is compared with."""
    beta: float = 0.01
    """Strength of the pull towards the reference policy, at step 0."""
    beta_final: float | None = None
    """beta at the end of its linear schedule. None: constant."""
    beta_steps: int = 0
    """Steps over which beta goes linearly from beta to beta_final."""
    beta_stop_step: int | None = None
    """Step at which beta jumps to beta_final, wherever the line is. None: it follows the line to its end."""
    reward_temperature: float = 1.0
    """tau at step 0: the log-reward log pi_ref / gamma + reward / beta is divided by it."""
    reward_temperature_steps: int = 0
    """Steps over which tau goes linearly to 1."""
    reference_temperature: float = 1.0
    """gamma at the end of its linear schedule from 1: the reference log-probability is divided by it."""
    reference_temperature_steps: int = 0
    """Steps over which gamma goes linearly from 1 to reference_temperature."""
    reference_reset_period: int = 0
    """rho of TBA', steps between two resets of the reference policy to the policy; a multiple of k. 0: never."""

    # The batch
    steps: int = 1000
    """Optimizer steps."""
    queries_per_batch: int = 7
    """B, queries in a batch."""
    responses_per_query: int = 20
    """K, responses per query in a batch; log Z of a query is estimated from them."""
    samples_per_query: int = 24
    """S, responses that a searcher generates for a query; at least K."""
    queries_per_micro_batch: int = 1
    """Queries per forward and backward pass; divides B. The gradient does not depend on it, memory does."""

    # Search and replay
    sync_period: int = 2
    """k, trainer steps between two syncs."""
    most_on_policy_prob: float = 0.95
    """m, probability that a query of the batch is drawn from those of the latest sync."""
    initial_responses: int = 500
    """Responses in the buffer before the first step."""
    capacity_per_query: int = 100
    """Responses that the buffer keeps per query."""
    max_staleness: int | None = None
    """Responses of versions more than this many steps old are left out of batches. None: none are."""
    reward_inverse_temperature: float = 0.0
    """Replay draws a query's responses by softmax(reward times this). 0: uniformly."""
    temperature: float = 0.7
    """Sampling temperature; the logits of policy and reference policy are divided by it too."""
    max_prompt_tokens: int = 512
    """A query with a longer prompt is skipped and counted."""
    max_response_tokens: int = 512
    """A response is cut off here, and counts as unfinished."""
    constant_staleness: int | None = None
    """Instead of the buffer: each batch is made by one version and trained on exactly this many steps later, k = 1, S = K, duplicates kept."""
    synchronous: bool = False
    """Train on-policy with the same code, for comparison: --constant_staleness 0, so that the trainer waits for each batch."""

    # The optimizer (AdamW)
    learning_rate: float = 1e-5
    """Peak learning rate."""
    lr_schedule: str = "constant"
    """constant, linear (to 0 at the last step) or warmup_stable_decay (cosine decay); all start with warmup_steps."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    stable_steps: int = 0
    """warmup_stable_decay: steps at the peak."""
    decay_steps: int = 0
    """warmup_stable_decay: length of the decay; it may end after the last step."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    adam_beta2: float = 0.999
    """AdamW's decay of the mean of squared gradients."""
    max_grad_norm: float | None = None
    """Clip the gradient to this norm. None: no clipping."""

    # Processes and progress
    searchers: int | None = None
    """Searcher processes. None: one per GPU besides the trainer's, one if there is a single GPU or none."""
    gpu_memory_utilization: float | None = None
    """Share of its GPU's memory that a searcher's vLLM takes. None: most of a GPU of its own, less of one shared with the trainer."""
    searcher_timeout: float = 600.0
    """Seconds without a sign of life after which a process is taken for dead, and of waiting after which the trainer gives up."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last two are kept. 0: only at the end, and when the run is interrupted."""
    resume: str = ""
    """Directory of a run that ended early: go on from its newest checkpoint, with its settings, but for how long, how often and how fast to learn."""
    eval_every: int = 0
    """Steps between evaluations in mid-run. 0: only the base model and the final one."""
    eval_only: bool = False
    """Only evaluate --model: the task's metrics on its test queries, with 95 % intervals (bootstrap over the queries)."""
    json: bool = False
    """With --eval_only: print JSON instead of a table."""

    @property
    def lockstep(self) -> bool:
        """Whether searchers make one batch a version, and the trainer waits for it, instead of each going at its own pace."""
        return self.constant_staleness is not None

    def settle(self) -> None:
        """The settings that follow from others."""
        if self.lockstep:
            self.sync_period, self.samples_per_query = 1, self.responses_per_query


LR_SCHEDULES = ("constant", "linear", "warmup_stable_decay")


def build_config(arguments: list[str]) -> Config:
    """The command line as a Config: the defaults, over them the task's preset, over that the flags. Raises UserError."""
    flags, options = _parse(arguments)
    if "resume" in flags:
        return _resumed(flags, options)
    presets = PRESETS.get(flags.get("task", Config.task), {"": {}})
    if options.get("tiny") and flags.setdefault("preset", "tiny") != "tiny":
        raise UserError(
            f"--preset is {flags['preset']!r}, but --tiny is a preset of its own: give one of the two"
        )
    preset = flags.get("preset", next(iter(presets)))
    if preset not in presets:
        raise UserError(
            f"--preset is {preset!r}: "
            + (f"it is one of {', '.join(presets)}" if "" not in presets else "this task has none")
        )
    options = presets[preset].get("options", {}) | options
    config = Config(**{**presets[preset], **flags, "preset": preset, "options": options})
    if config.synchronous:
        if flags.get("constant_staleness"):  # a preset's gives way
            raise UserError(
                f"--constant_staleness is {config.constant_staleness}, but --synchronous makes it 0: give one of the two"
            )
        config.constant_staleness = 0
    config.settle()
    check(config)
    return config


# What a run that is resumed may change: how long, how often, how fast. Everything else is part of what has been learnt.
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


def _resumed(flags: dict, options: dict) -> Config:
    """The settings of the run in the directory flags["resume"], changed by the other flags. Raises UserError."""
    directory = flags["resume"]
    try:
        config = Config(**json.loads((Path(directory) / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"--resume {directory!r} holds no run that can be resumed: {type(error).__name__}: {error}"
        ) from error
    config.output_dir = directory
    settings = vars(config) | config.options
    for name, value in (flags | options).items():
        if name == "model" and Path(value).is_dir():
            value = str(Path(value).resolve())
        if name not in ("resume", *CHANGEABLE) and value != settings.get(name):
            raise UserError(
                f"--{name} is {value!r}, but the run to resume has {settings.get(name)!r}: only {', '.join(CHANGEABLE)} may change"
            )
        if name == "steps" and value != config.steps and config.constant_staleness:
            raise UserError(
                f"--steps is {value}, but the run to resume has {config.steps}: with --constant_staleness its last batches are made for that"
            )
        if name in flags:
            setattr(config, name, value)
    check(config)
    return config


def check(config: Config) -> None:
    """Raises UserError for what can be seen to be wrong without loading anything."""
    for name in ("samples_per_query", "responses_per_query"):
        if getattr(config, name) < 2:
            raise UserError(
                f"--{name} is {getattr(config, name)}: it must be at least 2, log Z of a query is a mean over its responses"
            )
    for name in (
        "steps",
        "queries_per_batch",
        "queries_per_micro_batch",
        "sync_period",
        "max_prompt_tokens",
        "max_response_tokens",
        "beta",
        "learning_rate",
        "temperature",
        "searcher_timeout",
        "beta_final",
        "max_grad_norm",
        "searchers",
        "reward_temperature",
        "reference_temperature",
    ):
        if getattr(config, name) is not None and not 0 < getattr(config, name) < float("inf"):
            raise UserError(f"--{name} is {getattr(config, name)}: it must be positive")
    for name in (
        "beta_steps",
        "initial_responses",
        "reward_inverse_temperature",
        "warmup_steps",
        "stable_steps",
        "decay_steps",
        "weight_decay",
        "eval_every",
        "seed",
        "reference_reset_period",
        "max_staleness",
        "constant_staleness",
        "checkpoint_every",
        "reward_temperature_steps",
        "reference_temperature_steps",
    ):
        if getattr(config, name) is not None and not 0 <= getattr(config, name) < float("inf"):
            raise UserError(f"--{name} is {getattr(config, name)}: it must not be negative")
    if config.responses_per_query > config.samples_per_query:
        raise UserError(
            f"--responses_per_query is {config.responses_per_query}, more than --samples_per_query {config.samples_per_query}: "
            "a query needs at least as many samples as it is trained with"
        )
    if config.samples_per_query > config.capacity_per_query:
        raise UserError(
            f"--capacity_per_query is {config.capacity_per_query}, less than --samples_per_query {config.samples_per_query}: "
            "the buffer must hold one group of a query"
        )
    if config.queries_per_batch % config.queries_per_micro_batch:
        raise UserError(
            f"--queries_per_batch {config.queries_per_batch} is not divisible by --queries_per_micro_batch "
            f"{config.queries_per_micro_batch}"
        )
    if not 0 <= config.most_on_policy_prob <= 1:
        raise UserError(
            f"--most_on_policy_prob is {config.most_on_policy_prob}: it is a probability, from 0 to 1"
        )
    if not 0 < config.adam_beta2 < 1:
        raise UserError(f"--adam_beta2 is {config.adam_beta2}: it lies between 0 and 1")
    if not 0.01 <= config.temperature <= 2:
        raise UserError(f"--temperature is {config.temperature}: vLLM samples at 0.01 to 2")
    if config.lr_schedule == "warmup_stable_decay" and not config.decay_steps:
        raise UserError("--lr_schedule warmup_stable_decay needs --decay_steps")
    if config.gpu_memory_utilization is not None and not 0 < config.gpu_memory_utilization < 1:
        raise UserError(
            f"--gpu_memory_utilization is {config.gpu_memory_utilization}: it is a share, between 0 and 1"
        )
    if config.lr_schedule not in LR_SCHEDULES:
        raise UserError(
            f"--lr_schedule is {config.lr_schedule!r}: it is one of {', '.join(LR_SCHEDULES)}"
        )
    if config.beta_final is not None and not config.beta_steps and config.beta_stop_step is None:
        raise UserError(
            f"--beta_final is {config.beta_final} but nothing says when: give --beta_steps or --beta_stop_step"
        )
    if config.reward_temperature != 1 and not config.reward_temperature_steps:
        raise UserError(
            f"--reward_temperature is {config.reward_temperature} but nothing says how long: give --reward_temperature_steps"
        )
    if config.reference_temperature != 1 and not config.reference_temperature_steps:
        raise UserError(
            f"--reference_temperature is {config.reference_temperature} but nothing says when: give --reference_temperature_steps"
        )
    if config.json and not config.eval_only:
        raise UserError("--json is for --eval_only: a run writes metrics.jsonl")
    if config.reference_reset_period % config.sync_period:
        raise UserError(
            f"--reference_reset_period is {config.reference_reset_period}, no multiple of --sync_period {config.sync_period}: "
            "the reference policy is reset at a sync"
        )
    if config.lockstep and config.max_staleness is not None:
        raise UserError(
            f"--max_staleness {config.max_staleness} is for the buffer, which a run of constant staleness does not use: leave it out"
        )
    if config.lockstep and config.searchers and config.searchers > config.queries_per_batch:
        raise UserError(
            f"--searchers is {config.searchers}, more than --queries_per_batch {config.queries_per_batch}: in a run of constant "
            "staleness each searcher generates a share of every batch"
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)


def _parse(arguments: list[str]) -> tuple[dict, dict]:
    """The flags that are given: a run's, and the task's own. Those are known once it is known which task it is."""
    from tasks import find_task  # not at the top: it imports this file

    help_wanted = {"-h", "--help"} & set(arguments)
    first, rest = _parser(None).parse_known_args(
        [argument for argument in arguments if argument not in help_wanted]
    )
    # TASK comes first: behind a flag that is not known yet stands that flag's value.
    task = (
        arguments[0]
        if arguments and not arguments[0].startswith("-")
        else Config.task
        if rest
        else getattr(first, "task", Config.task)
    )
    if "resume" in first and arguments[0].startswith("-"):
        with suppress(OSError, ValueError):  # who resumes it will say what is wrong
            task = json.loads((Path(first.resume) / "config.json").read_text()).get("task", task)
    settings = find_task(task) if rest or help_wanted else None
    if clash := set(_fields(settings)) & set(_fields(Config)):
        raise UserError(
            f"task {task!r} has a setting {min(clash)!r}, which is one of every run: give it another name"
        )
    parser = _parser(settings)
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        nearest = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        raise UserError(
            f"unknown argument {unknown[0]!r}"
            + (f": did you mean {nearest[0]}?" if nearest else ": see python tba.py --help")
        )
    own = set(_fields(settings))
    return {n: v for n, v in vars(flags).items() if n not in own}, {
        n: v for n, v in vars(flags).items() if n in own
    }


def _parser(task: type | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python tba.py",
        usage="python tba.py [TASK] [--flag value ...]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Trajectory Balance with Asynchrony on one machine.",
        epilog="Presets (presets.py): "
        + "; ".join(f"{name}: {', '.join(presets)}" for name, presets in PRESETS.items()),
    )
    _add_flags(parser, Config, parser)
    if _fields(task):
        _add_flags(parser, task, parser.add_argument_group(f"The task's own ({task.__name__})"))
    return parser


def _fields(settings: type | None) -> dict:
    return getattr(settings, "__dataclass_fields__", {})


def _add_flags(parser: argparse.ArgumentParser, settings: type, group) -> None:
    """Read off the source of a dataclass: a comment starts a group of flags, a field is a flag, the string under it is its help."""
    types, name = typing.get_type_hints(settings), ""
    for line in inspect.getsource(settings).splitlines():
        if line.startswith("    # "):
            group = parser.add_argument_group(line.removeprefix("    # "))
        elif field := re.match(r"    (\w+): ", line):
            name = field[1]
        elif name in _fields(settings) and re.match(r'    r?"""', line):
            default = getattr(settings, name, None)
            text = line.strip().lstrip("r").strip('"').replace("%", "%%") + (
                "" if default in ("", None, False) else f" (default {default})"
            )
            if name == "task":
                group.add_argument("task", nargs="?", metavar="TASK", help=text)
            elif types[name] is bool:
                group.add_argument(f"--{name}", action="store_true", help=text)
            elif types[name] is not dict:
                kind = next(
                    t
                    for t in (typing.get_args(types[name]) or [types[name]])
                    if t is not type(None)
                )
                group.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=text)
