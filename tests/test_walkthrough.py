"""docs/walkthrough.md: its numbers are those of the code, and its commands work."""

import math
import re
import shlex

import numpy as np
import pytest
import torch
from conftest import ROOT

from loss import LossInputs, trajectory_balance
from tasks import Query
from tasks.arithmetic import FORGETS, Arithmetic, homework

PAGE = (ROOT / "docs" / "walkthrough.md").read_text()
ONE_QUERY = "2. One query, by hand"
BETA = 0.1  # the demo's


def section(title: str) -> str:
    """The page from this heading to the next."""
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return found


def rows_of(text: str) -> list[list[str]]:
    """The rows of the first table of a text, without its head."""
    lines = re.search(r"(?:^\|.*\n)+", text, re.M)[0].replace("−", "-").splitlines()[2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def balance(rewards, log_ref, log_pi) -> tuple[float, float]:
    """The loss and log Z by the code: responses of one token each, of one query."""
    column = {"ref_logprobs": log_ref, "logprobs": log_pi, "mask": np.ones(len(log_pi))}
    inputs = {name: torch.tensor(values).view(-1, 1) for name, values in column.items()}
    inputs |= dict(rewards=torch.tensor(rewards), behavior_logprobs=None, beta=BETA)
    loss, metrics = trajectory_balance(LossInputs(**inputs, group_size=len(rewards)))
    return loss.item(), metrics["log_z"].item()


@pytest.mark.parametrize("title", [ONE_QUERY, "3. The same, later"])
def test_the_responses_of_the_page_and_their_line_of_metrics_are_as_the_code_has_them(title):
    text = section(title)
    numbers = np.array([row[1:] for row in rows_of(text)], float)
    rewards, log_ref, log_pi, target, residual, square = numbers.T
    loss, log_z = balance(rewards, log_ref, log_pi)
    assert target == pytest.approx(log_ref + rewards / BETA, abs=1e-3)
    assert residual == pytest.approx(log_z + log_pi - target, abs=2e-3)
    assert square == pytest.approx(residual**2, rel=2e-3, abs=2e-3)
    said = re.search(r"\*\*log Z = ([\d.]+)\*\*.*?\*\*loss = ([\d.]+)\*\*", text, re.S)
    assert [*map(float, said.groups())] == pytest.approx([log_z, loss], abs=6e-3)
    if title == ONE_QUERY:
        line = re.search(r'"loss": ([\d.]+), "log_z": ([\d.]+)', text)
        assert [*map(float, line.groups())] == pytest.approx([loss, log_z], 1e-3)


def commands() -> list[list[str]]:
    """The flags of each command of the page that makes a run."""
    found = re.findall(r"^    python tba\.py (?!--report)(.*)$", PAGE, re.M)
    demos = re.findall(r'^    make demo DEMO_FLAGS="(.*)"$', PAGE, re.M)
    return [shlex.split(line) for line in found + [f"arithmetic {demo}" for demo in demos]]


def carries(query) -> int:
    (a, b), units = divmod(query.id, 100), query.id // 100 % 10 + query.id % 10
    return (units > 9) + (a // 10 + b // 10 + (units > 9) > 9)


def test_what_the_page_predicts_follows_from_the_pupil():
    """By Eq. 2, a right answer of probability p has p exp(1 / beta) / Z under the best policy."""
    counts = np.bincount([carries(query) for query in Arithmetic().queries("train")])
    shares = counts / counts.sum()
    right = (1 - FORGETS) ** np.arange(3)
    rows = rows_of(section("4. Predict what it becomes"))
    table = np.array([row[1:] for row in rows], float)
    assert table[:3, 0] == pytest.approx(shares, abs=0.006)
    assert table[:3, 1] == pytest.approx(right, abs=1e-4)
    for column, beta in ((2, 1.0), (3, BETA)):
        best = right * math.exp(1 / beta) / (right * math.exp(1 / beta) + 1 - right)
        assert table[:3, column] == pytest.approx(best, abs=6e-4)
        assert table[3, column] == pytest.approx(shares @ best, abs=2e-3)
    assert table[3, 1] == pytest.approx(shares @ right, abs=2e-3)


def test_the_pupil_gives_right_answers_as_often_as_the_page_says():
    rng = np.random.default_rng(0)
    for sum_of, right, share in (2134, "055", 1.0), (758, "065", 0.35), (6758, "125", 0.1225):
        query = Query(sum_of, "", right)
        are_right = [homework(query, rng) == right for _ in range(4000)]
        assert np.mean(are_right) == pytest.approx(share, abs=0.03)


def test_what_the_page_says_of_the_changes_is_what_was_measured():
    """A row of the page is a part of the row of the results that has its name."""
    results = (ROOT / "benchmarks" / "results" / "walkthrough.md").read_text()
    measured = {row[0]: row[1:] for row in rows_of(results)}
    for name, *cells in rows_of(section("6. Three changes to try").split("### Measured")[1]):
        assert cells == measured[name], name
