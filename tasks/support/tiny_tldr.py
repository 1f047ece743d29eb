"""TL;DR in miniature, to try tasks/tldr.py without a GPU or a download.

Posts are about an animal and what it did. A summary is good if it names the animal and the deed of
the post, and nothing besides. The policy guesses and rambles; the reward model has learnt this
taste from scored summaries, and the gold model the same one from others.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForSequenceClassification

from tasks.support.cache import cached
from tasks.support.pretraining import train, train_policy, word_tokenizer

ANIMALS = ["cat", "dog", "goat", "duck", "pony", "frog"]
DEEDS = (
    "ate my lunch, slept in my boat, sang at night, hid my keys, painted the barn, read my book"
).split(", ")
ASIDES = ["it was a Monday", "I was tired", "nobody helped", "it rained again"]
RAMBLE = ["well", "so", "anyway", "honestly", "basically"]
PAIRS = list(itertools.product(ANIMALS, DEEDS, ASIDES))
TEST_POSTS = 36


def post(animal: str, deed: str, aside: str) -> str:
    return (
        f"SUBREDDIT: r/farm\n\nTITLE: a question\n\nPOST: {aside} . My {animal} {deed} .\n\nTL;DR:"
    )


def summary(animal: str, deed: str, ramble: list[str]) -> str:
    return "".join(f" {word}" for word in [*ramble, animal, deed])


def pupils_summary(animal: str, deed: str, rng: np.random.Generator) -> tuple[str, float]:
    """A summary, and what it is worth."""
    says_animal = animal if rng.random() < 0.4 else rng.choice(ANIMALS)
    says_deed = deed if rng.random() < 0.4 else rng.choice(DEEDS)
    ramble = rng.choice(RAMBLE, size=rng.integers(4)).tolist()
    worth = 2.0 * (says_animal == animal) + 2.0 * (says_deed == deed) - 0.5 * len(ramble) - 1.0
    return summary(says_animal, says_deed, ramble), worth


def stand_ins() -> Path:
    """Return a directory with train.jsonl, test.jsonl, and the models policy, reward and gold."""
    return cached("tiny_tldr", Path(__file__).read_text(encoding="utf-8"), build)


def build(directory: Path) -> None:
    rng = np.random.default_rng(0)
    pairs = [PAIRS[i] for i in rng.permutation(len(PAIRS))]
    training = pairs[TEST_POSTS:]
    directory.mkdir()
    for split, chosen in {"test": pairs[:TEST_POSTS], "train": training}.items():
        rows = [(post(*pair), summary(*pair[:2], ["well"])) for pair in chosen]
        lines = [json.dumps({"query": x, "reference_response": y}) for x, y in rows]
        (directory / f"{split}.jsonl").write_text("\n".join(lines))
    # Phrases as tokens: short sequences are learnt in seconds.
    phrases = [*post("", "", "").split("  "), *(f" {text}" for text in [*DEEDS, *ASIDES])]
    texts = [post(*pair) + summary(*pair[:2], RAMBLE) for pair in PAIRS]
    tokenizer = word_tokenizer(texts, phrases)

    def examples(count: int, rng: np.random.Generator) -> list[tuple[str, str, float]]:
        chosen = [training[i] for i in rng.integers(len(training), size=count)]
        return [(post(*pair), *pupils_summary(*pair[:2], rng)) for pair in chosen]

    def loss(model, rng: np.random.Generator) -> torch.Tensor:
        prompts, texts, worth = zip(*examples(64, rng))
        ended = [prompt + text + tokenizer.eos_token for prompt, text in zip(prompts, texts)]
        ids = tokenizer(ended, padding=True, return_tensors="pt").input_ids
        return model(input_ids=ids, labels=torch.tensor(worth, dtype=torch.float32)).loss

    train_policy(examples, tokenizer, directory / "policy", steps=150, batch=64)
    for seed, name in enumerate(("reward", "gold")):
        how = dict(steps=300, seed=seed, num_labels=1)
        train(LlamaForSequenceClassification, loss, tokenizer, directory / name, **how)
