"""What a task's own file may do, and the models that it cannot have."""

import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
from conftest import PATIENCE, ROOT
from transformers import AutoConfig

from config import Config, UserError
from launch import checks
from launch.checks import check_evaluate, check_lengths, load_data
from launch.command_line import build_config
from models.architecture import weight_shapes
from models.tokens import load_tokenizer
from rollouts import Group, make_tokens
from runtime import child
from runtime.responses.scoring import RewardScorer, make_scorer
from tasks import Query, find_task, load_task, sampling_for_tests

OWN_TYPES = """
from dataclasses import dataclass
from tasks import Query, Task

@dataclass(frozen=True)
class Range:
    low: int
    high: int

def length(response):
    return float(len(response))

class Between(Task):
    def queries(self, split):
        return [Query(0, "0+1=", Range(0, 2))]

    def score(self, queries, responses, finished):
        return [length(response) for response in responses]
"""


def exit_code_of(target, *arguments) -> int | None:
    process = get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(PATIENCE)
    ended = process.exitcode
    process.kill()
    return ended


def call_in_a_pool(file: str, start: str) -> None:
    length = sys.modules[find_task(file).__module__].length
    with get_context(start).Pool(1) as pool:
        found = pool.map(length, ["a", "bb"])
    raise SystemExit(3 if found == [1.0, 2.0] else str(found))


# Only a name that can be imported is found by a process that is spawned. None is forked from the
# tests' own process: its threads hold locks.
@pytest.mark.parametrize(
    "name, start", [("own.types.py", "fork"), ("my-task.py", "spawn"), ("__main__.py", "fork")]
)
def test_what_a_task_file_defines_can_be_pickled_and_called_in_another_process(
    name, start, tmp_path
):
    file = tmp_path / name
    file.write_text(OWN_TYPES)
    query = find_task(str(file))().queries("train")[0]
    assert pickle.loads(pickle.dumps(query)) == query
    assert exit_code_of(call_in_a_pool, str(file), start) == 3


def test_a_task_file_that_was_changed_is_imported_again(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_TYPES)
    before = find_task(str(file))
    assert find_task(str(file)) is before
    file.write_text(OWN_TYPES.replace("Between", "Within"))
    assert find_task(str(file)).__name__ == "Within"


WITH_WORKERS = """
from tasks import Query, Task

class JudgeError(Exception):  # cannot be unpickled
    def __init__(self, code, text):
        super().__init__(text)

class Timed(Task):
    score_timeout = 5.0

    def queries(self, split):
        return [Query(0, "0+1=", 1)]

    def METHOD(self, *arguments):
        raise JudgeError(503, "the judge is not there")

    def is_right(self, response, answer):
        return True
"""
EXITS = """
from tasks import Query, Task

class Exits(Task):
    def queries(self, split):
        return [Query(0, "0+1=", 1)]

    def score(self, queries, responses, finished):
        if any(query.id == 0 for query in queries):
            exit()
        return [float(query.id) for query in queries]

    @staticmethod
    def reply(query, turns):
        raise SystemExit(2)
"""


def ended_group(number: int) -> Group:
    """A group of one response that waits to be scored."""
    group = Group(query_id=number, query=Query(number, "", 1))
    group.end(["a"], [make_tokens([1])], [True])
    return group


def begin_workers_and_fail(file: str, method: str) -> None:
    """Leave a process whose score workers live, by an exception."""
    task = load_task(file)
    scorer = make_scorer(Config(task=file), task)
    scorer.add([ended_group(0)])
    while not (scored := scorer.take()):
        time.sleep(0.1)
    problem = f"{method}() fails: JudgeError: the judge is not there ({file}, line 15)"
    raise SystemExit(3 if str(scored[0].error) == problem else str(scored[0].error))


@pytest.mark.parametrize("method", ["score", "load"])
def test_a_process_with_score_workers_ends_at_once_by_an_exception_too(method, tmp_path):
    file = tmp_path / "timed.py"
    file.write_text(WITH_WORKERS.replace("METHOD", method))
    assert exit_code_of(begin_workers_and_fail, str(file), method) == 3


def leave_a_pool() -> None:
    sys.pool = ProcessPoolExecutor(1)
    raise SystemExit(sys.pool.submit(int, 3).result())


def test_a_process_does_not_wait_for_a_pool_of_a_tasks_own(tmp_path):
    (tmp_path / "logs").mkdir()
    arguments = "name", f"{__name__}:leave_a_pool", (), str(tmp_path), os.getpid(), None
    assert exit_code_of(child.enter, *arguments) == 3


def test_an_answer_that_no_score_worker_could_get_is_refused_at_the_start(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_TYPES.replace("Range(0, 2)", "lambda: 1") + "    score_timeout = 1.0\n")
    with pytest.raises(UserError, match="pickling a query, as score_timeout wants it, fails"):
        load_data(Config(task=str(file)))


def test_a_task_that_exits_in_score_or_reply_loses_its_query_alone(tmp_path):
    (tmp_path / "exits.py").write_text(EXITS)
    scorer = RewardScorer(load_task(str(tmp_path / "exits.py")))
    groups = [ended_group(number) for number in range(3)]
    scorer.add(groups)
    failed, *others = scorer.take()
    failures = failed.error, scorer.reply(groups[0].query, ["a"]).exception()
    for error, said in zip(failures, ["score() fails: SystemExit", "reply() fails: SystemExit: 2"]):
        assert isinstance(error, UserError) and str(error).startswith(said)
        assert re.search(r" \(.*/exits.py, line 1[05]\)$", str(error))
    assert [group.rewards.tolist() for group in others] == [[1.0], [2.0]]


def test_a_digest_of_rows_has_their_answers_and_is_one_whatever_order_sets_have(monkeypatch):
    digests = []
    for answer in {0, 8}, {8, 0}, [0, 8], [8, 0]:
        queries = [Query(0, "0+1=", {"any of": answer})]
        task = SimpleNamespace(queries=lambda split, own=queries: own, score_timeout=None)
        monkeypatch.setattr(checks, "make_task", lambda config, task=task: task)
        digests.append(load_data(Config())[-1])
    assert repr({0, 8}) != repr({8, 0}), "as with texts, whose hashes differ from start to start"
    assert digests[0] == digests[1] and len({*digests}) == 3


def test_prompts_that_are_too_long_are_counted_at_the_start_and_refused_if_all_are(
    untied_model, capsys
):
    tokenizer = load_tokenizer(Config(model=str(untied_model)))
    config = Config(max_prompt_tokens=4)
    prompts = {"train": ["123", "123456", ""], "test": ["1234"]}
    check_lengths(config, prompts, tokenizer)
    found = "2 of 3 train prompts have more tokens than --max_prompt_tokens 4 (the longest has 6)"
    assert found in capsys.readouterr().err
    with pytest.raises(UserError, match=r"^1 of 1 test prompts .*the longest has 5"):
        check_lengths(config, prompts | {"test": ["12345"]}, tokenizer)
    with pytest.raises(UserError, match=r"^1000 of 1000 test prompts "):
        check_lengths(config, {"test": ["12345"] * 1500}, tokenizer)
    check_lengths(config, {"test": ["12345", "1234"] * 750}, tokenizer)  # half of them fit


@pytest.mark.parametrize(
    "returned, problem",
    [
        ("{'length': [len(r) for r in responses]}", None),
        ("{'by query': list({query.id: 1.0 for query in queries}.values())}", None),
        ("{'pairs': scores[:, None] + scores}", None),
        ("scores", "metrics by name, it gave array"),
        ("{'length': scores.mean()}", "2 values of 'length' for .* an array of shape ()"),
        ("{'length': scores[:1]}", r"2 values of 'length' for .* an array of shape \(1,\)"),
        ("{'length': [None, 'x']}", "could not convert"),
        ("exit()", r"SystemExit.*own\.py, line 21\)"),
    ],
)
def test_an_evaluate_of_the_users_own_is_tried_at_the_start(returned, problem, tmp_path):
    file = tmp_path / "own.py"
    method = f"""
    def evaluate(self, queries, responses, finished, scores):
        return {returned}
"""
    file.write_text(OWN_TYPES + method)
    config = Config(task=str(file))
    task = load_task(config.task)
    query = task.queries("test")[0]
    if problem is None:
        return check_evaluate(config, task, query)
    with pytest.raises(UserError, match=rf"^tried on two responses, .*evaluate\(\) .*{problem}"):
        check_evaluate(config, task, query)


def test_a_response_ends_in_an_evaluation_where_it_does_in_training(tmp_path):
    file = tmp_path / "own.py"
    method = """
    def sampling(self, rng):
        return {"stop": ["\\n"], "stop_token_ids": [7], "top_p": 0.9, "max_tokens": 5}
"""
    file.write_text(OWN_TYPES + method)
    found = sampling_for_tests(Config(max_response_tokens=9), load_task(str(file)))
    ends = {"stop": ["\n"], "stop_token_ids": [7]}
    assert found == {"temperature": 0.0, "max_tokens": 5, **ends}


def test_an_async_score_is_refused(tmp_path):
    file = tmp_path / "waits.py"
    file.write_text(OWN_TYPES + "    async def ask(self): pass  # his score() may await it\n")
    assert find_task(str(file))
    file.write_text(OWN_TYPES.replace("    def score", "    async def score"))
    with pytest.raises(UserError, match=r"score\(\) is async"):
        find_task(str(file))


@pytest.mark.parametrize("name", ["random", "queue", "tokenizers"])
def test_a_file_beside_tba_that_hides_a_module_is_named_before_any_is_imported(name, tmp_path):
    shutil.copy(ROOT / "tba.py", tmp_path)
    (tmp_path / f"{name}.py").write_text("raise RuntimeError")
    command = [sys.executable, tmp_path / "tba.py", "arithmetic"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2
    assert ended.stderr == f"error: {name}.py, beside tba.py, hides the module {name}: rename it\n"
    (tmp_path / f"{name}.py").rename(tmp_path / "my_task.py")
    own = os.environ | {"PYTHONPATH": str(tmp_path)}  # where config.py is not
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=own)
    assert "No module named 'config'" in ended.stderr


@pytest.mark.parametrize("path", ["x" * 300, "~nobody-of-this-name/x", "a/" * 3000])
def test_a_path_that_cannot_be_asked_for_is_one_line(path, tmp_path):
    with pytest.raises(UserError, match=r"^--output_dir '.* cannot be read: "):
        build_config(["arithmetic", "--output_dir", path])
    with pytest.raises(UserError, match=r"^data file '.* cannot be read: "):
        load_task("jsonl", data=path).queries("train")


def test_a_tilde_is_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build_config(["arithmetic", "--output_dir=~/x"]).output_dir == str(tmp_path / "x")


SIZES = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
FACTORS = dict(short_factor=[1.0] * 16, long_factor=[4.0] * 16)


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_longrope_is_refused_beyond_the_length_at_which_vllm_changes_its_factors(kind, tmp_path):
    original = dict(original_max_position_embeddings=64)  # phi3 has it beside the rest
    rope = dict(rope_type="longrope", rope_theta=1e4, **FACTORS, **original)
    shape = original | dict(rope_parameters=rope, max_position_embeddings=1024)
    settings = dict(vocab_size=257, pad_token_id=0, eos_token_id=0, **SIZES, **shape)
    AutoConfig.for_model(kind, **settings).save_pretrained(tmp_path)
    lengths = dict(model=str(tmp_path), max_prompt_tokens=32)
    assert weight_shapes(Config(**lengths, max_response_tokens=32))
    with pytest.raises(UserError, match="is 65, more than the 64 positions .*longrope"):
        weight_shapes(Config(**lengths, max_response_tokens=33))
