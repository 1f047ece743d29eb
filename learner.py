"""The Learner: what a batch does to the policy. Log-probabilities, the loss, AdamW.

The Trainer around it moves batches in and weights out. Adapters (--lora_rank) and a policy that is
sharded over processes (--trainer_processes) are subclasses of it, in extras/.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from buffer import Row
from config import Config, UserError, extra, import_file
from loss import LossInputs, Metrics, Objective, trajectory_balance
from models.device import compute_dtype, device
from models.importance import LogWeights, importance_figures, log_weights
from models.loading import replacing, save_model
from models.logprobs import TOKENS_PER_FORWARD, micro_batches, response_logprobs
from models.policy import find_not_finite, load_policy, trained_parameters
from models.schedules import beta_at, lr_schedule, reference_temperature_at, reward_temperature_at

BAD_STEPS = 10  # this many steps in a row with a gradient that is not finite end the run


class Learner:
    """The policy and its optimizer.

    say: shows the user a line. The last methods of the class are what a subclass changes.
    """

    gathers_state = False  # True: state() yields temporary tensors, which must be copied

    def __init__(self, config: Config, say: Callable[[str], None]):
        self.config, self.say = config, say
        torch.manual_seed(config.seed)
        self.objective = find_objective(config.loss)
        self.dtype = compute_dtype(config)
        self.policy = self.load_policy()
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
        self.log_weights: list[LogWeights] = []  # of the batch, for metrics

    def update(self, rows: list[Row]) -> Metrics:
        """Make one optimizer step on B x K rows. Returns the metrics of the step."""
        metrics = self.accumulate(rows)
        metrics["grad_norm"] = self.step_optimizer()
        metrics["learning_rate"] = self.lr_schedule.get_last_lr()[0]
        metrics["beta"] = beta_at(self.config, self.step)  # accumulate() had the same
        self.lr_schedule.step()
        self.step += 1
        return {"step": self.step, **metrics}

    def accumulate(self, rows: list[Row]) -> Metrics:
        """Add up the gradient of a batch, a few queries at a time. Returns its loss and metrics.

        Each row weighs the same, whatever micro-batch it falls to.
        """
        config, step = self.config, self.step
        beta = beta_at(config, step)
        tau, gamma = reward_temperature_at(config, step), reference_temperature_at(config, step)
        self.log_weights = []
        totals: Metrics = {"loss": 0.0}
        for part, share in self.split_batch(rows):
            loss, metrics = self.backward(part, beta * tau, gamma * tau, share)
            for name, value in {"loss": loss, **metrics}.items():
                totals[name] = totals.get(name, 0.0) + value * share
        return self.total({name: float(value) for name, value in totals.items()})

    def backward(
        self, rows: list[Row], beta: float, reference_temperature: float = 1.0, share: float = 1.0
    ) -> tuple[Tensor, Metrics]:
        """Add the gradient of the rows' loss, times their share. Returns that loss and its metrics.

        beta, reference_temperature: multiplied by tau already, as in loss_inputs().
        """
        if self.low_memory:
            return extra("low_memory").backward(self, rows, beta, reference_temperature, share)
        inputs = self.loss_inputs(rows, beta, reference_temperature)
        self.log_weights.append(log_weights(inputs))
        # "tb", the default, is trajectory_balance in loss.py (Eq. 3 to 5).
        loss, metrics = self.objective(inputs)
        (loss * share).backward()
        return loss.detach(), metrics

    def loss_inputs(
        self, rows: list[Row], beta: float, reference_temperature: float = 1.0
    ) -> LossInputs:
        """Compute log pi of the rows and pad the rest to its shape (N, T).

        The log-reward of trajectory balance is [log pi_ref / gamma + reward / beta] / tau: so
        `beta` is beta tau, and `reference_temperature` is gamma tau.
        """
        logprobs = self.logprobs(rows)

        def padded(arrays: list[np.ndarray]) -> Tensor:
            out = np.zeros(logprobs.shape, np.float32)
            for i, array in enumerate(arrays):
                out[i, : len(array)] = array
            return torch.from_numpy(out).to(logprobs.device)

        return LossInputs(
            logprobs=logprobs,
            ref_logprobs=padded([row.ref_logprobs for row in rows]) / reference_temperature,
            behavior_logprobs=padded([row.behavior_logprobs for row in rows]),
            mask=padded([row.in_loss for row in rows]),
            rewards=torch.tensor([row.reward for row in rows], device=logprobs.device),
            group_size=self.config.responses_per_query,
            beta=beta,
            max_response_length=self.config.longest_row[1],
            prompt_lengths=torch.tensor([len(row.prompt) for row in rows], device=logprobs.device),
            sampled=padded([row.sampled for row in rows]),
            staleness=self.step - torch.tensor([row.version for row in rows]).to(logprobs.device),
        )

    def logprobs(self, rows: list[Row], temperature: float | None = None) -> Tensor:
        """Compute log pi of the rows' tokens: (N, T). temperature: None for --temperature."""
        prompts, tokens = [row.prompt for row in rows], [row.tokens for row in rows]
        if temperature is None:
            temperature = self.config.temperature
        return self.policy_logprobs(prompts, tokens, temperature, self.dtype)

    def step_optimizer(self) -> float:
        """Clip the gradient, apply it, and return its norm. One that is not finite is left out.

        Raises FloatingPointError at BAD_STEPS of those in a row.
        """
        max_norm = self.config.max_grad_norm or float("inf")
        grad_norm = float(self.whole(clip_grad_norm_(self.trained.values(), max_norm)))
        if np.isfinite(grad_norm):
            self.optimizer.step()
            self.bad_steps_in_a_row = 0
        else:
            self.bad_steps += 1
            self.bad_steps_in_a_row += 1
            self.say(f"step {self.step}: the gradient norm is {grad_norm}: the step is skipped")
            if self.bad_steps_in_a_row == BAD_STEPS:
                weights = ((name, self.whole(p.detach())) for name, p in self.trained.items())
                name = find_not_finite(weights)
                cause = f", as the weight {name} is NaN or infinite" if name else ""
                raise FloatingPointError(
                    f"{BAD_STEPS} steps in a row had a gradient that is not finite{cause}: "
                    "lower --learning_rate or raise --beta"
                )
        self.optimizer.zero_grad()
        return grad_norm

    @torch.no_grad()
    def logprobs_under(
        self, weights: dict[str, Tensor], rows: list[Row], temperature: float | None = None
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

        That is three counters, the trained parameters, and AdamW's state of each. The learning rate
        is a function of the step, so its schedule has no state.
        """
        yield "counters", torch.tensor([self.step, self.bad_steps, self.bad_steps_in_a_row])
        for name, parameter in self.trained.items():
            yield f"policy.{name}", self.whole(parameter.detach())
            for key, value in self.optimizer.state[parameter].items():
                yield f"optimizer.{name}.{key}", self.whole(value)

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what state() gave, of any number of trainer processes."""
        for name, parameter in self.trained.items():
            self.fill(parameter, state[f"policy.{name}"])
            prefix = f"optimizer.{name}"
            if f"{prefix}.step" not in state:  # there are no moments before the first step
                continue
            moments = {"step": state[f"{prefix}.step"].to(parameter.device)}
            for key in ("exp_avg", "exp_avg_sq"):
                moments[key] = torch.empty_like(parameter)
                self.fill(moments[key], state[f"{prefix}.{key}"])
            self.optimizer.state[parameter] = moments
        self.step, self.bad_steps, self.bad_steps_in_a_row = state["counters"].tolist()
        schedule = self.lr_schedule.state_dict() | {"last_epoch": self.step - 1}
        self.lr_schedule.load_state_dict(schedule)
        self.lr_schedule.step()

    def save_model(self, directory: Path) -> None:
        """Save the policy for from_pretrained and for vLLM, in the dtype of what is trained."""
        dtype = next(iter(self.trained.values())).dtype
        parameters = {name for name, _ in self.policy.named_parameters(remove_duplicate=False)}
        whole = {name: tensor.to("cpu", dtype) for name, tensor in self.weights()}
        buffers = self.policy.state_dict().items()
        whole |= {name: tensor for name, tensor in buffers if name not in parameters}
        with replacing(directory) as unfinished:
            save_model(self.policy, whole, self.config.model, unfinished)

    # What a subclass changes

    def load_policy(self) -> torch.nn.Module:
        """Load the policy onto this process's device. Raises as models.policy.load_policy does."""
        return load_policy(self.config, device())

    def policy_logprobs(self, *arguments: Any) -> Tensor:
        """Compute log-probabilities under the policy: response_logprobs() behind its model."""
        return response_logprobs(self.policy, *arguments)

    def split_batch(self, rows: list[Row]) -> list[tuple[list[Row], float]]:
        """Split a batch into what is computed at once, each part with its share of the batch."""
        limits = self.config.micro_batch_tokens, TOKENS_PER_FORWARD[device().type]
        parts = micro_batches(rows, self.config.responses_per_query, *limits)
        return [(part, len(part) / len(rows)) for part in parts]

    def total(self, metrics: Metrics) -> Metrics:
        """Return the metrics of the whole batch, with those of its importance weights."""
        return metrics | importance_figures(self.log_weights)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each weight, whole and without adapters, one at a time."""
        for name, parameter in self.policy.named_parameters():
            yield name, parameter.detach()

    def fill_policy(self, weights: dict[str, Tensor]) -> None:
        """Give the policy other weights."""
        for name, parameter in self.policy.named_parameters():
            parameter.copy_(weights[name])

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the full tensor of a parameter, gradient or moment: here the tensor itself."""
        return tensor

    def fill(self, parameter: Tensor, value: Tensor) -> None:
        """Copy a whole tensor into a parameter or moment."""
        parameter.copy_(value)

    def in_step(self, parts: list) -> list[tuple[Any, int]]:
        """Pair each part with its weight, 1. A sharded learner appends parts of weight 0."""
        return [(part, 1) for part in parts]

    def all_fit(self, fits: bool) -> bool:
        """Return whether a pass fitted into memory in all trainer processes. fits: in this one."""
        return fits


def make_learner(config: Config, say: Callable[[str], None], rank: Any = None) -> Learner:
    """Make the learner that the settings want. rank: of extras/sharding.py, one of several."""
    if rank:
        return extra("sharding").ShardedLearner(config, say, rank)
    if config.lora_rank:
        return extra("lora").LoraLearner(config, say)
    return Learner(config, say)


def find_objective(name_or_file: str) -> Objective:
    """Find "tb", another objective of LOSSES, or the one public function of a .py file.

    Raises UserError.
    """
    if name_or_file == "tb":
        return trajectory_balance
    if not name_or_file.endswith(".py"):
        losses = extra("objectives").LOSSES
        if name_or_file not in losses:
            names = ", ".join(losses)
            raise UserError(f"--loss is {name_or_file!r}: it is one of {names}, or a .py file")
        return losses[name_or_file]
    module = import_file("objective", name_or_file)
    found = inspect.getmembers(module, inspect.isfunction)
    own = [each for name, each in found if each.__module__ == module.__name__ and name[0] != "_"]
    if len(own) != 1:
        raise UserError(
            f"objective file {name_or_file!r} defines {len(own)} functions: it must define one, "
            "besides those whose names begin with _"
        )
    return own[0]
