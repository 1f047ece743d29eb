"""The GSM8K grader, and what it says about data that cannot be used."""

import json
from pathlib import Path

import pytest
from conftest import GSM8K as DATA

from config import UserError
from tasks import Query, load_task
from tasks.gsm8k import GSM8K

ROW = {"question": "How many are two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}


def reward(response: str, gold: str) -> float:
    (value,) = GSM8K().score([Query(id=0, prompt="", answer=gold)], [response], [True])
    return value


def write(path: Path, *lines: dict | str | bytes) -> GSM8K:
    """Make a task whose train.jsonl has these lines, a dict as JSON and a text as it is."""
    texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    texts = [text.encode() if isinstance(text, str) else text for text in texts]
    (path / "train.jsonl").write_bytes(b"".join(text + b"\n" for text in texts))
    return GSM8K(data_dir=str(path))


NUMBERS = {"First 3, then 17, so 5 remain": "5", "line one: 3\nline two: 4\n": "4", "007": "7"}
NUMBERS |= {"She pays $1,250.50.": "1250.5", "either 5, 100": "100", "They are 3,4": "4"}
NUMBERS |= {"It fell to −7": "-7", "12 - -5": "-5", "20 dollars-5": "5", "in all 10.00": "10"}
NUMBERS |= {"It shrank by -5%.": "-5", "42cm": "42", "2+2=<<2+2=4>>4": "4", "3/4 of it": "0.75"}


@pytest.mark.parametrize("response, number", NUMBERS.items())
def test_the_last_number_of_a_response_is_its_answer(response, number):
    assert GSM8K().extract(response) == number
    assert reward(response, number) == 1.0
    assert reward(response, f"{number}1") == 0.0


@pytest.mark.parametrize("response", ["", "one hundred", "$", "-", ",", "."])
def test_a_response_without_a_number_is_wrong(response):
    assert GSM8K().extract(response) is None and reward(response, "0") == 0.0


def test_responses_are_scored_each_against_its_own_query_and_one_that_was_cut_off_is_wrong():
    queries = [Query(id=i, prompt="", answer=str(i)) for i in range(4)]
    assert GSM8K().score(queries, [*"0223"], [True] * 3 + [False]) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("split, count", [("train", 7473), ("test", 1319)])
def test_every_gold_solution_is_right_and_wrong_when_another_number_follows(split, count):
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not there")
    task = load_task("gsm8k", data_dir=str(DATA))
    queries = task.queries(split)
    with open(DATA / f"{split}.jsonl", encoding="utf-8") as lines:
        answers = [json.loads(line)["answer"] for line in lines]
    assert len(queries) == len(answers) == count
    gold = [int(answer.split("#### ")[1].replace(",", "")) for answer in answers]
    assert [int(query.answer) for query in queries] == gold
    assert task.score(queries, answers, [True] * count) == [1.0] * count
    changed = [f"{answer} {number + 1:,}" for answer, number in zip(answers, gold)]
    assert task.score(queries, changed, [True] * count) == [0.0] * count
    assert task.score(queries, answers, [False] * count) == [0.0] * count


def test_a_query_holds_the_question_in_the_prompt_and_has_an_id_of_its_own(tmp_path):
    other = {"question": "How far {is} it?", "answer": "#### 1,000"}
    first, second = write(tmp_path, ROW, other).queries("train")
    assert first.prompt == "[MATH TASK] Problem:\nHow many are two and two?\n\nSolution:\n"
    assert second.prompt == "[MATH TASK] Problem:\nHow far {is} it?\n\nSolution:\n"
    assert (first.answer, second.answer) == ("4", "1000")
    assert first.id != second.id


@pytest.mark.parametrize(
    "line, message",
    [
        ({"answer": "#### 4"}, "has no 'question'"),
        ({"question": "How many?", "answer": 4}, "has no 'answer'"),
        (["How many?", "#### 4"], "has no 'question'"),
        ('{"question": "How many?", "answer": ', "as JSON"),
        (b'{"question": "How many?", "answer": "\xff"}', "can't decode byte 0xff"),
        ({"question": "How many \ud83d?", "answer": "#### 4"}, "surrogates not allowed"),
        ({"question": "How many?", "answer": "There are 4."}, "no number"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, line, message):
    before = [ROW, "", ROW] * 100  # more than is read at once; blank lines are passed over
    task = write(tmp_path, *before, line, ROW)
    with pytest.raises(UserError, match=rf"train\.jsonl line 301:? .*{message}") as raised:
        task.queries("train")
    assert "\n" not in str(raised.value)


def test_with_chat_a_question_is_a_message_and_its_answer_the_same(tmp_path):
    [plain] = write(tmp_path, ROW).queries("train")
    [chat] = GSM8K(data_dir=str(tmp_path), chat=True).queries("train")
    [message] = chat.prompt
    assert message["role"] == "user" and message["content"].startswith(ROW["question"] + "\n\n")
    assert chat.answer == plain.answer
