"""The MATH grader: which answers are equal, and what happens to malicious or enormous ones."""

import json
from contextlib import closing

import numpy as np
import pytest
from conftest import flags, read, steps_of, tba, wait_for

from config import Config
from rollouts import Group
from runtime.responses.scoring import make_scorer
from tasks import Query, load_task
from tasks.competition_math import is_correct, last_boxed

# Answers in a box, and the gold one to each.
RIGHT = {
    "fractions": {r"\frac{1}{2}": r"\frac12", "0.5": r"\frac{1}{2}", "1/2": r"\frac{1}{2}"},
    "signs": {r"-\frac{3}{4}": "-0.75", r"-\frac{3\sqrt{5}}{2}": r"\frac{-3\sqrt{5}}{2}"},
    "intervals": {r"(-\infty, 3]": r"(-\infty,3]", r"x \in [1,2]": "[1,2]"},
    "sets": {r"(-1,0)\cup(0,1)": r"(-1,0) \cup (0,1)", r"\{1,2,3\}": r"\{3,2,1\}"},
    "lists": {"1,2,3": "1, 2, 3", r"3\pm\sqrt2": r"3-\sqrt{2}, 3+\sqrt{2}"},
    "units": {r"5\text{ cm}": "5", r"5\,\text{cm}^2": "5", r"5~\text{cm}": "5", r"90^\circ": "90"},
    "words": {r"\text{Tuesday}": "Tuesday", r"\text{(B)}": "B"},
    "dollars and percent": {r"\$18": "18", r"50\%": "50", "50": r"50\%"},
    "roots and powers": {r"\sqrt{8}": r"2\sqrt{2}", "2^{10}": "1024", "x^2+2x+1": "(x+1)^2"},
    "thousands": {"1{,}000": "1000", "1,000": "1000", r"11,\! 111": "11111", r"10\,000": "10000"},
    "spaces": {r"10\;000": "10000", "10000": r"10\ 000", r"(1,\,200)": "(1, 200)"},
    "equations": {"x=5": "5", "a+b=5.": "5", "y=2x+3": "2x-y+3=0"},
    "numbers": {r"5\times10^{-2}": "0.05", r"\frac{\pi}{2}": r"\pi/2", "3": "3.0"},
    "powers": {r"1.1^n": r"(\frac{11}{10})^n", "1+2i": "2i+1"},
    "a vector": {r"\begin{pmatrix}1\\2\end{pmatrix}": r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"},
    "points": {"(2,3)": "(2, 3)", r"\left( 3, \frac{\pi}{2} \right)": r"(3,\pi/2)"},
    "as they are": {"12_{3}": "12_3", r"\infty": r"\infty", r"\boxed{7}": "7"},
}
WRONG = {
    "numbers": {r"\frac{1}{3}": r"\frac{1}{2}", r"\pi": "3.14", "-3": "3", "0.333": r"\frac13"},
    "near 0": {r"\frac{1}{2^{99}}": r"\frac{1}{2^{98}}", "(0, 2^{-99})": "(0, 2^{-98})"},
    "lists": {"(0,1)": "[0,1)", "(3,2)": "(2,3)", r"\{1,2\}": r"\{1,2,3\}"},
    "a set and a tuple": {r"\{1,2\}": "(1,2)"},
    "a word": {r"\text{Monday}": "Tuesday"},
    "a vector": {r"\begin{pmatrix}1\\2\end{pmatrix}": r"\begin{pmatrix}1\\3\end{pmatrix}"},
    "nothing": dict.fromkeys([r"\frac{", r"\frac{1}{0}", "", r"\left(", "}{", "x" * 2000], "1"),
    "no matrix": {r"\begin{pmatrix}1": "1"},
    # What is left to compute, or restates the question.
    "a sum": {"5!": "120", r"\sum_{i=1}^{5}1": "5", r"\int_0^5 1dx": "5", "2+3": "5"},
    "a limit": {r"\lim_{x \to 5} x": "5", "1=2=3=4=5": "5", r"6\times7": "42"},
    "a base or percent": {"11": "11_2", r"50\%": "0.5"},
}
KINDS = [*((kind, True) for kind in RIGHT), *((kind, False) for kind in WRONG)]


@pytest.mark.parametrize("kind, is_right", KINDS)
def test_an_answer_is_right_if_it_equals_the_gold_one(kind, is_right):
    for answer, gold in (RIGHT if is_right else WRONG)[kind].items():
        assert is_correct(f"So the answer is $\\boxed{{{answer}}}$.", gold) == is_right, answer


BOXED = {
    r"\boxed{5}, or rather \boxed{6}": "6",
    r"\boxed{\frac{a}{b}}": r"\frac{a}{b}",
    r"\boxed{ \boxed{7} }": "7",
    r"\boxed{\{1,2\}}": r"\{1,2\}",
    r"\boxed{\} }": r"\}",
    r"so it is $\boxed 5$.": "5",
    r"\fbox{5}": "5",
    "x" * 100_000 + r" \boxed{5}": "5",
    r"\boxed{" + "1" * 5000 + "}": None,
    **dict.fromkeys(["the answer is 5", r"\boxed{5", r"\boxed ", r"\boxed{" * 15_000]),
}


@pytest.mark.parametrize("response, expected", BOXED.items())
def test_the_last_box_counts(response, expected):
    assert last_boxed(response) == expected


HOSTILE = [
    "9^{9^{9^{9^{9}}}}",
    "(" * 400,
    r"\frac{" * 100,
    r"\sqrt{" * 150 + "2" + "}" * 150,
    "10000000!",
    r"\sum_{k=1}^{10^{9}} k^{k}",
    r"\int_0^{10} \sin(x^{x^{x}}) dx",
    "1" * 900,
    "2^{" * 200 + "}" * 200,
]


def test_no_answer_of_a_group_costs_another_its_score():
    def rewards_of(*answers: str) -> list[float]:
        texts = [rf"\boxed{{{answer}}}" for answer in answers]
        finished = np.ones(len(texts), bool)
        scorer.add([Group(query_id=0, query=Query(0, "", "2"), texts=texts, finished=finished)])
        [group] = wait_for(scorer.take, "the scores")
        return group.rewards.tolist()

    config, task = Config(task="competition_math"), load_task("competition_math")
    with closing(make_scorer(config, task)) as scorer:
        assert rewards_of("2", "2") == [1.0, 1.0], "its workers have started"
        assert rewards_of(*HOSTILE, "2") == [0.0] * len(HOSTILE) + [1.0]


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
def problems(tmp_path_factory):
    """Two problems of MATH's shape."""
    directory = tmp_path_factory.mktemp("problems")
    rows = [{"problem": f"{i}+{i}?", "solution": rf"So \boxed{{{2 * i}}}"} for i in (1, 2)]
    for split in ("train", "test"):
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory


def test_a_problem_is_one_user_message_with_the_sentence_of_the_released_code(problems):
    sentence = "Place your answer at end exactly inside latex box for example"
    prompt = [{"role": "user", "content": rf"1+1? {sentence} \boxed12 or \boxed51."}]
    answers, finished = [r"\boxed{2}", r"\boxed{3}", r"\boxed{2}"], [True, True, False]
    for grade_unfinished, last in ((False, 0.0), (True, 1.0)):
        options = dict(data_dir=str(problems), grade_unfinished=grade_unfinished)
        task = load_task("competition_math", **options)
        query = task.queries("train")[0]
        assert (query.prompt, query.answer) == (prompt, "2")
        assert task.score([query] * 3, answers, finished) == [1.0, 0.0, last]
    assert not load_task("competition_math").grade_unfinished


@pytest.mark.runs
def test_a_task_with_messages_trains_and_is_evaluated_on_samples(problems, chat_model, tmp_path):
    run_dir = tmp_path / "run"
    small = flags(steps=2, queries_per_batch=2, responses_per_query=4, trainer_processes=2)
    short = flags(max_prompt_tokens=160, max_response_tokens=8, evaluation_samples=3)
    where = flags(data_dir=problems, model=chat_model, output_dir=run_dir)
    result = tba("competition_math", *flags(preset="async2_released"), *small, *short, *where)
    assert [line["step"] for line in steps_of(run_dir)] == [1, 2]
    assert "on 2 test queries (few: the interval is wide), 3 samples each" in result.stdout
    final = read(run_dir, "metrics.jsonl")[-1]
    assert final["final_pass@1"] <= final["final_pass@2"] <= final["final_pass@3"]
    assert read(run_dir, "samples.jsonl")[0]["prompt"][0]["role"] == "user"
