"""Try an objective on an example, before a model is loaded."""

import torch

from config import Config, UserError, first_line
from learner import find_objective
from loss import LossInputs

# What metrics.jsonl has already, and an objective might take for its own.
COLUMNS = "step", "loss", "grad_norm", "learning_rate", "beta", "reward", "kl", "entropy"


def check_objective(config: Config) -> None:
    """Try the objective on two groups of responses of three tokens. Raises UserError."""
    name, objective, inputs = f"--loss {config.loss}", find_objective(config.loss), example(config)
    try:
        found = objective(inputs)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
            raise UserError(f"{name}: it must return a loss and a dict of metrics")
        loss = torch.as_tensor(found[0])
        metrics = {metric: torch.as_tensor(value) for metric, value in found[1].items()}
        if loss.requires_grad and not loss.shape:
            loss.backward()
    except UserError:
        raise
    except Exception as error:
        problem = f"it fails on an example: {type(error).__name__}: {first_line(error)}"
        raise UserError(f"{name}: {problem}") from error
    if loss.shape or not loss.isfinite():
        what = f"of shape {tuple(loss.shape)}" if loss.shape else float(loss)
        raise UserError(f"{name}: its loss must be one finite number; of an example it is {what}")
    for metric, value in metrics.items():
        if value.numel() != 1 or metric in COLUMNS:
            raise UserError(
                f"{name}: its metric {metric!r} must be one number, under a name that is none of "
                f"{', '.join(COLUMNS)}"
            )
    if inputs.logprobs.grad is None:
        raise UserError(f"{name}: its loss has no gradient with respect to logprobs")


def example(config: Config) -> LossInputs:
    """Make two groups of responses of three tokens."""
    rows, length = 2 * config.responses_per_query, 3
    return LossInputs(
        logprobs=torch.full((rows, length), -1.0, requires_grad=True),
        ref_logprobs=torch.full((rows, length), -1.1),
        behavior_logprobs=torch.full((rows, length), -0.9),
        mask=torch.ones(rows, length),
        rewards=torch.arange(rows) / rows,
        group_size=config.responses_per_query,
        beta=config.beta,
        max_response_length=length,
        prompt_lengths=torch.ones(rows),
        sampled=torch.ones(rows, length),
        staleness=torch.arange(rows),
    )
