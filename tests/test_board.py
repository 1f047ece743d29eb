"""The board: which of its rows are the searchers', how they fail and how they fall silent."""

import time
from types import SimpleNamespace

import pytest
from conftest import wait_for

from runtime.responses.scoring import FailureLimit
from runtime.transport import board as module
from runtime.transport.board import Board


def test_further_processes_of_the_trainer_are_no_searchers_and_nothing_is_saved_of_them():
    board = Board(["trainer", "searcher 0", "searcher 1", "trainer 1"])
    for name, cursor in zip(board.names, (100, 1, 2, 100)):
        board.set(name, "cursor", cursor)
    assert board.searchers == ["searcher 0", "searcher 1"] and board.total("cursor") == 3
    alone = Board(["trainer", "searcher 0", "searcher 1"])
    alone.load_state_dict(board.state_dict())
    assert [alone.get(name, "cursor") for name in alone.names] == [0, 1, 2]


def test_a_searcher_gives_up_when_most_of_its_latest_groups_have_no_scores_not_when_a_third_has():
    board, query = Board(["searcher 0"]), SimpleNamespace(id=7)
    limit = FailureLimit(board, "searcher 0")
    good, bad = (SimpleNamespace(query=query, error=e) for e in (None, ValueError("no score")))
    for rollout in [bad, good, good] * 100:
        limit.count(rollout)
    assert board.get("searcher 0", "unscored_groups") == 100
    with pytest.raises(SystemExit):
        for _ in range(40):
            limit.count(bad)


def test_a_pause_of_who_watches_is_nobodys_silence_and_a_silence_is_found_all_the_same(monkeypatch):
    monkeypatch.setattr(module, "LONGEST_GAP", 0.1)
    board = Board(["searcher 0"])
    board.loaded("searcher 0")
    for _ in range(2):
        assert not board.is_silent("searcher 0", 0.3)
        time.sleep(0.5)  # no look meanwhile
    wait_for(lambda: board.is_silent("searcher 0", 0.3), "the silence to be found")
    board.beat("searcher 0")
    assert not board.is_silent("searcher 0", 0.3)
