"""The Learner: what a batch does to the policy. Log-probabilities, the loss, AdamW; the Trainer around it moves batches in and weights out."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import get_scheduler

from buffer import Row
from config import Config
from loss import LOSSES, LossInputs, Metrics
from policy import load_policy, load_tokenizer, response_logprobs, response_logprobs_under
from processes import device

BAD_STEPS = 10  # this many steps in a row with a gradient that is not finite end the run


class Learner:
    """say: shows the user a line."""

    def __init__(self, config: Config, say: Callable[[str], None]):
        self.config, self.say = config, say
        torch.manual_seed(config.seed)
        self.policy = load_policy(config, device())
        # fp32 masters: a step of 1e-5 times a bf16 weight rounds away.
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(0.9, config.adam_beta2),
            fused=True,
        )
        self.lr_schedule = lr_schedule(self.optimizer, config)
        self.step = 0  # optimizer steps done; the version of the weights
        self.bad_steps = self.bad_steps_in_a_row = 0

    def update(self, rows: list[Row]) -> Metrics:
        """One optimizer step on B x K rows, a few queries at a time. Each row weighs the same whatever the micro-batch."""
        config = self.config
        beta, tau, gamma = (
            beta_at(config, self.step),
            reward_temperature_at(config, self.step),
            reference_temperature_at(config, self.step),
        )
        size = config.queries_per_micro_batch * config.responses_per_query
        totals: Metrics = {"loss": 0.0}
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            loss, metrics = LOSSES[config.loss](self.loss_inputs(part, beta * tau, gamma * tau))
            (loss * len(part) / len(rows)).backward()
            for name, value in {"loss": loss.detach(), **metrics}.items():
                totals[name] = totals.get(name, 0.0) + value * len(part) / len(rows)
        grad_norm = float(
            clip_grad_norm_(self.policy.parameters(), config.max_grad_norm or float("inf"))
        )
        learning_rate = self.lr_schedule.get_last_lr()[0]
        if np.isfinite(grad_norm):
            self.optimizer.step()
            self.bad_steps_in_a_row = 0
        else:
            self.bad_steps += 1
            self.bad_steps_in_a_row += 1
            self.say(f"step {self.step}: the gradient norm is {grad_norm}: the step is skipped")
            if self.bad_steps_in_a_row == BAD_STEPS:
                raise FloatingPointError(
                    f"{BAD_STEPS} steps in a row had a gradient that is not finite: lower --learning_rate or raise --beta"
                )
        self.optimizer.zero_grad()
        self.lr_schedule.step()
        self.step += 1
        return (
            {"step": self.step}
            | {k: float(v) for k, v in totals.items()}
            | {"grad_norm": grad_norm, "learning_rate": learning_rate, "beta": beta}
        )

    def loss_inputs(
        self, rows: list[Row], beta: float, reference_temperature: float = 1.0
    ) -> LossInputs:
        """[log pi_ref / gamma + reward / beta] / tau is the log-reward of trajectory balance: so these two are beta tau and gamma tau."""
        logprobs = response_logprobs(
            self.policy, [r.prompt for r in rows], [r.tokens for r in rows], self.config.temperature
        )  # (N, T)

        def padded(arrays: list[np.ndarray]) -> Tensor:
            out = np.zeros(logprobs.shape, np.float32)
            for i, array in enumerate(arrays):
                out[i, : len(array)] = array
            return torch.from_numpy(out).to(logprobs.device)

        return LossInputs(
            logprobs=logprobs,
            ref_logprobs=padded([r.ref_logprobs for r in rows]) / reference_temperature,
            behavior_logprobs=padded([r.behavior_logprobs for r in rows]),
            mask=padded(
                [np.ones(len(r.tokens)) for r in rows]
            ),  # by length, not by token id: end-of-sequence may equal padding
            rewards=torch.tensor([r.reward for r in rows], device=logprobs.device),
            group_size=self.config.responses_per_query,
            beta=beta,
            max_response_length=self.config.max_response_tokens,
        )

    def renew_references(
        self, rows: list[Row], reference_version: int, reference: Callable[[], dict[str, Tensor]]
    ) -> None:
        """Rows that were scored by an earlier reference policy get their log-probabilities under the present one. They are recomputed when
        they are first drawn, not dropped: a reset leaves nothing to wait for, and what is never drawn costs nothing."""
        old = [row for row in rows if row.reference_version != reference_version]
        if not old:
            return
        logprobs = response_logprobs_under(
            reference(),
            self.policy,
            [r.prompt for r in old],
            [r.tokens for r in old],
            self.config.temperature,
        )
        for row, renewed in zip(old, logprobs.cpu().numpy()):
            row.ref_logprobs, row.reference_version = renewed[: len(row.tokens)], reference_version

    def try_largest_batch(self) -> None:
        """Forward, backward and AdamW on the longest micro-batch that can come, to no effect: what does not fit into memory shows now, and not
        hours later. Raises MemoryError with what to lower."""
        config = self.config
        size, vocabulary = (
            config.queries_per_micro_batch * config.responses_per_query,
            self.policy.get_input_embeddings().num_embeddings,
        )
        rng, numbers = np.random.default_rng(0), np.zeros(config.max_response_tokens, np.float32)
        prompts = rng.integers(
            vocabulary, size=(config.queries_per_micro_batch, config.max_prompt_tokens)
        )
        responses = rng.integers(
            vocabulary, size=(size, config.max_response_tokens)
        )  # random: equal rows would run once
        rows = [
            Row(
                -1,
                0,
                0,
                prompts[i // config.responses_per_query],
                responses[i],
                numbers,
                numbers,
                0.0,
            )
            for i in range(size)
        ]
        try:
            for parameter in self.policy.parameters():
                parameter.grad = torch.zeros_like(parameter)
            stand_in = torch.optim.AdamW(
                self.policy.parameters(), lr=0.0, fused=True
            )  # its two moments are there from the second step on
            stand_in.step()
            LOSSES[config.loss](self.loss_inputs(rows, config.beta))[0].backward()
        except torch.OutOfMemoryError as error:
            smaller = (
                "--queries_per_micro_batch"
                if config.queries_per_micro_batch > 1
                else "--max_response_tokens or --responses_per_query"
            )
            raise MemoryError(
                f"{size} responses of {config.max_prompt_tokens} + {config.max_response_tokens} tokens do not fit into memory in one "
                f"forward and backward pass: lower {smaller}"
            ) from error
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        """Policy and optimizer by name, and three counters. The learning rate's schedule is a function of the step."""
        counters = {"counters": torch.tensor([self.step, self.bad_steps, self.bad_steps_in_a_row])}
        names = {parameter: name for name, parameter in self.policy.named_parameters()}
        moments = {
            f"optimizer.{names[p]}.{key}": value
            for p, state in self.optimizer.state.items()
            for key, value in state.items()
        }
        return {f"policy.{name}": p.detach() for p, name in names.items()} | moments | counters

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.policy.named_parameters():
            parameter.copy_(state[f"policy.{name}"])
            prefix = f"optimizer.{name}."
            moments = {
                key.removeprefix(prefix): value.to(parameter.device)
                for key, value in state.items()
                if key.startswith(prefix)
            }
            if moments:  # there are none before the first step
                self.optimizer.state[parameter] = moments
        self.step, self.bad_steps, self.bad_steps_in_a_row = state["counters"].tolist()
        self.lr_schedule.load_state_dict(
            self.lr_schedule.state_dict() | {"last_epoch": self.step - 1}
        )
        self.lr_schedule.step()

    def save_model(self, directory: Path) -> None:
        """For from_pretrained and for vLLM. Written beside its place and renamed into it."""
        for setting in (
            "temperature",
            "top_p",
            "top_k",
        ):  # of some base models; without do_sample they are refused on saving
            setattr(self.policy.generation_config, setting, None)
        unfinished = directory.with_suffix(".unfinished")
        self.policy.save_pretrained(unfinished)
        load_tokenizer(self.config).save_pretrained(unfinished)
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.rename(directory)


def beta_at(config: Config, step: int) -> float:
    if config.beta_final is None:
        return config.beta
    if config.beta_stop_step is not None and step >= config.beta_stop_step:
        return config.beta_final
    return config.beta + (config.beta_final - config.beta) * min(
        1.0, step / max(1, config.beta_steps)
    )


def reward_temperature_at(config: Config, step: int) -> float:
    """tau"""
    return config.reward_temperature + (1 - config.reward_temperature) * min(
        1.0, step / max(1, config.reward_temperature_steps)
    )


def reference_temperature_at(config: Config, step: int) -> float:
    """gamma"""
    return 1 + (config.reference_temperature - 1) * min(
        1.0, step / max(1, config.reference_temperature_steps)
    )


def lr_schedule(optimizer: torch.optim.Optimizer, config: Config):
    name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
    if (
        name == "warmup_stable_decay"
    ):  # its length is its own: the run may end before the decay does
        extra = {"num_stable_steps": config.stable_steps, "num_decay_steps": config.decay_steps}
        return get_scheduler(name, optimizer, config.warmup_steps, scheduler_specific_kwargs=extra)
    return get_scheduler(name, optimizer, config.warmup_steps, config.steps)
