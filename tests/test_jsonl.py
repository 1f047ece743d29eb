"""Rows of one's own: what counts as right, which rows are refused, and a run on ten of them."""

import json
import math

import pytest
from conftest import flags, steps_of, tba

from config import UserError
from runtime.responses.samples import look_at
from tasks import Query, load_task

CHAT = [{"role": "user", "content": "1+1?"}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}


def write(file, *rows) -> str:
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(file)


@pytest.mark.parametrize(
    "match, answer, wanted, right, wrong",
    [
        ("exact", " Paris ", "Paris", ["Paris", " Paris\n"], ["paris", "Paris.", "In Paris", ""]),
        ("exact", 7, "7", ["7"], ["7.0", "17"]),
        ("number", "so 3 #### 1,007", "1007", ["it is $1007.", "1,007"], ["1007 or 8", "none"]),
        ("number", -0.5, "-0.5", ["-.5", "1 - -0.50", r"-\frac{1}{2}", "–1/2"], ["0.5"]),
        ("number", "3/4", "0.75", ["0.75", "75e-2"], ["3", "4"]),
        ("number", "1/3", "1/3", ["2/6"], ["0." + "3" * 40]),
        ("number", 1e-7, "0.0000001", ["0.0000001"], ["7"]),
        ("regex", r"\b(yes|yep)\b", r"\b(yes|yep)\b", ["a\nyep", "yes!"], ["yesterday", "no"]),
        ("math", "1/2", "1/2", [r"\boxed{0.5}", r"\boxed{\frac12}"], [r"\boxed{2}", "0.5"]),
        ("math", r"so \boxed{x+1}", "x+1", [r"\boxed{1+x}"], [r"\boxed{x}"]),
    ],
)
def test_a_response_is_right_if_its_answer_is_the_rows_and_both_are_texts(
    match, answer, wanted, right, wrong, tmp_path
):
    data = write(tmp_path / "rows.jsonl", *({"prompt": q, "answer": answer} for q in "qr"))
    task = load_task("jsonl", data=data, match=match)
    (query,) = task.queries("train")
    task.load()
    assert query.answer == wanted
    assert all(isinstance(task.extract(response), str) for response in right)
    if match in ("exact", "number"):
        assert {task.extract(response) for response in right} == {wanted}
    for responses, expected in ((right, 1.0), (wrong, 0.0)):
        count = len(responses)
        assert task.score([query] * count, responses, [True] * count) == [expected] * count
    assert task.score([query], right[:1], [False]) == [0.0], "it was cut off"
    assert bool(task.score_timeout) == (match in ("regex", "math")), "may take for ever"
    assert task.extract(" ") is None, "no answer"


BAD_ROWS = [
    ({"question": "q", "answer": 1}, "exact", "it lacks 'prompt' (--prompt_column): {"),
    ({"prompt": "q", "answer": None}, "exact", "it lacks 'answer' (--answer_column): {"),
    ('["q", 1]', "exact", "it lacks 'prompt' (--prompt_column) and 'answer' (--answer_column): ["),
    ('{"prompt": "q"', "exact", "cannot be read as JSON in UTF-8: "),
    ({"prompt": "  ", "answer": 1}, "exact", "'prompt': it is empty"),
    ({"prompt": 7, "answer": 1}, "exact", "'prompt': it must be a string, or a list"),
    ({"prompt": [{"role": "user"}], "answer": 1}, "exact", "message 1 has no text as 'content'"),
    ({"prompt": [*CHAT, CALL], "answer": 1}, "exact", "message 2 has 'tool_calls', which is not"),
    ('{"prompt": "q", "answer": ' + "7" * 5000 + "}", "exact", "value has 5000 digits"),
    ({"prompt": "q", "answer": []}, "exact", "'answer' is neither a text nor a number"),
    ({"prompt": "q", "answer": math.nan}, "exact", "'answer' is neither a text nor a number"),
    ('{"prompt": "q", "answer": 1e999}', "exact", "'answer' is neither a text nor a number"),
    ({"prompt": "q", "answer": True}, "exact", "'answer' is neither a text nor a number"),
    ({"prompt": "q", "answer": "x"}, "number", "--match number: 'answer' is not one number"),
    ({"prompt": "q", "answer": "12 m^2"}, "number", "'answer' is not one number"),
    ({"prompt": "q", "answer": "3 to 5"}, "number", "'answer' is not one number"),
    ({"prompt": "q", "answer": " "}, "regex", "--match regex: 'answer' is nothing to match"),
    ({"prompt": "q", "answer": "("}, "regex", "missing ), unterminated subpattern"),
    ({"prompt": "q", "answer": "a{99999999999}"}, "regex", "repetition number"),
]


@pytest.mark.parametrize("row, match, says", BAD_ROWS)
def test_a_bad_row_is_named_by_its_line(row, match, says, tmp_path):
    data = write(tmp_path / "rows.jsonl", {"prompt": CHAT, "answer": "2"}, "", row)
    with pytest.raises(UserError) as error:
        load_task("jsonl", data=data, match=match).queries("train")
    assert "rows.jsonl line 3" in str(error.value) and says in str(error.value)


def test_a_byte_order_mark_text_in_parts_and_nulls_beside_a_message_are_no_fault(tmp_path):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    message = {"role": "user", "content": parts, "tool_calls": None, "name": None}
    data = write(tmp_path / "rows.jsonl", *[{"prompt": [message], "answer": "2"}] * 2)
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "rows.jsonl").read_bytes())
    assert load_task("jsonl", data=data, test_data=data).queries("train")[0].prompt == CHAT


@pytest.mark.parametrize(
    "count, options, says",
    [
        (None, {}, "give --data, a .jsonl file"),
        (None, {"data": "absent.jsonl"}, "absent.jsonl cannot be read: No such file"),
        (0, {}, "is empty"),
        (1, {}, "--test_share 0.1 of 1 different prompts leaves nothing to train"),
        (2, {"test_share": 1.0}, "--test_share 1.0 of 2 different prompts leaves nothing"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(count, options, says, tmp_path):
    if count is not None:
        rows = [{"prompt": f"q{i}", "answer": 1} for i in range(count)]
        options = options | {"data": write(tmp_path / "rows.jsonl", *rows)}
    with pytest.raises(UserError, match=says):
        load_task("jsonl", **options).queries("train")


def test_a_share_of_the_rows_is_held_out_and_a_test_file_takes_its_place(tmp_path):
    data = write(tmp_path / "rows.jsonl", *({"prompt": str(i), "answer": i} for i in range(30)))
    parts = [load_task("jsonl", data=data, test_share=0.2).queries(s) for s in ("train", "test")]
    train, test = ([query.prompt for query in part] for part in parts)
    assert 2 < len(test) < 12 and sorted(train + test, key=int) == [str(i) for i in range(30)]
    write(tmp_path / "rows.jsonl", *({"prompt": str(i), "answer": 0} for i in range(-5, 33)))
    more = load_task("jsonl", data=data, test_share=0.2)
    assert {*test} <= {query.prompt for query in more.queries("test")}, "rows keep their side"
    assert {*train} <= {query.prompt for query in more.queries("train")}
    other = write(tmp_path / "test.jsonl", {"prompt": "x", "answer": 1})
    task = load_task("jsonl", data=data, test_data=other, chat=True)
    assert [len(task.queries(split)) for split in ("train", "test")] == [38, 1]
    assert task.queries("test")[0].prompt == [{"role": "user", "content": "x"}]


def test_rows_with_the_same_prompt_are_all_trained_on_or_all_tested_on(tmp_path):
    rows = [{"prompt": str(i % 3), "answer": i} for i in range(24)]
    task = load_task("jsonl", data=write(tmp_path / "rows.jsonl", *rows))
    train, test = (task.queries(split) for split in ("train", "test"))
    assert not {query.prompt for query in train} & {query.prompt for query in test}
    assert (len(train), len(test)) == (16, 8)


def test_the_file_of_gsm8k_works_as_it_is(gsm8k_data):
    file = str(gsm8k_data / "train.jsonl")
    task = load_task("jsonl", data=file, test_data=file, prompt_column="question", match="number")
    known = load_task("gsm8k", data_dir=str(gsm8k_data)).queries("train")
    assert [query.answer for query in task.queries("train")] == [query.answer for query in known]


def test_the_look_at_responses_finds_the_answers_of_exact(tmp_path):
    data = write(tmp_path / "rows.jsonl", *[{"prompt": "q", "answer": "Paris"}] * 2)
    task, query = load_task("jsonl", data=data), Query(0, "q", "Paris")
    look = look_at(task, [query] * 3, [" Paris", "Rome", ""], [1, 0, 0], [True] * 3)
    assert look.unanswered == pytest.approx(1 / 3)
    assert look.examples[1] == "  wrong: reward 0, extracted 'Rome', wanted 'Paris': 'q' → 'Rome'"


@pytest.mark.runs
def test_ten_rows_are_trained_on_and_the_first_prompt_is_shown(untied_model, tmp_path):
    data = write(tmp_path / "rows.jsonl", *({"prompt": f"{i}+1=", "answer": i} for i in range(10)))
    short = flags(max_response_tokens=4, max_prompt_tokens=16, initial_responses=48)
    few = flags(steps=3, queries_per_batch=2, checkpoint_every=0)
    where = flags(data=data, model=untied_model, output_dir=tmp_path / "run")
    left = "VLLM_DP_RANK=1", "VLLM_DP_SIZE=2", "VLLM_DP_MASTER_PORT=1"  # by another launcher
    result = tba("jsonl", *short, *few, *where, prefix=("env", *left))
    assert "the first prompt, as the model reads it: '" in result.stdout
    assert len(steps_of(tmp_path / "run")) == 3
