"""The Learner: what a batch does to the policy. Log-probabilities, the loss, AdamW.

The Trainer around it moves batches in and weights out. Adapters (--lora_rank) and a policy that is
sharded over processes (--trainer_processes) are subclasses of it, in extras/.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import get_scheduler

from config import Config, UserError, import_file, users_code
from loss import LossInputs, Metrics, Objective, sequence_sum, trajectory_balance
from models.device import compute_dtype, device, to_device
from models.loading import replacing, save_model
from models.logprobs import TOKENS_IN_LOW_MEMORY, micro_batch_tokens, response_logprobs, split_rows
from models.policy import fill, find_not_finite, load_policy, trained_parameters, whole
from rollouts import TOKEN, Response

BAD_STEPS = 10  # this many steps in a row with a gradient that is not finite end the run


class Learner:
    """The policy and its optimizer.

    say: shows the user a line.
    """

    def __init__(self, config: Config, say: Callable[[str], None]):
        self.config, self.say = config, say
        torch.manual_seed(config.seed)
        self.objective = find_objective(config.loss)
        self.dtype = compute_dtype(config)
        self.policy = self.load_policy()
        # A sharded policy replaces this by a module, whose forward pass gathers the shards.
        self.response_logprobs = partial(response_logprobs, self.policy)
        self.trained = trained_parameters(self.policy)
        # In --master_dtype. Most steps of 1e-5 on a bf16 weight round away, and the paper's GSM8K
        # run is one of those (docs/experiments.md).
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(0.9, config.adam_beta2),
            fused=True,
        )
        self.lr_schedule = lr_schedule(self.optimizer, config)
        self.low_memory = config.low_memory == "on"  # or set by the largest-batch trial
        self.step = 0  # optimizer steps done; the version of the weights
        self.bad_steps = self.bad_steps_in_a_row = 0
        # log pi / b of the batch's tokens, and which of them were sampled, by micro-batch.
        self.log_ratios: list[tuple[Tensor, Tensor]] = []

    def update(self, rows: list[Response]) -> Metrics:
        """Make one optimizer step on B x K rows. Returns the metrics of the step."""
        self.log_ratios = []
        metrics = self.accumulate(rows)
        metrics |= importance_figures(self.log_ratios)
        metrics["grad_norm"] = self.step_optimizer()
        metrics["learning_rate"] = self.lr_schedule.get_last_lr()[0]
        metrics["beta"] = beta_at(self.config, self.step)
        metrics["bad_steps"] = self.bad_steps
        self.lr_schedule.step()
        self.step += 1
        return {"step": self.step, **metrics}

    def accumulate(self, rows: list[Response]) -> Metrics:
        """Add up the gradient of a batch, a few queries at a time. Returns its loss and metrics.

        Each row weighs the same, whatever micro-batch it falls to.
        """
        prompts, tokens = [row.prompt for row in rows], [row.tokens for row in rows]
        limits = micro_batch_tokens(self.config), self.config.responses_per_query
        totals: Metrics = {}
        for part, share in self.with_shares(split_rows(prompts, tokens, *limits)):
            loss, metrics = self.backward(rows[part.start : part.stop], share)
            for name, value in {"loss": loss, **metrics}.items():
                totals[name] = totals.get(name, 0.0) + value * share
        return {name: float(value) for name, value in totals.items()}

    def backward(self, rows: list[Response], share: float = 1.0) -> tuple[Tensor, Metrics]:
        """Add the gradient of the rows' loss, times their share. Returns that loss and its metrics.

        In two passes (--low_memory) it takes the memory of a few rows, and a third more work. The
        objective is a function of the log-probabilities alone: so a first pass, without a graph,
        gives its gradient with respect to them, and a second one takes that to the weights.
        """
        with torch.set_grad_enabled(not self.low_memory):
            inputs = self.loss_inputs(rows)
        if self.low_memory:
            inputs.logprobs.requires_grad_()  # a leaf
        # "tb", the default, is trajectory_balance in loss.py (Eq. 3 to 5).
        loss, metrics = self.objective(inputs)
        (loss * share).backward()
        if self.low_memory:
            self.backward_logprobs(rows, inputs.logprobs.grad)
        if share:
            log_ratio = inputs.logprobs.detach() - inputs.behavior_logprobs
            self.log_ratios.append((log_ratio, inputs.sampled))
        return loss.detach(), metrics

    def backward_logprobs(self, rows: list[Response], grad: Tensor) -> None:
        """Take the gradient of the rows' log-probabilities, (N, T), to the weights."""
        prompts, tokens = [row.prompt for row in rows], [row.tokens for row in rows]
        parts = split_rows(prompts, tokens, TOKENS_IN_LOW_MEMORY[grad.device.type])
        for part, share in self.with_shares(parts):
            few = slice(part.start, part.stop)
            logprobs = self.logprobs(rows[few])  # (rows, T of these)
            logprobs.backward(grad[few, : logprobs.shape[1]] * (share > 0))

    def loss_inputs(self, rows: list[Response]) -> LossInputs:
        """Compute log pi of the rows, and pad the rest to its shape (N, T)."""
        config, step = self.config, self.step
        logprobs = self.logprobs(rows)
        # The log-reward of trajectory balance is [log pi_ref / gamma + reward / beta] / tau.
        tau = interpolate(config.reward_temperature, 1, step, config.reward_temperature_steps)
        gamma_steps = config.reference_temperature_steps
        gamma = interpolate(1, config.reference_temperature, step, gamma_steps)
        padded = np.zeros(logprobs.shape, TOKEN)
        for own, row in zip(padded, rows):
            own[: len(row.tokens)] = row.tokens

        def tensor(values: np.ndarray | list[float]) -> Tensor:
            return to_device(np.array(values, np.float32), logprobs.device)

        return LossInputs(
            logprobs=logprobs,
            ref_logprobs=tensor(padded["ref_logprob"]) / (gamma * tau),
            behavior_logprobs=tensor(padded["behavior_logprob"]),
            mask=tensor(padded["in_loss"]),
            rewards=tensor([row.reward for row in rows]),
            group_size=config.responses_per_query,
            beta=beta_at(config, step) * tau,
            max_response_length=config.longest_row[1],
            prompt_lengths=tensor([len(row.prompt) for row in rows]).long(),
            sampled=tensor(padded["sampled"]),
            staleness=tensor([step - row.version for row in rows]).long(),
        )

    def logprobs(self, rows: list[Response], temperature: float | None = None) -> Tensor:
        """Compute log pi of the rows' tokens: (N, T). temperature: None for --temperature."""
        prompts, tokens = [row.prompt for row in rows], [row.tokens["token"] for row in rows]
        temperature = self.config.temperature if temperature is None else temperature
        return self.response_logprobs(prompts, tokens, temperature, self.dtype)

    def step_optimizer(self) -> float:
        """Clip the gradient, apply it, and return its norm. One that is not finite is left out.

        Raises FloatingPointError at BAD_STEPS of those in a row.
        """
        max_norm = self.config.max_grad_norm or float("inf")
        grad_norm = float(whole(clip_grad_norm_(self.trained.values(), max_norm)))
        if np.isfinite(grad_norm):
            self.optimizer.step()
            self.bad_steps_in_a_row = 0
        else:
            self.bad_steps += 1
            self.bad_steps_in_a_row += 1
            self.say(f"step {self.step}: the gradient norm is {grad_norm}: the step is skipped")
            if self.bad_steps_in_a_row == BAD_STEPS:
                weights = ((name, whole(p.detach())) for name, p in self.trained.items())
                name = find_not_finite(weights)
                cause = f", as the weight {name} is NaN or infinite" if name else ""
                problem = f"{BAD_STEPS} steps in a row had a gradient that is not finite{cause}"
                raise FloatingPointError(f"{problem}: lower --learning_rate or raise --beta")
        self.optimizer.zero_grad()
        return grad_norm

    @torch.no_grad()
    def logprobs_under(
        self, weights: dict[str, Tensor], rows: list[Response], temperature: float | None = None
    ) -> list[np.ndarray]:
        """Compute log pi of each row's tokens, (T,), as if the policy had other weights.

        weights: by name, of any dtype and device, without adapters. The policy's own are cloned and
        put back: call it between steps, when no gradients take memory.
        """
        own = {name: parameter.clone() for name, parameter in self.policy.named_parameters()}
        try:
            self.fill_policy(weights)
            logprobs = self.logprobs(rows, temperature).cpu().numpy()
        finally:
            for name, parameter in self.policy.named_parameters():
                parameter.copy_(own[name])
        return [padded[: len(row.tokens)] for padded, row in zip(logprobs, rows)]

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the state of the training by name, one full tensor at a time.

        The learning rate is a function of the step, so its schedule has no state.
        """
        yield "counters", torch.tensor([self.step, self.bad_steps, self.bad_steps_in_a_row])
        for name, parameter in self.trained.items():
            yield f"policy.{name}", whole(parameter.detach())
            for key, value in self.optimizer.state[parameter].items():
                yield f"optimizer.{name}.{key}", whole(value)

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what state() gave, of any number of trainer processes."""
        for name, parameter in self.trained.items():
            fill(parameter, state[f"policy.{name}"])
            prefix = f"optimizer.{name}"
            if f"{prefix}.step" not in state:  # there are no moments before the first step
                continue
            moments = {"step": state[f"{prefix}.step"].to(parameter.device)}
            for key in ("exp_avg", "exp_avg_sq"):
                moments[key] = torch.empty_like(parameter)
                fill(moments[key], state[f"{prefix}.{key}"])
            self.optimizer.state[parameter] = moments
        self.step, self.bad_steps, self.bad_steps_in_a_row = state["counters"].tolist()
        schedule = self.lr_schedule.state_dict() | {"last_epoch": self.step - 1}
        self.lr_schedule.load_state_dict(schedule)
        self.lr_schedule.step()

    def save_model(self, directory: Path) -> None:
        """Save the policy for from_pretrained and for vLLM, in the dtype of what is trained."""
        dtype = next(iter(self.trained.values())).dtype
        parameters = {name for name, _ in self.policy.named_parameters(remove_duplicate=False)}
        tensors = {name: tensor.to("cpu", dtype) for name, tensor in self.weights()}
        buffers = self.policy.state_dict().items()
        tensors |= {name: tensor for name, tensor in buffers if name not in parameters}
        with replacing(directory) as unfinished:
            save_model(self.policy, tensors, self.config.model, unfinished)

    def fits(self, rows: list[Response]) -> bool:
        """Return whether a step on these rows, AdamW's moments included, fits into memory."""
        parameters = list(self.trained.values())
        try:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            # Its two moments are there from the second step on.
            stand_in = torch.optim.AdamW(parameters, lr=0.0, fused=True)
            stand_in.step()
            self.backward(rows)
        except (torch.OutOfMemoryError, UserError) as error:  # also one in a user's objective
            if not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
                raise
            return False
        finally:
            for parameter in parameters:
                parameter.grad = None
        return True

    # These four are for subclasses to change; so are accumulate() and fits(). Others they extend.

    def load_policy(self) -> torch.nn.Module:
        """Load the policy onto this process's device. Raises as models.policy.load_policy does."""
        return load_policy(self.config, device())

    def with_shares(self, parts: list[range]) -> list[tuple[range, float]]:
        """Pair each part of some rows with its share of them, 0 for a dummy of a sharded policy."""
        num_rows = sum(map(len, parts))
        return [(part, len(part) / num_rows) for part in parts]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each weight, whole and without adapters, one at a time."""
        for name, parameter in self.policy.named_parameters():
            yield name, whole(parameter.detach())

    def fill_policy(self, weights: dict[str, Tensor]) -> None:
        """Give the policy other weights, by the names of weights()."""
        for name, parameter in self.policy.named_parameters():
            fill(parameter, weights[name])


def importance_figures(parts: list[tuple[Tensor, Tensor]]) -> Metrics:
    """How far a batch is from on-policy: figures of the weights w = pi / b of importance sampling.

    That is effective sample sizes as shares of the sample, and quantiles of log w of responses.
    parts: by micro-batch log w of its tokens, and 1 on those that were sampled, both (N, T).
    """
    parts = [(log_w.double().cpu(), mask.cpu()) for log_w, mask in parts]
    tokens = torch.cat([log_w[mask.bool()] for log_w, mask in parts])
    responses = torch.cat([sequence_sum(log_w, mask) for log_w, mask in parts])
    low, high = responses.quantile(torch.tensor([0.05, 0.95]).to(responses)).tolist()
    return {
        "ess_responses": effective_share(responses),
        "ess_tokens": effective_share(tokens),
        "log_w_5": low,
        "log_w_95": high,
    }


def effective_share(log_w: Tensor) -> float:
    """Return the effective sample size of weights, (sum w)^2 / sum w^2, as a share of their number.

    1 where all are equal, 1 / N where one outweighs all others.
    """
    w = (log_w - log_w.max()).exp()
    return float(w.sum().square() / w.square().sum() / len(w))


def beta_at(config: Config, step: int) -> float:
    """Return beta at a step: a line from beta to beta_final, which a stop step may cut short."""
    if config.beta_final is None:
        return config.beta
    if config.beta_stop_step is not None and step >= config.in_steps(config.beta_stop_step):
        return config.beta_final
    return interpolate(config.beta, config.beta_final, step, config.in_steps(config.beta_steps))


def interpolate(start: float, end: float, step: int, steps: int) -> float:
    """Return where a line from start to end, in so many steps, is at a step."""
    return start + (end - start) * min(1.0, step / max(1, steps))


def lr_schedule(
    optimizer: torch.optim.Optimizer, config: Config
) -> torch.optim.lr_scheduler.LRScheduler:
    """Make the learning rate's schedule, as transformers has it."""
    # Its length may be its own: then the run may end before the decay does.
    decay_ends = config.warmup_steps + config.decay_steps if config.decay_steps else config.steps
    settings = {"num_training_steps": decay_ends}
    if config.lr_schedule == "warmup_stable_decay":
        lengths = {"num_stable_steps": config.stable_steps, "num_decay_steps": config.decay_steps}
        settings = {"scheduler_specific_kwargs": lengths}
    is_constant = config.lr_schedule == "constant"
    name = "constant_with_warmup" if is_constant else config.lr_schedule
    return get_scheduler(name, optimizer, config.warmup_steps, **settings)


def make_learner(config: Config, say: Callable[[str], None], rank: Any = None) -> Learner:
    """Make the learner that the settings want. rank: of extras/sharding.py, one of several."""
    if rank:
        from extras.sharding import ShardedLearner

        return ShardedLearner(config, say, rank)
    if config.lora_rank:
        from extras.lora import LoraLearner

        return LoraLearner(config, say)
    return Learner(config, say)


def find_objective(name_or_file: str) -> Objective:
    """Find "tb", another objective of LOSSES, or the one public function of a .py file.

    Raises UserError.
    """
    if name_or_file == "tb":
        return trajectory_balance
    if not name_or_file.endswith(".py"):
        from extras.objectives import LOSSES

        if name_or_file not in LOSSES:
            names = ", ".join(LOSSES)
            raise UserError(f"--loss is {name_or_file!r}: it is one of {names}, or a .py file")
        return LOSSES[name_or_file]
    module = import_file("objective", name_or_file)
    found = inspect.getmembers(module, inspect.isfunction)
    own = [each for name, each in found if each.__module__ == module.__name__ and name[0] != "_"]
    if len(own) != 1:
        raise UserError(
            f"objective file {name_or_file!r} defines {len(own)} functions: it must define one, "
            "besides those whose names begin with _"
        )
    return users_code(f"--loss {name_or_file}")(own[0])
