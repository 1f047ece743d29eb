"""The policy as transformers sees it: loading, and log-probabilities of responses.

Trainer and searchers both take their log-probabilities from here, the one for the policy, the others for the reference policy, so that the two come
from the same framework, dtype and temperature.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from buffer import Group, rows_of
from config import Config, UserError

TOKENS_PER_FORWARD = 8192  # padded tokens in one forward pass; bounds what attention and MLP hold beyond the saved activations
POSITIONS_PER_LOGITS = 2048  # rows of [positions, vocabulary] logits that exist at once


def load_policy(config: Config, device: torch.device) -> torch.nn.Module:
    """config.model in fp32, in evaluation mode (the objective is about pi itself: no dropout). Raises ValueError for unknown kinds of logits."""
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32, trust_remote_code=config.trust_remote_code)
    model = model.to(device).eval()
    check_head(model)
    return model


def load_tokenizer(config: Config):
    return AutoTokenizer.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, a tied one once, with nothing loaded. Raises UserError for a model that cannot be had or is too short."""
    try:
        architecture = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(architecture, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {config.model!r} cannot be used: {str(error).splitlines()[0]}") from error
    tokens, limit = config.max_prompt_tokens + config.max_response_tokens, getattr(architecture, "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise UserError(f"--max_prompt_tokens {config.max_prompt_tokens} + --max_response_tokens {config.max_response_tokens} is {tokens}, more "
                        f"than the {limit} positions of --model {config.model!r}")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def response_logprobs(model: torch.nn.Module, prompts: list[np.ndarray], responses: list[np.ndarray], temperature: float) -> Tensor:
    """log pi of each response token, in fp32: (N, T), T the longest response; 0 behind the end of a shorter one.

    Rows run sorted by length in chunks of similar length, and logits are made for response positions only, a slice at a time, and made again in the
    backward pass: memory grows with the tokens of these N rows, never with N x T x vocabulary.
    """
    device = next(model.parameters()).device
    prompt_lengths, lengths = [len(p) for p in prompts], [len(r) for r in responses]
    totals = np.add(prompt_lengths, lengths)
    longest_first = np.argsort(-totals, kind="stable")
    logprobs = torch.zeros(len(responses), max(lengths), device=device)

    start = 0
    while start < len(longest_first):
        width = int(totals[longest_first[start]])
        rows = longest_first[start : start + max(1, TOKENS_PER_FORWARD // width)]
        start += len(rows)

        ids = np.zeros((len(rows), width), np.int64)
        for i, row in enumerate(rows):
            ids[i, : totals[row]] = np.concatenate([prompts[row], responses[row]])
        row_index = np.repeat(rows, np.take(lengths, rows))  # (R,) R = response tokens in the chunk
        chunk_index = np.repeat(np.arange(len(rows)), np.take(lengths, rows))  # (R,)
        token_index = np.concatenate([np.arange(lengths[row]) for row in rows])  # (R,) position within the response
        position = token_index + np.take(prompt_lengths, row_index)  # (R,) position within the row
        ids = torch.from_numpy(ids).to(device)

        # Padding is on the right and attention is causal: no real token sees it, so no attention mask is needed.
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (rows, width, H)
            hidden = hidden[chunk_index, position - 1]  # (R, H): the state before a token predicts it
            slices = zip(hidden.split(POSITIONS_PER_LOGITS), ids[chunk_index, position].split(POSITIONS_PER_LOGITS))
            taken = [checkpoint(_token_logprobs, model, h, targets, temperature, use_reentrant=False) for h, targets in slices]
        logprobs = logprobs.index_put((torch.from_numpy(row_index).to(device), torch.from_numpy(token_index).to(device)), torch.cat(taken))
    return logprobs


@torch.no_grad()
def response_logprobs_under(weights: dict[str, Tensor], model: torch.nn.Module, *arguments) -> Tensor:
    """response_logprobs(model, *arguments) as if the model had other weights than its own, by name and of any dtype and device."""
    device = next(model.parameters()).device
    scorer = _Scorer(model)
    return functional_call(scorer, {f"model.{name}": tensor.to(device, torch.float32) for name, tensor in weights.items()}, arguments)


def mismatch(group: Group, weights: dict[str, Tensor], model: torch.nn.Module) -> float:
    """Mean |difference| of a token's log-probability between vLLM and transformers, in nats, for a group that these weights sampled. Near 0
    it shows that what was published is what samples."""
    rows = rows_of(group)
    logprobs = response_logprobs_under(weights, model, [r.prompt for r in rows], [r.tokens for r in rows], group.temperature).cpu().numpy()
    return float(np.concatenate([np.abs(ours[: len(r.tokens)] - r.behavior_logprobs) for ours, r in zip(logprobs, rows)]).mean())


class _Scorer(torch.nn.Module):
    """response_logprobs as a module: functional_call wants one."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *arguments) -> Tensor:
        return response_logprobs(self.model, *arguments)


def _token_logprobs(model: torch.nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = model.get_output_embeddings()(hidden).float() / temperature  # (positions, vocabulary)
    return -F.cross_entropy(logits, targets, reduction="none")


@torch.no_grad()
def check_head(model: torch.nn.Module) -> None:
    """Raises ValueError for a model whose logits are more than its output embedding of its last hidden state (scaled, capped)."""
    ids = torch.arange(4, device=next(model.parameters()).device)[None]
    direct = model(input_ids=ids).logits
    ours = model.get_output_embeddings()(model.base_model(input_ids=ids).last_hidden_state)
    if not torch.allclose(direct, ours, atol=1e-3):
        raise ValueError(f"{type(model).__name__} transforms its logits, which response_logprobs does not know: use another architecture")
