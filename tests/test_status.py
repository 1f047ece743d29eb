"""The status table: which of its rows are searchers, how they fail and how they fall silent."""

import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import wait_for

from config import Config
from runtime.record.metrics import RATE_WINDOW, StepMetrics, rate_of
from runtime.record.report import Report
from runtime.record.timeline import Timeline
from runtime.responses.scoring import FailureLimit
from runtime.transport import status as module
from runtime.transport.status import StatusTable
from runtime.waiting import Wait, Waits
from weights import SharedWeights


def test_further_processes_of_the_trainer_are_no_searchers_and_nothing_is_saved_of_them():
    status = StatusTable(["trainer", "searcher 0", "searcher 1", "trainer 1"])
    for name, cursor in zip(status.names, (100, 1, 2, 100)):
        status.set(name, "cursor", cursor)
    assert status.searchers == ["searcher 0", "searcher 1"] and status.total("cursor") == 3
    alone = StatusTable(["trainer", "searcher 0", "searcher 1"])
    alone.load_state_dict(status.state_dict())
    assert [alone.get(name, "cursor") for name in alone.names] == [0, 1, 2]


def test_a_searcher_gives_up_when_most_of_its_latest_groups_have_no_scores_not_when_a_third_has():
    status, query = StatusTable(["searcher 0"]), SimpleNamespace(id=7)
    limit = FailureLimit(status, "searcher 0")
    good, bad = (SimpleNamespace(query=query, error=e) for e in (None, ValueError("no score")))
    for rollout in [bad, good, good] * 100:
        limit.count(rollout)
    assert status.get("searcher 0", "unscored_groups") == 100
    with pytest.raises(SystemExit):
        for _ in range(40):
            limit.count(bad)


def test_a_pause_of_who_watches_is_nobodys_silence_and_a_silence_is_found_all_the_same(monkeypatch):
    monkeypatch.setattr(module, "LONGEST_GAP", 0.1)
    status = StatusTable(["searcher 0"])
    status.mark_ready("searcher 0")
    for _ in range(2):
        assert not status.is_silent("searcher 0", 0.3)
        time.sleep(0.5)  # no look meanwhile
    wait_for(lambda: status.is_silent("searcher 0", 0.3), "the silence to be found")
    status.beat("searcher 0")
    assert not status.is_silent("searcher 0", 0.3)


def test_the_busy_share_of_a_searcher_whose_work_began_before_the_window_is_not_above_one(tmp_path):
    (tmp_path / "logs").mkdir()
    status = StatusTable(["trainer", "searcher 0"])
    timeline = Timeline(str(tmp_path), status, "searcher 0")
    weights = SharedWeights({"weight": (1,)}, torch.float32, readers=1)
    metrics = StepMetrics(weights, None, None, status)
    with timeline.span("score"):
        time.sleep(0.2)
        metrics.rates(waited=0.0)
    assert metrics.rates(waited=0.0)["searcher_busy"] == 1.0
    with timeline.span("wait"):
        time.sleep(0.2)
    assert metrics.rates(waited=0.0)["searcher_busy"] == pytest.approx(0.5, abs=0.2)


def test_the_first_wait_is_said_at_once_and_a_searcher_is_loading_alive_or_silent(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    status, config = StatusTable(["trainer", "searcher 0"]), Config()
    report, timeline = (
        Report(str(tmp_path), config, status),
        Timeline(str(tmp_path), status, "trainer"),
    )
    waits = Waits(config, status, report, timeline, is_interruptible=True)
    for _ in range(2):
        Wait(waits).goes_on("the first responses, 0 of 9")
    said = "waiting 0 s for the first responses, 0 of 9; searcher 0: loading …\n"
    assert capsys.readouterr().out == said
    status.mark_ready("searcher 0")
    assert status.health("searcher 0") == "alive"
    status.set("searcher 0", "beat", time.monotonic() - 12)
    assert status.health("searcher 0") == "silent for 12 s"
    status.set("searcher 0", "evaluating", 1)
    status.set("searcher 0", "scoring", 1)
    assert status.health("searcher 0") == "silent for 12 s, evaluating, in score()"


def test_a_rate_follows_the_latest_seconds_and_is_zero_at_first():
    assert rate_of(deque([(0.0, 1.0)]), RATE_WINDOW) == 0.0
    counts = {0.0: [0, 0], 100.0: [1, 1], 105.0: [30, 1], 111.0: [34, 1]}
    slow_then_fast = deque((time, np.array(count)) for time, count in counts.items())
    assert rate_of(slow_then_fast, RATE_WINDOW).tolist() == [3.0, 0.0]
