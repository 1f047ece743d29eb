"""A step in two passes (--low_memory): the memory of a few rows, a third more work, same gradient.

The objective is a function of the log-probabilities alone. So a first pass, without a graph, gives
its gradient with respect to them, and a second one takes that to the weights, a few rows at a time.
"""

import torch
from torch import Tensor

from buffer import Row
from config import UserError
from learner import Learner
from loss import Metrics
from models.importance import log_weights
from models.logprobs import TOKENS_IN_LOW_MEMORY, split_rows


def backward(
    learner: Learner, rows: list[Row], beta: float, reference_temperature: float, share: float
) -> tuple[Tensor, Metrics]:
    """Do what Learner.backward does, in two passes."""
    with torch.no_grad():
        inputs = learner.loss_inputs(rows, beta, reference_temperature)
    learner.log_weights.append(log_weights(inputs))
    inputs.logprobs.requires_grad_()  # a leaf
    loss, metrics = learner.objective(inputs)
    (loss * share).backward()
    prompts, tokens = [row.prompt for row in rows], [row.tokens for row in rows]
    parts = split_rows(prompts, tokens, TOKENS_IN_LOW_MEMORY)
    for few, is_counted in learner.in_step(parts):
        logprobs = learner.logprobs([rows[i] for i in few])  # (rows, T of these)
        logprobs.backward(is_counted * inputs.logprobs.grad[few, : logprobs.shape[1]])
    return loss.detach(), metrics


def check_inputs(learner: Learner, rows: list[Row]) -> None:
    """Raise UserError where an input besides logprobs has a gradient: two passes have only that."""
    inputs = learner.loss_inputs(rows, learner.config.beta)
    for name, value in vars(inputs).items():
        if name != "logprobs" and getattr(value, "requires_grad", False):
            raise UserError(
                f"--loss {learner.config.loss}: a step in two passes would leave out the gradient "
                f"of LossInputs.{name}: it has that of logprobs alone. Give --low_memory off"
            )
