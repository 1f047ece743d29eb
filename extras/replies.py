"""The tokens of an environment's reply, between two turns of the model (extras/episodes.py)."""

from transformers import PreTrainedTokenizerBase

from models.tokens import render, split_prefill

TURN = "<think>\na turn\n</think>\n\nof the model"  # stands for one in a chat template


def encode_reply(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, str]],
    reply: str,
    last_token: int,
) -> list[int]:
    """Return the token ids between a turn of the model and its next one: what a reply adds.

    Of messages that is what the chat template writes after the turn; last_token, with which the
    model has ended that itself, is not repeated. Raises UnicodeError for what is no text, and
    ValueError for a template that changes what stands before a reply, such as one that drops old
    thinking: the next turn would see something else than was sampled.
    """
    if isinstance(prompt, str):
        return tokenizer(reply, add_special_tokens=False).input_ids
    before, begun = split_prefill(prompt)
    turns = {"role": "assistant", "content": begun + TURN}, {"role": "user", "content": reply}
    messages = [*before, *turns]
    turn = render(tokenizer, messages).removeprefix(render(tokenizer, prompt)).lstrip()
    if not turn.startswith(TURN):
        raise ValueError("it changes what stands before a reply, the prompt or the model's turn")
    text, end = turn.removeprefix(TURN), tokenizer.decode([last_token])
    if end and text.lstrip().startswith(end):
        text = text.lstrip().removeprefix(end)
    return tokenizer(text, add_special_tokens=False).input_ids
