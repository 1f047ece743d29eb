"""Every preset starts: its models are replaced by tiny random ones of the same architecture.

Lengths, batch and initial responses are cut too; what is left is the preset's. Two steps each.
"""

import json

import pytest
import torch
import transformers
from conftest import CHAT_TEMPLATE, PATIENCE, Run, byte_tokenizer, read

from tasks import find_presets

TASKS = ("gsm8k", "competition_math", "tldr", "redteam", "arithmetic", "addends", "reach")
# With one preset each. Runs of the others end in test_hub.py and test_runs.py.
TO_THE_END = ("gsm8k", "competition_math", "addends")
SHAPE = dict(
    hidden_size=64,  # 32 a head: the fewest that vLLM takes on a CPU
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
CUT = ["--steps", 2, "--checkpoint_every", 0, "--initial_responses", 40]
SHORT = ["--max_prompt_tokens", 250, "--max_response_tokens", 8]


def make(directory, kind: str, **settings) -> str:
    """Save a random model of that class, with a tokenizer of bytes that has a chat template."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    end, model_class = tokenizer.eos_token_id, getattr(transformers, kind)
    tokens = dict(vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=end, bos_token_id=None)
    model = model_class(model_class.config_class(**SHAPE | tokens | settings))
    model.save_pretrained(directory / kind)
    tokenizer.save_pretrained(directory / kind)
    return str(directory / kind)


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory, gsm8k_data) -> dict[str, list]:
    """For each task the flags that name tiny models and local data."""
    models, data = tmp_path_factory.mktemp("stand_ins"), tmp_path_factory.mktemp("data")
    rows = {
        "math": {"problem": "1+1?", "solution": r"\boxed{2}"},
        "tldr": {"query": "POST: a", "reference_response": " b", "query_reference_response": ""},
    }
    for name, row in rows.items():
        (data / name).mkdir()
        for split in ("train", "test"):
            (data / name / f"{split}.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    pythia = make(models, "GPTNeoXForCausalLM")
    reward = make(models, "GPTNeoXForSequenceClassification", num_labels=1)
    victim = make(models, "GPT2LMHeadModel")
    labels = dict(id2label={0: "nothate", 1: "hate"}, label2id={"nothate": 0, "hate": 1})
    hate = make(models, "RobertaForSequenceClassification", **labels)
    embedding = make(models, "BertModel")
    return {
        "gsm8k": ["--model", make(models, "LlamaForCausalLM"), "--data_dir", gsm8k_data],
        "competition_math": [
            *("--model", make(models, "Qwen2ForCausalLM"), "--data_dir", data / "math"),
            *("--queries_per_batch", 4, "--evaluation_samples", 2),
        ],
        "tldr": [
            *("--model", pythia, "--reference_model", pythia, "--data_dir", data / "tldr"),
            *("--reward_model", reward, "--gold_model", reward),
        ],
        "redteam": [
            *("--model", victim, "--victim_model", victim, "--classifier", hate),
            *("--embedding_model", embedding, "--victim_tokens", 4),
        ],
    }


@pytest.mark.runs
@pytest.mark.parametrize(
    "task, preset", [(task, preset) for task in TASKS for preset in find_presets(task)]
)
def test_a_preset_starts_and_makes_two_steps(task, preset, stand_ins, tmp_path):
    # tiny and demo bring models of their own, for short texts.
    flags = [] if preset in ("tiny", "demo") else [*stand_ins[task], *SHORT]
    if preset.startswith("llama"):
        flags += ["--judge", stand_ins["gsm8k"][1], "--searchers", 1]
    with Run(tmp_path / "run", task, "--preset", preset, *CUT, *flags) as run:
        run.is_at(2)
        if task in TO_THE_END and preset == next(iter(find_presets(task))):
            _, err = run.process.communicate(timeout=PATIENCE)
            assert run.process.returncode == 0, err
            final = read(run.run_dir, "metrics.jsonl")[-1]
            assert any(name.startswith("final_") for name in final)
    assert [line["step"] for line in run.steps()] == [1, 2]
    settings = json.loads((run.run_dir / "config.json").read_text())
    assert settings["preset"] == preset
