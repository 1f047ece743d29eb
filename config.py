"""Config: every setting of a run.

A field is a flag (`--queries_per_batch 7`), the string under it is its help text, and its type says
which values it takes. A class is a group of flags; Config is all of them together.
`launch/command_line.py` makes a Config of a command line, `launch/settings.py` checks it.
"""

import importlib.util
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple


class UserError(Exception):
    """Something the user can put right. Shown as one line; exit code 2."""


def first_line(error: Exception) -> str:
    """Say in one line what an error says; of one without a text, its type."""
    if "trust_remote_code" in str(error):
        return "it brings code of its own: --trust_remote_code lets that of --model run"
    return str(error).partition("\n")[0] or type(error).__name__


def find_path(flag: str, path: str | Path) -> Path:
    """Return a path, with ~ expanded, whether anything is there or not.

    Raises UserError where that cannot be asked: it may not be read, or is too long.
    """
    try:
        found = Path(path).expanduser()
        found.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte; no such user's home
        problem = getattr(error, "strerror", None) or error
        raise UserError(f"{flag} {str(path)!r:.200} cannot be read: {problem}") from error
    return found


def import_file(kind: str, file: str) -> ModuleType:
    """Import a Python file of the user's own: a "task" or an "objective". Raises UserError."""
    path = find_path(f"{kind} file", file)
    if not path.is_file():
        raise UserError(f"{kind} file {file!r} does not exist")
    path = path.resolve()
    # By its own name a spawned process, as of a pool in score(), finds what the file defines, for
    # it gets this search path. Where another module has that name, or it is none: one without dots.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()  # the file may be newer than what was seen of its directory
    name, modified = path.stem, path.stat().st_mtime_ns
    is_name = "." not in name and name != "__main__"
    found = importlib.util.find_spec(name) if is_name else None
    if not found or found.origin != str(path):
        name = f"{kind} file {path}".replace(".", "_")
    if getattr(sys.modules.get(name), "__modified__", None) != modified:
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        module.__modified__ = None  # until it has run
        with users_code(f"importing {kind} file {file!r}"):
            spec.loader.exec_module(module)
        module.__modified__ = modified
    return sys.modules[name]


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Run what a user wrote: whatever it raises becomes a UserError with a line of his file.

    SystemExit too, which would end the process without a word, but not KeyboardInterrupt.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            if "__modified__" in frame.f_globals:  # from import_file()
                place = f" ({frame.f_code.co_filename}, line {line})"
        said = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
        raise UserError(f"{what} fails: {said:.300}{place}") from error


ENGINE_ROWS = 256  # responses that vLLM generates at a time
LOAD_SECONDS = 600.0  # that a process may take to load its model, a node to import the project


class Bound(NamedTuple):
    """Which values a setting takes, and the words for it."""

    holds: Callable[[Any], bool]
    words: str


class Extra:
    """The modules of extras/ that are imported where a setting is not its default."""

    def __init__(self, *modules: str):
        self.modules = modules


LOCKSTEP = Extra("lockstep", "lockstep_searcher")
POSITIVE = Bound(lambda x: 0 < x < math.inf, "it must be positive")
NOT_NEGATIVE = Bound(lambda x: 0 <= x < math.inf, "it must not be negative")
STEPS = Bound(
    lambda x: 0 <= x < math.inf and (x < 1 or x == int(x)),
    "it is a number of steps, or a share of --steps below 1",
)
GROUP = Bound(
    lambda x: x >= 2, "it must be at least 2, log Z of a query is a mean over its responses"
)
GPU_LIST = Bound(
    lambda x: re.fullmatch(r"([1-9]\d*x[1-9]\d*)?", x) is not None,
    "it is a number of GPUs and the GiB of each, like 4x80",
)
TRACKER = Bound(
    lambda x: x in ("", "wandb", "tensorboard"), "it is wandb or tensorboard, or empty for none"
)
EVALUATION = Bound(lambda x: x == 0 or 0.01 <= x <= 2, "vLLM samples at 0 or 0.01 to 2")
PositiveInt = Annotated[int, POSITIVE]
PositiveFloat = Annotated[float, POSITIVE]
NonNegativeInt = Annotated[int, NOT_NEGATIVE]
NonNegativeFloat = Annotated[float, NOT_NEGATIVE]
StepsOrShare = Annotated[float, STEPS]
Seed = Annotated[int, Bound(lambda x: 0 <= x < 2**64, "it is a number from 0 to 2^64 - 1")]
GroupSize = Annotated[int, GROUP]
GPUs = Annotated[str, GPU_LIST]
TrackerName = Annotated[str, TRACKER]
Probability = Annotated[float, Bound(lambda x: 0 <= x <= 1, "it is a probability, from 0 to 1")]
Share = Annotated[float, Bound(lambda x: 0 < x < 1, "it is a share, between 0 and 1")]
Decay = Annotated[float, Bound(lambda x: 0 < x < 1, "it lies between 0 and 1")]
SamplingTemperature = Annotated[float, Bound(lambda x: 0.01 <= x <= 2, "vLLM samples at 0.01 to 2")]
EvaluationTemperature = Annotated[float, EVALUATION]


def one_of(*choices: str) -> type[str]:
    """Make the type of a setting that is one of these words."""
    return Annotated[str, Bound(lambda x: x in choices, f"it is one of {', '.join(choices)}")]


DType = one_of("auto", "float32", "bfloat16")
MasterDType = one_of("float32", "bfloat16")
Switch = one_of("auto", "on", "off")
Schedule = one_of("constant", "linear", "warmup_stable_decay")


@dataclass(frozen=True)
class ModelSettings:
    """What to learn."""

    preset: str = ""
    """Preset to start from; flags override it. Empty: the task's first."""
    model: str = ""
    """Policy and reference policy at the start: a directory or a hub id. Empty: the task's."""
    output_dir: str = ""
    """Where the run writes. Empty: runs/<task>-<time>."""
    seed: Seed = 0
    """Seeds the order of queries, the sampling of responses and the draws from the buffer."""
    lora_rank: Annotated[NonNegativeInt, Extra("lora")] = 0
    """Train adapters of this rank beside all linear layers but the head. 0: train all weights."""
    lora_alpha: PositiveFloat | None = None
    """LoRA adds alpha / rank times the adapters' product to a weight. None: twice the rank."""
    trust_remote_code: bool = False
    """Let the model's repository run its own code."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """The objective."""

    loss: Annotated[str, Extra("objectives")] = "tb"
    """The objective: tb, another of LOSSES (extras/objectives.py), or a .py file with your own."""
    beta: PositiveFloat = 0.01
    """Strength of the pull towards the reference policy, at step 0."""
    beta_final: PositiveFloat | None = None
    """beta at the end of its linear schedule. None: constant."""
    beta_steps: StepsOrShare = 0
    """Steps over which beta goes linearly from beta to beta_final. Below 1: a share of --steps."""
    beta_stop_step: StepsOrShare | None = None
    """Step at which beta jumps to beta_final. Below 1: a share of --steps.
    None: no jump."""
    reward_temperature: PositiveFloat = 1.0
    """tau at step 0: the log-reward log pi_ref / gamma + reward / beta is divided by it."""
    reward_temperature_steps: NonNegativeInt = 0
    """Steps over which tau goes linearly to 1."""
    reference_temperature: PositiveFloat = 1.0
    """gamma at the end of its schedule from 1: the reference log-probability is divided by it."""
    reference_temperature_steps: NonNegativeInt = 0
    """Steps over which gamma goes linearly from 1 to reference_temperature."""
    reference_reset_period: Annotated[NonNegativeInt, LOCKSTEP] = 0
    """rho of TBA', with constant staleness: steps between two resets of the reference to the
    policy. 0: never."""


@dataclass(frozen=True)
class BatchSettings:
    """The batch."""

    steps: PositiveInt = 1000
    """Optimizer steps."""
    queries_per_batch: PositiveInt = 7
    """B, queries in a batch."""
    responses_per_query: GroupSize = 20
    """K, responses per query in a batch; log Z of a query is estimated from them."""
    samples_per_query: GroupSize = 24
    """S, responses that a searcher generates for a query; at least K."""
    tokens_per_micro_batch: NonNegativeInt = 0
    """Most tokens in a micro-batch, rounded down to whole queries of full length.
    0: one such query, the least. Memory depends on it, the gradient does not."""


@dataclass(frozen=True)
class SearchSettings:
    """Search and replay."""

    sync_period: PositiveInt = 2
    """k, trainer steps between two syncs."""
    most_on_policy_prob: Probability = 0.95
    """m, probability that a query of the batch is drawn from those of the latest sync."""
    initial_responses: NonNegativeInt = 500
    """Responses in the buffer before the first step."""
    capacity_per_query: int = 100
    """Responses that the buffer keeps per query."""
    buffer_growth_steps: NonNegativeInt | None = None
    """Steps after which a query's new responses replace its oldest, one for one.
    None: they do so only once capacity_per_query is reached."""
    max_staleness: NonNegativeInt | None = None
    """Responses of versions more than this many steps old are left out. None: no limit."""
    search_ahead: PositiveInt | None = None
    """Steps that searchers may be ahead of the trainer; once it trains, no more is in flight.
    None: no limit, or two syncs where a searcher is on the trainer's GPU."""
    reward_inverse_temperature: NonNegativeFloat = 0.0
    """Replay draws a query's responses by softmax(reward times this). 0: uniformly."""
    temperature: SamplingTemperature = 0.7
    """Sampling temperature; the logits of policy and reference policy are divided by it too."""
    max_prompt_tokens: PositiveInt = 512
    """A query with a longer prompt is skipped and counted."""
    max_response_tokens: PositiveInt = 512
    """A response, or a turn of an episode, is cut off here, and counts as unfinished."""
    max_turns: PositiveInt = 10
    """Most turns of the model in an episode (multi-turn tasks only)."""
    max_episode_tokens: Annotated[PositiveInt | None, Extra("episodes", "replies")] = None
    """Most tokens in an episode: prompt, turns and replies together. None: no episodes."""
    synchronous: Annotated[bool, LOCKSTEP] = False
    """Train on-policy, for comparison: --constant_staleness 0, the trainer waits for each batch."""
    constant_staleness: Annotated[NonNegativeInt | None, LOCKSTEP] = None
    """Train on each batch exactly so many steps after the version that generated it, without a
    replay buffer. Then k = 1, S = K, and duplicates are kept."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer (AdamW)."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate."""
    lr_schedule: Schedule = "constant"
    """constant, linear (to 0) or warmup_stable_decay (by a cosine); after warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    stable_steps: NonNegativeInt = 0
    """warmup_stable_decay: steps at the peak."""
    decay_steps: NonNegativeInt = 0
    """Steps of the decay, which may outlast the run. 0, with linear: until the last step."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    adam_beta2: Decay = 0.999
    """AdamW's decay of the mean of squared gradients."""
    max_grad_norm: PositiveFloat | None = None
    """Clip the gradient to this norm. None: no clipping."""


@dataclass(frozen=True)
class ProcessSettings:
    """Processes and progress."""

    dtype: DType = "auto"
    """What forward passes, published weights and vLLM compute in: float32 or bfloat16.
    auto: bfloat16 on a GPU, float32 without one."""
    master_dtype: MasterDType = "float32"
    """Dtype of the trainer's weights (with LoRA of its adapters) and of AdamW's two moments.
    bfloat16: with --dtype bfloat16 only."""
    compile: bool = False
    """Compile the layers of policy and reference policy (torch.compile). Not measured on a GPU."""
    low_memory: Switch = "auto"
    """Make the trainer's step in two passes: the memory of a few rows, a third more work, the same
    gradient. auto: if the largest batch does not fit otherwise (--plan)."""
    trainer_processes: Annotated[PositiveInt, Extra("sharding")] = 1
    """Trainer processes. Each has a GPU or a share of the cores, holds a share of the policy
    (FSDP2), and computes a share of each batch."""
    searchers: NonNegativeInt | None = None
    """Searcher processes. None: one per GPU that no trainer process has, and at least one."""
    ray: Annotated[str, Extra("nodes.joining")] = ""
    """Add searchers on each further node of this Ray cluster: auto, local or host:port.
    Then --searchers are those of this machine, and may be 0."""
    searchers_per_node: PositiveInt | None = None
    """With --ray: searchers on each further node. None: one per GPU, and at least one."""
    gpu_memory_utilization: Share | None = None
    """Share of its GPU's memory for a searcher's vLLM. None: most, less beside the trainer."""
    searcher_timeout: PositiveFloat = 600.0
    """Seconds after which a silent process counts as dead, and a wait without progress ends the
    run. A pause of the whole run does not count."""
    checkpoint_every: NonNegativeInt = 100
    """Steps between checkpoints; the last two are kept. 0: only at the end or an interrupt."""
    track: Annotated[TrackerName, Extra("tracking")] = ""
    """Give metrics, settings and samples to a tracker too: wandb or tensorboard. Empty: none."""
    config: str = ""
    """The config.json of an earlier run: start a new run with its settings, flags over them."""
    resume: str = ""
    """Directory of a run that ended early: go on from its newest checkpoint, with its settings.
    Length, frequency, rate and resources may change."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations during the run. 0: only the base model and the final one."""
    evaluation_samples: PositiveInt = 1
    """Responses to each test query in the final evaluation and with --eval_only, for pass@k; any
    other metric is the mean over all of them. Evaluations during the run use one."""
    evaluation_temperature: EvaluationTemperature | None = None
    """Sampling temperature for test queries, 0: greedy. None: the task's, mostly 0."""
    plan: bool = False
    """Only print what each process will need of memory and disk, and whether it is there."""
    plan_gpus: GPUs = ""
    """With --plan: for such GPUs, 4x80 for four of 80 GiB. Empty: those of this machine."""
    report: str = ""
    """Directory of a run: only write its report.html and its pictures."""
    eval_only: bool = False
    """Only evaluate --model: the task's metrics on its test queries, with 95 % intervals."""


@dataclass(frozen=True)
class Config(
    ProcessSettings,
    OptimizerSettings,
    SearchSettings,
    BatchSettings,
    ObjectiveSettings,
    ModelSettings,
):
    """All settings. Nothing changes them: what a run resolves is another Config."""

    task: str = "arithmetic"
    """A name in tasks/ or the path of a .py file with a task of your own."""
    options: dict = field(default_factory=dict)
    """The task's own settings, by name: flags too, see python tba.py TASK --help."""
    data_digest: str = ""
    """Set at the start: a digest of the task's rows, and the first prompt as the model reads it."""
    kv_cache_bytes: int | None = None
    """Set by launch/planning/plan.py where a searcher is on the trainer's GPU: what vLLM gets there
    for keys and values. None: it measures what is free."""
    base_model: str = ""
    """Set at the start: the weights that the run began with, as identify_weights() names them."""

    def in_steps(self, steps_or_share: float) -> int:
        """Return a number of steps as it is; of a share, below 1, that of --steps, rounded down."""
        is_share = 0 < steps_or_share < 1
        # 0.29 x 100 is 28.999… in floating point.
        return int(steps_or_share * self.steps + 1e-9) if is_share else int(steps_or_share)

    @property
    def lockstep(self) -> bool:
        """Whether each batch is made by one version, and the trainer waits for it."""
        return self.constant_staleness is not None

    @property
    def reads_reference(self) -> bool:
        """Whether the objective reads log pi_ref: else no searcher loads a reference policy."""
        if self.loss == "tb" or self.loss.endswith(".py"):
            return True
        from extras.objectives import WITHOUT_REFERENCE

        return self.loss not in WITHOUT_REFERENCE

    @property
    def longest_row(self) -> tuple[int, int]:
        """Tokens of prompt and response of the row that takes most memory."""
        if self.max_episode_tokens is None:
            return self.max_prompt_tokens, self.max_response_tokens
        return 1, self.max_episode_tokens - 1  # a short prompt, and many turns


def settle(config: Config) -> Config:
    """Fill in the settings that follow from others."""
    if config.synchronous:
        config = replace(config, constant_staleness=0)
    if config.lockstep:
        config = replace(config, sync_period=1, samples_per_query=config.responses_per_query)
    return config
