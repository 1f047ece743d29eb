"""Models for the tasks that need no download: about 130,000 parameters each, made in seconds by supervised training, and kept.

A task gives texts to learn from, errors included: what is left for reinforcement learning is to find out which habits are rewarded.
"""

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tasks import Query

Examples = Callable[
    [int, np.random.Generator], list[tuple[str, str]]
]  # as many (prompt, response); the response is what is learnt


def cached(build: Callable[[Path], None], *files: str) -> Path:
    """The directory that `build` has filled. It is filled once; a change of one of the files, or of this one, fills another."""
    name = Path(files[0]).stem.strip("_")
    recipe = hashlib.sha256(
        b"".join(Path(file).read_bytes() for file in (*files, __file__))
    ).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tba"
    directory = cache / f"{name}-{recipe}"
    if not directory.is_dir():
        print(
            f"building the models of {name} (once, less than a minute) …",
            file=sys.stderr,
            flush=True,
        )
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=cache
        ) as unfinished:  # renamed when whole: two runs may build at once
            build(Path(unfinished) / "models")
            try:
                (Path(unfinished) / "models").rename(directory)
            except OSError:
                if not directory.is_dir():  # not just the other run being first
                    raise
    return directory


def pupil(
    task_file: str,
    queries: Sequence[Query],
    homework: Callable[[Query, np.random.Generator], str],
    steps: int = 400,
) -> str:
    """A policy that answers these queries as a pupil would: its directory. Prompts and answers are made of digits, + and =."""

    def examples(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        chosen = [queries[i] for i in rng.integers(len(queries), size=count)]
        return [(query.prompt, homework(query, rng)) for query in chosen]

    characters = tokenizer(".", [*"0123456789+="])
    return str(
        cached(
            lambda directory: train_policy(examples, characters, directory, steps, batch=256),
            task_file,
        )
    )


def tokenizer(pattern: str, pieces: Sequence[str]):
    """Each match of the regular expression is a token, if it is one of the pieces. Special tokens: <pad>, <eos>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *dict.fromkeys(pieces)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def word_tokenizer(texts: Sequence[str], phrases: Sequence[str]):
    """A token is one of the phrases, or else a word with the space before it; all words of these texts are known."""
    pattern = "|".join([*map(re.escape, phrases), r"\s?\S+", r"\s"])
    return tokenizer(pattern, [piece for text in texts for piece in re.findall(pattern, text)])


def architecture(tokenizer, **more) -> dict:
    return (
        dict(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.1,  # about 1/sqrt(hidden_size); the default 0.02 leaves so small a model on a plateau for long
        )
        | more
    )


def train_policy(examples: Examples, tokenizer, directory: Path, steps: int, batch: int) -> None:
    """A causal language model from random weights; leaves model and tokenizer in `directory`."""
    import torch  # not at the top: tasks are also loaded where torch is not needed
    from transformers import LlamaConfig, LlamaForCausalLM

    def loss(model, rng: np.random.Generator):
        pairs = examples(batch, rng)
        ids = tokenizer(
            [prompt + response + tokenizer.eos_token for prompt, response in pairs],
            padding=True,
            return_tensors="pt",
        ).input_ids
        prompts = torch.tensor(
            [len(ids) for ids in tokenizer([prompt for prompt, _ in pairs]).input_ids]
        )
        hidden = (torch.arange(ids.shape[1]) < prompts[:, None]) | (ids == tokenizer.pad_token_id)
        return model(input_ids=ids, labels=ids.masked_fill(hidden, -100)).loss

    train(
        lambda: LlamaForCausalLM(LlamaConfig(**architecture(tokenizer))),
        loss,
        tokenizer,
        directory,
        steps,
    )


def train(
    make_model: Callable, loss: Callable, tokenizer, directory: Path, steps: int, seed: int = 0
) -> None:
    """make_model() gives the model to start from, loss(model, rng) the loss of a batch."""
    import torch
    from transformers import get_linear_schedule_with_warmup

    torch.set_num_threads(
        1
    )  # so small a model gains nothing from a second thread, and loses minutes if another process has that core
    rng = np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    for _ in range(steps):
        loss(model, rng).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
