"""Alarms: what is wrong with a run is said once, with what to do about it."""

from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, flags, make_group, read, tba

from config import Config
from launch.display import first_look
from launch.display.alarms import NOTHING_NEW_SECONDS, WINDOW, Alarms
from runtime.record.lines import Lines
from runtime.record.metrics import describe
from runtime.transport.status import StatusTable

HEALTHY = dict(mismatch=1e-6, equal_rewards=0.5, reward=0.4, ess_responses=0.6, finished=0.9)


def raised(run_dir: Path, steps: list[dict], **settings) -> list[str]:
    """What is said of a run with these metrics, a step a second that brings responses."""
    run_dir.mkdir(exist_ok=True)
    watching = Alarms(str(run_dir), Config(**dict(task="arithmetic", dtype="float32") | settings))
    lines = [{"step": i, "seconds": i, "received": 8 * i} | line for i, line in enumerate(steps, 1)]
    return [text for line in lines for text in watching.observe(line)]


BF16, LONG = {"dtype": "bfloat16"}, int(NOTHING_NEW_SECONDS) + 3
ODD = {"equal_rewards": 1.0, "ess_responses": 0.004, "finished": 0.0}
WATCHED = [  # what differs from HEALTHY in each step, settings, whether there is an alarm
    (([ODD] + [{}] * (WINDOW - 1)) * 5, {}, False),  # one odd batch among good ones
    # Rewards are equal because they are the best, or not.
    *[([{"equal_rewards": 1.0, "reward": reward}] * WINDOW, {}, False) for reward in (1.0, 0.96)],
    *[([{"equal_rewards": 1.0, "reward": reward}] * WINDOW, {}, True) for reward in (0.5, 7.0)],
    ([{"mismatch": 0.05}], {}, True),
    ([{"mismatch": 0.05}], BF16, False),
    ([{"mismatch": 0.2}], BF16, True),
    ([{"mismatch": 0.05}], {"task": "redteam"}, False),  # vLLM masks an early end there
    ([{}] * 8 + [{"received": 64}] * LONG, {}, True),  # the buffer gets nothing new
    ([{"received": 0}] * LONG, {}, False),  # there is no buffer
]


@pytest.mark.parametrize("changed, settings, is_alarm", WATCHED)
def test_an_alarm_is_raised_where_something_is_wrong_alone(changed, settings, is_alarm, tmp_path):
    steps = [HEALTHY | figures for figures in changed]
    assert len(raised(tmp_path, steps, **settings)) == is_alarm


@pytest.mark.parametrize(
    "name, figures, says",
    [
        ("mismatch", {"mismatch": 2e-4}, "differ by 0.0002 nats a token"),
        ("nothing new", {"received": 64}, "the buffer got nothing new for"),
        ("equal rewards", {"equal_rewards": 0.96}, "in 96% of the groups all rewards are equal"),
        ("effective sample size", {"ess_responses": 0.008}, "is 0.80%"),
        ("unfinished", {"finished": 0.0}, "no response ends before --max_response_tokens"),
    ],
)
def test_each_alarm_is_raised_once_and_not_again_by_a_resumed_run(name, figures, says, tmp_path):
    steps = [HEALTHY] * 30 + [HEALTHY | figures] * 130
    (text,) = raised(tmp_path, steps)
    assert says in text and "--" in text, "a flag that may help"
    assert raised(tmp_path, steps) == [], "as a resumed run does"
    (line,) = read(tmp_path, "alarms.jsonl")
    assert line["name"] == name and line["text"] == text and line["step"] > 30


def test_groups_whose_rewards_are_all_equal_are_counted():
    rewards = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0], [0.5, 0.5, 0.5]], np.float32)
    groups = [make_group(0, 0, [1] * 3, [1] * 3, rewards=row) for row in rewards]
    assert describe(groups)["equal_rewards"] == 0.75


WRONG = "equal rewards do not say which response is better"
FIRST = [
    ({}, 0, []),
    ({"unseen": ["<think>", "</think>"]}, 0, ["see special tokens in the responses, <think>, "]),
    ({"equal_rewards": 1.0}, 0, [WRONG]),
    ({"equal_rewards": 1.0, "reward": 1.0}, 0, []),
    ({"equal_rewards": 1.0, "reward": 0.0}, 0, [WRONG]),
    ({"finished": 0.75, "turns": 3}, 0, ["25% of the first responses were cut off by --max_turns"]),
    ({}, 3, ["prompts left out, over --max_prompt_tokens"]),
    ({"extracted": None}, 0, ["an answer in none of 3 responses: see extract()"]),
]


@pytest.mark.parametrize("figures, left_out, says", FIRST)
def test_before_the_first_step_a_user_is_told_what_to_look_at(
    figures, left_out, says, monkeypatch, tmp_path
):
    figures = dict(equal_rewards=0.25, reward=0.4, finished=1.0) | figures
    has_turns, extracted = "turns" in figures, figures.pop("extracted", "46")
    for name, part in dict(find_unseen=figures.pop("unseen", []), describe=figures).items():
        monkeypatch.setattr(first_look, name, lambda *_, part=part: part)
    limits = dict(max_episode_tokens=600 if has_turns else None, initial_responses=12)
    config = Config(task="arithmetic", output_dir=str(tmp_path), **limits)
    status, said = StatusTable(["trainer", "searcher 0"]), []
    status.set("searcher 0", "long_prompts", left_out)
    wrong = dict(prompt="12+34=", answer="46", response="4" * 999, extracted=None, reward=0.0)
    right = wrong | dict(response="46.", extracted=extracted, reward=1.0)
    Lines(tmp_path / "samples.jsonl").write(wrong, right, wrong)
    look = first_look.FirstLook(config, status, said.append, is_wanted=True)
    for count in range(1, 15):
        look.take(make_group(0, 0, [1], [7]))
        look.say_if_due()
        assert bool(said) == (count >= 12)
    first, *example = said[:4]
    equal = "reward {reward:.3g}; all rewards equal in {equal_rewards:.0%} of them"
    rewards = equal.format(**figures) if figures["reward"] else "no response was right"
    assert first == f"first 12 groups: {rewards}"
    answers = f"  reward 1, extracted {extracted!r}, wanted '46'"
    assert example == ["  prompt: '12+34='", "  response: '46.'", answers]
    assert len(said[4:]) == len(says) and all(text in line for text, line in zip(says, said[4:]))


@pytest.mark.runs
def test_a_run_whose_responses_are_all_cut_off_says_so_and_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    settings = flags(max_response_tokens=1, steps=60, output_dir=run_dir)
    result = tba("arithmetic", *SMALL, *settings)
    before = result.stdout.split("step 1/60")[0]
    assert "no response was right" in before
    assert "100% of the first responses were cut off by --max_response_tokens" in before
    lines = read(run_dir, "alarms.jsonl")
    assert {line["name"] for line in lines} == {"unfinished", "equal rewards"}
    for line in lines:
        assert f"warning: {line['text']}\n" in result.stdout
