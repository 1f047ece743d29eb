"""Every preset makes two steps with tiny models of its architectures; lengths are cut, too."""

import json

import pytest
from conftest import Run, flags, make, read

from launch.command_line import find_presets

TASKS = ("gsm8k", "competition_math", "tldr", "redteam", "arithmetic", "sums", "multiples", "reach")
PRESETS = [(task, preset) for task in TASKS for preset in find_presets(task)]
# With one preset each. Runs of the others end in test_episodes, test_hub and test_runs.
TO_THE_END = ("gsm8k", "competition_math", "multiples")
CUT = flags(steps=2, checkpoint_every=0, initial_responses=40)
SHORT = flags(max_prompt_tokens=250, max_response_tokens=8)


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory, gsm8k_data) -> dict[str, list]:
    """For each task the flags that name tiny models and local data."""
    models, data = tmp_path_factory.mktemp("stand_ins"), tmp_path_factory.mktemp("data")
    problem = {"problem": "1+1?", "solution": r"\boxed{2}"}
    post = {"query": "POST: a", "reference_response": " b", "query_reference_response": ""}
    for name, row in ("math", problem), ("tldr", post):
        (data / name).mkdir()
        for split in ("train", "test"):
            (data / name / f"{split}.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    gsm8k = flags(model=make(models, "LlamaForCausalLM"), data_dir=gsm8k_data)
    math = flags(model=make(models, "Qwen2ForCausalLM"), data_dir=data / "math")
    math += flags(queries_per_batch=4, evaluation_samples=2)
    pythia = make(models, "GPTNeoXForCausalLM")
    reward = make(models, "GPTNeoXForSequenceClassification", num_labels=1)
    tldr = flags(model=pythia, reference_model=pythia, reward_model=reward, gold_model=reward)
    tldr += flags(data_dir=data / "tldr")
    victim = make(models, "GPT2LMHeadModel")
    labels = dict(id2label={0: "nothate", 1: "hate"}, label2id={"nothate": 0, "hate": 1})
    hate = make(models, "RobertaForSequenceClassification", **labels)
    redteam = flags(model=victim, victim_model=victim, victim_tokens=4, classifier=hate)
    redteam += flags(embedding_model=make(models, "BertModel"))
    return dict(gsm8k=gsm8k, competition_math=math, tldr=tldr, redteam=redteam)


@pytest.mark.runs
@pytest.mark.parametrize("task, preset", PRESETS)
def test_a_preset_starts_and_makes_two_steps(task, preset, stand_ins, tmp_path):
    # These bring models of their own, for short texts.
    own = [*stand_ins[task], *SHORT] if task in stand_ins and preset != "tiny" else []
    if preset.startswith("llama"):
        own += flags(judge=stand_ins["gsm8k"][1], searchers=1)
    with Run(tmp_path / "run", task, "--preset", preset, *CUT, *own) as run:
        run.is_at(2)
        if task in TO_THE_END and preset == next(iter(find_presets(task))):
            run.ends_with(0)
            final = read(run.run_dir, "metrics.jsonl")[-1]
            assert any(name.startswith("final_") for name in final)
    assert [line["step"] for line in run.steps()] == [1, 2]
    assert json.loads((run.run_dir / "config.json").read_text())["preset"] == preset
