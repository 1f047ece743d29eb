"""TL;DR: the reward model at the last token, and the evaluation."""

import numpy as np
import pytest
import torch
from conftest import make
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks import Query, load_task
from tasks.support.classifier import Classifier
from tasks.tldr import perplexities, wins

REWARD = dict(kind="LlamaForSequenceClassification", num_labels=1)
REWARD |= dict(hidden_size=32, initializer_range=0.3)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """Make a reward model whose padding token is its end-of-sequence token."""
    return make(tmp_path_factory.mktemp("models"), **REWARD)


def test_a_win_is_a_higher_score_and_a_tie_is_none():
    scores, reference_scores = np.array([1.0, 2.0, 3.0, -1.0]), np.array([0.0, 2.0, 4.0, -2.0])
    assert wins(scores, reference_scores).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_perplexity_has_the_prompt_tokens_in_its_denominator(untied_model):
    prompts, responses, finished = ["ab", "a long prompt"], ["xyz", "q"], [True, False]
    model = AutoModelForCausalLM.from_pretrained(untied_model)
    tokenizer = AutoTokenizer.from_pretrained(untied_model)
    expected = []
    for prompt, response, done in zip(prompts, responses, finished):
        prompt_ids = tokenizer(prompt).input_ids
        ids = prompt_ids + tokenizer(response).input_ids + [tokenizer.eos_token_id] * done
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        nll = -sum(logprobs[i - 1, ids[i]].item() for i in range(len(prompt_ids), len(ids)))
        expected.append(np.exp(nll / len(ids)))
    computed = perplexities(str(untied_model), prompts, responses, finished)
    assert computed == pytest.approx(expected, rel=1e-4)


def test_the_reward_is_read_at_the_end_even_where_that_is_padding_too(reward_model):
    classifier = Classifier(str(reward_model))
    model, tokenizer = classifier.model, classifier.tokenizer
    texts = ["short", "a text that is much longer than the other"]
    for text, reward in zip(texts, classifier.rewards(texts)):
        ids = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            alone = model.score(model.base_model(input_ids=ids).last_hidden_state[0, -1])
        assert reward == pytest.approx(float(alone), abs=1e-5)


def test_the_reward_is_that_of_post_and_summary_and_minus_1_without_an_end(reward_model):
    task = load_task("tldr", reward_model=str(reward_model))
    task.load()
    expected = float(task.reward.rewards(["one two"])[0])
    scores = task.score([Query(0, "one", "")] * 2, [" two", " two"], [True, False])
    assert scores == [pytest.approx(expected, abs=1e-4), -1.0]
