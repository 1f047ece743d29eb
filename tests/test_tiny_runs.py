"""TL;DR and red-teaming in miniature, and the example tasks.

These are whole runs on the real vLLM, with no GPU and no download.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, flags, read, steps_of, tba
from test_runs import OUTPUTS
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from config import UserError
from models.hub import find_model
from tasks import load_task
from tasks.redteam import VICTIM_PROMPT
from tasks.support import tiny_redteam
from tasks.support.classifier import Judge, judged_texts, prepare_judge
from tasks.support.pretraining import train_policy, word_tokenizer

EXAMPLES = ROOT / "examples"
JUDGE_TEMPLATE = "User:{{ messages[0].content }} Agent:{{ messages[1].content }} Verdict:"
# The stand-ins are small, and so is the run; what is Llama's own stays.
AS_LLAMA = (
    "--preset llama --searchers 1 --lora_rank 0 --lora_alpha None --beta 0.5 --learning_rate 1e-3 "
    "--warmup_steps 0 --weight_decay 0 --reward_temperature_steps 15 --responses_per_query 32 "
    "--samples_per_query 32 --initial_responses 128 --max_prompt_tokens 32 --max_response_tokens 8 "
    "--victim_tokens 8 --checkpoint_every 0"
).split()


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, str]:
    """The stand-ins of red-teaming, the victim as a chat model, and a language model as judge.

    By the settings of the task that take them.
    """
    directory = tmp_path_factory.mktemp("judged") / "models"
    shutil.copytree(load_task("redteam", tiny=True).made, directory)
    victim = AutoTokenizer.from_pretrained(directory / "victim")
    template = VICTIM_PROMPT.replace("{instruction}", "{{ messages[0].content }}")
    victim.chat_template = template.removesuffix("\n") + "{{ '\\n' }}"
    save(victim, directory / "victim")

    def examples(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        asked = [tiny_redteam.instruction(thing, rng).strip() for thing in tiny_redteam.THINGS]
        asked, failed = rng.choice(asked, size=count), rng.integers(2, size=count)
        kinds = tiny_redteam.POLITE, tiny_redteam.FAILURES
        answers = [rng.choice(kinds[i]).format(text.split()[3]) for i, text in zip(failed, asked)]
        verdicts = [("safe", "unsafe")[i] for i in failed]
        return [*zip(judged_texts(tokenizer, asked, answers), verdicts)]

    # All words, and those of the template as one token each.
    texts = [text for x in tiny_redteam.THINGS for text in [x, f" {x}.", f" {x}"]]
    words = " ".join(tiny_redteam.VERBS + tiny_redteam.ADJECTIVES + tiny_redteam.PLACES)
    texts += [words, " " + words, *tiny_redteam.POLITE, *tiny_redteam.FAILURES]
    phrases = ["User:", " Agent:", " Verdict:\n\n", "unsafe", "safe"]
    tokenizer = word_tokenizer([*texts, *tiny_redteam.VERBS, *phrases], phrases)
    tokenizer.chat_template = JUDGE_TEMPLATE
    train_policy(examples, tokenizer, directory / "judge", steps=120, batch=64)
    save(tokenizer, directory / "judge")
    names = dict(victim_model="victim", judge="judge", embedding_model="embedding")
    return {setting: str(directory / name) for setting, name in names.items()}


def save(tokenizer, directory: Path) -> None:
    """Save a tokenizer that begins each text with a special token, unless a template does."""
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    begin = TemplateProcessing(single=f"{end[0]} $A", special_tokens=[end])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.save_pretrained(directory)


RUNS = [("tldr", False), ("redteam", False), ("redteam", True)]


@pytest.mark.runs
@pytest.mark.parametrize("task, is_judged", RUNS)
def test_a_tiny_run_raises_the_reward_and_prints_its_metrics(task, is_judged, judged, tmp_path):
    run_dir, settings = tmp_path / "run", ["--tiny"]
    if is_judged:
        attacker = Path(judged["judge"]).with_name("attacker")
        settings = [*flags(model=attacker, **judged), *AS_LLAMA]
    # On-policy: how stale 60 free-running steps are, and so what they learn, is the machine's.
    result = tba(task, *settings, "--steps", 60, "--synchronous", "--output_dir", run_dir)
    assert all((run_dir / name).exists() for name in OUTPUTS)
    lines = read(run_dir, "metrics.jsonl")
    base = next(line["reward"] for line in lines if "loss" not in line and "reward" in line)
    final = lines[-1]
    assert final["final_reward"] > base + 0.5
    metrics = ["win_rate", "perplexity"] if task == "tldr" else ["toxic_share", "diversity"]
    metrics.append("reward")
    names = {f"final_{name}" for name in metrics}
    names |= {f"{name}_interval" for name in names}
    assert final.keys() == names | {"step", "base_model"}
    assert all(f"final {name}: {final[f'final_{name}']:.2f} (" in result.stdout for name in metrics)
    # In red-teaming vLLM masks an early end, so that there is a mismatch.
    assert steps_of(run_dir)[-1]["mismatch"] < 1e-4 or task == "redteam"


def test_the_example_with_a_regular_expression():
    task = load_task(str(EXAMPLES / "iso_dates.py"))
    query = task.queries("train")[0]
    assert query.prompt.endswith("2 January 1980 = ") and query.answer == "1980-01-02"
    responses = ["1980-01-02", " 1980-01-03.", "January"]
    assert task.score([query] * 3, responses, [True] * 3) == [1.0, 0.2, 0.0]
    assert not {q.id for q in task.queries("train")} & {q.id for q in task.queries("test")}


@pytest.mark.runs
def test_the_example_is_evaluated_from_the_command_line(tied_model):
    settings = flags(model=tied_model, max_response_tokens=3)  # three bytes are no date
    result = tba(EXAMPLES / "iso_dates.py", "--eval_only", *settings)
    reward = json.loads(result.stdout.splitlines()[-1])["metrics"]["reward"]
    assert reward == [0.0, 0.0, pytest.approx(0.0021, abs=1e-4)], "Wilson's interval"


def test_the_example_with_a_model():
    classifier = load_task("redteam", tiny=True).classifier
    options = dict(classifier=classifier, label="polite")
    task = load_task(str(EXAMPLES / "kind_replies.py"), **options)
    task.prepare()
    task.load()
    texts = ["Sure, the boat.", "Zork, the boat.", "Sure, the boat."]
    rewards = task.score(list(task.queries("train"))[:3], texts, [True, True, False])
    assert rewards[0] > 0.9 and rewards[1] < 0.1 and rewards[2] == 0.0


@pytest.mark.parametrize("task", ["tldr", "redteam"])
def test_the_model_that_a_task_starts_from_is_a_hub_id_or_a_directory(task):
    for options in ({}, {"tiny": True}):
        assert find_model("--model", load_task(task, **options).base_model())


def test_a_victim_is_asked_in_slices_and_answers_as_often_as_it_should():
    task = load_task("redteam", tiny=True)
    task.load()
    toxicity = task.toxicity([" Fold the red whistle twice", " Fold the red boat twice"] * 50)
    assert toxicity.shape == (100, 5)
    # Prompts with the weak spot and without it alternate.
    assert np.median(toxicity[::2]) > 0.9
    assert np.median(toxicity[1::2]) < 0.1


def test_a_judge_reads_prompt_and_answer_and_a_chat_victim_is_asked_through_its_template(judged):
    task = load_task("redteam", victim_temperature=0.1, **judged)
    task.prepare()
    task.load()
    assert task.victim.is_chat and task.models()[1] == judged["judge"]
    generate, read, inputs, pairs = task.victim.model.generate, task.reader.probabilities, [], []
    task.victim.model.generate = lambda **how: inputs.append(how["input_ids"]) or generate(**how)
    task.reader.probabilities = lambda *texts: pairs.extend(zip(*texts)) or read(*texts)
    toxicity = task.toxicity([" Fold the red whistle twice", " Fold the red boat twice"] * 4)
    assert np.median(toxicity[::2]) > 0.9 and np.median(toxicity[1::2]) < 0.1
    assert not (inputs[0] == task.victim.tokenizer.eos_token_id).any(), "the template's tokens only"
    assert len(pairs) == 40 and all(asked.split()[3] in answer for asked, answer in pairs)
    judge = Judge(judged["judge"])
    asked = ["Fold the red boat twice", "Fold the red boat twice"]
    found = judge.probabilities(asked, ["Zork, the boat.", "Sure, the boat."])
    assert found[0] > 0.9 and found[1] < 0.1, "its verdict is its own"


@pytest.mark.parametrize("template", [None, "{{ messages[0].content[0].text }}"])
def test_a_judge_whose_template_leaves_out_what_is_judged_is_refused(template, judged, tmp_path):
    shutil.copytree(judged["judge"], tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "judge")
    tokenizer.chat_template = template
    (tmp_path / "judge" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(tmp_path / "judge")
    with pytest.raises(UserError, match="--judge .* has no chat template that shows"):
        prepare_judge("--judge", str(tmp_path / "judge"))
