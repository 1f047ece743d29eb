"""Responses of several turns: the model acts, the environment (Task.reply) answers, it acts again.

An episode is one response: its tokens are those of the turns and of the replies between them. What
was sampled is never decoded and encoded again. A reply is no choice of the policy, so its tokens
are in no loss: where the same turns give the same reply, the environment's probabilities are 1, and
trajectory balance keeps its fixed point whoever played.
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
    """One of the responses of a rollout, while it is played."""

    rollout: Rollout
    number: int  # among them
    turns: list[str] = field(default_factory=list)  # of the model
    tokens: list[int] = field(default_factory=list)  # of turns and replies
    logprobs: list[float] = field(default_factory=list)  # of these when they were sampled, or 0
    sampled: list[bool] = field(default_factory=list)
    reply: Future | None = None  # to the latest turn

    def append(self, tokens: list[int], logprobs: list[float], is_sampled: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.sampled += [is_sampled] * len(tokens)

    def __len__(self) -> int:
        return len(self.rollout.prompt) + len(self.tokens)


class Episodes(Generation):
    """Plays the episodes of rollouts. Each turn is a request, which joins the others."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.playing: dict[str, Episode] = {}  # a turn in the engine, by request
        self.replying: list[Episode] = []  # it is the environment's turn
        self.generated: list[Rollout] = []  # in this step

    @property
    def responses(self) -> int:
        return self.engine.rows + len(self.replying)

    def start(self, rollout: Rollout) -> None:
        size = rollout.sampling["n"]
        rollout.texts, rollout.finished, rollout.arrays = [[None] * size for _ in range(3)]
        for number in range(size):
            self.begin_turn(Episode(rollout, number), rollout.version)

    def step(self, version: int) -> list[Rollout]:
        self.generated = []
        if self.engine.rows:
            for output in self.engine.step():
                self.end_turn(self.playing.pop(output.request_id), output.outputs[0])
        else:
            time.sleep(POLL_SECONDS)
        replying, self.replying = self.replying, []
        for episode in replying:
            if episode.reply.done():
                self.take_reply(episode, version)
            else:
                self.replying.append(episode)
        for rollout in self.generated:
            rollout.last_version = version
        return self.generated

    def begin_turn(self, episode: Episode, version: int) -> None:
        rollout, turn = episode.rollout, len(episode.turns)
        room = self.config.max_episode_tokens - len(episode)
        sampling = rollout.sampling | {"n": 1}
        sampling["max_tokens"] = min(room, sampling["max_tokens"])
        if "seed" in sampling:
            seeds = np.random.SeedSequence((sampling["seed"], episode.number, turn))
            sampling["seed"] = int(seeds.generate_state(1)[0])
        request = f"{rollout.request}.{episode.number}.{turn}"
        self.engine.add(request, rollout.prompt + episode.tokens, version, **sampling)
        self.playing[request] = episode

    def end_turn(self, episode: Episode, completion) -> None:
        """Take a turn of the model, and ask for the reply to it."""
        if episode.rollout.error:  # of another of its episodes: the group is dropped
            return
        tokens, logprobs, *_ = completion_arrays(completion, final_token=None)
        episode.append(tokens.tolist(), logprobs.tolist(), is_sampled=True)
        (text,), (has_ended,) = decode(self.tokenizer, [completion])
        episode.turns.append(text)
        if has_ended:
            episode.reply = self.scorer.reply(episode.rollout.query, episode.turns)
            self.replying.append(episode)
        else:
            self.end(episode, is_finished=False)

    def take_reply(self, episode: Episode, version: int) -> None:
        """Append a reply, and begin the next turn if there is to be one."""
        rollout = episode.rollout
        if rollout.error:
            return
        if error := episode.reply.exception():
            rollout.error = error
            self.generated.append(rollout)
            return
        if (reply := episode.reply.result()) is None:
            self.end(episode, is_finished=True)
            return
        tokens = encode_reply(self.tokenizer, rollout.query.prompt, reply, episode.tokens[-1])
        room = self.config.max_episode_tokens - len(episode) - len(tokens)
        if room <= 0 or len(episode.turns) == self.config.max_turns:
            self.end(episode, is_finished=False)
            return
        episode.append(tokens, [0.0] * len(tokens), is_sampled=False)
        self.begin_turn(episode, version)

    def end(self, episode: Episode, is_finished: bool) -> None:
        """Give an episode to its rollout. is_finished: reply() ended it, and no limit."""
        rollout, i, sampled = episode.rollout, episode.number, np.array(episode.sampled)
        rollout.texts[i], rollout.finished[i] = episode.turns, is_finished
        arrays = np.array(episode.tokens, np.int32), np.array(episode.logprobs, np.float32)
        rollout.arrays[i] = *arrays, sampled, sampled
        if all(arrays is not None for arrays in rollout.arrays):
            self.generated.append(rollout)
