"""What a task's own file may do, and the models that it cannot have."""

import pickle
from multiprocessing import get_context

import pytest
from transformers import AutoConfig

from config import Config, UserError
from models.architecture import weight_shapes
from tasks import find_task

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


def test_what_a_task_file_defines_can_be_pickled_and_called_in_another_process(tmp_path):
    file = tmp_path / "own.types.py"
    file.write_text(OWN_TYPES)
    task = find_task(str(file))()
    query = task.queries("train")[0]
    assert pickle.loads(pickle.dumps(query)) == query
    with get_context("fork").Pool(1) as pool:
        assert pool.map(task.score.__globals__["length"], ["a", "bb"]) == [1.0, 2.0]


def test_a_task_file_that_was_changed_is_imported_again(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_TYPES)
    before = find_task(str(file))
    assert find_task(str(file)) is before
    file.write_text(OWN_TYPES.replace("Between", "Within"))
    assert find_task(str(file)).__name__ == "Within"


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
