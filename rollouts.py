"""The record of a search: a query's group of responses, from the draw of the query to the loss.

A searcher fills a Group step by step and sends it; the trainer's buffer cuts it into Responses, of
which a batch is made. The tokens of a group are one array of TOKEN, its responses end to end.

`in_loss` and `sampled` are both True for every token, with three exceptions:

    an end that was appended (Task.append_eos)      in_loss, not sampled
    an environment's reply (Task.reply)             neither
    end-of-sequence that is padding (pad_is_eos)    sampled, not in_loss
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

TOKEN = np.dtype(
    [
        ("token", np.int32),  # its id
        ("ref_logprob", np.float32),  # under the reference policy
        ("behavior_logprob", np.float32),  # under the policy that sampled it, as vLLM reports it
        ("in_loss", np.bool_),  # the objective sums its log-probability
        ("sampled", np.bool_),  # the policy chose it
    ]
)


def make_tokens(ids: Any, **fields: Any) -> np.ndarray:
    """Make (T,) of TOKEN: sampled, in the loss, with log-probabilities 0, but for `fields`.

    ids: (T,). fields: by the names of TOKEN's, one value for all or (T,) of them.
    """
    tokens = np.zeros(len(ids), TOKEN)
    for name, values in {"token": ids, "in_loss": True, "sampled": True, **fields}.items():
        tokens[name] = values
    return tokens


def join_tokens(parts: list[np.ndarray]) -> np.ndarray:
    """Join arrays of TOKEN end to end. As bytes: np.concatenate takes 20 times as long."""
    return np.frombuffer(bytearray().join(parts), TOKEN)


@dataclass(eq=False, kw_only=True)
class Group:
    """The S responses to one query. Comments say when a field is set; until then it is None."""

    query_id: int
    prompt: np.ndarray | None = None  # (P,) int32 token ids
    batch: int | None = None  # lockstep: the trainer step that the group is for
    # When the generation starts:
    version: int | None = None  # trainer step of the weights in the engine
    temperature: float | None = None  # that the responses are sampled at
    # When all responses have ended:
    last_version: int | None = None  # newest that sampled a token: weights may be loaded meanwhile
    lengths: np.ndarray | None = None  # (S,) int32 tokens per response, end-of-sequence included
    tokens: np.ndarray | None = None  # (sum of lengths,) TOKEN; ref_logprob is set last of all
    finished: np.ndarray | None = None  # (S,) bool, False where a limit cut the response off
    # When they are scored:
    rewards: np.ndarray | None = None  # (S,) float32
    # With ref_logprob: trainer step of the reference policy's weights, 0 until it is reset.
    reference_version: int = 0
    # The searcher's own: not sent, as answers may be large or of any kind, and texts are tokens.
    query: Any = None  # a tasks.Query
    request: str | None = None  # its name in the engine, which no other there has
    index: int | None = None  # in the order in which a share is drawn, all epochs counted
    visit: int | None = None  # how often the query was drawn before
    is_for_evaluation: bool = False
    sampling: dict | None = None  # as in vllm.SamplingParams
    texts: list[str] | list[list[str]] | None = None  # (S,); of an episode its turns
    error: Exception | None = None  # why there are no rewards

    OWN = frozenset("query request index visit is_for_evaluation sampling texts error".split())

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent."""
        return {name: value for name, value in vars(self).items() if name not in self.OWN}

    def end(self, texts: list, responses: list[np.ndarray], finished: list[bool]) -> None:
        """Take the S responses, once all have ended. responses: (T,) of TOKEN each."""
        self.texts, self.finished = texts, np.array(finished)
        self.lengths = np.array([len(tokens) for tokens in responses], np.int32)
        self.tokens = join_tokens(responses)

    def responses(self, step: int = 0) -> list["Response"]:
        """Return the S responses, whose tokens are views. step: at which they arrived."""
        same = dict(query_id=self.query_id, version=self.version, prompt=self.prompt)
        cut = np.split(self.tokens, np.cumsum(self.lengths)[:-1])
        return [
            Response(**same, tokens=tokens, reward=reward, received_step=step)
            for tokens, reward in zip(cut, self.rewards.tolist())
        ]


@dataclass(eq=False, slots=True, kw_only=True)
class Response:
    """One response with its prompt: what the buffer keeps and what a batch is made of."""

    query_id: int
    version: int  # as of its group
    prompt: np.ndarray  # (P,) int32
    tokens: np.ndarray  # (T,) TOKEN
    reward: float
    received_step: int = 0  # trainer step at which it arrived
