"""The code of docs/fork.md, and the README's objective: it works as it stands there."""

import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, flags, make_group, python, read, tba
from test_loss import make_example, to_inputs, value_and_gradient

import buffer
from learner import find_objective
from loss import trajectory_balance
from tasks import load_task
from tba import main

PAGES = "".join((ROOT / page).read_text() for page in ("README.md", "docs/fork.md"))
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGES, re.DOTALL))


@pytest.fixture
def paste(tmp_path):
    """Paste a file of the pages somewhere. Returns its path."""

    def paste(name: str) -> Path:
        (tmp_path / name).write_text(FILES[name])
        return tmp_path / name

    return paste


def test_its_task_scores_what_its_docstring_says(paste):
    task = load_task(str(paste("parity.py")))
    train, test = (task.queries(split) for split in ("train", "test"))
    assert len(train) == 900 and {query.id for query in train}.isdisjoint(q.id for q in test)
    assert train[1].prompt == "Is 2 even? "
    assert task.score(train[:2], ["yes", " yes "], [True, True]) == [0.0, 1.0]


def test_its_episode_ends_at_the_goal_and_is_worth_its_length(paste):
    task = load_task(str(paste("climb.py")))
    query = next(query for query in task.queries("train") if query.answer == 5)
    assert task.reply(query, ["*2"]) == " 2 to 5: "
    assert task.reply(query, ["*2", " *2", "+1"]) is None
    responses = ["*2", "*2", "+1"], ["*2", "*2", "*2"]
    assert task.score([query] * 2, responses, [True, True]) == [1 / 3, 0.0]


@pytest.mark.parametrize("scale, is_small", [(1.0, True), (100.0, False)])
def test_its_objective_is_half_of_trajectory_balance_up_to_residuals_of_five_nats(
    scale, is_small, paste
):
    objective = find_objective(str(paste("huber.py")))
    inputs = to_inputs(make_example("mixed"))
    inputs.logprobs, inputs.ref_logprobs = inputs.logprobs * scale, inputs.ref_logprobs * scale
    inputs.rewards = inputs.rewards * scale
    _, huber = value_and_gradient(objective, inputs)
    _, whole = value_and_gradient(trajectory_balance, inputs)
    assert huber.sign().equal(whole.sign()) and huber.abs().max() > 0
    assert torch.allclose(huber, whole / 2) == is_small
    log_zs = {float(loss(inputs)[1]["log_z"]) for loss in (objective, trajectory_balance)}
    assert len(log_zs) == 1


@pytest.mark.runs
def test_the_tests_of_every_objective_pass_its_own_and_find_one_that_mixes_queries(paste):
    file = paste("huber.py")
    command = ["-m", "pytest", "-q", "tests/extras/test_objectives.py", "-k", "huber"]
    assert " passed" in python(*command, "--loss", file).stdout
    of_queries = ".view(-1, x.group_size).mean(dim=1)"
    assert of_queries in FILES["huber.py"]
    of_all = ".mean().expand(len(x.rewards) // x.group_size)"
    file.write_text(FILES["huber.py"].replace(of_queries, of_all))
    failed = python(*command, "--loss", file, code=1)
    assert "test_queries_one_by_one_average_to_all_queries_at_once" in failed.stdout


def test_its_sampling_rule_replays_the_newest():
    names = vars(buffer).copy()
    exec(FILES["buffer.py"], names)
    replay = buffer.ReplayBuffer(100, names["newest"], seed=0)
    for version in range(4):
        replay.add([make_group(0, version, [1, 1], [version, 10 + version])], step=version)
    for count, versions in (2, [3, 3]), (3, [3, 3, 2]), (10, [3, 3, 2, 2, 1, 1, 0, 0, 3, 3]):
        assert [row.version for row in replay.sample(1, count, 0.0)] == versions
    replay.rule = lambda *_: [0]
    with pytest.raises(ValueError, match="rule chose 1 responses instead of 2"):
        replay.sample(1, 2, 0.0)


@pytest.mark.runs
@pytest.mark.parametrize(
    "name, own",
    [
        ("parity.py", {}),
        ("climb.py", dict(max_turns=3, max_episode_tokens=60, max_response_tokens=4)),
    ],
)
def test_its_tasks_train(name, own, paste, tied_model, tmp_path):
    (words,) = re.findall(r"^\*\*Test:\*\* the command above with `(.*?)`", PAGES, re.MULTILINE)
    run_dir, settings = tmp_path / "run", dict(max_prompt_tokens=16) | own
    command = flags(model=tied_model, output_dir=run_dir, loss=paste("huber.py"), **settings)
    tba(paste(name), *words.split(), *command)
    assert "final_score" in read(run_dir, "metrics.jsonl")[-1]


def flags_of(name: str) -> list[str]:
    """The flags of the command of the pages that trains on this file, but for --model."""
    command = rf"^    python tba.py {name} (.*)--model DIR_OR_HUB_ID$"
    (line,) = re.findall(command, PAGES, re.MULTILINE)
    return line.split()


def test_its_command_is_accepted(paste, tied_model, capsys):
    short = flags(max_prompt_tokens=32, max_response_tokens=16, model=tied_model)
    assert main([str(paste("parity.py")), *flags_of("parity.py"), *short, "--plan"]) == 0
    assert "trainer" in capsys.readouterr().out
