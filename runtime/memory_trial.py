"""The largest-batch trial: what does not fit into memory shows in the first minute."""

from collections.abc import Callable

import numpy as np
import torch

from buffer import Row
from config import Config, extra, has_extra
from learner import Learner


def try_largest_batch(config: Config, learner: Learner, say: Callable[[str], None]) -> None:
    """Run forward, backward and AdamW on the longest micro-batch that can come, to no effect.

    With --low_memory auto a batch that does not fit makes the learner take two passes, if this copy
    of the project has them. say: shows the user a line. Raises MemoryError that says what to lower.
    """
    rows = largest_micro_batch(config, learner.policy.get_input_embeddings().num_embeddings)
    it_fits = fits(config, learner, rows)
    if config.low_memory == "auto" and not it_fits and has_extra("low_memory"):
        learner.low_memory = True
        it_fits = fits(config, learner, rows)
        if it_fits:
            what = "the largest batch does not fit into memory"
            say(f"{what}: a step takes two passes (--low_memory)")
    if it_fits:
        if learner.low_memory:
            extra("low_memory").check_inputs(learner, rows[:1])
        return
    length = "--max_episode_tokens" if config.max_episode_tokens else "--max_response_tokens"
    smaller = f"{length} or --responses_per_query"
    if config.full_queries > 1:
        smaller = "--tokens_per_micro_batch"
    may_try = config.low_memory == "off" and has_extra("low_memory")
    also = " or try --low_memory on" if may_try else ""
    raise MemoryError(
        f"{len(rows)} responses of {len(rows[0].prompt)} + {len(rows[0].tokens)} tokens do not fit "
        f"into memory in one forward and backward pass: lower {smaller}{also}"
    )


def largest_micro_batch(config: Config, vocabulary: int) -> list[Row]:
    """Make rows of full length, of random tokens: equal rows would be merged into one."""
    num_queries, group_size = config.full_queries, config.responses_per_query
    size = num_queries * group_size
    prompt_tokens, response_tokens = config.longest_row
    rng, arrays = np.random.default_rng(0), np.ones((4, response_tokens), np.float32)
    prompts = rng.integers(vocabulary, size=(num_queries, prompt_tokens))
    tokens = rng.integers(vocabulary, size=(size, response_tokens))
    return [Row(-1, 0, 0, prompts[i // group_size], tokens[i], *arrays, 0.0) for i in range(size)]


def fits(config: Config, learner: Learner, rows: list[Row]) -> bool:
    """Return whether a step on these rows, AdamW's moments included, fits into memory on all ranks.

    They make the same passes on equal devices: if one lacks memory, all do. One that failed alone
    would leave the others waiting in a collective, until its timeout.
    """
    parameters, fits_here = list(learner.trained.values()), True
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        # Its two moments are there from the second step on.
        stand_in = torch.optim.AdamW(parameters, lr=0.0, fused=True)
        stand_in.step()
        learner.backward(rows, config.beta)
    except torch.OutOfMemoryError:
        fits_here = False
    for parameter in parameters:
        parameter.grad = None
    return learner.all_fit(fits_here)
