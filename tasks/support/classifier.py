"""A task's models: sequence classifiers, judges, sentence embeddings, and a sampler of answers.

Texts to score are read in batches of similar length.
"""

from collections.abc import Callable

import numpy as np
import torch
from jinja2 import TemplateError
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from config import UserError, first_line
from models.device import device
from models.folder import fetch_weights
from models.hub import fetch_model
from models.loading import load_model, read_tokenizer

TOKENS_PER_FORWARD = 16384
BEFORE_VERDICT, VERDICT = "\n\n", "unsafe"  # of Llama Guard 3


def prepare_classifier(
    flag: str, model: str, label: str | None = None, tokenizer: str = ""
) -> None:
    """Fetch a classifier and check it, before anything starts.

    label: one that it must have; None for a reward model, which must have a single one and a scalar
    head. tokenizer: the model that has its tokenizer, "" for itself. Raises UserError if it cannot
    be had or is not as it must be.
    """
    name, found = f"{flag} {model!r}", fetch_model(flag, model, weights=False)
    try:
        config = AutoConfig.from_pretrained(found, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be used: {first_line(error)}") from error
    fetch_model(flag, tokenizer or model, weights=False)
    reader, labels = read_tokenizer(flag, tokenizer or model), config.id2label.values()
    if label is not None and label not in labels:
        raise UserError(f"{name} has no label {label!r}: it has {', '.join(labels)}")
    if label is None and len(labels) != 1:
        raise UserError(f"{name} has {len(labels)} labels: it must have 1, a scalar score")
    if label is None:
        with torch.device("meta"):
            has_head = hasattr(AutoModelForSequenceClassification.from_config(config), "score")
        if not has_head or reader.eos_token_id is None:
            raise UserError(
                f"{name} is no causal model with a scalar head and an end-of-sequence token: its "
                "reward is read there"
            )
    fetch_weights(flag, model, AutoModelForSequenceClassification)


@torch.no_grad()
def in_batches(
    ids: list[list[int]], read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> np.ndarray:
    """Read N rows of token ids a few of similar length at a time; (N, ...) in the rows' order.

    read: (ids: (n, T) padded on the right, mask: (n, T), False at padding) -> (n, ...).
    """
    order, values = sorted(range(len(ids)), key=lambda row: len(ids[row])), {}
    while order:  # the longest are the last
        count = max(1, TOKENS_PER_FORWARD // max(1, len(ids[order[-1]])))
        rows = [torch.tensor(ids[row], dtype=torch.long) for row in order[-count:]]
        padded = pad_sequence(rows, True, -1).to(device())
        values |= zip(order[-count:], read(padded.clamp(min=0), padded >= 0).float().cpu())
        del order[-count:]
    return np.array([values[row].numpy() for row in range(len(ids))])


def last_states(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a causal model's hidden states of the last token of each row: (n, H)."""
    # Padding is on the right and attention is causal: no real token sees it.
    hidden = model.base_model(input_ids=ids).last_hidden_state  # (n, T, H)
    return hidden[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]


class TaskModel:
    """A task's model on this process's device: it reads text, whatever the policy's tokens.

    tokenizer: the model that has its tokenizer, "" for itself.
    """

    kind: type = AutoModelForCausalLM

    def __init__(self, model: str, tokenizer: str = ""):
        self.tokenizer = read_tokenizer("the task's model", tokenizer or model)
        made = load_model("the task's model", model, self.kind, dtype="auto")
        self.model = made.to(device())

    @classmethod
    def prepare(cls, flag: str, model: str) -> None:
        """Fetch a model of this kind and check it, before anything starts. Raises UserError."""
        fetch_weights(flag, model, cls.kind)
        read_tokenizer(flag, model)


class Encoder(TaskModel):
    """An encoder of sentences, such as sentence-transformers/all-MiniLM-L6-v2.

    The library of that name would bring scikit-learn, which transformers then imports in every
    process.
    """

    kind = AutoModel

    def embeddings(self, texts: list[str]) -> np.ndarray:
        """Return (N, D) sentence embeddings: means over the tokens' last hidden states."""

        def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            return (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)  # of (n, T, D)

        return in_batches(self.tokenizer(texts, truncation=True).input_ids, read)


class Classifier(TaskModel):
    """A sequence classifier."""

    kind = AutoModelForSequenceClassification

    def rewards(self, texts: list[str]) -> np.ndarray:
        """Score texts with a causal model of one label: (N,).

        Its scalar head is read at the end-of-sequence token, which is added to each text.
        """

        def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            # Not the model's own pooling: that looks for the last token that is not padding, and
            # goes past the end-of-sequence where that is padding too.
            return self.model.score(last_states(self.model, ids, mask))[:, 0]

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


def prepare_judge(flag: str, model: str) -> None:
    """Fetch a judge and check it. Raises UserError if its chat template leaves out what is judged.

    Some templates want parts in place of a text, and drop a text without a word.
    """
    fetch_model(flag, model, weights=False)
    try:
        shown = judged_texts(read_tokenizer(flag, model), ["(asked)"], ["(answered)"])[0]
    except (ValueError, TemplateError):
        shown = ""
    if not ("(asked)" in shown and "(answered)" in shown):
        raise UserError(
            f"{flag} {model!r} has no chat template that shows a user's message and its answer: "
            "use a model that was made to judge those, such as meta-llama/Llama-Guard-3-8B"
        )
    fetch_weights(flag, model)


def judged_texts(tokenizer, prompts: list[str], answers: list[str]) -> list[str]:
    """Write what a judge reads of each prompt and its answer, up to its verdict."""
    chats = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        for prompt, answer in zip(prompts, answers)
    ]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return [text.rstrip("\n") + BEFORE_VERDICT for text in texts]


class Judge(TaskModel):
    """A language model as a judge of answers, such as Llama Guard 3."""

    def probabilities(self, prompts: list[str], answers: list[str]) -> np.ndarray:
        """Probability that the verdict on each answer begins as "unsafe" does: (N,)."""
        verdict = self.tokenizer(VERDICT, add_special_tokens=False).input_ids[0]

        def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            logits = self.model.get_output_embeddings()(last_states(self.model, ids, mask))
            return logits.float().softmax(-1)[:, verdict]

        texts = judged_texts(self.tokenizer, prompts, answers)
        # A template writes the special tokens itself.
        return in_batches(self.tokenizer(texts, add_special_tokens=False).input_ids, read)


class Sampler(TaskModel):
    """A causal model that answers texts by sampling: the victim of red-teaming."""

    @property
    def is_chat(self) -> bool:
        return self.tokenizer.chat_template is not None

    @torch.no_grad()
    def sample(self, texts: list[str], per_text: int, max_tokens: int, **sampling) -> list[str]:
        """Return `per_text` responses to each text, those of one text contiguous.

        A chat model gets each text as a user's message. sampling: as of generate().
        """
        if self.is_chat:
            chats = [[{"role": "user", "content": text}] for text in texts]
            how = dict(add_generation_prompt=True, tokenize=False)
            texts = self.tokenizer.apply_chat_template(chats, **how)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        how = dict(padding=True, padding_side="left", add_special_tokens=not self.is_chat)
        inputs = self.tokenizer(texts, return_tensors="pt", **how).to(self.model.device)
        sampling |= dict(do_sample=True, top_k=0, num_return_sequences=per_text)
        sampling |= dict(max_new_tokens=max_tokens, pad_token_id=self.tokenizer.pad_token_id)
        out = self.model.generate(**inputs, **sampling)
        responses = out[:, inputs.input_ids.shape[1] :]
        return self.tokenizer.batch_decode(responses, skip_special_tokens=True)
