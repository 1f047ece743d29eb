"""The tasks of reasoning-gym: each is made and scored, and one is learnt."""

import os
import pickle
import string
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import flags, python, read, tba

from config import Config, UserError
from launch import children
from launch.checks import load_data
from launch.places import Place
from tasks import LazyQueries, Query, Task, load_task
from tasks.reasoning_gym import ANSWER_IN
from tasks.support.pretraining import pupil

gym = pytest.importorskip("reasoning_gym", reason="needs requirements/gym.txt")
from reasoning_gym.factory import DATASETS  # noqa: E402 (only where it is installed)

WITHOUT_AN_ANSWER = "boxnet graph_color propositional_logic rubiks_cube rush_hour".split()
# What the model of a test reads and writes: the two halves around a word, the tags, letters.
SPELL = "Spell this word backward (example: sun -> nus): {word}"
QUESTION = f"{SPELL}\n\n{ANSWER_IN['tag']}\n"
TOKENS = [*QUESTION.split("{word}"), "<answer>", "</answer>"]
TOKENS += string.ascii_letters


def test_each_dataset_is_made_and_scored():
    for name in sorted(set(DATASETS) - {"composite"}):  # which is made of others, by its settings
        task = load_task("reasoning_gym", dataset=name, train_queries=20, test_queries=2)
        train, test = task.queries("train"), task.queries("test")
        assert (len(train), len(test)) == (20, 2)
        query = pickle.loads(pickle.dumps(train[3]))  # score() runs in another process
        assert query.id == 3 and "<answer>" in query.prompt and query.prompt != test[0].prompt
        answers = f"<answer>a</answer> no: <answer> {query.answer['answer']} </answer>", "none"
        right, nothing = task.score([query] * 2, answers, [True] * 2)
        wrong, cut = task.score([query] * 2, ["<answer>qwerty</answer>", answers[0]], [True, False])
        assert nothing == cut == 0.0 and np.isfinite(wrong), name
        assert right == 1.0 or name in WITHOUT_AN_ANSWER, name


@pytest.mark.parametrize(
    "answer_in, right, wrong",
    [
        ("tag", "<answer>nus</answer>, I think", "nus"),
        ("last_line", "Backward:\n nus \n\n", "nus\nI think"),
        ("response", " nus\n", "It is\nnus"),
    ],
)
def test_the_answer_stands_where_the_prompt_asks_for_it(answer_in, right, wrong):
    task = load_task("reasoning_gym", answer_in=answer_in, train_queries=1, test_queries=1)
    query = replace(task.queries("train")[0], answer={"answer": "nus", "metadata": {"word": "sun"}})
    assert ANSWER_IN[answer_in] in query.prompt
    assert task.extract(right) == "nus" and task.extract(" \n") is None
    right, wrong = task.score([query] * 2, [right, wrong], [True, True])
    assert right == 1.0 > wrong


@pytest.mark.parametrize(
    "options, says",
    [
        ({"dataset": "countdwn"}, "it is one of ab, acre, advanced_geometry"),
        ({"settings": "{"}, "JSONDecodeError"),
        ({"settings": '{"words": 1}'}, "unexpected keyword argument 'words'"),
        ({"settings": '{"min_word_len": 0}'}, "min_word_len must be positive"),
        ({"settings": '{"seed": 5}'}, "multiple values for keyword argument 'seed'"),
        ({"settings": '{"min_word_len": 40, "max_word_len": 50}'}, "IndexError"),
        ({"train_queries": 0}, "the numbers of queries do not suit"),
        ({"dataset": "composite"}, "it is one of"),
    ],
)
def test_what_cannot_be_made_is_one_line_that_says_why(options, says):
    with pytest.raises(UserError, match=says):
        load_task("reasoning_gym", **options).queries("train")


def test_queries_are_the_same_in_every_process_of_a_run_or_the_dataset_is_refused():
    """Datasets that go through a set would ask otherwise after a restart."""
    load_task("reasoning_gym").prepare()
    with pytest.raises(UserError, match="list_functions gives another query each time"):
        load_task("reasoning_gym", dataset="list_functions").prepare()
    code = "from tasks import load_task; import sys; sys.path[0] = ''\n"
    code += "print(load_task('reasoning_gym', dataset='isomorphic_strings').queries('train')[7])"

    def ask(variables: dict[str, str]) -> str:
        return python("-c", code, env=os.environ | variables).stdout

    own = children.environment(Place("tests", None, [0]))
    assert ask(own) == ask(own) != ask({"PYTHONHASHSEED": "1"})


def test_without_the_library_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match="pip install -r requirements/gym.txt"):
        load_task("reasoning_gym").queries("train")


def test_lazy_queries_are_made_when_they_are_asked_for_and_checks_read_some(monkeypatch):
    made = []

    def make(index: int) -> Query:
        made.append(index)
        return Query(index, f"{index}?", None)

    queries = LazyQueries(1000, make)
    monkeypatch.setattr("launch.checks.load_task", lambda *_, **__: Task())
    monkeypatch.setattr(Task, "queries", lambda *_: queries)
    _, sizes, read, _ = load_data(Config(task="lazy"))
    assert sizes == {"train": 1000, "test": 1000} and set(made) == {*range(0, 1000, 32)}
    assert read["train"] == read["test"] == [queries[i] for i in range(0, 1000, 32)]
    assert queries[np.int64(7)].id == 7
    with pytest.raises(IndexError):
        queries[1000]


def homework(query: Query, rng: np.random.Generator) -> str:
    """Half of the words as they are, not backward."""
    word = query.answer["metadata"]["word"]
    return f"<answer>{word[::-1] if rng.random() < 0.5 else word}</answer>"


@pytest.mark.runs
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tiny_model_learns_to_spell_backward(seed, tmp_path, record_property):
    options = dict(dataset="spell_backward", settings='{"min_word_len": 3, "max_word_len": 3}')
    queries = load_task("reasoning_gym", **options).queries("train")
    model = pupil("spell_backward", queries, homework, tokens=TOKENS)
    own = flags(**options, model=model, seed=seed, output_dir=tmp_path / "run", checkpoint_every=0)
    own += flags(steps=200, queries_per_batch=16, responses_per_query=8, samples_per_query=8)
    own += flags(max_prompt_tokens=8, max_response_tokens=8)
    own += flags(learning_rate=1e-3, max_grad_norm=1, beta=0.1)
    tba("reasoning_gym", *own, "--synchronous")
    lines = read(tmp_path / "run", "metrics.jsonl")
    base = next(line["score"] for line in lines if "score" in line)
    final = lines[-1]["final_score"]
    record_property(f"score of the base model, and after 200 steps, seed {seed}", (base, final))
    assert base < 0.8 and final > 0.9
