"""TL;DR and red-teaming in miniature, and the examples of tasks of one's own: whole runs on the real vLLM, with no GPU and no download."""

import json

import numpy as np
import pytest
from conftest import ROOT, read, steps_of, tba
from test_runs import OUTPUTS

from tasks import load_task


@pytest.mark.faults  # not for faults but for its two minutes: make test keeps within ten
@pytest.mark.parametrize(
    "task, metrics",
    [
        ("tldr", {"win_rate", "perplexity", "reward"}),
        ("redteam", {"toxic_share", "diversity", "reward"}),
    ],
)
def test_a_tiny_run_raises_the_reward_and_prints_the_metrics_of_the_task(task, metrics, tmp_path):
    result = tba(task, "--tiny", "--steps", 60, "--output_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert all((tmp_path / "run" / name).exists() for name in OUTPUTS)
    base, last = (
        line["reward"]
        for line in read(tmp_path / "run", "metrics.jsonl")
        if "loss" not in line and "reward" in line
    )
    assert last > base + 0.5
    final = read(tmp_path / "run", "metrics.jsonl")[-1]
    assert {f"final_{name}" for name in metrics} == final.keys() - {"step"}
    assert all(f"final {name}: {final[f'final_{name}']:.2f} (" in result.stdout for name in metrics)
    assert (
        steps_of(tmp_path / "run")[-1]["mismatch"] < 1e-4 or task == "redteam"
    )  # there vLLM masks an early end


def test_the_example_with_a_regular_expression(tied_model, tmp_path):
    task = load_task(str(ROOT / "examples" / "iso_dates.py"))
    query = task.queries("train")[0]
    assert query.prompt.endswith("2 January 1980 = ") and query.answer == "1980-01-02"
    assert task.score([query] * 3, ["1980-01-02", " 1980-01-03.", "January"], [True] * 3) == [
        1.0,
        0.2,
        0.0,
    ]
    assert not {q.id for q in task.queries("train")} & {q.id for q in task.queries("test")}
    result = tba(
        ROOT / "examples" / "iso_dates.py",
        "--eval_only",
        "--json",
        "--model",
        tied_model,
        "--max_response_tokens",
        3,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["metrics"]["reward"] == [
        0.0,
        0.0,
        0.0,
    ]  # three bytes are no date


def test_the_example_with_a_model():
    classifier = load_task("redteam", tiny=True).classifier
    task = load_task(
        str(ROOT / "examples" / "kind_replies.py"), classifier=classifier, label="polite"
    )
    task.prepare()
    task.load()
    texts = ["Sure, the boat.", "Zork, the boat.", "Sure, the boat."]
    rewards = task.score(list(task.queries("train"))[:3], texts, [True, True, False])
    assert rewards[0] > 0.9 and rewards[1] < 0.1 and rewards[2] == 0.0


def test_examples_are_short():
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize("task", ["tldr", "redteam"])
def test_the_model_that_a_task_starts_from_is_a_hub_id_or_a_directory(task):
    from models.hub import find_model

    for options in ({}, {"tiny": True}):
        assert find_model("--model", load_task(task, **options).base_model())


def test_a_victim_is_asked_in_slices_and_answers_as_often_as_it_should():
    task = load_task("redteam", tiny=True)
    task.load()
    toxicity = task.toxicity([" Fold the red whistle twice", " Fold the red boat twice"] * 50)
    assert toxicity.shape == (100, 5)
    assert np.median(toxicity[::2]) > 0.9 and np.median(toxicity[1::2]) < 0.1, (
        "weak spot and none, in their order"
    )
