"""A language model as a judge of answers, such as Llama Guard 3."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from config import UserError
from models.classifier import in_batches
from models.device import device
from models.hub import cached_model, fetch_model
from models.policy import read_tokenizer

BEFORE_VERDICT, VERDICT = "\n\n", "unsafe"  # of Llama Guard 3, which says what is unsafe after it


def prepare_judge(flag: str, model: str) -> None:
    """Fetch a judge and check it. Raises UserError if its chat template leaves out what is judged.

    Some templates want parts in place of a text, and drop a text without a word.
    """
    fetch_model(flag, model)
    tokenizer = read_tokenizer(flag, model)
    shown = chats(tokenizer, ["(asked)"], ["(answered)"])[0] if tokenizer.chat_template else ""
    if not ("(asked)" in shown and "(answered)" in shown):
        raise UserError(
            f"{flag} {model!r} has no chat template that shows a user's message and its answer: "
            "use a model that was made to judge those, such as meta-llama/Llama-Guard-3-8B"
        )


def chats(tokenizer, prompts: list[str], answers: list[str]) -> list[str]:
    """Write what the judge reads of each prompt and its answer, up to its verdict."""
    messages = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        for prompt, answer in zip(prompts, answers)
    ]
    how = dict(add_generation_prompt=True, tokenize=False)
    return [text + BEFORE_VERDICT for text in tokenizer.apply_chat_template(messages, **how)]


class Judge:
    """A judge on this process's device."""

    def __init__(self, model: str):
        self.tokenizer = read_tokenizer("the task's model", model)
        directory = cached_model("the task's model", model)
        loaded = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        self.model = loaded.to(device()).eval()
        self.verdict = self.tokenizer(VERDICT, add_special_tokens=False).input_ids[0]

    def probabilities(self, prompts: list[str], answers: list[str]) -> np.ndarray:
        """Probability that the verdict on each answer begins as "unsafe" does: (N,)."""

        def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.model.base_model(input_ids=ids).last_hidden_state  # (n, T, H)
            ends = hidden[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]  # (n, H)
            logits = self.model.get_output_embeddings()(ends)  # (n, vocabulary)
            return logits.float().softmax(-1)[:, self.verdict]

        texts = chats(self.tokenizer, prompts, answers)
        # A template writes the special tokens itself.
        return in_batches(self.tokenizer(texts, add_special_tokens=False).input_ids, read)
