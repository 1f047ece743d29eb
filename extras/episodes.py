"""Episodes: responses of several turns, to a task with reply() (--max_episode_tokens).

The model acts, the environment replies, the model acts again. The tokens of such a response are
those of the turns and of the replies between them; what was sampled is never decoded and encoded
again. A reply is no choice of the policy, so its tokens are in no loss: where the same turns give
the same reply its probability is 1, and trajectory balance keeps its fixed point, whoever played.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from config import Config
from models.tokens import render, split_prefill
from rollouts import Generation, Rollout, TokenArrays, newest_version
from runtime.responses.scoring import RewardScorer

if TYPE_CHECKING:
    from models.engine import Engine

TURN = "<think>\na turn\n</think>\n\nof the model"  # stands for one in a chat template


@dataclass(eq=False)
class Response:
    """One of the S responses of a rollout, while it is generated."""

    rollout: Rollout
    number: int  # among them
    turns: list[str] = field(default_factory=list)  # of the model
    pieces: list[TokenArrays] = field(default_factory=list)  # turns and replies
    reply: Future | None = None  # to the latest turn

    @property
    def tokens(self) -> list[int]:
        """Of turns and replies."""
        return [token for piece in self.pieces for token in piece.tokens.tolist()]


class Episodes(Generation):
    """Generates episodes. scorer: in whose workers the environment replies."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        engine: "Engine",
        scorer: RewardScorer,
    ):
        super().__init__(config, tokenizer, engine, scorer.task)
        self.scorer = scorer
        self.replying: list[Response] = []  # it is the environment's turn
        self.generated: list[Rollout] = []  # in this step

    @property
    def rows(self) -> int:
        return self.engine.rows + len(self.replying)

    @property
    def is_idle(self) -> bool:
        """Whether step() must wait, for work or for replies.

        In lockstep for all of them, so that the same turns share each step of the engine whenever
        their replies come.
        """
        has_come = [response.reply.done() for response in self.replying]
        if self.config.lockstep and not all(has_come):
            return True
        return not self.engine.rows and not any(has_come)

    def start(self, rollout: Rollout) -> None:
        """Begin S episodes, each a request of its own: one of S would end with the slowest turn."""
        size = rollout.sampling["n"]
        rollout.texts, rollout.finished, rollout.arrays = ([None] * size for _ in range(3))
        for number in range(size):
            self.begin_turn(Response(rollout, number))

    def begin_turn(self, response: Response) -> None:
        """Have the next turn of an episode generated, after all of it so far."""
        rollout, turn = response.rollout, len(response.turns)
        sampling, prompt = rollout.sampling | {"n": 1}, rollout.prompt + response.tokens
        room = self.config.max_episode_tokens - len(prompt)
        for limit in ("max_tokens", "min_tokens"):
            if limit in sampling:
                sampling[limit] = min(room, sampling[limit])
        if "seed" in sampling:
            seeds = np.random.SeedSequence((sampling["seed"], response.number, turn))
            sampling["seed"] = int(seeds.generate_state(1)[0])
        request = f"{rollout.request}.{response.number}.{turn}"
        self.engine.add(request, prompt, **sampling)
        self.generating[request] = response

    def step(self) -> list[Rollout]:
        """Generate one token of every turn. Returns the rollouts that finished with it."""
        self.generated = []
        replying, self.replying = self.replying, []
        for response in replying:
            self.take_reply(response)
        for output in self.engine.step():
            response = self.generating.pop(output.request_id)
            response.rollout.last_version = newest_version(output)
            if not response.rollout.error:  # of another of its responses: the group is dropped
                self.end_turn(response, output.outputs[0])
        return self.generated

    def end_turn(self, response: Response, completion) -> None:
        """Take what the model has generated: a turn to which the environment replies, or all."""
        text, arrays, has_ended = self.read(completion)
        response.turns.append(text)
        response.pieces.append(arrays)
        if has_ended:
            response.reply = self.scorer.reply(response.rollout.query, [*response.turns])
            self.replying.append(response)
        else:
            self.end(response, is_finished=False)

    def take_reply(self, response: Response) -> None:
        """Append a reply if it has come, and begin the next turn unless the episode has ended."""
        rollout = response.rollout
        if rollout.error:
            response.reply.cancel()
            return
        if not response.reply.done():
            self.replying.append(response)
            return
        try:
            reply = response.reply.result()
            if reply is None:
                self.end(response, is_finished=True)
                return
            if not isinstance(reply, str):
                raise TypeError(f"reply() must give a string or None, it gave {reply!r}")
            end = response.tokens[-1]
            tokens = encode_reply(self.tokenizer, rollout.query.prompt, reply, end)
        except Exception as error:  # a user's code: it costs the group, and is counted
            rollout.error = error
            self.scorer.scored.append(rollout)
            return
        length = len(rollout.prompt) + len(response.tokens) + len(tokens)
        if length >= self.config.max_episode_tokens or len(response.turns) == self.config.max_turns:
            self.end(response, is_finished=False)
            return
        logprobs, masks = np.zeros(len(tokens), np.float32), np.zeros((2, len(tokens)), bool)
        response.pieces.append(TokenArrays(np.array(tokens, np.int32), logprobs, *masks))
        self.begin_turn(response)

    def end(self, response: Response, is_finished: bool) -> None:
        """Give a response to its rollout. is_finished: the environment has ended it, no limit."""
        rollout, i = response.rollout, response.number
        rollout.texts[i], rollout.finished[i] = response.turns, is_finished
        rollout.arrays[i] = TokenArrays(*map(np.concatenate, zip(*response.pieces)))
        if all(arrays is not None for arrays in rollout.arrays):
            self.generated.append(rollout)


def encode_reply(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, str]],
    reply: str,
    last_token: int,
) -> list[int]:
    """Return the token ids between a turn of the model and its next one: what a reply adds.

    Of messages that is what the chat template writes after the turn; last_token, with which the
    model has ended that itself, is not repeated. Raises UnicodeError for what is no text, and
    ValueError for a template that changes what stands before a reply, such as one that drops old
    thinking: the next turn would see something else than was sampled.
    """
    if isinstance(prompt, str):
        return tokenizer(reply, add_special_tokens=False).input_ids
    before, begun = split_prefill(prompt)
    turns = {"role": "assistant", "content": begun + TURN}, {"role": "user", "content": reply}
    messages = [*before, *turns]
    turn = render(tokenizer, messages).removeprefix(render(tokenizer, prompt)).lstrip()
    if not turn.startswith(TURN):
        raise ValueError("it changes what stands before a reply, the prompt or the model's turn")
    text, end = turn.removeprefix(TURN), tokenizer.decode([last_token])
    if end and text.lstrip().startswith(end):
        text = text.lstrip().removeprefix(end)
    return tokenizer(text, add_special_tokens=False).input_ids
