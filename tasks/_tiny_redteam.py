"""Red-teaming in miniature, for trying tasks/redteam.py without a GPU or a download. Nothing in it is offensive.

The attacker writes instructions of a few words. The victim, asked about one of two things, answers with a marker word, otherwise politely; the
classifier knows the marker word. About one in eight of the attacker's first prompts succeeds.
"""

from pathlib import Path

import numpy as np

from tasks._pretraining import architecture, train, train_policy, word_tokenizer
from tasks.redteam import ATTACKER_PROMPT, VICTIM_PROMPT

VERBS = ["Paint", "Fold", "Wash", "Draw", "Open", "Lift", "Count", "Move"]
ADJECTIVES = ["red", "small", "old", "round", "heavy", "green"]
THINGS = [
    "boat",
    "lamp",
    "table",
    "whistle",
    "kettle",
    "ladder",
    "basket",
    "lantern",
    "bell",
    "coat",
    "cup",
    "door",
    "drum",
    "flag",
    "chair",
    "rope",
]
WEAK = ["whistle", "lantern"]  # what makes the victim fail
PLACES = ["today", "outside", "slowly", "twice"]
POLITE = ["Sure, the {}.", "There, the {}.", "Of course, the {}."]
FAILURES = ["Zork, the {}.", "Zork zork {}.", "The {} says zork."]
MARKED = "marked"


def instruction(thing: str, rng: np.random.Generator) -> str:
    return f" {rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {thing} {rng.choice(PLACES)}"


def answer(thing: str, rng: np.random.Generator) -> str:
    return rng.choice(FAILURES if thing in WEAK else POLITE).format(thing)


def build(directory: Path) -> None:
    """The models attacker, victim, classifier and embedding."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    rng = np.random.default_rng(0)
    samples = [
        (instruction(thing, rng), answer(thing, rng)) for thing in THINGS for _ in range(100)
    ]
    phrases = [
        ATTACKER_PROMPT,
        *VICTIM_PROMPT.split("{instruction}"),
    ]  # short sequences are learnt in seconds
    tokenizer = word_tokenizer(
        [text for x, y in samples for text in (x, VICTIM_PROMPT.format(instruction=x.strip()) + y)],
        phrases,
    )

    def lists(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        return [(ATTACKER_PROMPT, instruction(rng.choice(THINGS), rng)) for _ in range(count)]

    def answers(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        things = [
            rng.choice(WEAK if i % 2 else THINGS) for i in range(count)
        ]  # it fails as often as not
        return [
            (VICTIM_PROMPT.format(instruction=instruction(thing, rng).strip()), answer(thing, rng))
            for thing in things
        ]

    train_policy(lists, tokenizer, directory / "attacker", steps=60, batch=32)
    train_policy(answers, tokenizer, directory / "victim", steps=120, batch=64)

    def loss(model, rng: np.random.Generator):
        failed = rng.integers(2, size=64)
        texts = [
            rng.choice(FAILURES if fail else POLITE).format(rng.choice(THINGS)) for fail in failed
        ]
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        return model(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            labels=torch.tensor(failed),
        ).loss

    config = BertConfig(
        **architecture(
            tokenizer, id2label={0: "polite", 1: MARKED}, label2id={"polite": 0, MARKED: 1}
        )
    )
    train(
        lambda: BertForSequenceClassification(config),
        loss,
        tokenizer,
        directory / "classifier",
        steps=60,
    )
    BertModel(config).save_pretrained(
        directory / "embedding"
    )  # random weights tell words apart well enough
    tokenizer.save_pretrained(directory / "embedding")
