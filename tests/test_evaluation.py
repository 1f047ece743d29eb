"""Evaluation: the means over responses and over pairs, their intervals, and --eval_only."""

import dataclasses
import json
import math
from functools import partial

import numpy as np
import pytest

from config import Config, UserError
from launch.checks import check_sampling
from rollouts import Group
from runtime.record.lines import to_json
from runtime.responses.evaluation import EvaluationRun, mean_and_interval, weighted_means
from runtime.responses.final_metrics import evaluate, over_queries
from runtime.responses.samples import look_at
from runtime.responses.scoring import score
from runtime.transport.messages import Evaluation
from tasks import Query, Task, sampling_for_tests


def test_metrics_are_means_over_responses_or_over_pairs_of_different_responses():
    assert weighted_means(np.array([1.0, 0.0, 0.0, 1.0]), np.ones((1, 4))) == 0.5
    pairs = np.array([[9.0, 1.0, 2.0], [1.0, 9.0, 3.0], [2.0, 3.0, 9.0]])
    assert weighted_means(pairs, np.ones((1, 3))) == 2.0


def test_a_tasks_own_metrics_see_each_score_beside_its_response_whichever_ended_first():
    class Lengths(Task):
        def evaluate(self, queries, responses, finished, scores):
            return {"fits": np.array([float(len(r) == s) for r, s in zip(responses, scores)])}

    run = evaluation_run(Lengths(), scores={2: 2, 0: 0, 1: 1})
    assert run.result(partial(evaluate, Lengths())).metrics["fits"][0] == 1.0


def evaluation_run(task: Task, scores: dict[int, float]) -> EvaluationRun:
    """An evaluation with a response to each query: as long as its id, and of that score."""
    run = EvaluationRun.__new__(EvaluationRun)
    run.task, run.version, run.num_samples, run.long_prompts = task, 40, 1, 0
    run.scored, run.unscored = [], []
    for index, value in scores.items():
        own = dict(texts=["a" * index], finished=np.array([True]), rewards=np.array([value]))
        run.scored.append(Group(query_id=index, query=Query(index, "", None), index=index, **own))
    return run


def test_an_evaluation_on_the_way_has_its_interval_in_the_metrics():
    run = evaluation_run(Task(), {i: i % 4 == 0 for i in range(400)})
    line = json.loads(to_json(run.result().line("0a1b")))
    low, high = line.pop("score_interval")
    assert line == {"step": 40, "score": 0.25, "base_model": "0a1b"}
    assert 0.19 < low < 0.23 and 0.27 < high < 0.31
    run.scored = []
    nothing = {"score": None, "score_interval": [None, None]}
    assert json.loads(to_json(run.result().line("0a1b"))) == line | nothing


@pytest.mark.parametrize("share, samples", [(0.97, 1), (0.3, 8)])
def test_the_interval_of_a_share_covers_the_truth_as_often_as_it_says(share, samples):
    """Samples of a query are alike: half of them are copies of its first one."""
    rng, covered, ids = np.random.default_rng(0), 0, np.arange(60).repeat(samples)
    for _ in range(400):
        right = (rng.random((60, samples)) < share) * 1.0
        right[:, : samples // 2] = right[:, :1]
        _, low, high = mean_and_interval(right.ravel(), ids)
        covered += low <= share <= high
    assert 0.92 < covered / 400 < 0.98


INTERVALS = [
    ([0] * 4, [0, 1, 2, 3], (0.0, 0.0, 0.4899)),  # Wilson's, as statsmodels has it
    ([1] * 8, [0, 0, 1, 1, 2, 2, 3, 3], (1.0, 0.5101, 1.0)),  # two of each query say no more
    ([1, 0, 0, 0], [0, 1, 2, 3], (0.25, 0.0456, 0.6994)),
    ([1, 0, 1, 0], [0, 0, 1, 1], (0.5, 0.1500, 0.8500)),  # no more than there are responses
    ([0.5] * 9 + [0], [3] * 9 + [7], (0.45, 0.0, 0.5)),  # no share: queries are drawn, not rows
]


@pytest.mark.parametrize("values, ids, expected", INTERVALS)
def test_an_interval_is_over_queries_and_that_of_a_share_is_never_empty(values, ids, expected):
    assert mean_and_interval(np.array(values, float), ids) == pytest.approx(expected, abs=1e-4)


def test_the_interval_over_pairs_resamples_rows_and_not_pairs():
    """The mean product of pairs of N(1, 1) numbers has a standard error of about 2 / sqrt(N)."""
    x = np.random.default_rng(0).normal(1.0, 1.0, 400)
    _, low, high = mean_and_interval(np.outer(x, x), range(400))
    assert (high - low) / 3.92 == pytest.approx(2 * np.sqrt(1 / 400) * x.mean(), rel=0.2)


def test_a_tasks_sampling_of_test_queries_gives_way_to_the_flags():
    class Sampled(Task):
        evaluation_sampling = {"top_p": 0.9, "max_tokens": 3}

    config = Config(evaluation_samples=4, max_response_tokens=9)
    greedy = {"temperature": 0.0, "top_p": 0.9, "max_tokens": 3}
    assert sampling_for_tests(config, Sampled()) == greedy
    warm = dataclasses.replace(config, evaluation_temperature=0.5)
    assert sampling_for_tests(warm, Sampled())["temperature"] == 0.5
    with pytest.raises(UserError, match="give an --evaluation_temperature above 0"):
        check_sampling(config, Sampled())
    check_sampling(warm, Sampled())


@pytest.mark.parametrize(
    "sampling, says",
    [
        ({"stop": ["</answer>"], "top_p": 0.9}, None),
        ({"stop_token_ids": [1], "min_tokens": 2}, None),
        ({"min_tokens": 32}, None),
        ({"min_tokens": 600}, "min_tokens must be less than or equal to max_tokens=512"),
        ({"n": 3}, "ValueError: --samples_per_query is for 'n'"),
        ({"topp": 0.9}, "TypeError: Unexpected keyword argument 'topp'"),
        ({"top_p": 2.0}, "top_p must be in (0, 1], got 2.0"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"detokenize": True}, "multiple values for keyword argument 'detokenize'"),
        (None, "TypeError: unsupported operand"),
    ],
)
def test_a_sampling_that_vllm_refuses_is_named_before_anything_starts(sampling, says):
    class Own(Task):
        def sampling(self, rng):
            return sampling

    class ForTests(Task):
        evaluation_sampling = sampling

    for task in (Own(), *([ForTests()] if sampling and "n" not in sampling else [])):
        if not says:
            check_sampling(Config(), task)
            continue
        with pytest.raises(UserError) as error:
            check_sampling(Config(task="mine"), task)
        assert "sampling of task 'mine' fails: " in str(error.value)
        assert says in str(error.value) and "\n" not in str(error.value)


NO_NUMBERS = [[1.0, odd, 0.0] for odd in (None, math.nan, math.inf)]


@pytest.mark.parametrize("scores", [[1.0], *NO_NUMBERS, "abc", None, [[1.0], [0.0], [1.0]]])
def test_scores_that_are_not_a_finite_number_each_are_refused_with_what_they_are(scores):
    class Bad(Task):
        def score(self, queries, responses, finished):
            return scores

    message = "must give 3 finite numbers for as many responses, it gave|could not convert string"
    with pytest.raises(UserError, match=message):
        score(Bad(), [Query(0, "", "")] * 3, ["a", "b", "c"], [True] * 3)


def test_several_samples_of_a_query_give_pass_at_k_and_its_different_answers():
    """By hand: query 3 has 1 of 4 right, query 7 2 of 4; two answers and three."""
    ids, scores = [3] * 4 + [7] * 4, np.array([1.0, 0, 0, 0, 0, 1.0, 1.0, 0])
    found = over_queries(ids, scores, [*"1222", ["3"], ["4"], None, ["5"]])  # as a user has them
    assert {name: values[0] for name, values in found.items()} == {
        "pass@1": pytest.approx((1 / 4 + 2 / 4) / 2),
        "pass@2": pytest.approx((3 / 6 + 5 / 6) / 2),  # of 6 pairs
        "pass@4": 1.0,
        "distinct_answers": 2.5,
    }
    assert found["distinct_answers"][1:] == (2.0, 3.0), "an interval over queries"
    some_unscored = over_queries(ids[1:], scores[1:], [None] * 7)
    assert [*some_unscored] == ["pass@1", "pass@2", "pass@4"]
    assert some_unscored["pass@4"][0] == 1.0, "of the one query that has four"
    assert over_queries(ids, scores / 2, [None] * 8) == {}, "no score is right or wrong"


def test_each_metric_is_a_line_with_its_interval_and_what_was_left_out():
    metrics = {"win_rate": (0.5, 0.4, 0.6), "perplexity": (1.125, 1.0, 1.25)}
    evaluation = Evaluation(0, metrics, 30, samples=4, long_prompts=2, unscored=1)
    over = "2 left out, prompt over --max_prompt_tokens, empty or not Unicode"
    counted = f"on 30 test queries, 4 samples each; {over}; 1 left out, they got no score"
    assert [*evaluation.describe()] == [
        f"win_rate: 0.50 (0.5000, 95 % interval 0.4000 to 0.6000, {counted})",
        f"perplexity: 1.12 (1.1250, 95 % interval 1.0000 to 1.2500, {counted})",
    ]
    (few,) = Evaluation(0, {"accuracy": (0.0, 0.0, 0.49)}, 4).describe()
    assert few.endswith(", on 4 test queries (few: the interval is wide))")


class Numbers(Task):
    def extract(self, response):
        return response if response.isdigit() else None


LOOKS = [
    (
        [("7", 1, True), ("8", 0, True), ("a" * 500, 0, False), ("b", 0.5, True)],
        "25% of the responses were cut off (--max_response_tokens), 50% have no answer\n"
        "  best: reward 1, extracted '7', wanted '7': 'of 0' → '7'\n"
        "  wrong: reward 0, extracted '8', wanted '7': 'of 1' → '8'\n"
        f"  cut off: reward 0, extracted None, wanted '7': 'of 2' → '{'a' * 100} … {'a' * 100}'",
    ),
    (
        [("7", 0, True), ("a\nb", 0, True)],
        "0% of the responses were cut off, 50% have no answer\n"
        "  best: reward 0, extracted '7', wanted '7': 'of 0' → '7'",
    ),
    (
        [("a\nb", 0, False)],
        "100% of the responses were cut off (--max_response_tokens), 100% have no answer\n"
        "  cut off: reward 0, extracted None, wanted '7': 'of 0' → 'a\\nb'",
    ),
]


@pytest.mark.parametrize("responses, says", LOOKS)
def test_a_look_shows_the_best_response_a_wrong_one_and_one_that_was_cut_off(responses, says):
    queries = [Query(i, f"of {i}", 7) for i in range(len(responses))]
    assert str(look_at(Numbers(), queries, *zip(*responses))) == says


def test_an_extract_that_fails_finds_no_answer_and_ends_nothing():
    class Fails(Task):
        def extract(self, response):
            return response.split("answer: ")[1]

    queries = [Query(0, "q", None)] * 2
    found = look_at(Fails(), queries, ["answer: 7", "none"], [1.0, 0.0], [True, True])
    assert found.unanswered == 0.5
    assert found.examples[1] == "  wrong: reward 0, extracted None: 'q' → 'none'"


def test_a_task_that_extracts_no_answers_has_no_share_without_one():
    query = Query(0, [{"role": "user", "content": "go"}], None)
    turns = str(look_at(Task(), [query], [["to", "and fro"]], [1.0], [True])).splitlines()
    chat = repr(str(query.prompt))
    assert turns[1] == f"  best: reward 1: {chat} → ['to', 'and fro']" and len(turns) == 2
