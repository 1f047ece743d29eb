"""The largest-batch trial: what does not fit into memory shows in the first minute."""

from collections.abc import Callable

import numpy as np
import torch

from buffer import Row
from config import Config
from loss import LOSSES, LossInputs


def try_largest_batch(
    config: Config,
    policy: torch.nn.Module,
    loss_inputs: Callable[[list[Row], float], LossInputs],
) -> None:
    """Run forward, backward and AdamW on the longest micro-batch that can come, to no effect.

    loss_inputs: the learner's, from rows and beta. Raises MemoryError that says what to lower.
    """
    num_queries, group_size = config.queries_per_micro_batch, config.responses_per_query
    size, vocabulary = num_queries * group_size, policy.get_input_embeddings().num_embeddings
    # Random, as equal rows would run once.
    rng, numbers = np.random.default_rng(0), np.zeros(config.max_response_tokens, np.float32)
    prompts = rng.integers(vocabulary, size=(num_queries, config.max_prompt_tokens))
    responses = rng.integers(vocabulary, size=(size, config.max_response_tokens))
    rows = [
        Row(-1, 0, 0, prompts[i // group_size], responses[i], numbers, numbers, 0.0)
        for i in range(size)
    ]
    try:
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        # Its two moments are there from the second step on.
        stand_in = torch.optim.AdamW(policy.parameters(), lr=0.0, fused=True)
        stand_in.step()
        LOSSES[config.loss](loss_inputs(rows, config.beta))[0].backward()
    except torch.OutOfMemoryError as error:
        smaller = "--max_response_tokens or --responses_per_query"
        if num_queries > 1:
            smaller = "--queries_per_micro_batch"
        raise MemoryError(
            f"{size} responses of {config.max_prompt_tokens} + {config.max_response_tokens} tokens "
            f"do not fit into memory in one forward and backward pass: lower {smaller}"
        ) from error
    for parameter in policy.parameters():
        parameter.grad = None
