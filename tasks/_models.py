"""Models that give rewards: sequence classifiers, read with transformers in batches of texts of similar length."""

from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from config import UserError
from preflight import fetch_model, find_model
from processes import device

TOKENS_PER_FORWARD = 16384


def prepare_classifier(
    flag: str, model: str, labels: int | None = None, label: str | None = None
) -> None:
    """Fetches the model. Raises UserError if it cannot be had, if it has not as many labels, or not this one."""
    found = find_model(flag, model)
    try:
        config = AutoConfig.from_pretrained(found)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {model!r} cannot be used: {str(error).splitlines()[0]}") from error
    if labels is not None and config.num_labels != labels:
        raise UserError(
            f"{flag} {model!r} has {config.num_labels} labels: it must have {labels}"
            + ", a scalar score" * (labels == 1)
        )
    if labels == 1:
        with torch.device("meta"):
            has_head = hasattr(AutoModelForSequenceClassification.from_config(config), "score")
        if not has_head or AutoTokenizer.from_pretrained(found).eos_token_id is None:
            raise UserError(
                f"{flag} {model!r} is no causal model with a scalar head and an end-of-sequence token: its reward is read there"
            )
    if label is not None and label not in config.label2id:
        raise UserError(
            f"{flag} {model!r} has no label {label!r}: it has {', '.join(config.label2id)}"
        )
    fetch_model(flag, found)


def embeddings(model: str, texts: list[str]) -> np.ndarray:
    """(N, D) sentence embeddings: the mean over tokens of an encoder's last hidden state, as sentence-transformers/all-MiniLM-L6-v2 has it. Not by
    the library of that name: it brings scikit-learn, which transformers then imports in every process."""
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
    """read(ids: (n, T) padded on the right, lengths: (n,)) gives (n, ...) for rows of similar length; (N, ...) for all, in their order."""
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
    """A sequence classifier and its own tokenizer: what it reads is text, whatever tokens the policy wrote it in."""

    def __init__(self, model: str):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = (
            AutoModelForSequenceClassification.from_pretrained(model, dtype="auto")
            .to(device())
            .eval()
        )

    def rewards(self, texts: list[str]) -> np.ndarray:
        """(N,) of a causal model with one label: its scalar head at the last token of each text, to which end-of-sequence is added."""

        def read(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            # Not the model's own pooling: that looks for the last token that is not padding, and where padding is end-of-sequence goes past it.
            # Padding is on the right and attention is causal: no real token sees it.
            hidden = self.model.base_model(input_ids=ids).last_hidden_state  # (n, T, H)
            return self.model.score(hidden[torch.arange(len(ids), device=ids.device), lengths - 1])[
                :, 0
            ]

        limit = self.model.config.max_position_embeddings - 1
        return in_batches(
            [
                row[:limit] + [self.tokenizer.eos_token_id]
                for row in self.tokenizer(texts).input_ids
            ],
            read,
        )

    def probabilities(self, texts: list[str], label: str) -> np.ndarray:
        """(N,) probability of the label."""

        def read(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            logits = self.model(input_ids=ids, attention_mask=mask.long()).logits  # (n, labels)
            return logits.float().softmax(-1)[:, self.model.config.label2id[label]]

        return in_batches(self.tokenizer(texts, truncation=True).input_ids, read)
