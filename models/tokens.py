"""Text to tokens and back: what the policy reads, and what it has written."""

import re
from collections.abc import Iterable

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from config import Config
from models.loading import read_tokenizer

CHARACTER_BYTES = 4  # at most, in UTF-8


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer of config.model. Raises UserError for one that cannot be used."""
    return read_tokenizer("--model", config.model, config.trust_remote_code)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]]
) -> list[int]:
    """Return the token ids of a prompt, with one beginning-of-sequence at most and no end of one.

    Messages go through the model's chat template, which writes its own first token. Of what the
    tokenizer adds to a text only the opening stays. Text that is not Unicode has no tokens.
    """
    text = prompt if isinstance(prompt, str) else render(tokenizer, prompt)
    try:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        whole = tokenizer(text).input_ids if isinstance(prompt, str) else ids
    except (TypeError, UnicodeError):
        return []
    if not ids:
        return [token for token in whole if token != tokenizer.eos_token_id]
    starts = (i for i in range(len(whole)) if whole[i : i + len(ids)] == ids)
    opening = whole[: next(starts, 0)]
    # A prompt that was rendered before has it already.
    return ids if ids[: len(opening)] == opening else opening + ids


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Write messages by the chat template, up to where the model goes on.

    That is a turn of its own, or the last message where that is the assistant's (a prefill). Not by
    continue_final_message: templates trim that message, or close what it thinks.
    """
    asked, begun = split_prefill(messages)
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    if begun.startswith("<think>"):  # some templates open it themselves
        text = re.sub(r"<think>\s*$", "", text)
    return text + begun


def split_prefill(messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], str]:
    """Split off the text of a last message that is the assistant's; "" if it is not."""
    *before, last = messages
    return (before, last["content"]) if last["role"] == "assistant" else (messages, "")


def tokens_left_out(tokenizer: PreTrainedTokenizerBase, kept: Iterable[str] = ()) -> dict[int, str]:
    """Name the special tokens that are left out of a response's text, by id: all but those kept."""
    added = tokenizer.added_tokens_decoder.items()
    special = {number: str(token) for number, token in added if token.special}
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
    return {number: text for number, text in special.items() if text not in {*kept}}


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """Return the text that each token adds to those before it, special tokens included.

    A character of several tokens comes with the last, "" with the others. U+FFFD: no text.
    """
    if not tokenizer.is_fast:
        return [tokenizer.decode([token]) for token in tokens]
    texts, stream, num_held = [], DecodeStream(), 0
    for token in tokens:
        text = None
        try:
            text = stream.step(tokenizer.backend_tokenizer, token)
            num_held = 0 if text else num_held + 1
        except Exception:  # some sequences of bytes have no decoding step by step
            num_held = CHARACTER_BYTES
        if num_held == CHARACTER_BYTES:  # then these bytes are no character
            text, stream, num_held = "\ufffd", DecodeStream(), 0
        texts.append(text or "")
    return texts
