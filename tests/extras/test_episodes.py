"""Episodes: what stands between two turns, what is learnt of them, and a run of them."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import CHAT_TEMPLATE, Run, flags, make_group, read, steps_of, tba
from test_fork import FILES, flags_of
from transformers import AutoTokenizer

from config import Config, UserError
from extras.objectives import LOSSES
from extras.replies import encode_reply
from launch.checks import check_tokenizer
from learner import Learner
from models.tokens import encode_prompt
from tba import main

CHAT = [{"role": "user", "content": "Where to?"}]
# As Qwen3's: what a turn has thought is gone once another turn follows.
FORGETTING = CHAT_TEMPLATE.replace(
    "message.content", "(message.content if loop.last else message.content.split('</think>')[-1])"
)


@pytest.fixture
def chat_tokenizer(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.add_tokens(["<|end|>"], special_tokens=True)
    return tokenizer


def test_between_two_turns_stands_what_the_template_writes_there(chat_tokenizer):
    turn = chat_tokenizer("left<|end|>", add_special_tokens=False).input_ids
    tokens = encode_prompt(chat_tokenizer, CHAT) + turn
    tokens += encode_reply(chat_tokenizer, CHAT, "A wall.", last_token=turn[-1])
    whole = [*CHAT, dict(role="assistant", content="left"), dict(role="user", content="A wall.")]
    text = chat_tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert chat_tokenizer.decode(tokens) == text
    reply = encode_reply(chat_tokenizer, "Where to?", " 3", last_token=0)
    assert reply == chat_tokenizer(" 3").input_ids
    begun = [*CHAT, dict(role="assistant", content="<think>\n")]
    reply = encode_reply(chat_tokenizer, begun, "A wall.", last_token=turn[-1])
    assert chat_tokenizer.decode(reply) == "\n<|start|>user\nA wall.<|end|>\n<|start|>assistant\n"


def test_a_template_that_drops_what_was_thought_is_refused_at_the_start(chat_model, tmp_path):
    shutil.copytree(chat_model, tmp_path / "model")
    config = Config(model=str(tmp_path / "model"), max_episode_tokens=99)
    check_tokenizer(config, [CHAT])
    (tmp_path / "model" / "chat_template.jinja").write_text(FORGETTING)
    with pytest.raises(UserError, match="template .* changes what stands before a reply"):
        check_tokenizer(config, [CHAT])
    check_tokenizer(replace(config, max_episode_tokens=None), [CHAT])


def test_the_command_of_the_pages_is_accepted(tmp_path, tied_model, capsys):
    (tmp_path / "climb.py").write_text(FILES["climb.py"])
    command = [str(tmp_path / "climb.py"), *flags_of("climb.py"), *flags(model=tied_model)]
    assert main([*command, "--plan"]) == 0 and "trainer" in capsys.readouterr().out


def test_tokens_that_are_in_no_loss_move_no_objective(untied_model):
    """Whatever their log-probabilities are, and whatever the objective."""
    own = dict.fromkeys(("in_loss", "sampled"), [True, False, True] * 2)
    group = make_group(0, 0, [3, 3], range(1, 7), own, rewards=np.array([0.0, 1.0], np.float32))
    config = Config(model=str(untied_model), responses_per_query=2, queries_per_batch=1, beta=1.0)
    learner, losses = Learner(config, print), []
    for value in (0.0, -50.0):
        for name in ("ref_logprob", "behavior_logprob"):
            group.tokens[name][[1, 4]] = value
        with torch.no_grad():
            inputs = learner.loss_inputs(group.responses())
            losses.append({name: float(loss(inputs)[0]) for name, loss in LOSSES.items()})
        assert inputs.sampled.sum() == 4
    assert losses[0] == losses[1]


REACH = ["reach", *flags(queries_per_batch=4, eval_every=3, checkpoint_every=2, seed=1)]


@pytest.mark.faults
def test_a_run_killed_in_the_midst_of_episodes_comes_to_the_same_end(tmp_path):
    command = [*REACH, "--synchronous", *flags(steps=6)]
    tba(*command, "--output_dir", tmp_path / "whole")
    with Run(tmp_path / "killed", *command) as run:
        run.is_at(3)
        saved = run.run_dir / "checkpoints" / "step-00000002"
        run.until(saved.exists, "the checkpoint of step 2")  # it is written in the background
        run.process.kill()
    tba("--resume", tmp_path / "killed")
    for key in "step", "loss", "reward", "response_tokens":
        lines, resumed_lines = (steps_of(tmp_path / name) for name in ("whole", "killed"))
        assert [line[key] for line in lines] == [line[key] for line in resumed_lines]
    sample = next(s for s in read(tmp_path / "whole", "samples.jsonl") if s["sampled"])
    replies = [r for r, own in zip(sample["ref_logprobs"], sample["sampled"]) if not own]
    assert len(sample["response"]) > 1 and set(replies) == {0}
    assert "moves" in (tmp_path / "whole" / "metrics.jsonl").read_text()


@pytest.mark.faults
def test_a_searcher_killed_in_the_midst_of_episodes_is_replaced(tmp_path):
    with Run(tmp_path / "run", *REACH, "--steps", 300) as run:
        run.is_at(3)
        run.kill("searcher 0")
        out, _ = run.ends_with(0)
    assert "searcher 0" in out and "final_moves" in read(run.run_dir, "metrics.jsonl")[-1]


@pytest.mark.runs
@pytest.mark.parametrize("kind", [dict(lora_rank=4), dict(trainer_processes=2), dict(searchers=2)])
def test_episodes_are_played_and_learnt_in_other_kinds_of_runs(kind, tmp_path):
    tba(*REACH, *flags(**kind, steps=6, output_dir=tmp_path / "run"))
    last_step, final = steps_of(tmp_path / "run")[-1], read(tmp_path / "run", "metrics.jsonl")[-1]
    assert last_step["step"] == 6 and last_step["mismatch"] < 1e-4
    assert final["final_moves"] >= final["final_fewest"] > 0
