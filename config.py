"""Config: every setting of a run, and a preset per task.

A field is a flag (`--queries_per_batch 7`), the string under it is its help text. `build_config` turns a command line into a checked Config.
"""

import argparse
import difflib
import inspect
import json
import re
import typing
from dataclasses import dataclass
from pathlib import Path


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
    data_dir: str = ""
    """Directory with the task's data files. Empty: the task's hub dataset, if it has one."""
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
    max_grad_norm: float | None = None
    """Clip the gradient to this norm. None: no clipping."""

    # Processes and progress
    searchers: int | None = None
    """Searcher processes. None: one per GPU besides the trainer's, one if there is a single GPU or none."""
    gpu_memory_utilization: float | None = None
    """Share of its GPU's memory that a searcher's vLLM takes. None: 0.75 on a GPU of its own, 0.3 on one shared with the trainer."""
    searcher_timeout: float = 600.0
    """Seconds without a sign of life after which a process is taken for dead, and of waiting after which the trainer gives up."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last two are kept. 0: only at the end, and when the run is interrupted."""
    resume: str = ""
    """Directory of a run that ended early: go on from its newest checkpoint, with its settings. Only settings of how long, how often and how fast
    to learn may be changed."""
    eval_every: int = 0
    """Steps between evaluations in mid-run. 0: only the base model and the final one."""

    @property
    def lockstep(self) -> bool:
        """Whether searchers make one batch a version, and the trainer waits for it, instead of each going at its own pace."""
        return self.constant_staleness is not None

    def settle(self) -> None:
        """The settings that follow from others."""
        if self.lockstep:
            self.sync_period, self.samples_per_query = 1, self.responses_per_query

    def task_options(self) -> dict:
        """What load_task passes on to the task."""
        return {"data_dir": self.data_dir} if self.data_dir else {}


LR_SCHEDULES = ("constant", "linear", "warmup_stable_decay")

_GSM8K = dict(
    model="realtreetune/rho-1b-sft-GSM8K", beta_final=0.004, beta_steps=500, learning_rate=1e-5, lr_schedule="warmup_stable_decay", warmup_steps=50,
    queries_per_batch=7, responses_per_query=20, samples_per_query=24, most_on_policy_prob=0.95, sync_period=2, initial_responses=500,
    temperature=0.7, reward_inverse_temperature=0.0, max_prompt_tokens=512, max_response_tokens=512,
)  # fmt: skip
# The run behind Figure 1 of the paper: 700 steps of a schedule made for 1,000.
_GSM8K_FIGURE_1 = _GSM8K | dict(steps=700, beta=0.014, stable_steps=350, decay_steps=600)

# Task -> name -> settings. The first of a task is the one it gets without --preset.
PRESETS: dict[str, dict[str, dict]] = {
    "arithmetic": {
        "demo": dict(
            beta=0.1, steps=1000, queries_per_batch=32, responses_per_query=8, samples_per_query=12, queries_per_micro_batch=32, sync_period=2,
            most_on_policy_prob=0.5, initial_responses=400, eval_every=200, checkpoint_every=500, temperature=1.0, max_prompt_tokens=16,
            max_response_tokens=8, learning_rate=1e-3, lr_schedule="linear", warmup_steps=10, max_grad_norm=1.0,
        ),
    },
    "gsm8k": {
        "figure1": _GSM8K_FIGURE_1,
        "table2": _GSM8K | dict(steps=1000, beta=0.012, stable_steps=450, decay_steps=500),
        # K = 40 at the same batch size, as nearly as whole queries allow: 4 x 40 responses for 7 x 20. S in the same proportion to K is ours.
        "k40": _GSM8K_FIGURE_1 | dict(queries_per_batch=4, responses_per_query=40, samples_per_query=48),
    },
}  # fmt: skip
PRESETS["addends"] = {"demo": PRESETS["arithmetic"]["demo"]}


def build_config(arguments: list[str]) -> Config:
    """The command line as a Config: the defaults, over them the task's preset, over that the flags. Raises UserError."""
    flags, unknown = _parser().parse_known_args(arguments)
    if unknown:
        known = [f"--{name}" for name in Config.__dataclass_fields__ if name != "task"]
        nearest = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        raise UserError(f"unknown argument {unknown[0]!r}" + (f": did you mean {nearest[0]}?" if nearest else ": see python tba.py --help"))
    if "resume" in flags:
        return _resumed(vars(flags))
    presets = PRESETS.get(getattr(flags, "task", Config.task), {"": {}})
    preset = getattr(flags, "preset", next(iter(presets)))
    if preset not in presets:
        raise UserError(f"--preset is {preset!r}: " + (f"it is one of {', '.join(presets)}" if "" not in presets else "this task has none"))
    config = Config(**{**presets[preset], **vars(flags), "preset": preset})
    if config.synchronous:
        if config.constant_staleness:
            raise UserError(f"--constant_staleness is {config.constant_staleness}, but --synchronous makes it 0: give one of the two")
        config.constant_staleness = 0
    config.settle()
    check(config)
    return config


# What a run that is resumed may change: how long, how often, how fast. Everything else is part of what has been learnt.
CHANGEABLE = ("steps", "learning_rate", "max_grad_norm", "eval_every", "checkpoint_every", "output_dir", "searcher_timeout", "gpu_memory_utilization")


def _resumed(flags: dict) -> Config:
    """The settings of the run in the directory flags["resume"], changed by the other flags. Raises UserError."""
    directory = flags["resume"]
    try:
        config = Config(**json.loads((Path(directory) / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--resume {directory!r} holds no run that can be resumed: {type(error).__name__}: {error}") from error
    config.output_dir = directory
    for name, value in flags.items():
        if name == "model" and Path(value).is_dir():
            value = str(Path(value).resolve())
        if name not in ("resume", *CHANGEABLE) and value != getattr(config, name):
            raise UserError(f"--{name} is {value!r}, but the run to resume has {getattr(config, name)!r}: only {', '.join(CHANGEABLE)} may change")
        if name == "steps" and value != config.steps and config.constant_staleness:
            raise UserError(f"--steps is {value}, but the run to resume has {config.steps}: with --constant_staleness its last batches are made for that")
        setattr(config, name, value)
    check(config)
    return config


def check(config: Config) -> None:
    """Raises UserError for what can be seen to be wrong without loading anything."""
    for name in ("samples_per_query", "responses_per_query"):
        if getattr(config, name) < 2:
            raise UserError(f"--{name} is {getattr(config, name)}: it must be at least 2, log Z of a query is a mean over its responses")
    for name in ("steps", "queries_per_batch", "queries_per_micro_batch", "sync_period", "max_prompt_tokens", "max_response_tokens",
                 "beta", "learning_rate", "temperature", "searcher_timeout", "beta_final", "max_grad_norm", "searchers"):
        if getattr(config, name) is not None and not 0 < getattr(config, name) < float("inf"):
            raise UserError(f"--{name} is {getattr(config, name)}: it must be positive")
    for name in ("beta_steps", "initial_responses", "reward_inverse_temperature", "warmup_steps", "stable_steps", "decay_steps",
                 "weight_decay", "eval_every", "seed", "reference_reset_period", "max_staleness",
                 "constant_staleness", "checkpoint_every"):
        if getattr(config, name) is not None and not 0 <= getattr(config, name) < float("inf"):
            raise UserError(f"--{name} is {getattr(config, name)}: it must not be negative")
    if config.responses_per_query > config.samples_per_query:
        raise UserError(f"--responses_per_query is {config.responses_per_query}, more than --samples_per_query {config.samples_per_query}: "
                        "a query needs at least as many samples as it is trained with")
    if config.samples_per_query > config.capacity_per_query:
        raise UserError(f"--capacity_per_query is {config.capacity_per_query}, less than --samples_per_query {config.samples_per_query}: "
                        "the buffer must hold one group of a query")
    if config.queries_per_batch % config.queries_per_micro_batch:
        raise UserError(f"--queries_per_batch {config.queries_per_batch} is not divisible by --queries_per_micro_batch "
                        f"{config.queries_per_micro_batch}")
    if not 0 <= config.most_on_policy_prob <= 1:
        raise UserError(f"--most_on_policy_prob is {config.most_on_policy_prob}: it is a probability, from 0 to 1")
    if not 0.01 <= config.temperature <= 2:
        raise UserError(f"--temperature is {config.temperature}: vLLM samples at 0.01 to 2")
    if config.lr_schedule == "warmup_stable_decay" and not config.decay_steps:
        raise UserError("--lr_schedule warmup_stable_decay needs --decay_steps")
    if config.gpu_memory_utilization is not None and not 0 < config.gpu_memory_utilization < 1:
        raise UserError(f"--gpu_memory_utilization is {config.gpu_memory_utilization}: it is a share, between 0 and 1")
    if config.lr_schedule not in LR_SCHEDULES:
        raise UserError(f"--lr_schedule is {config.lr_schedule!r}: it is one of {', '.join(LR_SCHEDULES)}")
    if config.beta_final is not None and not config.beta_steps and config.beta_stop_step is None:
        raise UserError(f"--beta_final is {config.beta_final} but nothing says when: give --beta_steps or --beta_stop_step")
    if config.reference_reset_period % config.sync_period:
        raise UserError(f"--reference_reset_period is {config.reference_reset_period}, no multiple of --sync_period {config.sync_period}: "
                        "the reference policy is reset at a sync")
    if config.lockstep and config.max_staleness is not None:
        raise UserError(f"--max_staleness {config.max_staleness} is for the buffer, which a run of constant staleness does not use: leave it out")
    if config.lockstep and config.searchers and config.searchers > config.queries_per_batch:
        raise UserError(f"--searchers is {config.searchers}, more than --queries_per_batch {config.queries_per_batch}: in a run of constant "
                        "staleness each searcher generates a share of every batch")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)


def _parser() -> argparse.ArgumentParser:
    """Read off the source of Config: a comment starts a group of flags, a field is a flag, the string under it is its help."""
    parser = _Parser(prog="python tba.py", usage="python tba.py [TASK] [--flag value ...]", allow_abbrev=False,
                     argument_default=argparse.SUPPRESS, description="Trajectory Balance with Asynchrony on one machine.",
                     epilog="Presets: " + "; ".join(f"{task} {name}: {preset}" for task in PRESETS for name, preset in PRESETS[task].items()))
    types = typing.get_type_hints(Config)
    group, name = parser, ""
    for line in inspect.getsource(Config).splitlines():
        if line.startswith("    # "):
            group = parser.add_argument_group(line.removeprefix("    # "))
        elif field := re.match(r"    (\w+): ", line):
            name = field[1]
        elif name and line.startswith('    """'):
            default = getattr(Config, name)
            text = line.strip().strip('"').replace("%", "%%") + ("" if default in ("", None, False) else f" (default {default})")
            if name == "task":
                group.add_argument("task", nargs="?", metavar="TASK", help=text)
            elif types[name] is bool:
                group.add_argument(f"--{name}", action="store_true", help=text)
            else:
                kind = next(t for t in (typing.get_args(types[name]) or [types[name]]) if t is not type(None))
                group.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=text)
    return parser
