"""How much memory a model takes, from its architecture alone: nothing is loaded or computed."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from config import Config, UserError
from models.logprobs import POSITIONS_PER_LOGITS, response_states
from models.policy import policy_without_weights

ENGINE_ROWS = 256  # responses that vLLM generates at a time


class Pass(NamedTuple):
    """A forward pass over responses of full length: how many, and to how many queries."""

    rows: int
    queries: int


@dataclass(frozen=True)
class PolicySize:
    """What the parts of a policy take, in numbers (not bytes) unless it says so."""

    parameters: int
    head: int  # of the output embedding's matrix
    vocabulary: int
    layer: int  # of one token on its way through a layer: states and what its MLP holds
    keys_and_values: int  # of one token, all layers together


def policy_size(config: Config) -> PolicySize:
    """Return the size of config.model."""
    model = policy_without_weights(config)
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return PolicySize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        head=model.get_output_embeddings().weight.numel(),
        vocabulary=model.get_input_embeddings().num_embeddings,
        layer=4 * text.hidden_size + 3 * inner,
        keys_and_values=2 * text.num_hidden_layers * key_heads * head_size,
    )


def loaded_bytes(model: str) -> int:
    """Bytes of a model as transformers loads it with dtype="auto", a head aside.

    Raises UserError for one that cannot be had.
    """
    try:
        architecture = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise UserError(f"the task's model {model!r} cannot be used: {problem}") from error
    with torch.device("meta"):
        parameters = AutoModel.from_config(architecture).num_parameters()
    return parameters * (architecture.dtype or torch.float32).itemsize


def activation_bytes(config: Config, passes: list[Pass], dtype: torch.dtype) -> int:
    """Bytes that response_logprobs keeps for its backward pass, casts of the weights included.

    Counted on its own forward passes over fake tensors: they have shapes and storages, no numbers.
    """
    kept: dict[StorageWeakRef, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(StorageWeakRef(tensor.untyped_storage()), tensor)
        return tensor

    masters, different = getattr(torch, config.master_dtype), Counter(passes)
    prompt, first = np.arange(config.max_prompt_tokens), next(iter(different))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(
            policy_without_weights(config).config,
            dtype=masters,
            trust_remote_code=config.trust_remote_code,
        ).eval()
        own = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
        totals = []
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype, enabled=masters != dtype):
            for one in (first, *different):
                prompts = [prompt + row % one.queries for row in range(one.rows)]
                ids = torch.zeros(one.rows, config.max_response_tokens, dtype=torch.long)
                keep(response_states(model, prompts, ids).to(dtype))
                storages = [kept[place].untyped_storage() for place in set(kept) - own]
                totals.append(sum(storage.nbytes() for storage in storages))
    each = dict(zip(different, np.diff(totals)))
    casts = totals[0] - each[first]  # of the weights: made once, by the first pass of all
    return int(casts + sum(count * each[one] for one, count in different.items()))


def head_bytes(
    size: PolicySize, dtype: torch.dtype, device: torch.device, positions: int, gradient: bool
) -> int:
    """Bytes of logits while log-probabilities are taken, and of the head's cast and gradient.

    positions: response tokens there are; gradient: whether there is a backward pass.
    """
    logits = min(positions, POSITIONS_PER_LOGITS[device.type]) * size.vocabulary
    cast = 0 if dtype == torch.float32 else size.head * dtype.itemsize
    fp32 = (1 + gradient) * logits + gradient * size.head
    return fp32 * torch.float32.itemsize + cast
