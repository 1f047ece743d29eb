"""The board: which of its rows are the searchers', where the trainer has several processes."""

import time
from types import SimpleNamespace

import pytest
from conftest import flags, wait_for

from runtime.command_line import build_config
from runtime.processes.places import find_places
from runtime.responses.scoring import FailureLimit
from runtime.transport import board as module
from runtime.transport.board import Board


def make_board(**settings) -> Board:
    config = build_config(["arithmetic", *flags(**settings)])
    return Board([place.name for place in find_places(config, gpus=[])])


def test_further_processes_of_the_trainer_are_no_searchers():
    board = make_board(searchers=2, trainer_processes=2)
    assert board.searchers == ["searcher 0", "searcher 1"]
    for name in board.names:
        board.set(name, "tokens", 1 if name.startswith("searcher") else 100)
    assert board.total("tokens") == 2


def test_what_is_saved_of_searchers_is_taken_over_with_another_number_of_trainer_processes():
    board = make_board(trainer_processes=2)
    board.set("searcher 0", "cursor", 7)
    alone = make_board()
    alone.load_state_dict(board.state_dict())
    assert alone.get("searcher 0", "cursor") == 7


def test_a_searcher_gives_up_when_most_of_its_latest_groups_have_no_scores_not_when_a_third_has():
    board = make_board()
    limit, query = FailureLimit(board, "searcher 0"), SimpleNamespace(id=7)
    good, bad = (SimpleNamespace(query=query, error=e) for e in (None, ValueError("no score")))
    for rollout in [bad, good, good] * 100:
        limit.count(rollout)
    assert board.get("searcher 0", "unscored_groups") == 100
    with pytest.raises(SystemExit):
        for _ in range(40):
            limit.count(bad)


def test_a_pause_of_who_watches_is_nobodys_silence_and_a_silence_is_found_all_the_same(monkeypatch):
    monkeypatch.setattr(module, "LONGEST_GAP", 0.1)
    board = make_board()
    board.loaded("searcher 0")
    for _ in range(2):
        assert not board.is_silent("searcher 0", 0.3)
        time.sleep(0.5)  # no look meanwhile
    wait_for(lambda: board.is_silent("searcher 0", 0.3), "the silence to be found")
    board.beat("searcher 0")
    assert not board.is_silent("searcher 0", 0.3)
