"""Models of about 130,000 parameters, made in seconds by supervised training.

A task gives texts to learn from, errors included. Slow to import: import it where a model is made.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

from tasks import Query
from tasks.support.cache import cached


def pupil(
    name: str,
    queries: Sequence[Query],
    homework: Callable[[Query, np.random.Generator], str],
    steps: int = 400,
    tokens: Sequence[str] = "0123456789+=",
) -> str:
    """Return the directory of a model that answers these queries as a pupil who makes mistakes.

    What is left for reinforcement learning is to find out which of its habits are rewarded.
    name: of the task; homework: the pupil's answer to a query; steps: of supervised training;
    tokens: that prompts and answers consist of; one that others begin with comes after them.
    """

    def examples(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        chosen = [queries[i] for i in rng.integers(len(queries), size=count)]
        return [(query.prompt, homework(query, rng)) for query in chosen]

    def build(directory: Path) -> None:
        tokenizer = word_tokenizer(tokens, phrases=tokens)
        train_policy(examples, tokenizer, directory, steps, batch=256)

    lesson = examples(1000, np.random.default_rng(0))
    return str(cached(name, repr((lesson, steps)), build))


def word_tokenizer(texts: Sequence[str], phrases: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a token of each phrase, and otherwise of each word with the space before it.

    All words of these texts are known. Special tokens: <pad>, <eos>.
    """
    pattern = "|".join([*map(re.escape, phrases), r"\s?\S+", r"\s"])
    pieces = [piece for text in texts for piece in re.findall(pattern, text)]
    tokens = ["<pad>", "<eos>", *dict.fromkeys(pieces)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def train_policy(
    examples: Callable, tokenizer: PreTrainedTokenizerFast, directory: Path, steps: int, batch: int
) -> None:
    """Train a causal language model; leave it in `directory`.

    examples(batch, rng): so many rows (prompt, response, …); the response is what is learnt.
    """

    def loss(model, rng: np.random.Generator) -> torch.Tensor:
        rows = examples(batch, rng)
        texts = [prompt + response + tokenizer.eos_token for prompt, response, *_ in rows]
        ids = tokenizer(texts, padding=True, return_tensors="pt").input_ids
        lengths = [len(ids) for ids in tokenizer([prompt for prompt, *_ in rows]).input_ids]
        in_prompt = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
        hidden = in_prompt | (ids == tokenizer.pad_token_id)
        return model(input_ids=ids, labels=ids.masked_fill(hidden, -100)).loss

    train(LlamaForCausalLM, loss, tokenizer, directory, steps)


def train(
    kind: type[PreTrainedModel],
    loss: Callable,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    steps: int,
    seed: int = 0,
    **more,
) -> None:
    """Train a model for so many steps of loss(model, rng); leave it in `directory`.

    more: settings of its configuration. With 0 steps its weights stay random.
    """
    config = kind.config_class(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # About 1/sqrt(hidden_size): the default 0.02 leaves so small a model on a plateau for long.
        initializer_range=0.1,
        **more,
    )
    # So small a model gains nothing from a second thread, and loses minutes if another process has
    # that core.
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    for _ in range(steps):
        loss(model, rng).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
