"""The task whose right answers can be enumerated, and what is known exactly because of it."""

import itertools

import numpy as np
import pytest
import torch
from conftest import make
from exact_real import KINDS, ExactSearcher, exact
from study import train
from transformers import LlamaConfig, LlamaForCausalLM

from models.logprobs import response_logprobs
from tasks import load_task
from tasks.multiples import HELD_OUT, NUMBERS, right_answers

BETA, EOS, LENGTH = 0.25, 0, 3
TASK = load_task("multiples")


@pytest.fixture(scope="module")
def language() -> list[tuple[int, ...]]:
    """All responses of at most LENGTH of four letters; EOS ends the shorter ones."""
    letters = range(1, 5)
    ended = [p for n in range(LENGTH) for p in itertools.product(letters, repeat=n)]
    return [(*prefix, EOS) for prefix in ended] + [*itertools.product(letters, repeat=LENGTH)]


@torch.no_grad()
def logprobs(seed: int, language) -> torch.Tensor:
    """Log-probabilities of a whole language under a model of random weights."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=5, initializer_range=0.5, **sizes)).double()
    rows = [np.array(response) for response in language]
    return response_logprobs(model, [np.array([1, 2])] * len(rows), rows, 1.0, torch.float64).sum(1)


def test_the_optimum_is_that_of_a_whole_language_by_brute_force(language):
    reference, policy = (logprobs(seed, language) for seed in (0, 1))
    assert reference.exp().sum() == pytest.approx(1, abs=1e-6), "the whole language"
    right = torch.tensor([3, 5, 8, 21, 40])
    rewards = torch.zeros(len(language)).double().index_fill(0, right, 1.0)
    unnormalised = reference + rewards / BETA
    log_z, best = unnormalised.logsumexp(0), unnormalised.log_softmax(0)  # of Eq. 2

    def attained(policy: torch.Tensor) -> float:
        return float(policy.exp() @ (rewards - BETA * (policy - reference)))

    at_best = exact(best[right], reference[right], BETA)
    assert at_best["log Z"] == pytest.approx(float(log_z), abs=1e-6)
    assert at_best["attained"] == pytest.approx(attained(best), abs=1e-6)
    assert at_best["mass"] == pytest.approx(float(best.exp() @ rewards), abs=1e-6)
    assert at_best["KL to π*"] == pytest.approx(0, abs=1e-6)
    assert at_best["attained"] == at_best["attainable"] and at_best["covered"] == 1
    assert at_best["perplexity"] == pytest.approx(at_best["perplexity of π*"], abs=1e-6)
    # Another policy may drift within the rest: what it attains is bounded from above.
    found = exact(policy[right], reference[right], BETA)
    assert attained(policy) < found["attained"] < found["attainable"]
    assert found["KL to π*"] < float(policy.exp() @ (policy - best))
    at_start = exact(reference[right], reference[right], BETA)
    assert at_start["attained"] == pytest.approx(at_start["mass"], abs=1e-6), "no KL to itself"


def test_the_right_answers_are_the_lines_of_multiples_and_no_others():
    query = next(query for query in TASK.queries("test") if query.answer == 7)
    lines = [f"{n}\n" for n in range(200)] + ["14", "14\n\n", " 14\n", "014\n", "14 \n", "14\n21\n"]
    rewards = TASK.score([query] * len(lines), lines, [True] * len(lines))
    found = [line for line, reward in zip(lines, rewards) if reward]
    assert found == right_answers(7) and len(found) == 14
    assert query.prompt.startswith("Some multiples of 7 below 100:\n")
    assert TASK.score([query], ["14\n"], [False]) == [0.0], "it was cut off"


def test_numbers_and_pairs_of_examples_are_held_out():
    train, test = TASK.queries("train"), TASK.queries("test")
    assert {query.answer for query in train} == set(NUMBERS) - set(HELD_OUT)
    assert {query.answer for query in test} == set(NUMBERS)
    prompts = [query.prompt for query in [*train, *test]]
    assert len({query.id for query in [*train, *test]}) == len(prompts)
    assert not {query.prompt for query in train} & {query.prompt for query in test}


def test_a_run_is_measured_as_it_goes_and_at_its_end(tmp_path):
    sizes = dict(queries_per_batch=2, responses_per_query=4, samples_per_query=4, steps=3)
    sizes |= dict(initial_responses=8, max_prompt_tokens=99, eval_every=2, learning_rate=3e-2)
    # An objective that moves a policy also where no response is right.
    settings = sizes | dict(task="multiples", model=make(tmp_path, "LlamaForCausalLM"))
    settings |= dict(loss="asymre")
    found = train(settings, searcher=ExactSearcher, groups_per_sync=2)
    assert [point["step"] for point in found["curve"]] == [0, 2, 3]
    first, _, last = ([point[kind] for kind in KINDS] for point in found["curve"])
    assert last != first
    for sampled in found["sampled"].values():  # importance sampling from the trained policy
        assert np.subtract(*sampled["log Z"]).mean() == pytest.approx(0, abs=0.15)
