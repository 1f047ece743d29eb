"""The Learner: what a batch does to the policy. Log-probabilities, the loss, AdamW.

The Trainer around it moves batches in and weights out.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from buffer import Row
from config import Config
from loss import LossInputs, Metrics
from models.device import compute_dtype, device
from models.importance import LogWeights, importance_figures, log_weights
from models.logprobs import TOKENS_IN_LOW_MEMORY, TOKENS_PER_FORWARD, micro_batches, split_rows
from models.lora import load_trained_policy, merged, save, trained_parameters
from models.policy import find_not_finite
from models.schedules import beta_at, lr_schedule, reference_temperature_at, reward_temperature_at
from models.sharding import OneProcess, full, load_state_of, state_of
from objectives import find_objective

BAD_STEPS = 10  # this many steps in a row with a gradient that is not finite end the run


class Learner:
    """The policy and its optimizer.

    say: shows the user a line. ranks: the trainer's processes (models/sharding.py). A method that
    needs them all calls itself on the others first. With one process, the default, read past every
    self.ranks: call() does nothing; share(), keep_step() and gather() return what they get.
    """

    def __init__(self, config: Config, say: Callable[[str], None], ranks: OneProcess | None = None):
        self.config, self.say, self.ranks = config, say, ranks or OneProcess()
        torch.manual_seed(config.seed)
        self.objective = find_objective(config.loss)
        self.dtype = compute_dtype(config)
        self.policy, self.adapted = load_trained_policy(config, self.dtype)  # on the CPU
        self.policy_logprobs = self.ranks.shard(self.policy, self.dtype)
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
        self.log_weights: list[LogWeights] = []  # of this rank's rows of the batch

    def update(self, rows: list[Row]) -> Metrics:
        """Make one optimizer step on B x K rows. Returns the metrics of the step."""
        self.ranks.call("update", rows)
        metrics = self.accumulate(rows)
        learning_rate = self.lr_schedule.get_last_lr()[0]
        grad_norm = self.step_optimizer()
        beta = beta_at(self.config, self.step)  # accumulate() had the same
        self.lr_schedule.step()
        self.step += 1
        own = {"grad_norm": grad_norm, "learning_rate": learning_rate, "beta": beta}
        return {"step": self.step, **metrics, **own}

    def accumulate(self, rows: list[Row]) -> Metrics:
        """Add up the gradient of a batch, a few queries at a time. Returns its loss and metrics.

        Each row weighs the same, whatever the micro-batch and the rank that it falls to.
        """
        config, step = self.config, self.step
        beta = beta_at(config, step)
        tau, gamma = reward_temperature_at(config, step), reference_temperature_at(config, step)
        own = self.ranks.share(rows, config.responses_per_query)
        limits = config.micro_batch, TOKENS_PER_FORWARD[device().type]
        parts = micro_batches(own, config.responses_per_query, *limits)
        self.log_weights = []
        totals: Metrics = {"loss": 0.0}
        for part, is_counted in self.ranks.keep_step(parts, config.responses_per_query):
            # A part that counts nothing answers the collectives of ranks with more parts.
            share = is_counted * len(part) / len(rows)
            loss, metrics = self.backward(part, beta * tau, gamma * tau, share)
            for name, value in {"loss": loss, **metrics}.items():
                totals[name] = totals.get(name, 0.0) + value * share
        totals = {name: float(value) for name, value in totals.items()}
        of_ranks = self.ranks.gather((totals, self.log_weights))
        sums = {name: sum(others[name] for others, _ in of_ranks) for name in totals}
        return sums | importance_figures([part for _, parts in of_ranks for part in parts])

    def backward(
        self, rows: list[Row], beta: float, reference_temperature: float = 1.0, share: float = 1.0
    ) -> tuple[Tensor, Metrics]:
        """Add the gradient of the rows' loss, times their share. Returns that loss and its metrics.

        beta, reference_temperature: times tau, as of loss_inputs().
        The objective is a function of the log-probabilities alone. So with low memory a first pass,
        without a graph, gives its gradient with respect to them. A second one takes that to the
        weights, a few rows at a time: exact, with the memory of those few.
        """
        with torch.set_grad_enabled(not self.low_memory):
            inputs = self.loss_inputs(rows, beta, reference_temperature)
        if share:
            self.log_weights.append(log_weights(inputs))  # for metrics: no objective uses them
        inputs.logprobs.requires_grad_()  # low memory: a leaf, for the first pass; else it is so
        # "tb", the default, is trajectory_balance in loss.py (Eq. 3 to 5).
        loss, metrics = self.objective(inputs)
        (loss * share).backward()
        if self.low_memory:
            prompts, tokens = [row.prompt for row in rows], [row.tokens for row in rows]
            parts = split_rows(prompts, tokens, TOKENS_IN_LOW_MEMORY)
            for few, is_counted in self.ranks.keep_step(parts):
                logprobs = self.logprobs([rows[i] for i in few])  # (rows, T of these)
                logprobs.backward(is_counted * inputs.logprobs.grad[few, : logprobs.shape[1]])
        return loss.detach(), metrics

    def logprobs(self, rows: list[Row], temperature: float | None = None) -> Tensor:
        """Compute log pi of the rows' tokens: (N, T). temperature: None for --temperature."""
        prompts, tokens = [row.prompt for row in rows], [row.tokens for row in rows]
        if temperature is None:
            temperature = self.config.temperature
        return self.policy_logprobs(prompts, tokens, temperature, self.dtype)

    @torch.no_grad()
    def logprobs_under(
        self, weights: dict[str, Tensor] | None, rows: list[Row], temperature: float | None = None
    ) -> list[np.ndarray]:
        """Compute log pi of each row's tokens, (T,), as if the policy had other weights.

        weights: by name, whole, of a model without adapters; only rank 0 needs them.
        """
        self.ranks.call("logprobs_under", None, rows, temperature)
        own = self.ranks.share(rows, group_size=1)
        with self.ranks.under(self.policy, weights):
            logprobs = self.logprobs(own or rows[:1], temperature).cpu().numpy()  # keep in step
        found = [padded[: len(row.tokens)] for padded, row in zip(logprobs, own)]
        return [one for part in self.ranks.gather(found) for one in part]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each weight, whole and without adapters, one at a time."""
        self.ranks.call("weights")
        for name, tensor in merged(self.policy):
            yield name, full(tensor.detach())

    def step_optimizer(self) -> float:
        """Clip the gradient, apply it, and return its norm. One that is not finite is left out.

        Raises FloatingPointError at BAD_STEPS of those in a row.
        """
        max_norm = self.config.max_grad_norm or float("inf")
        grad_norm = float(full(clip_grad_norm_(self.trained.values(), max_norm)))
        if np.isfinite(grad_norm):
            self.optimizer.step()
            self.bad_steps_in_a_row = 0
        else:
            self.bad_steps += 1
            self.bad_steps_in_a_row += 1
            self.say(f"step {self.step}: the gradient norm is {grad_norm}: the step is skipped")
            if self.bad_steps_in_a_row == BAD_STEPS:
                weights = ((name, full(p.detach())) for name, p in self.trained.items())
                name = find_not_finite(weights)
                cause = f", as the weight {name} is NaN or infinite" if name else ""
                raise FloatingPointError(
                    f"{BAD_STEPS} steps in a row had a gradient that is not finite{cause}: "
                    "lower --learning_rate or raise --beta"
                )
        self.optimizer.zero_grad()
        return grad_norm

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
        )

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is trained and its moments, whole, by name, one at a time; three counters.

        The learning rate's schedule is a function of the step.
        """
        self.ranks.call("state")
        yield "counters", torch.tensor([self.step, self.bad_steps, self.bad_steps_in_a_row])
        yield from state_of(self.trained, self.optimizer)

    def load_state(self, state: dict[str, Tensor] | None) -> None:
        """Take over what state() gave, of any number of ranks. Only rank 0 needs it."""
        self.ranks.call("load_state", None)
        counters = self.ranks.gather((state or {}).get("counters"))[0]
        load_state_of(self.trained, self.optimizer, self.ranks, state or {})
        self.step, self.bad_steps, self.bad_steps_in_a_row = counters.tolist()
        schedule = self.lr_schedule.state_dict() | {"last_epoch": self.step - 1}
        self.lr_schedule.load_state_dict(schedule)
        self.lr_schedule.step()

    def save_model(self, directory: Path) -> None:
        """Save the policy for from_pretrained and for vLLM. With LoRA it is merged."""
        is_plain = not self.adapted and self.ranks.size == 1
        whole = None if is_plain else self.weights()
        save(self.config, self.policy, self.adapted, whole, directory)
