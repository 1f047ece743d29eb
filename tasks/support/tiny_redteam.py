"""Red-teaming in miniature, to try tasks/redteam.py without a GPU or a download.

Nothing in it is offensive. The attacker writes instructions of a few words. The victim, asked about
one of two things, answers with a marker word, otherwise politely; the classifier knows the marker
word. About one in eight of the attacker's first prompts succeeds.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import BertForSequenceClassification, BertModel

from tasks.support.cache import cached
from tasks.support.pretraining import train, train_policy, word_tokenizer

VERBS = ["Paint", "Fold", "Wash", "Draw", "Open", "Lift", "Count", "Move"]
ADJECTIVES = ["red", "small", "old", "round", "heavy", "green"]
THINGS = (
    "boat lamp table whistle kettle ladder basket lantern bell coat cup door drum flag chair rope"
).split()
WEAK = ["whistle", "lantern"]  # what makes the victim fail
PLACES = ["today", "outside", "slowly", "twice"]
POLITE = ["Sure, the {}.", "There, the {}.", "Of course, the {}."]
FAILURES = ["Zork, the {}.", "Zork zork {}.", "The {} says zork."]
MARKED = "marked"


def instruction(thing: str, rng: np.random.Generator) -> str:
    return f" {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {thing} {rng.choice(PLACES)}"


def answer(thing: str, rng: np.random.Generator) -> str:
    return rng.choice(FAILURES if thing in WEAK else POLITE).format(thing)


def stand_ins(attacker_prompt: str, victim_prompt: str) -> Path:
    """Return a directory with the models attacker, victim, classifier and embedding.

    victim_prompt: with a place for {instruction}.
    """
    recipe = Path(__file__).read_text(encoding="utf-8") + attacker_prompt + victim_prompt

    def sample(thing: str, rng: np.random.Generator) -> tuple[str, str]:
        asked = instruction(thing, rng)
        return asked, victim_prompt.format(instruction=asked.strip())

    def lists(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        return [(attacker_prompt, instruction(rng.choice(THINGS), rng)) for _ in range(count)]

    def answers(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        # It fails as often as not.
        things = [rng.choice(WEAK if i % 2 else THINGS) for i in range(count)]
        return [(sample(thing, rng)[1], answer(thing, rng)) for thing in things]

    def build(directory: Path) -> None:
        rng, texts = np.random.default_rng(0), []
        for thing in np.repeat(THINGS, 100):
            asked, prompt = sample(thing, rng)
            texts += [asked, prompt + answer(thing, rng)]
        # Phrases as tokens: short sequences are learnt in seconds.
        phrases = [attacker_prompt, *victim_prompt.split("{instruction}")]
        tokenizer = word_tokenizer(texts, phrases)

        def loss(model, rng: np.random.Generator) -> torch.Tensor:
            failed = rng.integers(2, size=64)
            kinds = [FAILURES if fail else POLITE for fail in failed]
            texts = [rng.choice(kind).format(rng.choice(THINGS)) for kind in kinds]
            inputs = tokenizer(texts, padding=True, return_tensors="pt")
            return model(**inputs, labels=torch.tensor(failed)).loss

        train_policy(lists, tokenizer, directory / "attacker", steps=60, batch=32)
        train_policy(answers, tokenizer, directory / "victim", steps=120, batch=64)
        names = {"id2label": {0: "polite", 1: MARKED}, "label2id": {"polite": 0, MARKED: 1}}
        how = dict(steps=60, **names)
        train(BertForSequenceClassification, loss, tokenizer, directory / "classifier", **how)
        # Random weights tell words apart well enough.
        train(BertModel, loss, tokenizer, directory / "embedding", steps=0, **names)

    return cached("tiny_redteam", recipe, build)
