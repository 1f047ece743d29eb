"""Addition of two-digit numbers: small enough to watch TBA learn on a laptop. "07+58=" wants "065".

The base model, about 130,000 parameters, is made here in seconds by supervised training on the homework of a pupil who forgets most carries.
It can add, but it would rather not carry: its samples hold the right answer, its greedy answer to a sum with a carry is wrong. What is
left for reinforcement learning is to find out which of its habits are rewarded.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tasks import Query, Task

FORGETS = 0.65  # probability that the pupil forgets a carry
TEST_QUERIES = 1000  # of the 10,000 sums; never trained on, neither here nor by reinforcement learning
PRETRAINING_STEPS = 400
PRETRAINING_BATCH = 256


class Arithmetic(Task):
    """Reward 1 for the right sum, else 0."""

    metric = "accuracy"

    def queries(self, split: str) -> Sequence[Query]:
        sums = np.random.default_rng(0).permutation(10_000)
        chosen = sums[:TEST_QUERIES] if split == "test" else sums[TEST_QUERIES:]
        return [Query(id=int(i), prompt=f"{i // 100:02}+{i % 100:02}=", answer=f"{i // 100 + i % 100:03}") for i in chosen]

    def score(self, queries: list[Query], responses: list[str], finished: list[bool]) -> list[float]:
        return [float(done and response == query.answer) for query, response, done in zip(queries, responses, finished)]

    def extract(self, response: str) -> str | None:
        return response

    def base_model(self) -> str:
        """Built once and cached; a change of this file builds it anew."""
        recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tba"
        directory = cache / f"arithmetic-{recipe}"
        if not directory.is_dir():
            print("building the base model of the arithmetic task (once, about 20 s) …", flush=True)
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as unfinished:  # renamed when whole: two runs may build at once
                pretrain(self.queries("train"), Path(unfinished) / "model")
                try:
                    (Path(unfinished) / "model").rename(directory)
                except OSError:
                    if not directory.is_dir():  # not just the other run being first
                        raise
        return str(directory)


def homework(query: Query, rng: np.random.Generator) -> str:
    """The pupil's answer: digit by digit from the right, forgetting carries."""
    a, b = query.id // 100, query.id % 100
    tens, units = a // 10 + b // 10, a % 10 + b % 10
    tens += units > 9 and rng.random() > FORGETS
    hundreds = tens > 9 and rng.random() > FORGETS
    return f"{int(hundreds)}{tens % 10}{units % 10}"


def pretrain(queries: Sequence[Query], directory: Path) -> None:
    """Supervised training from random weights on the pupil's homework; leaves model and tokenizer in `directory`."""
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
    schedule = get_linear_schedule_with_warmup(optimizer, PRETRAINING_STEPS // 10, PRETRAINING_STEPS)
    prompt_length = len(tokenizer(queries[0].prompt).input_ids)  # the same for all
    for _ in range(PRETRAINING_STEPS):
        batch = [queries[i] for i in rng.integers(len(queries), size=PRETRAINING_BATCH)]
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
