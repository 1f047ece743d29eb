"""Prompts of messages: rendered by the model's chat template, to token ids, to a trained model."""

import pytest
from conftest import CHAT_TEMPLATE, byte_tokenizer
from tokenizers import processors

from config import Config, UserError
from launch.checks import check_tokenizer, load_data
from models.tokens import encode_prompt, load_tokenizer, tokens_left_out

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


def test_score_sees_the_special_tokens_that_the_task_keeps(tokenizer):
    names = tokens_left_out(tokenizer, kept=["<|start|>"])
    assert {*names.values()} == {"<bos>", "<eos>", "<|end|>"}
    ids = tokenizer("<bos>a<|start|>b<|end|><eos>", add_special_tokens=False).input_ids
    assert tokenizer.decode([i for i in ids if i not in names]) == "a<|start|>b"
    plain = tokenizer.decode([i for i in ids if i not in tokens_left_out(tokenizer)])
    assert plain == tokenizer.decode(ids, skip_special_tokens=True) == "ab", "as transformers does"


def test_a_tokenizer_without_a_template_is_named_before_anything_starts(untied_model):
    config = Config(task="sums", model=str(untied_model))
    assert load_tokenizer(config).chat_template is None
    _, _, chats, _ = load_data(config)
    with pytest.raises(UserError, match="template of --model .*: there is none, .*: use a model"):
        check_tokenizer(config, chats["train"])
    check_tokenizer(config, [])  # a task whose prompts are texts needs none
