"""What changes with the step: beta, tau and gamma of the log-reward, and the learning rate."""

import torch
from transformers import get_scheduler

from config import Config


def beta_at(config: Config, step: int) -> float:
    """Return beta at a step: a line from beta to beta_final, which a stop step may cut short."""
    if config.beta_final is None:
        return config.beta
    if config.beta_stop_step is not None and step >= config.in_steps(config.beta_stop_step):
        return config.beta_final
    return interpolate(config.beta, config.beta_final, step, config.in_steps(config.beta_steps))


def reward_temperature_at(config: Config, step: int) -> float:
    """Return tau at a step: a line from reward_temperature to 1."""
    return interpolate(config.reward_temperature, 1.0, step, config.reward_temperature_steps)


def reference_temperature_at(config: Config, step: int) -> float:
    """Return gamma at a step: a line from 1 to reference_temperature."""
    return interpolate(1.0, config.reference_temperature, step, config.reference_temperature_steps)


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
