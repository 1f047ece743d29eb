"""Responses of several turns: the model acts, the environment (Task.reply) answers, it acts again.

An episode is one response, whose tokens are those of the turns and of the replies between them.
Tokens in, tokens out: what was sampled is never decoded and encoded again. A reply is no choice of
the policy: its tokens are in no loss. Where replies are a function of the turns alone, trajectory
balance keeps its fixed point on off-policy episodes, as the environment's probabilities are 1.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from models.engine import completion_arrays
from models.policy import encode_reply
from runtime.modes.free_running import Rollout
from runtime.responses.generation import Generation
from runtime.responses.scoring import decode

POLL_SECONDS = 0.001  # while all episodes wait for replies


@dataclass(eq=False)
class Episode:
    """One of the S responses of a rollout, while it is played."""

    rollout: Rollout
    number: int  # which of them
    turns: list[str] = field(default_factory=list)  # of the model, as texts
    # Of each turn and each reply, as Rollout has them of a response.
    parts: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    reply: Future | None = None  # to the latest turn

    def tokens(self) -> list[int]:
        """Prompt, turns and replies so far."""
        return sum((tokens.tolist() for tokens, *_ in self.parts), list(self.rollout.prompt))


class Episodes(Generation):
    """Plays the episodes of rollouts: a request for each turn, which joins the others."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.generating: dict[str, Episode] = {}  # in the engine, by request
        self.replying: list[Episode] = []  # the environment's turn
        self.unfinished: dict[str, int] = {}  # episodes of a rollout in play, by its request
        self.ended: list[Rollout] = []  # in this step

    @property
    def responses(self) -> int:
        return self.engine.rows + len(self.replying)

    def start(self, rollout: Rollout) -> None:
        size = self.unfinished[rollout.request] = rollout.sampling["n"]
        rollout.texts, rollout.finished, rollout.arrays = [[None] * size for _ in range(3)]
        for number in range(size):
            self.begin_turn(Episode(rollout, number), rollout.version)

    def step(self, version: int) -> list[Rollout]:
        if self.engine.rows:
            for output in self.engine.step():
                episode = self.generating.pop(output.request_id)
                if not episode.rollout.error:
                    self.end_turn(episode, output.outputs[0])
        else:
            time.sleep(POLL_SECONDS)
        replying, self.replying = self.replying, []
        for episode in replying:
            if episode.rollout.error:
                continue
            if episode.reply.done():
                self.take_reply(episode, version)
            else:
                self.replying.append(episode)
        ended, self.ended = self.ended, []
        for rollout in ended:
            rollout.last_version = version
        return ended

    def begin_turn(self, episode: Episode, version: int) -> None:
        rollout, turn, tokens = episode.rollout, len(episode.turns), episode.tokens()
        room = self.config.max_episode_tokens - len(tokens)
        most = min(room, rollout.sampling["max_tokens"])
        sampling = rollout.sampling | {"n": 1, "max_tokens": most}
        if "seed" in sampling:
            seeds = np.random.SeedSequence((sampling["seed"], episode.number, turn))
            sampling["seed"] = int(seeds.generate_state(1)[0])
        request = f"{rollout.request}.{episode.number}.{turn}"
        self.engine.add(request, tokens, version, **sampling)
        self.generating[request] = episode

    def end_turn(self, episode: Episode, completion) -> None:
        """Take a turn of the model, and ask for the reply to it."""
        episode.parts.append(completion_arrays(completion, self.final_token))
        (text,), (has_ended,) = decode(self.tokenizer, [completion])
        episode.turns.append(text)
        if has_ended:
            episode.reply = self.scorer.reply(episode.rollout.query, episode.turns)
            self.replying.append(episode)
        else:
            self.end(episode, False)

    def take_reply(self, episode: Episode, version: int) -> None:
        """Append a reply, and begin the next turn, if there is to be one."""
        rollout, last_token = episode.rollout, int(episode.parts[-1][0][-1])
        if error := episode.reply.exception():  # the group is dropped
            rollout.error = error
            del self.unfinished[rollout.request]
            self.ended.append(rollout)
            return
        reply = episode.reply.result()
        if reply is None or len(episode.turns) == self.config.max_turns:
            self.end(episode, reply is None)
            return
        tokens = encode_reply(self.tokenizer, rollout.query.prompt, reply, last_token)
        if len(episode.tokens()) + len(tokens) >= self.config.max_episode_tokens:
            self.end(episode, False)
            return
        nowhere = np.zeros(len(tokens), bool)
        no_logprobs = np.zeros(len(tokens), np.float32)
        episode.parts.append((np.array(tokens, np.int32), no_logprobs, nowhere, nowhere))
        self.begin_turn(episode, version)

    def end(self, episode: Episode, is_finished: bool) -> None:
        """Give an episode to its rollout. is_finished: it ended by itself, not by a limit."""
        rollout, i = episode.rollout, episode.number
        rollout.texts[i], rollout.finished[i] = episode.turns, is_finished
        rollout.arrays[i] = tuple(map(np.concatenate, zip(*episode.parts)))
        self.unfinished[rollout.request] -= 1
        if not self.unfinished[rollout.request]:
            del self.unfinished[rollout.request]
            self.ended.append(rollout)
