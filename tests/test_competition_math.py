"""The MATH grader: which answers are equal, and what happens to malicious or enormous ones."""

import json
from pathlib import Path

import pytest
from conftest import wait_for

from config import Config, UserError
from runtime.modes.free_running import Rollout
from runtime.responses.scoring import RewardScorer
from tasks import Query, load_task
from tasks.competition_math import is_correct, last_boxed

RIGHT = [  # answer in the box, gold
    (r"\frac{1}{2}", r"\frac12"),
    ("0.5", r"\frac{1}{2}"),
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    ("1/2", r"\frac{1}{2}"),
    (r"-\frac{3}{4}", "-0.75"),
    ("[0,1)", "[0, 1)"),
    (r"(-\infty, 3]", r"(-\infty,3]"),
    (r"x \in [1,2]", "[1,2]"),
    (r"(-1,0)\cup(0,1)", r"(-1,0) \cup (0,1)"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    ("1,2,3", "1, 2, 3"),
    ("(2,3)", "(2, 3)"),
    (r"3\pm\sqrt2", r"3-\sqrt{2}, 3+\sqrt{2}"),
    (r"5\text{ cm}", "5"),
    (r"5\,\text{cm}^2", "5"),
    (r"\text{Tuesday}", "Tuesday"),
    (r"\text{(B)}", "B"),
    (r"90^\circ", "90"),
    (r"\$18", "18"),
    (r"50\%", "50"),
    ("50", r"50\%"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("2^{10}", "1024"),
    ("x^2+2x+1", "(x+1)^2"),
    ("1{,}000", "1000"),
    ("1,000", "1000"),
    (r"11,\! 111", "11111"),
    ("x=5", "5"),
    ("a+b=5.", "5"),
    (r"5~\text{cm}", "5"),
    (r"5\times10^{-2}", "0.05"),
    (r"-\frac{3\sqrt{5}}{2}", r"\frac{-3\sqrt{5}}{2}"),
    ("y=2x+3", "2x-y+3=0"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    ("3", "3.0"),
    ("1+2i", "2i+1"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("12_{3}", "12_3"),
    (r"\infty", r"\infty"),
    (r"\boxed{7}", "7"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
]
WRONG = [
    (r"\frac{1}{3}", r"\frac{1}{2}"),
    ("(0,1)", "[0,1)"),
    ("(3,2)", "(2,3)"),
    (r"\pi", "3.14"),
    ("-3", "3"),
    ("0.333", r"\frac13"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    (r"\text{Monday}", "Tuesday"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"\frac{", "1"),
    (r"\frac{1}{0}", "1"),
    ("", "1"),
    (r"\left(", "1"),
    (r"\begin{pmatrix}1", "1"),
    (r"}{", "1"),
    ("x" * 2000, "1"),
    # What is left to compute, or restates the question.
    ("5!", "120"),
    (r"\sum_{i=1}^{5}1", "5"),
    (r"\int_0^5 1dx", "5"),
    (r"\lim_{x \to 5} x", "5"),
    ("1=2=3=4=5", "5"),
    ("2+3", "5"),
    (r"6\times7", "42"),
    ("11", "11_2"),
    (r"\{1,2\}", "(1,2)"),
    (r"50\%", "0.5"),
]


@pytest.mark.parametrize("answer, gold", RIGHT + WRONG)
def test_it_is_right_or_wrong(answer, gold):
    response = f"So the answer is $\\boxed{{{answer}}}$."
    assert is_correct(response, gold) == ((answer, gold) in RIGHT)


@pytest.mark.parametrize(
    "response, expected",
    [
        ("the answer is 5", None),
        (r"\boxed{5}, or rather \boxed{6}", "6"),
        (r"\boxed{\frac{a}{b}}", r"\frac{a}{b}"),
        (r"\boxed{ \boxed{7} }", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\} }", r"\}"),
        (r"\boxed{5", None),
        (r"so it is $\boxed 5$.", "5"),
        (r"\boxed ", None),
        (r"\fbox{5}", "5"),
        (r"\boxed{" + "1" * 5000 + "}", None),
        ("x" * 100_000 + r" \boxed{5}", "5"),
        (r"\boxed{" * 15_000, None),
    ],
)
def test_the_last_box_counts(response, expected):
    assert last_boxed(response) == expected


def test_an_unfinished_response_is_wrong():
    task = load_task("competition_math")
    query = Query(0, "", "5")
    responses = [r"\boxed{5}", r"\boxed{5}", r"\boxed{4}"]
    assert task.score([query] * 3, responses, [True, False, True]) == [1.0, 0.0, 0.0]


HOSTILE = [
    "9^{9^{9^{9^{9}}}}",
    "9^{9^{9^{9}}}",
    "(" * 400,
    r"\frac{" * 100,
    r"\sqrt{" * 150 + "2" + "}" * 150,
    "10000000!",
    r"\sum_{k=1}^{10^{9}} k^{k}",
    r"\int_0^{10} \sin(x^{x^{x}}) dx",
    "1" * 900,
    "2^{" * 200 + "}" * 200,
]


def test_no_answer_of_a_group_costs_another_its_score(scorer):
    texts = [*(rf"\boxed{{{answer}}}" for answer in HOSTILE), r"\boxed{2}"]
    assert rewards_of(scorer, texts) == [0.0] * len(HOSTILE) + [1.0]


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('touch {path}')",
        "exec(\"open('{path}','w')\")",
        r"\text{{__import__('os').system('touch {path}')}}",
        r"\input{{{path}}}\write18{{touch {path}}}",
        "eval('1+1')",
        "().__class__.__base__.__subclasses__()",
    ],
)
def test_an_answer_is_never_run(answer, tmp_path):
    path = tmp_path / "written"
    assert not is_correct(rf"\boxed{{{answer.format(path=path)}}}", "2")
    assert not path.exists()


@pytest.fixture(scope="module")
def scorer():
    """Make a searcher's scorer: worker processes with the task's time limit."""
    config = Config(task="competition_math")
    scorer = RewardScorer(config, load_task("competition_math"))
    # The workers start with the first responses.
    assert rewards_of(scorer, [r"\boxed{2}"] * 2) == [1.0, 1.0]
    yield scorer
    scorer.pool.stop()
    scorer.pool.join()


def rewards_of(scorer: RewardScorer, texts: list[str]) -> list[float]:
    finished = [True] * len(texts)
    scorer.add([Rollout(Query(0, "", "2"), "0", texts=texts, finished=finished)])
    [rollout] = wait_for(scorer.take, "the scores")
    return rollout.rewards.tolist()


def write(path: Path, rows: list[dict]) -> None:
    for split in ("train", "test"):
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_become_queries_and_a_row_without_its_columns_or_box_is_named(tmp_path):
    row = {"problem": "1+1?", "solution": r"We add: \boxed{2}"}
    write(tmp_path, [row])
    (query,) = load_task("competition_math", data_dir=str(tmp_path)).queries("train")
    assert query.answer == "2"
    assert query.prompt[0]["content"].startswith("1+1? Place your answer at end")
    for bad, message in (
        ({"problem": "1+1?"}, "line 2 has no 'solution'"),
        (row | {"solution": "two"}, r"line 2: the solution has no \\boxed"),
    ):
        write(tmp_path, [row, bad])
        with pytest.raises(UserError, match=message):
            load_task("competition_math", data_dir=str(tmp_path)).queries("train")
