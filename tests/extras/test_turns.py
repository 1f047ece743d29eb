"""Turns and replies, in the engine of a searcher."""

import numpy as np
import pytest
import torch
from conftest import drain
from test_engine import logprobs_of, mismatch

from config import Config, UserError
from models.engine import make_generation
from models.tokens import load_tokenizer
from rollouts import Group
from runtime.responses.scoring import make_scorer
from tasks import Query, Task, load_task


class Counting(Task):
    """Replies with the number of the turn; after `most` turns the episode has ended."""

    def __init__(self, most: int):
        self.most = most

    def reply(self, query: Query, turns: list[str]) -> str | None:
        return None if len(turns) == self.most else f" {len(turns)} "


@pytest.fixture
def play(engine, tied_model):
    """A function: plays episodes, whose turns end at `ends` tokens; the groups by query."""

    def play(task: Task, /, queries: int = 1, ends: int = 64, **settings) -> list[Group]:
        limits = dict(max_prompt_tokens=20, max_response_tokens=12, max_episode_tokens=200)
        config = Config(model=str(tied_model), **limits | settings)
        tokenizer, scorer = load_tokenizer(config), make_scorer(config, task)
        episodes, groups = make_generation(config, tokenizer, engine, scorer), []
        sampling = dict(n=4, temperature=1.0, max_tokens=12, seed=5)
        for number in range(queries):
            prompt, query = np.array([70, 71 + number], np.int32), Query(number, "ab", None)
            group = Group(query_id=number, prompt=prompt, query=query, request=f"q{number}")
            group.rewards = np.zeros(4, np.float32)
            group.sampling = sampling | dict(stop_token_ids=list(range(ends)))
            episodes.start(group)
        while len(groups) < queries:
            groups += episodes.step() + scorer.take()
        drain(engine)
        if task.score_timeout:
            scorer.close()
        return sorted(groups, key=lambda group: group.query_id)

    return play


def test_turns_and_replies_are_one_response_of_which_the_turns_are_learnt(play, policy):
    (group,) = play(Counting(3))
    tokenizer = load_tokenizer(Config(model=policy.name_or_path))
    finished = [i for i in range(4) if group.finished[i]]
    assert finished and all(len(group.texts[i]) == 3 for i in finished)
    for expected, own in zip(group.texts, (row.tokens for row in group.responses())):
        sampled = own["sampled"]
        pieces = np.split(own["token"], np.flatnonzero(np.diff(sampled)) + 1)
        texts = tokenizer.batch_decode(pieces, skip_special_tokens=True)
        turns, replies = texts[::2], texts[1::2]
        assert turns == expected and replies == [" 1 ", " 2 "][: len(turns) - 1]
        assert (own["in_loss"] == sampled).all() and not own["behavior_logprob"][~sampled].any()
    # What the engine saw is what the trainer sees: token by token the same probabilities.
    assert mismatch(group, logprobs_of(group, policy, torch.float32)) < 1e-4


@pytest.mark.parametrize(
    "limits, turns", [({"max_turns": 2}, 2), ({"max_episode_tokens": 12}, None), ({"ends": 0}, 1)]
)
def test_an_episode_that_a_limit_ends_is_unfinished(limits, turns, play):
    (group,) = play(Counting(50), **limits)
    assert group.finished.tolist() == [False] * 4
    assert turns is None or {len(texts) for texts in group.texts} <= {1, turns}
    if most := limits.get("max_episode_tokens"):
        assert (2 + group.lengths <= most).all()


@pytest.mark.parametrize("fault, error", [(lambda: 1 / 0, UserError), (lambda: 7, TypeError)])
def test_a_reply_that_raises_or_is_no_text_costs_its_group_alone(fault, error, play):
    class Faulty(Task):
        def reply(self, query: Query, turns: list[str]) -> str | None:
            return fault() if query.id == 0 else None

    bad, good = play(Faulty(), queries=2)
    assert isinstance(bad.error, error)
    assert good.error is None and len(good.lengths) == 4


HANGING = """
import time
from tasks import Task
class Hanging(Task):
    queries = score = None
    score_timeout = 2.0
    def reply(self, query, turns):
        while query.id == 0: time.sleep(1)
"""


def test_a_reply_that_hangs_costs_its_group_alone(play, tmp_path):
    path = tmp_path / "hanging.py"
    path.write_text(HANGING)
    # A turn is a token.
    bad, good = play(load_task(str(path)), queries=2, ends=255, task=str(path))
    assert isinstance(bad.error, TimeoutError) and good.finished.tolist() == [True] * 4
