"""Prompts of messages: rendered by the model's chat template, to token ids, to a trained model."""

import json

import pytest
from conftest import CHAT_TEMPLATE, byte_tokenizer, flags, read, steps_of, tba
from tokenizers import processors

from config import Config, UserError
from extras.episodes import encode_reply
from launch.checks.preflight import check_tokenizer, load_data
from models.tokens import encode_prompt, load_tokenizer, tokens_left_out
from tasks import load_task

CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.fixture
def tokenizer():
    """A tokenizer that opens each text with <bos>, as Llama's does, and whose template does too."""
    tokenizer = byte_tokenizer()
    turns = ["<|start|>", "<|end|>"]
    tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": turns})
    special = {"special_tokens": [("<bos>", tokenizer.bos_token_id)]}
    opening = processors.TemplateProcessing(single="<bos> $A", **special)
    tokenizer.backend_tokenizer.post_processor = opening
    tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    return tokenizer


def test_messages_go_through_the_template_and_no_first_token_is_doubled(tokenizer):
    ids = encode_prompt(tokenizer, CHAT)
    opened = "<|start|>assistant\n"  # the assistant's turn
    assert tokenizer.decode(ids) == f"<bos><|start|>user\n1+1?<|end|>\n{opened}"
    start, end = tokenizer.convert_tokens_to_ids(["<|start|>", "<|end|>"])
    assert (ids[1], ids.count(start), ids.count(end)) == (start, 2, 1), "one token each"
    bos = tokenizer.bos_token_id
    assert tokenizer("1").input_ids[0] == bos, "the tokenizer adds one by itself"
    for one in (ids, encode_prompt(tokenizer, "1+1?")):
        assert one[0] == bos and one.count(bos) == 1


def test_a_prompt_begins_once_and_has_no_end(tokenizer):
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert encode_prompt(tokenizer, rendered) == encode_prompt(tokenizer, CHAT), "one <bos>"
    special = {"special_tokens": [("<bos>", bos), ("<eos>", eos)]}
    both = processors.TemplateProcessing(single="<bos> $A <eos>", **special)
    tokenizer.backend_tokenizer.post_processor = both
    assert tokenizer("1").input_ids[-1] == eos, "the tokenizer ends a text by itself"
    assert encode_prompt(tokenizer, "1+1?") == [bos, *tokenizer("1+1?").input_ids[1:-1]]
    assert encode_prompt(tokenizer, "") == [bos] and eos not in encode_prompt(tokenizer, CHAT)


@pytest.mark.parametrize("trims", [False, True])
def test_a_last_message_of_the_assistant_is_gone_on_with(tokenizer, trims):
    if trims:  # as Llama 3's does
        tokenizer.chat_template = tokenizer.chat_template.replace("content", "content | trim")
    begun = [*CHAT, {"role": "assistant", "content": "<think>\n"}]
    text = tokenizer.decode(encode_prompt(tokenizer, begun))
    assert text == f"{tokenizer.decode(encode_prompt(tokenizer, CHAT))}<think>\n"
    if not trims:
        end = tokenizer.convert_tokens_to_ids("<|end|>")
        reply = tokenizer.decode(encode_reply(tokenizer, begun, "no", last_token=end))
        assert reply == "\n<|start|>user\nno<|end|>\n<|start|>assistant\n"


def test_score_sees_the_special_tokens_that_the_task_keeps(tokenizer):
    names = tokens_left_out(tokenizer, kept=["<|start|>"])
    assert {*names.values()} == {"<bos>", "<eos>", "<|end|>"}
    ids = tokenizer("<bos>a<|start|>b<|end|><eos>", add_special_tokens=False).input_ids
    assert tokenizer.decode([i for i in ids if i not in names]) == "a<|start|>b"
    plain = tokenizer.decode([i for i in ids if i not in tokens_left_out(tokenizer)])
    assert plain == tokenizer.decode(ids, skip_special_tokens=True) == "ab", "as transformers does"


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Two problems of MATH's shape."""
    directory = tmp_path_factory.mktemp("problems")
    rows = [{"problem": f"{i}+{i}?", "solution": rf"So \boxed{{{2 * i}}}"} for i in (1, 2)]
    for split in ("train", "test"):
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory


def test_a_problem_is_one_user_message_with_the_sentence_of_the_released_code(problems):
    sentence = "Place your answer at end exactly inside latex box for example"
    prompt = [{"role": "user", "content": rf"1+1? {sentence} \boxed12 or \boxed51."}]
    answers, finished = [r"\boxed{2}", r"\boxed{3}", r"\boxed{2}"], [True, True, False]
    for grade_unfinished, last in ((False, 0.0), (True, 1.0)):
        options = dict(data_dir=str(problems), grade_unfinished=grade_unfinished)
        task = load_task("competition_math", **options)
        query = task.queries("train")[0]
        assert (query.prompt, query.answer) == (prompt, "2")
        assert task.score([query] * 3, answers, finished) == [1.0, 0.0, last]
    assert not load_task("competition_math").grade_unfinished


def test_a_tokenizer_without_a_template_is_named_before_anything_starts(problems, untied_model):
    options = {"data_dir": str(problems)}
    config = Config(task="competition_math", model=str(untied_model), options=options)
    assert load_tokenizer(config).chat_template is None
    _, _, chats, _ = load_data(config)
    with pytest.raises(UserError, match="chat messages, but the tokenizer of --model .* has no"):
        check_tokenizer(config, chats)
    check_tokenizer(config, [])  # a task whose prompts are texts needs none


@pytest.mark.runs
def test_a_task_with_messages_trains_end_to_end_and_its_evaluation_has_several_samples(
    problems, chat_model, tmp_path
):
    run_dir = tmp_path / "run"
    small = flags(steps=2, queries_per_batch=2, responses_per_query=4, trainer_processes=2)
    short = flags(max_prompt_tokens=160, max_response_tokens=8, evaluation_samples=3)
    where = flags(data_dir=problems, model=chat_model, output_dir=run_dir)
    result = tba("competition_math", *flags(preset="async2_released"), *small, *short, *where)
    assert result.returncode == 0, result.stderr
    assert [line["step"] for line in steps_of(run_dir)] == [1, 2]
    assert "on 2 test queries, 3 samples each" in result.stdout
    assert read(run_dir, "samples.jsonl")[0]["prompt"][0]["role"] == "user"
