"""The largest-batch trial: what does not fit into memory shows in the first minute."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from config import Config, UserError
from learner import Learner
from models.logprobs import full_queries
from rollouts import Response, make_tokens


def try_largest_batch(config: Config, learner: Learner, say: Callable[[str], None]) -> None:
    """Run forward, backward and AdamW on the longest micro-batch that can come, to no effect.

    With --low_memory auto a batch that does not fit makes the learner take two passes. say: shows
    a line: what is tried, and how long the steps may take. Raises MemoryError with what to lower.
    """
    rows = largest_micro_batch(config, learner.policy.get_input_embeddings().num_embeddings)
    prompt, response = config.longest_row
    queries = full_queries(config)
    prompts = "a prompt" if queries == 1 else f"{queries} prompts"
    what = f"{len(rows)} responses of {response} tokens to {prompts} of {prompt}"
    say(f"trying the largest batch: {what} …")
    seconds = time_step(learner, rows)
    if config.low_memory == "auto" and not seconds:
        learner.low_memory = True
        seconds = time_step(learner, rows)
        if seconds:
            say("it does not fit into memory: a step takes two passes (--low_memory)")
    if seconds:
        if learner.low_memory:
            check_inputs(learner, rows[:1])
        share = math.ceil(config.queries_per_batch / config.trainer_processes)
        minutes = config.steps * math.ceil(share / queries) * seconds / 60
        longest = f"{math.ceil(minutes)} min" if minutes < 100 else f"{minutes / 60:.0f} h"
        say(f"it takes {seconds:.1f} s: all {config.steps} steps take {longest} at most")
        return
    length = "--max_episode_tokens" if config.max_episode_tokens else "--max_response_tokens"
    smaller = f"{length} or --responses_per_query"
    if queries > 1:
        smaller = "--tokens_per_micro_batch"
    also = " or try --low_memory on" if config.low_memory == "off" else ""
    problem = "do not fit into memory in one forward and backward pass"
    size = f"{len(rows)} responses of {prompt} + {response} tokens"
    raise MemoryError(f"{size} {problem}: lower {smaller}{also}")


def time_step(learner: Learner, rows: list[Response]) -> float | None:
    """Return the seconds of a step on these rows; None if it does not fit into memory."""
    # The first pass of all takes longer: it is a small one.
    if not learner.fits([replace(row, tokens=row.tokens[:2]) for row in rows]):
        return None
    start = time.monotonic()
    it_fits = learner.fits(rows)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic() - start if it_fits else None


def largest_micro_batch(config: Config, vocabulary: int) -> list[Response]:
    """Make rows of full length, of random tokens: equal rows would be merged into one."""
    num_queries, group_size = full_queries(config), config.responses_per_query
    prompt_tokens, response_tokens = config.longest_row
    rng = np.random.default_rng(0)
    prompts = rng.integers(vocabulary, size=(num_queries, prompt_tokens))
    ids = rng.integers(vocabulary, size=(num_queries * group_size, response_tokens))
    rows = []
    for prompt, own in zip(prompts.repeat(group_size, axis=0), ids):
        tokens = make_tokens(own, ref_logprob=1.0, behavior_logprob=1.0)
        rows.append(Response(query_id=-1, version=0, reward=0.0, prompt=prompt, tokens=tokens))
    return rows


def check_inputs(learner: Learner, rows: list[Response]) -> None:
    """Raise UserError where an input besides logprobs has a gradient: two passes have only that."""
    for name, value in vars(learner.loss_inputs(rows)).items():
        if name != "logprobs" and getattr(value, "requires_grad", False):
            raise UserError(
                f"--loss {learner.config.loss}: a step in two passes would leave out the gradient "
                f"of LossInputs.{name}: it has that of logprobs alone. Give --low_memory off"
            )
