"""Sequence classifiers as rewards, and sentence embeddings, read in batches of similar length."""

from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from config import UserError
from models.device import device
from models.hub import fetch_model, find_model

TOKENS_PER_FORWARD = 16384


def prepare_classifier(
    flag: str, model: str, labels: int | None = None, label: str | None = None
) -> None:
    """Fetch a classifier and check it, before anything starts.

    labels: how many it must have; 1 asks for a scalar head too. label: one that it must have.
    Raises UserError if it cannot be had or is not as it must be.
    """
    found = find_model(flag, model)
    try:
        config = AutoConfig.from_pretrained(found)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {model!r} cannot be used: {str(error).splitlines()[0]}") from error
    if labels is not None and config.num_labels != labels:
        wanted = "1, a scalar score" if labels == 1 else labels
        raise UserError(f"{flag} {model!r} has {config.num_labels} labels: it must have {wanted}")
    if labels == 1:
        with torch.device("meta"):
            has_head = hasattr(AutoModelForSequenceClassification.from_config(config), "score")
        if not has_head or AutoTokenizer.from_pretrained(found).eos_token_id is None:
            raise UserError(
                f"{flag} {model!r} is no causal model with a scalar head and an end-of-sequence "
                "token: its reward is read there"
            )
    if label is not None and label not in config.label2id:
        raise UserError(
            f"{flag} {model!r} has no label {label!r}: it has {', '.join(config.label2id)}"
        )
    fetch_model(flag, found)


def embeddings(model: str, texts: list[str]) -> np.ndarray:
    """Return (N, D) sentence embeddings: the mean over tokens of an encoder's last hidden state.

    That is what sentence-transformers/all-MiniLM-L6-v2 is made for. The library of that name would
    bring scikit-learn, which transformers then imports in every process.
    """
    encoder = AutoModel.from_pretrained(model).to(device()).eval()

    def read(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]  # (n, T)
        hidden = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state  # (n, T, D)
        return (hidden * mask[:, :, None]).sum(1) / lengths[:, None]

    return in_batches(AutoTokenizer.from_pretrained(model)(texts, truncation=True).input_ids, read)


@torch.no_grad()
def in_batches(
    ids: list[list[int]], read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> np.ndarray:
    """Read N rows of token ids a few of similar length at a time; (N, ...) in the rows' order.

    read: (ids: (n, T) padded on the right, lengths: (n,)) -> (n, ...).
    """
    order, values = np.argsort([-len(row) for row in ids], kind="stable"), [None] * len(ids)
    start = 0
    while start < len(order):
        width = len(ids[order[start]])
        rows = order[start : start + max(1, TOKENS_PER_FORWARD // max(1, width))]
        start += len(rows)
        padded = torch.tensor(
            [ids[row] + [0] * (width - len(ids[row])) for row in rows], device=device()
        )
        lengths = torch.tensor([len(ids[row]) for row in rows], device=device())
        for row, value in zip(rows, read(padded, lengths).float().cpu().numpy()):
            values[row] = value
    return np.array(values)


class Classifier:
    """A sequence classifier with its own tokenizer: it reads text, whatever the policy's tokens."""

    def __init__(self, model: str):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForSequenceClassification.from_pretrained(model, dtype="auto")
        self.model = loaded.to(device()).eval()

    def rewards(self, texts: list[str]) -> np.ndarray:
        """Score texts with a causal model of one label: (N,).

        Its scalar head is read at the end-of-sequence token, which is added to each text.
        """

        def read(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            # Not the model's own pooling: that looks for the last token that is not padding, and
            # goes past the end-of-sequence where that is padding too. Padding is on the right and
            # attention is causal: no real token sees it.
            hidden = self.model.base_model(input_ids=ids).last_hidden_state  # (n, T, H)
            ends = hidden[torch.arange(len(ids), device=ids.device), lengths - 1]  # (n, H)
            return self.model.score(ends)[:, 0]

        limit, eos = self.model.config.max_position_embeddings - 1, self.tokenizer.eos_token_id
        ids = [row[:limit] + [eos] for row in self.tokenizer(texts).input_ids]
        return in_batches(ids, read)

    def probabilities(self, texts: list[str], label: str) -> np.ndarray:
        """Probability of the label for each text: (N,)."""

        def read(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            logits = self.model(input_ids=ids, attention_mask=mask.long()).logits  # (n, labels)
            return logits.float().softmax(-1)[:, self.model.config.label2id[label]]

        return in_batches(self.tokenizer(texts, truncation=True).input_ids, read)
