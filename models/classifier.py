"""Sequence classifiers as rewards, and sentence embeddings, read in batches of similar length."""

from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from config import UserError, first_line
from models.device import device
from models.hub import cached_model, fetch_model
from models.logprobs import right_padded, split_rows
from models.policy import read_tokenizer

TOKENS_PER_FORWARD = 16384


def prepare_classifier(
    flag: str, model: str, label: str | None = None, tokenizer: str = ""
) -> None:
    """Fetch a classifier and check it, before anything starts.

    label: one that it must have; None for a reward model, which must have a single one and a scalar
    head. tokenizer: the model that has its tokenizer, "" for itself. Raises UserError if it cannot
    be had or is not as it must be.
    """
    found = fetch_model(flag, model, weights=False)
    try:
        config = AutoConfig.from_pretrained(found, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {model!r} cannot be used: {first_line(error)}") from error
    if tokenizer:
        fetch_model(flag, tokenizer, weights=False)
    reader = read_tokenizer(flag, tokenizer or model)
    if label is None:
        if config.num_labels != 1:
            raise UserError(
                f"{flag} {model!r} has {config.num_labels} labels: it must have 1, a scalar score"
            )
        with torch.device("meta"):
            has_head = hasattr(AutoModelForSequenceClassification.from_config(config), "score")
        if not has_head or reader.eos_token_id is None:
            raise UserError(
                f"{flag} {model!r} is no causal model with a scalar head and an end-of-sequence "
                "token: its reward is read there"
            )
    elif label not in config.id2label.values():
        raise UserError(
            f"{flag} {model!r} has no label {label!r}: it has {', '.join(config.id2label.values())}"
        )
    fetch_model(flag, model)


def embeddings(model: str, texts: list[str]) -> np.ndarray:
    """Return (N, D) sentence embeddings: the mean over tokens of an encoder's last hidden state.

    That is what sentence-transformers/all-MiniLM-L6-v2 is made for. The library of that name would
    bring scikit-learn, which transformers then imports in every process.
    """
    directory = cached_model("the task's model", model)
    encoder = AutoModel.from_pretrained(directory).to(device()).eval()

    def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state  # (n, T, D)
        return (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)

    tokenizer = read_tokenizer("the task's model", model)
    return in_batches(tokenizer(texts, truncation=True).input_ids, read)


@torch.no_grad()
def in_batches(
    ids: list[list[int]], read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> np.ndarray:
    """Read N rows of token ids a few of similar length at a time; (N, ...) in the rows' order.

    read: (ids: (n, T) padded on the right, mask: (n, T), False at padding) -> (n, ...).
    """
    values = [None] * len(ids)
    for rows in split_rows([], ids, TOKENS_PER_FORWARD):
        padded, mask = right_padded([ids[row] for row in rows], device())
        for row, value in zip(rows, read(padded, mask).float().cpu().numpy()):
            values[row] = value
    return np.array(values)


class Classifier:
    """A sequence classifier: it reads text, whatever the policy's tokens.

    tokenizer: the model that has its tokenizer, "" for itself.
    """

    def __init__(self, model: str, tokenizer: str = ""):
        self.tokenizer = read_tokenizer("the task's model", tokenizer or model)
        directory = cached_model("the task's model", model)
        loaded = AutoModelForSequenceClassification.from_pretrained(directory, dtype="auto")
        self.model = loaded.to(device()).eval()

    def rewards(self, texts: list[str]) -> np.ndarray:
        """Score texts with a causal model of one label: (N,).

        Its scalar head is read at the end-of-sequence token, which is added to each text.
        """

        def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            # Not the model's own pooling: that looks for the last token that is not padding, and
            # goes past the end-of-sequence where that is padding too. Padding is on the right and
            # attention is causal: no real token sees it.
            hidden = self.model.base_model(input_ids=ids).last_hidden_state  # (n, T, H)
            ends = hidden[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]  # (n, H)
            return self.model.score(ends)[:, 0]

        limit, eos = self.model.config.max_position_embeddings - 1, self.tokenizer.eos_token_id
        ids = [row[:limit] + [eos] for row in self.tokenizer(texts).input_ids]
        return in_batches(ids, read)

    def probabilities(self, texts: list[str], label: str) -> np.ndarray:
        """Probability of the label for each text: (N,)."""
        # Not label2id: there are published configurations in which that is null.
        number = next(i for i, name in self.model.config.id2label.items() if name == label)

        def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            logits = self.model(input_ids=ids, attention_mask=mask.long()).logits  # (n, labels)
            return logits.float().softmax(-1)[:, number]

        return in_batches(self.tokenizer(texts, truncation=True).input_ids, read)
