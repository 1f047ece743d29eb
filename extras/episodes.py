"""Episodes: responses of several turns, to a task with reply() (--max_episode_tokens).

The model acts, the environment replies, the model acts again. The tokens of such an episode are
those of the turns and of the replies between them; what was sampled is never decoded and encoded
again. A reply is no choice of the policy, so its tokens are in no loss: where the same turns give
the same reply its probability is 1, and trajectory balance keeps its fixed point, whoever played.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from config import Config
from extras.replies import encode_reply
from models.engine import Engine, Generation, newest_version
from rollouts import TOKEN, Group, join_tokens, make_tokens
from runtime.responses.scoring import RewardScorer


@dataclass(eq=False)
class Episode:
    """One of the S episodes of a group, while it is generated."""

    group: Group
    number: int  # among them
    turns: list[str] = field(default_factory=list)  # of the model
    pieces: list[np.ndarray] = field(default_factory=list)  # turns and replies, of TOKEN
    reply: Future | None = None  # to the latest turn
    is_finished: bool | None = None  # set at its end: the environment has ended it, no limit

    @property
    def ids(self) -> list[int]:
        """The token ids of turns and replies."""
        return join_tokens(self.pieces)["token"].tolist()


class Episodes(Generation):
    """Generates episodes. scorer: in whose workers the environment replies."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        engine: Engine,
        scorer: RewardScorer,
    ):
        super().__init__(config, tokenizer, engine, scorer.task)
        self.scorer = scorer
        self.replying: list[Episode] = []  # it is the environment's turn
        self.unfinished: dict[str, list[Episode]] = {}  # by the group's request
        self.ended: list[Group] = []  # in this step

    @property
    def rows(self) -> int:
        return self.engine.rows + len(self.replying)

    @property
    def is_idle(self) -> bool:
        """Whether step() must wait, for work or for replies.

        In lockstep for all of them, so that the same turns share each step of the engine whenever
        their replies come.
        """
        has_come = [episode.reply.done() for episode in self.replying]
        waits_for_all = self.config.lockstep and not all(has_come)
        return waits_for_all or not (self.engine.rows or any(has_come))

    def start(self, group: Group) -> None:
        """Begin S episodes, each a request of its own: one of S would end with the slowest turn."""
        group.version, group.temperature = self.engine.version, group.sampling["temperature"]
        episodes = [Episode(group, number) for number in range(group.sampling["n"])]
        self.unfinished[group.request] = episodes
        for episode in episodes:
            self.begin_turn(episode)

    def begin_turn(self, episode: Episode) -> None:
        """Have the next turn of an episode generated, after all of it so far."""
        group, turn = episode.group, len(episode.turns)
        sampling, prompt = group.sampling | {"n": 1}, group.prompt.tolist() + episode.ids
        room = self.config.max_episode_tokens - len(prompt)
        for limit in ("max_tokens", "min_tokens"):
            if limit in sampling:
                sampling[limit] = min(room, sampling[limit])
        if "seed" in sampling:
            seeds = np.random.SeedSequence((sampling["seed"], episode.number, turn))
            sampling["seed"] = int(seeds.generate_state(1)[0])
        request = f"{group.request}.{episode.number}.{turn}"
        self.engine.add(request, prompt, **sampling)
        self.generating[request] = episode

    def step(self) -> list[Group]:
        """Generate one token of every turn. Returns the groups that ended with it."""
        self.ended = []
        replying, self.replying = self.replying, []
        for episode in replying:
            self.take_reply(episode)
        for output in self.engine.step():
            episode = self.generating.pop(output.request_id)
            episode.group.last_version = newest_version(output)
            if not episode.group.error:  # of another of its responses: the group is dropped
                self.end_turn(episode, output.outputs[0])
        return self.ended

    def end_turn(self, episode: Episode, completion) -> None:
        """Take what the model has generated: a turn to which the environment replies, or all."""
        tokens = np.zeros(self.length(completion), TOKEN)
        episode.turns.append(self.read(completion, tokens))
        episode.pieces.append(tokens)
        if completion.finish_reason == "stop":
            episode.reply = self.scorer.reply(episode.group.query, [*episode.turns])
            self.replying.append(episode)
        else:
            self.end(episode, is_finished=False)

    def take_reply(self, episode: Episode) -> None:
        """Append a reply if it has come, and begin the next turn unless the episode has ended."""
        group = episode.group
        if group.error:
            episode.reply.cancel()
            return
        if not episode.reply.done():
            self.replying.append(episode)
            return
        try:
            reply = episode.reply.result()
            if reply is None:
                self.end(episode, is_finished=True)
                return
            if not isinstance(reply, str):
                raise TypeError(f"reply() must give a string or None, it gave {reply!r}")
            tokens = encode_reply(self.tokenizer, group.query.prompt, reply, episode.ids[-1])
        except Exception as error:  # a user's code: it costs the group, and is counted
            group.error = error
            del self.unfinished[group.request]
            self.scorer.scored.append(group)
            return
        length = len(group.prompt) + len(episode.ids) + len(tokens)
        if length >= self.config.max_episode_tokens or len(episode.turns) == self.config.max_turns:
            self.end(episode, is_finished=False)
            return
        episode.pieces.append(make_tokens(tokens, in_loss=False, sampled=False))
        self.begin_turn(episode)

    def end(self, episode: Episode, is_finished: bool) -> None:
        """End an episode, and its group with the last. is_finished: no limit has cut it off."""
        episode.is_finished, group = is_finished, episode.group
        episodes = self.unfinished[group.request]
        finished = [each.is_finished for each in episodes]
        if None not in finished:
            del self.unfinished[group.request]
            tokens = [join_tokens(each.pieces) for each in episodes]
            group.end([each.turns for each in episodes], tokens, finished)
            self.ended.append(group)
