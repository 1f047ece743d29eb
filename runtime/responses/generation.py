"""Generation: the responses to queries, of one turn or, for a task with reply(), of several.

Such a response is an episode: the model acts, the environment replies, the model acts again. Its
tokens are those of the turns and of the replies between them; what was sampled is never decoded and
encoded again. A reply is no choice of the policy, so its tokens are in no loss: where the same
turns give the same reply its probability is 1, and trajectory balance keeps its fixed point,
whoever played.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from config import Config
from models.engine import Engine
from models.policy import encode_reply, tokens_left_out
from runtime.modes.free_running import Rollout
from runtime.responses.scoring import RewardScorer


@dataclass(eq=False)
class Response:
    """One of the S responses of a rollout, while it is generated."""

    rollout: Rollout
    number: int  # among them
    turns: list[str] = field(default_factory=list)  # of the model
    tokens: list[int] = field(default_factory=list)  # of turns and replies
    # Of turns and replies, each as in Rollout.arrays.
    pieces: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    reply: Future | None = None  # to the latest turn

    def append(self, tokens: list[int], logprobs: list[float], *masks: np.ndarray) -> None:
        """Append a turn or a reply. masks: in_loss and sampled, as in buffer.Group."""
        self.tokens += tokens
        self.pieces.append((np.array(tokens, np.int32), np.array(logprobs, np.float32), *masks))


class Generation:
    """Has the engine generate the responses of rollouts, many at once.

    scorer: in whose workers the environment replies.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        engine: Engine,
        scorer: RewardScorer,
    ):
        self.config, self.tokenizer, self.engine, self.scorer = config, tokenizer, engine, scorer
        # Appended to responses that were cut off, where the task wants that.
        self.final_token = tokenizer.eos_token_id if scorer.task.append_eos else None
        pad_is_eos = scorer.task.pad_is_eos and tokenizer.pad_token is None
        self.padding_token = tokenizer.eos_token_id if pad_is_eos else None
        self.left_out = tokens_left_out(tokenizer, scorer.task.keep_special_tokens)
        self.generating: dict[str, list[Response]] = {}  # by request
        self.replying: list[Response] = []  # it is the environment's turn
        self.generated: list[Rollout] = []  # in this step

    @property
    def rows(self) -> int:
        """Responses that are not finished, those that wait for room included."""
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
        """Generate the responses of a rollout, which has its prompt, version and sampling.

        The engine takes the version for the sake of its cache of prefixes.
        """
        size = rollout.sampling["n"]
        rollout.texts, rollout.finished, rollout.arrays = ([None] * size for _ in range(3))
        responses = [Response(rollout, number) for number in range(size)]
        if not self.config.max_episode_tokens:
            self.engine.add(rollout.request, rollout.prompt, rollout.version, **rollout.sampling)
            self.generating[rollout.request] = responses
            return
        for response in responses:  # each a request: one of S would end with the slowest turn
            self.begin_turn(response, rollout.version)

    def begin_turn(self, response: Response, version: int) -> None:
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
        self.engine.add(request, prompt, version, **sampling)
        self.generating[request] = [response]

    def step(self, version: int) -> list[Rollout]:
        """Generate one token of every response. Returns the rollouts that finished with it.

        version: of the weights in the engine.
        """
        self.generated = []
        replying, self.replying = self.replying, []
        for response in replying:
            self.take_reply(response, version)
        for output in self.engine.step():
            for response, turn in zip(self.generating.pop(output.request_id), output.outputs):
                response.rollout.last_version = version
                self.end_turn(response, turn)
        return self.generated

    def end_turn(self, response: Response, completion) -> None:
        """Take what the model has generated: a turn to which the environment replies, or all."""
        if response.rollout.error:  # of another of its responses: the group is dropped
            return
        tokens, has_ended = list(completion.token_ids), completion.finish_reason == "stop"
        shown = [token for token in tokens if token not in self.left_out]
        response.turns.append(self.tokenizer.decode(shown))
        logprobs = [row[token].logprob for token, row in zip(tokens, completion.logprobs)]
        if self.final_token is not None and completion.finish_reason == "length":
            tokens.append(self.final_token)
            logprobs.append(0.0)  # it was not sampled: nothing else can stand there
        sampled = np.arange(len(tokens)) < len(completion.token_ids)
        in_loss = np.array([token != self.padding_token for token in tokens])
        response.append(tokens, logprobs, in_loss, sampled)
        if has_ended and self.config.max_episode_tokens:
            response.reply = self.scorer.reply(response.rollout.query, [*response.turns])
            self.replying.append(response)
        else:
            self.end(response, is_finished=has_ended)

    def take_reply(self, response: Response, version: int) -> None:
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
        response.append(tokens, [0.0] * len(tokens), *np.zeros((2, len(tokens)), bool))
        self.begin_turn(response, version)

    def end(self, response: Response, is_finished: bool) -> None:
        """Give a response to its rollout. is_finished: it ended by itself, and by no limit."""
        rollout, i = response.rollout, response.number
        rollout.texts[i] = response.turns if self.config.max_episode_tokens else response.turns[0]
        rollout.finished[i] = is_finished
        rollout.arrays[i] = tuple(map(np.concatenate, zip(*response.pieces)))
        if all(arrays is not None for arrays in rollout.arrays):
            self.generated.append(rollout)
