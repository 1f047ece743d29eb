"""The benchmarks measure what they say they measure."""

import json

import common
import numpy as np
import overlap
import pytest
import torch
import trainer_step
from conftest import byte_tokenizer
from transformers import AutoModelForCausalLM

from config import Config
from models.logprobs import response_logprobs
from models.policy import load_policy
from rollouts import Response, make_tokens


def test_the_counting_model_ends_as_often_as_the_lengths_say(tmp_path):
    tokenizer, lengths = byte_tokenizer(), [2, 2, 3, 5]
    common.counting_model(tmp_path, lengths, tokenizer, intermediate=64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    numbers = tokenizer.convert_tokens_to_ids([f"⟨{i}⟩" for i in range(1, 5)])
    ids = torch.tensor([[*tokenizer("12").input_ids, *numbers]])
    with torch.no_grad():
        probabilities = model(input_ids=ids).logits[0, 1:].softmax(-1)  # behind 2, ⟨1⟩, … ⟨4⟩
    ends = probabilities[:, tokenizer.eos_token_id].tolist()
    np.testing.assert_allclose(ends, [0, 2 / 4, 1 / 2, 0, 1], atol=1e-4)
    continues = [probabilities[i, numbers[i]].item() for i in range(4)]
    np.testing.assert_allclose(continues, [1, 1 / 2, 1 / 2, 1], atol=1e-4)


def test_the_variants_that_are_compared_give_the_same_log_probabilities(tied_model):
    model = load_policy(Config(model=str(tied_model)), torch.device("cpu"))
    ids, sizes = np.arange(30), ((4, 9, 4), (3, 7, 1))  # of prompts, of responses
    rows = [[ids[n : 2 * n] for n in part] for part in sizes]
    with torch.no_grad():
        ours = response_logprobs(model, *rows, 0.7)
        for variant in (trainer_step.trimmed, trainer_step.padded):
            found = variant(model, *rows, 0.7, torch.float32)[:, :7]
            torch.testing.assert_close(found, ours, atol=2e-5, rtol=0)


def test_the_floor_counts_each_prompt_once_and_no_padding():
    def row(query: int, prompt: int, tokens: int) -> Response:
        sizes = dict(prompt=np.zeros(prompt), tokens=make_tokens(range(tokens)))
        return Response(query_id=query, version=0, reward=0.0, **sizes)

    shape = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=3)
    shape |= dict(num_attention_heads=2, num_key_value_heads=1)
    # q; k and v of half its size; o; the MLP. A multiplication and an addition each.
    layer = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
    # Queries times their mean number of keys, for the scores and for the values.
    attention = 4 * 8 * (6 * (4 + 3) + 2 * (4 + 1) + 4 * 2)
    head = 2 * 8 * trainer_step.VOCABULARY
    rows = [row(0, 4, 6), row(0, 4, 2)]
    expected = 3 * (12 * 3 * layer + 3 * attention + 8 * head)
    assert trainer_step.floor_flops(shape, rows) == expected


def test_overlap_measures_rates_and_the_time_to_the_target(tmp_path):
    # 300 responses arrive at every second step, 3.1 % more of them right each time.
    lines = [dict(reward=0.5 + i // 2 * 0.031, received=300 * (i // 2 + 1)) for i in range(41)]
    lines = [line | dict(step=i + 1, loss=0.0, seconds=2.0 * i) for i, line in enumerate(lines)]
    (tmp_path / "logs").mkdir()
    for name, values in {
        "logs/trainer.spans.jsonl": [("step", i, i + 0.5) for i in range(41)],
        "logs/searcher-0.spans.jsonl": [("search", 0, 10.25), ("load", 11, 30)],
        "metrics.jsonl": lines,
    }.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, values)))
    expected = dict(rate=0.5, busy=20.5 / 40.5, t_train=0.5, t_search=0.25)
    for staleness, reached in (None, 32.5), (0, 30.5):
        config = {"queries_per_batch": 100, "responses_per_query": 5}
        config |= {"constant_staleness": staleness}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert overlap.measure(tmp_path) == pytest.approx(expected | {"reached": reached})
