"""Log-probabilities of responses, with transformers.

Trainer and searchers both take them from here, the one for the policy, the others for the reference
policy, so that the two come from the same framework, dtype and temperature.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from config import Config
from models.attention import check_attention, lay_out, run_flat
from models.device import to_device

# Tokens in a flat pass without a gradient: enough to keep the device busy.
TOKENS_PER_FORWARD = {"cpu": 1024, "cuda": 8192}
# In one with a gradient, where its memory is what counts (--low_memory).
TOKENS_IN_LOW_MEMORY = {"cpu": 1024, "cuda": 2048}
# Response tokens whose logits, a vocabulary each, exist at once.
POSITIONS_PER_LOGITS = {"cpu": 500, "cuda": 512}


def response_logprobs(
    model: torch.nn.Module,
    prompts: list[np.ndarray],
    responses: list[np.ndarray],
    temperature: float,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return log pi of each response token, in fp32: (N, T), T the longest response; 0 as padding.

    dtype: what is computed in; with bfloat16 the model's fp32 weights are cast by autocast, and
    logits are fp32 all the same. With a gradient all rows are one flat pass (models/attention.py),
    without one a few of them. Logits exist for a slice of the response positions at a time
    (TokenLogprobs): memory grows with the tokens of these rows, never with N x T x vocabulary.
    """
    device = next(model.parameters()).device
    most_tokens = math.inf if torch.is_grad_enabled() else TOKENS_PER_FORWARD[device.type]
    passes, found, index = split_rows(prompts, responses, most_tokens), [], []
    # One autocast for all passes: within it each weight is cast once.
    with torch.autocast(device.type, dtype, enabled=dtype != next(model.parameters()).dtype):
        for rows in passes:
            of_rows = ([texts[i] for i in rows] for texts in (prompts, responses))
            states, targets, pair_of = response_states(model, *of_rows, dtype)
            head = model.get_output_embeddings()
            states = (states / temperature).to(dtype)
            bias = None if head.bias is None else head.bias / temperature
            index.append(pair_of + sum(map(len, found)))
            with torch.autocast(device.type, enabled=False):  # it would round the logits
                found.append(TokenLogprobs.apply(states, head.weight, bias, targets))
    lengths = np.array([len(response) for response in responses])[:, None]
    is_token = np.arange(lengths.max()) < lengths  # (N, T)
    places = np.full(is_token.shape, sum(map(len, found)))  # padding: a 0 at the end
    places[is_token] = np.concatenate(index)
    places = to_device(places, device)
    return F.pad(torch.cat(found), (0, 1)).index_select(0, places.flatten()).view(places.shape)


def response_states(
    model: torch.nn.Module,
    prompts: list[np.ndarray],
    responses: list[np.ndarray],
    dtype: torch.dtype,
    packed: bool | None = None,
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return the state from which the model predicts each response token, and that token.

    Equal pairs stand there once: (R, H), (R,), and for each token of all responses its pair.
    packed: as in lay_out(), None where the device has that kernel.
    """
    device = next(model.parameters()).device
    if packed is None:
        packed = device.type == "cuda" and dtype == torch.bfloat16
        packed = packed and torch.cuda.get_device_capability(device) >= (8, 0)
    row = lay_out(prompts, responses, device, packed)
    pairs = row.predictors << 32 | np.concatenate(responses).astype(np.int64)
    pairs, pair_of = np.unique(pairs, return_inverse=True)
    places, targets = (to_device(part, device) for part in (pairs >> 32, pairs & 2**32 - 1))
    return run_flat(model, row).index_select(0, places), targets, pair_of


def split_rows(
    prompts: list[np.ndarray], responses: list[np.ndarray], most_tokens: float, together: int = 1
) -> list[range]:
    """Split rows into parts that are computed at once: the indices of each.

    most_tokens: in a part, by row_cost(), and once the prompt of rows that follow each other.
    together: rows of a query that are kept in one part; alone they may exceed it.
    """
    starts, tokens = [], math.inf
    for start in range(0, len(prompts), together):
        prompt, own = prompts[start], responses[start : start + together]
        more = sum(row_cost(len(prompt), len(response)) for response in own)
        tokens += more
        if not start or not np.array_equal(prompt, prompts[start - 1]):
            tokens += len(prompt)
        if tokens > most_tokens or not start:
            starts.append(start)
            tokens = more + len(prompt)
    return [range(*ends) for ends in zip(starts, [*starts[1:], len(prompts)])]


def row_cost(prompt: int, response: int) -> int:
    """Return what a row costs in a flat pass, in tokens: its response.

    Or a quarter of all its positions, if that is more: it has keys and values of its prompt, too.
    """
    return max(response, (prompt + response) // 4)


def full_query_tokens(config: Config) -> int:
    """Return what a query of full length costs, in tokens: its prompt once, and K rows."""
    prompt, response = config.longest_row
    return prompt + config.responses_per_query * row_cost(prompt, response)


def micro_batch_tokens(config: Config) -> int:
    """Most tokens in a micro-batch: the largest-batch trial runs that many."""
    full = full_query_tokens(config)
    return max(1, config.tokens_per_micro_batch // full) * full


def full_queries(config: Config) -> int:
    """Most queries of full length in a micro-batch of a trainer process."""
    share = math.ceil(config.queries_per_batch / config.trainer_processes)
    return min(share, micro_batch_tokens(config) // full_query_tokens(config))


class TokenLogprobs(torch.autograd.Function):
    """log softmax(states @ weight.T + bias) at the targets: (R,), in fp32.

    states: (R, H), in the dtype of the products; weight: (V, H); bias: (V,) or None; targets: (R,).
    Autograd would keep the logits, R x V, for the backward pass. Here a slice of them at a time is
    made, used, and made again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        size, cast = POSITIONS_PER_LOGITS[states.device.type], weight.to(states.dtype)
        chosen, normalizers = [], []
        for state, target in zip(states.split(size), targets.split(size)):
            logits = _logits(state, cast, bias)
            chosen.append(logits.gather(1, target[:, None])[:, 0])
            normalizers.append(logits.logsumexp(dim=1))
        normalizers = torch.cat(normalizers)
        ctx.save_for_backward(states, weight, bias, targets, normalizers)
        return torch.cat(chosen) - normalizers

    @staticmethod
    def backward(ctx, grad: Tensor):
        """d log pi(target) / d logits = onehot(target) - pi"""
        states, weight, bias, targets, normalizers = ctx.saved_tensors
        size, cast = POSITIONS_PER_LOGITS[states.device.type], weight.to(states.dtype)
        slices = zip(*(tensor.split(size) for tensor in (states, targets, normalizers, grad)))
        grad_states = []
        full = torch.promote_types(weight.dtype, torch.float32)
        is_trained = ctx.needs_input_grad[1]  # not with LoRA
        grad_weight = torch.zeros_like(weight, dtype=full) if is_trained else None
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for state, target, normalizer, g in slices:
            pi = _logits(state, cast, bias).sub_(normalizer[:, None]).exp_()
            grad_logits = pi.mul_(-g[:, None]).scatter_add_(1, target[:, None], g[:, None])
            if bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(states.dtype)
            grad_states.append(grad_logits @ cast)
            if is_trained:
                grad_weight += _product(grad_logits.T, state)
        grad_weight = grad_weight.to(weight.dtype) if is_trained else None
        return torch.cat(grad_states), grad_weight, grad_bias, None


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits in fp32. In bf16 those of 16 to 64 would be 0.125 to 0.25 apart."""
    logits = _product(states, weight.T)
    return logits if bias is None else logits.add_(bias)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; of two bf16 ones summed and returned in fp32, by tiles for bf16 if a CPU has them."""
    if a.dtype != torch.bfloat16:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    matmul = torch.backends.mkldnn.matmul  # vLLM sets its precision: mkldnn's own is not asked
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"  # which these fp32 numbers are
    try:
        return a.float() @ b.float()
    finally:
        matmul.fp32_precision = before


@torch.no_grad()
def check_architecture(model: torch.nn.Module) -> None:
    """Raise ValueError or UserError for a model, on a CPU, for which response_logprobs is wrong.

    That is one that changes its logits (scaled, capped), or whose tokens see in a flat pass what
    they should not.
    """
    check_attention(model)
    ids = np.arange(9) % model.get_input_embeddings().num_embeddings
    prompts, responses = [ids[:2], ids[:5]], [ids[3:], ids[4:]]
    with short_windows(model):
        ours = response_logprobs(model, prompts, responses, temperature=1.0)
        for row, prompt, response in zip(ours, prompts, responses):
            whole = torch.from_numpy(np.concatenate([prompt, response]))
            logprobs = model(input_ids=whole[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(1, whole[len(prompt) :, None])[:, 0]
            if not torch.allclose(row[: len(response)], expected, atol=1e-3):
                what = "transforms its logits, or attends in a way of its own, which"
                problem = f"{what} response_logprobs does not know: use another architecture"
                raise ValueError(f"{type(model).__name__} {problem}")


@contextmanager
def short_windows(model: torch.nn.Module) -> Iterator[None]:
    """Have layers with a sliding window see 4 tokens, so that a short row goes beyond it."""
    all_of_it = (model.config, *model.modules())
    own = [(each, getattr(each, "sliding_window", None)) for each in all_of_it]
    own = [(each, window) for each, window in own if isinstance(window, int)]
    try:
        for each, _ in own:
            each.sliding_window = 4
        yield
    finally:
        for each, window in own:
            each.sliding_window = window
