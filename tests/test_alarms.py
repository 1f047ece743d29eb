"""Alarms: what is wrong with a run is said once, with what to do about it."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, flags, make_group, read, tba

from config import Config
from runtime.record.alarms import NOTHING_NEW_SECONDS, WINDOW, Alarms, first_look
from runtime.record.metrics import describe
from runtime.record.report import Report
from runtime.transport.board import Board

HEALTHY = dict(mismatch=1e-6, equal_rewards=0.5, reward=0.4, ess_responses=0.6, finished=0.9)


def raised(run_dir: Path, steps: list[dict], **settings) -> list[str]:
    """What is said of a run with these metrics, a step a second that brings responses."""
    run_dir.mkdir(exist_ok=True)
    watching = Alarms(str(run_dir), Config(**dict(task="arithmetic", dtype="float32") | settings))
    lines = [{"step": i, "seconds": i, "received": 8 * i} | line for i, line in enumerate(steps, 1)]
    return [text for line in lines for text in watching.observe(line)]


def names(run_dir: Path) -> list[str]:
    return [line["name"] for line in read(run_dir, "alarms.jsonl")]


def test_neither_a_healthy_run_nor_one_odd_batch_among_good_ones_raises_an_alarm(tmp_path):
    odd = HEALTHY | {"equal_rewards": 1.0, "ess_responses": 0.004, "finished": 0.0}
    assert raised(tmp_path, [HEALTHY] * 100) == []
    assert raised(tmp_path, ([odd] + [HEALTHY] * (WINDOW - 1)) * 5) == []
    assert not (tmp_path / "alarms.jsonl").read_text()


@pytest.mark.parametrize(
    "name, figures, says",
    [
        ("mismatch", {"mismatch": 2e-4}, "differ by 0.0002 nats a token"),
        ("equal rewards", {"equal_rewards": 0.96}, "in 96% of the groups all rewards are equal"),
        ("effective sample size", {"ess_responses": 0.008}, "is 0.80%"),
        ("unfinished", {"finished": 0.0}, "no response ends before --max_response_tokens"),
    ],
)
def test_each_alarm_is_raised_once_with_what_to_do_and_is_logged(
    name, figures, says, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING):
        (text,) = raised(tmp_path, [HEALTHY] * 30 + [HEALTHY | figures] * 100)
    assert says in text and "--" in text, "a flag that may help"
    (line,) = read(tmp_path, "alarms.jsonl")
    assert line["name"] == name and line["text"] == text and line["step"] > 30
    assert text in caplog.text


def test_a_mismatch_that_is_normal_in_bf16_or_where_vllm_masks_an_early_end_is_no_alarm(tmp_path):
    lines = [HEALTHY | {"mismatch": 0.05}]
    assert not raised(tmp_path, lines, dtype="bfloat16")
    assert not raised(tmp_path, lines, task="redteam")
    assert raised(tmp_path, lines)
    assert raised(tmp_path / "bf16", [HEALTHY | {"mismatch": 0.2}], dtype="bfloat16")


def test_a_buffer_that_gets_nothing_new_is_an_alarm_but_not_where_there_is_none(tmp_path):
    seconds = int(NOTHING_NEW_SECONDS)
    stalled = [HEALTHY | {"received": 64}] * (seconds + 3)
    (text,) = raised(tmp_path, [HEALTHY] * 8 + stalled)
    assert "the buffer got nothing new for" in text and names(tmp_path) == ["nothing new"]
    lockstep = [HEALTHY | {"received": 0}] * (seconds + 3)
    assert raised(tmp_path / "lockstep", lockstep) == []


def test_a_resumed_run_does_not_say_it_again(tmp_path):
    steps = [HEALTHY | {"finished": 0.0}] * WINDOW
    assert len(raised(tmp_path, steps)) == 1 and raised(tmp_path, steps) == []


def test_the_terminal_shows_an_alarm_as_a_warning(tmp_path, capsys):
    config, board = Config(task="arithmetic", steps=9), Board(["trainer"])
    report = Report(str(tmp_path), config, board, "accuracy", "")
    report.step(HEALTHY | {"step": 1, "seconds": 1.0, "received": 8, "mismatch": 1.0})
    assert capsys.readouterr().out.startswith("warning: vLLM and the trainer differ by 1 nats")


def test_groups_whose_rewards_are_all_equal_are_counted():
    rewards = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0], [0.5, 0.5, 0.5]], np.float32)
    groups = [make_group(0, 0, [1] * 3, [1] * 3, rewards=row) for row in rewards]
    assert describe(groups)["equal_rewards"] == 0.75


@pytest.mark.parametrize(
    "figures, left_out, says",
    [
        ({"equal_rewards": 0.25, "finished": 1.0}, 0, []),
        ({"equal_rewards": 1.0, "finished": 1.0}, 0, ["not say which response is better"]),
        ({"finished": 0.75}, 0, ["25% of the first responses were cut off by --max_response_tok"]),
        ({"finished": 1.0}, 3, ["prompts left out, over --max_prompt_tokens"]),
        ({"equal_rewards": 1.0, "finished": 0.0}, 1, ["is better", "100% of", "prompts left out"]),
    ],
)
def test_before_the_first_step_it_is_said_what_a_user_would_ask(figures, left_out, says):
    figures = {"equal_rewards": 0.5, "reward": 0.4} | figures
    first, *lines = first_look(Config(), figures, 12, left_out)
    equal = f"{figures['equal_rewards']:.0%}"
    assert first == f"first 12 groups: reward 0.4; all rewards equal in {equal} of them"
    assert len(lines) == len(says) and all(text in line for text, line in zip(says, lines))


@pytest.mark.runs
def test_a_run_whose_responses_are_all_cut_off_says_so_and_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    settings = flags(max_response_tokens=1, steps=60, output_dir=run_dir)
    result = tba("arithmetic", *SMALL, *settings)
    assert result.returncode == 0, result.stderr
    assert set(names(run_dir)) == {"unfinished", "equal rewards"}
    before = result.stdout.split("step 1/60")[0]
    assert "all rewards equal in 100% of them" in before and "100% of the first responses" in before
    for line in read(run_dir, "alarms.jsonl"):
        assert f"warning: {line['text']}\n" in result.stdout
        assert line["text"] in (run_dir / "logs" / "trainer.log").read_text()
    assert json.loads((run_dir / "config.json").read_text())["steps"] == 60
    assert WINDOW < 60
