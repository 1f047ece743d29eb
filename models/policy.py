"""The policy as transformers loads it: trainer and reference policy both come from here."""

import re
from collections.abc import Iterable

import torch
from tokenizers.decoders import DecodeStream
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from config import Config, UserError, first_line
from models.folder import load_model, read_tokenizer
from models.hub import cached_model
from models.logprobs import check_architecture

CHARACTER_BYTES = 4  # at most, in UTF-8
TURN = "<think>\na turn\n</think>\n\nof the model"  # stands for one in a chat template


def load_policy(
    config: Config, device: torch.device, linear_dtype: torch.dtype | None = None
) -> torch.nn.Module:
    """Load config.model in --master_dtype and evaluation mode: pi is without dropout.

    linear_dtype: what a policy that is not trained computes in (hold_as_multiplied).

    Raises ValueError for an architecture that response_logprobs does not know, and UserError for
    weights that are not finite, or not the model's.
    """
    how = dict(dtype=torch.float32, trust_remote_code=config.trust_remote_code)
    model = load_model("--model", config.model, **how)
    check_finite(model, config)
    check_architecture(model)  # in fp32, to compare to 1e-3
    model.to(getattr(torch, config.master_dtype))
    if linear_dtype:
        hold_as_multiplied(model, linear_dtype)
    return model.to(device)


def find_not_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Name the first weight with a NaN or an infinity: its sum has one too, and is quick."""
    return next((name for name, weight in weights if not weight.sum().isfinite()), None)


def check_finite(model: torch.nn.Module, config: Config) -> None:
    """Raise UserError for a model, loaded from config.model, with such a weight."""
    if name := find_not_finite(model.named_parameters()):
        raise UserError(f"the weight {name} of --model {config.model!r} is NaN or infinite")


def hold_as_multiplied(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Hold the matrices of linear layers in the dtype in which autocast multiplies by them.

    They take half of the memory in bf16, and no casts. The products are the same. The input
    embedding stays as it is: it is read in fp32.
    """
    for layer in linear_layers(model):
        layer.to(dtype)


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer of config.model. Raises UserError for one that cannot be used."""
    return read_tokenizer("--model", config.model, config.trust_remote_code)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]]
) -> list[int]:
    """Return the token ids of a prompt, with one beginning-of-sequence at most and no end of one.

    Messages go through the model's chat template, which writes its own first token. Of what the
    tokenizer adds to a text only the opening stays. A text that is not Unicode, such as half of an
    emoji, has no tokens: it is skipped as an empty one is.
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


def tokens_left_out(tokenizer: PreTrainedTokenizerBase, kept: Iterable[str] = ()) -> dict[int, str]:
    """Name the special tokens that are left out of a response's text, by id: all but those kept."""
    added = tokenizer.added_tokens_decoder.items()
    special = {number: str(token) for number, token in added if token.special}
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
    return {number: text for number, text in special.items() if text not in {*kept}}


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """Return the text that each token adds to those before it, special tokens included.

    A character that several tokens make comes with the last of them, "" with the others. What is no
    text is U+FFFD.
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


def policy_without_weights(config: Config) -> torch.nn.Module:
    """Make config.model on the meta device: names and shapes, nothing loaded.

    Raises UserError for a model that cannot be had.
    """
    try:
        architecture = AutoConfig.from_pretrained(
            cached_model("--model", config.model, weights=False),
            trust_remote_code=config.trust_remote_code,
        )
        if getattr(architecture, "quantization_config", None):
            raise ValueError("it is quantized, and the trainer needs plain weights")
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                architecture, trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise UserError(f"--model {config.model!r} cannot be used: {first_line(error)}") from error


def linear_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """List the linear layers of a model, an output embedding that is the input's aside."""
    embedding = model.get_input_embeddings().weight
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return [layer for layer in layers if layer.weight is not embedding]


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the layers of a model: what transformers would not split between two devices."""
    kinds = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in kinds]


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, a tied one once, with nothing loaded.

    Raises UserError for a model that cannot be had, or has fewer positions than the run needs.
    """
    model = policy_without_weights(config)
    tokens = sum(config.longest_row)
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        flags = "--max_prompt_tokens {} + --max_response_tokens {}".format(*config.longest_row)
        flags = "--max_episode_tokens" if config.max_episode_tokens else flags
        raise UserError(
            f"{flags} is {tokens}, more than the {limit} positions of --model {config.model!r}"
        )
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
