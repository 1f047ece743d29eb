"""A causal model of transformers that answers texts by sampling: the victim of red-teaming."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.classifier import load_task_model
from models.hub import cached_model


class Sampler:
    """A model and its tokenizer on this process's device."""

    def __init__(self, model: str):
        directory = cached_model("the task's model", model)
        self.tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.is_chat = self.tokenizer.chat_template is not None
        self.model = load_task_model(AutoModelForCausalLM, model)

    @torch.no_grad()
    def sample(
        self, texts: list[str], per_text: int, temperature: float, top_p: float, max_tokens: int
    ) -> list[str]:
        """Return `per_text` responses to each text, those of one text contiguous.

        A chat model gets each text as a user's message.
        """
        how = dict(padding=True, return_tensors="pt")
        if self.is_chat:
            how |= dict(add_generation_prompt=True, return_dict=True)
            chats = [[{"role": "user", "content": text}] for text in texts]
            inputs = self.tokenizer.apply_chat_template(chats, **how)
        else:
            inputs = self.tokenizer(texts, **how)
        inputs = inputs.to(self.model.device)
        out = self.model.generate(
            **inputs,
            do_sample=True,
            temperature=temperature,
            top_p=top_p,
            top_k=0,
            max_new_tokens=max_tokens,
            num_return_sequences=per_text,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        responses = out[:, inputs.input_ids.shape[1] :]
        return self.tokenizer.batch_decode(responses, skip_special_tokens=True)
