"""Log-probabilities of responses, with transformers.

Trainer and searchers both take them from here, the one for the policy, the others for the reference
policy, so that the two come from the same framework, dtype and temperature.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from config import padded_row

# Padded response tokens in one forward pass: few enough that its rows are of one length, enough to
# keep the device busy.
TOKENS_PER_FORWARD = {"cpu": 1024, "cuda": 8192}
# The same where the memory of one pass is what counts (--low_memory).
TOKENS_IN_LOW_MEMORY = 1024
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
    logits are fp32 all the same. Equal rows run once, and rows of similar length together. Logits
    exist for a slice of the response positions at a time (TokenLogprobs): memory grows with the
    tokens of these N rows, a prompt counted for each, never with N x T x vocabulary.
    """
    device = next(model.parameters()).device
    prompts, responses, place, chunked_rows = distinct_passes(prompts, responses, device)
    width = max(len(response) for response in responses)
    head = model.get_output_embeddings()
    chunks = []
    is_cast = dtype != next(model.parameters()).dtype
    # One autocast for all chunks: within it each weight is cast once.
    with torch.autocast(device.type, dtype, enabled=is_cast):
        for rows in chunked_rows:  # M of them
            # (M, chunk's T). Two columns at least: so each chunk makes a pass after the prompts'.
            ids, mask = right_padded([responses[row] for row in rows], device, columns=2)
            states = response_states(model, [prompts[row] for row in rows], ids)[mask]
            full = torch.promote_types(states.dtype, torch.float32)
            states = (states.to(full) / temperature).to(dtype)  # (R, H), R response tokens
            bias = None if head.bias is None else head.bias / temperature
            with torch.autocast(device.type, enabled=False):  # it would round the logits
                taken = TokenLogprobs.apply(states, head.weight, bias, ids[mask])  # (R,)
            chunk = torch.zeros(mask.shape, dtype=taken.dtype, device=device)
            chunk = chunk.masked_scatter(mask, taken)
            chunks.append(F.pad(chunk, (0, width - mask.shape[1])))
    # In the order of the given rows; those that were merged are repeated.
    order = np.argsort(np.concatenate(chunked_rows))[place]
    return torch.cat(chunks)[torch.from_numpy(order).to(device)]


def distinct_passes(
    prompts: list[np.ndarray], responses: list[np.ndarray], device: torch.device
) -> tuple[list[np.ndarray], list[np.ndarray], list[int], list[np.ndarray]]:
    """Merge equal rows, and split the distinct ones into forward passes.

    Returns their prompts and responses, the index of each given row among them, and the indices of
    the rows of each pass.
    """
    kept, place = _distinct([(a.tobytes(), b.tobytes()) for a, b in zip(prompts, responses)])
    prompts, responses = [prompts[row] for row in kept], [responses[row] for row in kept]
    passes = split_rows(prompts, responses, TOKENS_PER_FORWARD[device.type])
    return prompts, responses, place, passes


def split_rows(
    prompts: list[np.ndarray], responses: list[np.ndarray] | list[list[int]], most_tokens: int
) -> list[np.ndarray]:
    """Return the indices of the rows of each forward pass: rows of similar length, longest first.

    prompts: [] for a model that reads texts whole. most_tokens: padded response tokens in a pass.
    """
    lengths = np.array([len(response) for response in responses])
    longest_prompt = max((len(prompt) for prompt in prompts), default=0)
    order = np.argsort(-lengths, kind="stable")

    def split(most: int) -> list[np.ndarray]:
        chunks, start = [], 0
        while start < len(order):
            count = max(1, most // padded_row(longest_prompt, lengths[order[start]]))
            chunks.append(order[start : start + count])
            start += count
        return chunks

    # The fewest passes, and of those the first not as full: less padding.
    return min((split(most_tokens * eighths // 8) for eighths in (4, 5, 6, 7, 8)), key=len)


def response_states(model: torch.nn.Module, prompts: list[np.ndarray], ids: Tensor) -> Tensor:
    """Return the state from which the model predicts each response token: (M, T, H).

    ids: (M, T), the responses, T at least 2. The K responses of a query share its prompt: each
    distinct prompt runs once, and its responses attend to the keys and values that it left.
    """
    kept, place = _distinct([prompt.tobytes() for prompt in prompts])  # Q prompts
    query = torch.tensor(place, device=ids.device)  # (M,)
    # Padded on the left, so that nothing lies between a prompt and its responses: a sliding window
    # counts columns, be they padding or not.
    reversed_ids, reversed_mask = right_padded([prompts[row][::-1] for row in kept], ids.device)
    prompt_ids, prompt_mask = reversed_ids.flip(1), reversed_mask.flip(1)  # (Q, P)
    positions = (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)
    out = model.base_model(
        input_ids=prompt_ids, attention_mask=prompt_mask, position_ids=positions, use_cache=True
    )
    # (M, 1, H): the last token of the prompt predicts the first of the response
    first = out.last_hidden_state[query, -1:]
    for layer in out.past_key_values.layers:
        layer.batch_select_indices(query)  # (M, heads, P, head size); gradients go back through it
    mask = F.pad(prompt_mask[query], (0, ids.shape[1] - 1), value=True)  # (M, P + T - 1)
    positions = positions[query, -1:] + torch.arange(1, ids.shape[1], device=ids.device)
    rest = model.base_model(
        input_ids=ids[:, :-1],
        attention_mask=mask,
        position_ids=positions,
        past_key_values=out.past_key_values,
    )
    return torch.cat([first, rest.last_hidden_state], dim=1)


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
    if states.dtype != torch.bfloat16:
        return F.linear(states, weight, bias)
    logits = _product(states, weight.T)
    return logits if bias is None else logits + bias


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; of two bf16 ones summed and returned in fp32."""
    if a.dtype != torch.bfloat16:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _distinct(keys: list) -> tuple[list[int], list[int]]:
    """Return where each distinct key first stands, and for each key which of those it equals."""
    first: dict = {}
    place = [first.setdefault(key, (len(first), i))[0] for i, key in enumerate(keys)]
    return [i for _, i in first.values()], place


def right_padded(
    rows: list[np.ndarray] | list[list[int]], device: torch.device, columns: int = 1
) -> tuple[Tensor, Tensor]:
    """Return token ids padded with 0, and True where they are not padding: both (rows, longest).

    columns: at least so many.
    """
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(max(columns, lengths.max())) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate(rows)
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


@torch.no_grad()
def check_architecture(model: torch.nn.Module) -> None:
    """Raise ValueError for a model, on a CPU, for which response_logprobs is wrong.

    That is one whose logits are more than its output embedding of its last hidden state (scaled,
    capped), or that remembers a prompt otherwise than by keys and values.
    """
    ids = np.arange(9) % model.get_input_embeddings().num_embeddings
    prompts, responses = [ids[:2], ids[:5]], [ids[3:], ids[4:]]
    refusal = (
        f"{type(model).__name__} {{}}, which response_logprobs does not know: "
        "use another architecture"
    )
    try:
        ours = response_logprobs(model, prompts, responses, temperature=1.0)
    except (AttributeError, TypeError) as error:
        problem = f"keeps no plain cache of keys and values ({error})"
        raise ValueError(refusal.format(problem)) from error
    for row, prompt, response in zip(ours, prompts, responses):
        whole = torch.from_numpy(np.concatenate([prompt, response]))
        logprobs = model(input_ids=whole[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, whole[len(prompt) :, None])[:, 0]
        if not torch.allclose(row[: len(response)], expected, atol=1e-3):
            raise ValueError(
                refusal.format("transforms its logits, or attends in a way of its own")
            )
