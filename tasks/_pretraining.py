"""Base models for the tasks that need no download: about 130,000 parameters, made in seconds by supervised training on a pupil's homework.

A task gives its training queries and the homework, a function that answers a query as the pupil would, errors included.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tasks import Query

STEPS = 400
BATCH = 256

Homework = Callable[[Query, np.random.Generator], str]


def cached_base_model(task_file: str, queries: Sequence[Query], homework: Homework) -> str:
    """The directory of the task's base model. Built once; a change of the task's file or of this one builds it anew."""
    name = Path(task_file).stem
    recipe = hashlib.sha256(Path(task_file).read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tba"
    directory = cache / f"{name}-{recipe}"
    if not directory.is_dir():
        print(f"building the base model of the {name} task (once, about 20 s) …", flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:  # renamed when whole: two runs may build at once
            pretrain(queries, homework, Path(unfinished) / "model")
            try:
                (Path(unfinished) / "model").rename(directory)
            except OSError:
                if not directory.is_dir():  # not just the other run being first
                    raise
    return str(directory)


def pretrain(queries: Sequence[Query], homework: Homework, directory: Path) -> None:
    """Supervised training from random weights; leaves model and tokenizer in `directory`. All prompts have one length, all homework has one too."""
    import torch  # not at the top: tasks are also loaded where torch is not needed
    from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

    torch.set_num_threads(1)  # so small a model gains nothing from a second thread, and loses minutes if another process has that core
    tokenizer = build_tokenizer()
    rng = np.random.default_rng(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=64, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.1,  # about 1/sqrt(hidden_size); the default 0.02 leaves so small a model on a plateau for long
        ))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, STEPS // 10, STEPS)
    prompt_length = len(tokenizer(queries[0].prompt).input_ids)
    for _ in range(STEPS):
        batch = [queries[i] for i in rng.integers(len(queries), size=BATCH)]
        texts = [query.prompt + homework(query, rng) + tokenizer.eos_token for query in batch]
        ids = torch.tensor(tokenizer(texts).input_ids)
        labels = ids.clone()
        labels[:, :prompt_length] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def build_tokenizer():
    """One token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
