"""TL;DR and red-teaming in miniature, and the example tasks.

These are whole runs on the real vLLM, with no GPU and no download.
"""

import json

import numpy as np
import pytest
from conftest import ROOT, read, steps_of, tba
from test_runs import OUTPUTS

from models.hub import find_model
from tasks import load_task


@pytest.mark.runs
@pytest.mark.parametrize(
    "task, metrics",
    [
        ("tldr", {"win_rate", "perplexity", "reward"}),
        ("redteam", {"toxic_share", "diversity", "reward"}),
    ],
)
def test_a_tiny_run_raises_the_reward_and_prints_the_metrics_of_the_task(task, metrics, tmp_path):
    run_dir = tmp_path / "run"
    # On-policy: how stale 60 free-running steps are, and so what they learn, is the machine's.
    result = tba(task, "--tiny", "--steps", 60, "--synchronous", "--output_dir", run_dir)
    assert result.returncode == 0, result.stderr
    assert all((run_dir / name).exists() for name in OUTPUTS)
    lines = read(run_dir, "metrics.jsonl")
    base = next(line["reward"] for line in lines if "loss" not in line and "reward" in line)
    last = lines[-1]["final_reward"]
    assert last > base + 0.5
    final = lines[-1]
    names = {f"final_{name}" for name in metrics}
    names |= {f"{name}_interval" for name in names}
    assert final.keys() == names | {"step", "base_model"}
    assert all(f"final {name}: {final[f'final_{name}']:.2f} (" in result.stdout for name in metrics)
    # In red-teaming vLLM masks an early end, so that there is a mismatch.
    assert steps_of(run_dir)[-1]["mismatch"] < 1e-4 or task == "redteam"


def test_the_example_with_a_regular_expression():
    example = ROOT / "examples" / "iso_dates.py"
    task = load_task(str(example))
    query = task.queries("train")[0]
    assert query.prompt.endswith("2 January 1980 = ") and query.answer == "1980-01-02"
    responses = ["1980-01-02", " 1980-01-03.", "January"]
    assert task.score([query] * 3, responses, [True] * 3) == [1.0, 0.2, 0.0]
    assert not {q.id for q in task.queries("train")} & {q.id for q in task.queries("test")}


@pytest.mark.runs
def test_the_example_is_evaluated_from_the_command_line(tied_model):
    example = ROOT / "examples" / "iso_dates.py"
    flags = ["--model", tied_model, "--max_response_tokens", 3]  # three bytes are no date
    result = tba(example, "--eval_only", *flags)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["metrics"]["reward"] == [0.0, 0.0, 0.0]


def test_the_example_with_a_model():
    classifier = load_task("redteam", tiny=True).classifier
    example = ROOT / "examples" / "kind_replies.py"
    task = load_task(str(example), classifier=classifier, label="polite")
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
    for options in ({}, {"tiny": True}):
        assert find_model("--model", load_task(task, **options).base_model())


def test_a_victim_is_asked_in_slices_and_answers_as_often_as_it_should():
    task = load_task("redteam", tiny=True)
    task.load()
    toxicity = task.toxicity([" Fold the red whistle twice", " Fold the red boat twice"] * 50)
    assert toxicity.shape == (100, 5)
    # Prompts with the weak spot and without it alternate.
    assert np.median(toxicity[::2]) > 0.9
    assert np.median(toxicity[1::2]) < 0.1
