"""The largest-batch trial: what does not fit into memory shows in the first minute."""

from collections.abc import Callable

import numpy as np

from config import Config, UserError
from learner import Learner
from rollouts import Response, make_tokens


def try_largest_batch(config: Config, learner: Learner, say: Callable[[str], None]) -> None:
    """Run forward, backward and AdamW on the longest micro-batch that can come, to no effect.

    With --low_memory auto a batch that does not fit makes the learner take two passes. say: shows
    the user a line. Raises MemoryError that says what to lower.
    """
    rows = largest_micro_batch(config, learner.policy.get_input_embeddings().num_embeddings)
    it_fits = learner.fits(rows)
    if config.low_memory == "auto" and not it_fits:
        learner.low_memory = True
        it_fits = learner.fits(rows)
        if it_fits:
            what = "the largest batch does not fit into memory"
            say(f"{what}: a step takes two passes (--low_memory)")
    if it_fits:
        if learner.low_memory:
            check_inputs(learner, rows[:1])
        return
    length = "--max_episode_tokens" if config.max_episode_tokens else "--max_response_tokens"
    smaller = f"{length} or --responses_per_query"
    if config.full_queries > 1:
        smaller = "--tokens_per_micro_batch"
    also = " or try --low_memory on" if config.low_memory == "off" else ""
    raise MemoryError(
        f"{len(rows)} responses of {len(rows[0].prompt)} + {len(rows[0].tokens)} tokens do not fit "
        f"into memory in one forward and backward pass: lower {smaller}{also}"
    )


def largest_micro_batch(config: Config, vocabulary: int) -> list[Response]:
    """Make rows of full length, of random tokens: equal rows would be merged into one."""
    num_queries, group_size = config.full_queries, config.responses_per_query
    prompt_tokens, response_tokens = config.longest_row
    rng = np.random.default_rng(0)
    prompts = rng.integers(vocabulary, size=(num_queries, prompt_tokens))
    ids = rng.integers(vocabulary, size=(num_queries * group_size, response_tokens))
    same = dict(query_id=-1, version=0, reward=0.0)
    tokens = [make_tokens(own, ref_logprob=1.0, behavior_logprob=1.0) for own in ids]
    return [
        Response(prompt=prompts[i // group_size], tokens=own, **same)
        for i, own in enumerate(tokens)
    ]


def check_inputs(learner: Learner, rows: list[Response]) -> None:
    """Raise UserError where an input besides logprobs has a gradient: two passes have only that."""
    for name, value in vars(learner.loss_inputs(rows)).items():
        if name != "logprobs" and getattr(value, "requires_grad", False):
            raise UserError(
                f"--loss {learner.config.loss}: a step in two passes would leave out the gradient "
                f"of LossInputs.{name}: it has that of logprobs alone. Give --low_memory off"
            )
