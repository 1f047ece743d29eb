"""A flat pass: prompts and responses behind each other in one row, where nothing is padded.

Each distinct prompt runs once, and each distinct response to it once. Only attention has to know
where one ends: attend() takes the place of the model's own. It works by segments: a prompt, a piece
of one, or a response. A segment's queries are its own tokens. Its keys are those, and before them
its prompt, or the earlier pieces.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from config import UserError
from models.device import to_device

FLAT = "flat"  # the name of attend() among transformers' attentions
SHORTEST_PIECE = 16  # of a prompt, in tokens


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,  # they are in query and key by now
    segments: "Packed | Padded | None" = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within segments, for transformers: query (1, heads, N, D) to (1, N, heads, D).

    Raises UserError for whatever else a layer wants, such as a cap of scores.
    """
    unknown = [name for name, what in others.items() if isinstance(what, Tensor) or what]
    if attention_mask is not None or segments is None:
        unknown.append("a mask of its own")
    if unknown:
        what = f"wants {unknown[0]}, which models/attention.py does not know"
        raise UserError(f"--model: {type(module).__name__} {what}: use another architecture")
    # Under autocast rotary embeddings may return queries and keys in fp32.
    query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return segments.attend(query, key, value, scaling, sliding_window)[None], None


AttentionInterface.register(FLAT, attend)


def run_flat(model: torch.nn.Module, row: "Row") -> Tensor:
    """Return a model's last hidden states of a row: (N, H)."""
    own = model.config._attn_implementation
    model.config._attn_implementation = FLAT
    try:
        inputs = dict(input_ids=row.ids[None], position_ids=row.positions[None])
        out = model.base_model(**inputs, use_cache=False, segments=row.segments)
    finally:
        model.config._attn_implementation = own
    return out.last_hidden_state[0]


class Row(NamedTuple):
    """The N tokens of a flat pass."""

    ids: Tensor  # (N,)
    positions: Tensor  # (N,) from 0 at the first token of each prompt
    segments: "Packed | Padded"
    predictors: np.ndarray  # of each response token, the place in the row of the token before it


def lay_out(
    prompts: list[np.ndarray], responses: list[np.ndarray], device: torch.device, packed: bool
) -> Row:
    """Put prompts and responses into a row, but for a response's last token: nothing follows it.

    packed: whether segments are Packed; else they are Padded.
    """
    # A long prompt as one segment would pad each response to its length.
    piece = max(SHORTEST_PIECE, *map(len, responses), max(map(len, prompts)) // 8)
    ids, positions, queries, keys, predictors = [], [], [], [], []
    known: dict[tuple[bytes, ...], np.ndarray] = {}

    def put(tokens: np.ndarray, prompt: np.ndarray) -> np.ndarray:
        """Put tokens behind a prompt. prompt, returned: places in the row."""
        begin, count = queries[-1][-1] + 1 if queries else 0, len(tokens)
        places = np.arange(begin, begin + count)
        ids.append(tokens)
        positions.append(np.arange(len(prompt), len(prompt) + count))
        step = max(1, count) if packed else piece
        for start in range(0, count, step):
            queries.append(places[start : start + step])
            keys.append(np.concatenate([prompt, places[: start + step]]))
        return places

    for prompt, response in zip(prompts, responses):
        query, row = (prompt.tobytes(),), (prompt.tobytes(), response.tobytes())
        if query not in known:
            known[query] = put(prompt, np.arange(0))
        if row not in known:
            own = put(response[:-1], known[query])
            known[row] = np.concatenate([known[query][-1:], own])[: len(response)]
        predictors.append(known[row])
    segments = (Packed if packed else Padded).of(queries, keys, device)
    row = (to_device(np.concatenate(parts), device) for parts in (ids, positions))
    return Row(*row, segments, np.concatenate(predictors))


class Packed(NamedTuple):
    """S segments for the kernel that a GPU has for them, in bf16."""

    keys: Tensor  # positions in the row of the keys of all segments, segment by segment
    query_ends: Tensor  # (S + 1,) int32, from 0: sums of the numbers of queries
    key_ends: Tensor  # (S + 1,) the same of keys
    longest: tuple[int, int]  # most queries and keys of a segment

    @classmethod
    def of(cls, queries: list[np.ndarray], keys: list[np.ndarray], device: torch.device):
        """Make them of the positions in the row of each segment's queries and keys."""
        counts = [np.array([len(each) for each in part]) for part in (queries, keys)]
        ends = [np.cumsum([0, *own], dtype=np.int32) for own in counts]
        index = (to_device(each, device) for each in (np.concatenate(keys), *ends))
        return cls(*index, tuple(int(own.max()) for own in counts))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attend within the segments: (N, heads, D) each. window: keys that a query sees."""
        key, value = (x.index_select(0, self.keys) for x in (key, value))
        before = -1 if window is None else window - 1
        how = dict(scale=scale, window_size=(before, 0), enable_gqa=True)
        return varlen_attn(query, key, value, self.query_ends, self.key_ends, *self.longest, **how)


class Padded(NamedTuple):
    """S segments as a batch, padded inside of attention alone; computed in fp32 at least."""

    queries: Tensor  # (S, A) positions in the row of the queries
    keys: Tensor  # (S, B)
    last_key: Tensor  # (S, 1, A, 1) the last of the B keys that a query sees
    mask: Tensor  # (S, 1, A, B) 0 for keys that it sees, -inf for others
    places: Tensor  # (N,) where the row's tokens stand in queries.flatten()

    @classmethod
    def of(cls, queries: list[np.ndarray], keys: list[np.ndarray], device: torch.device):
        """Make them, as Packed.of does."""
        counts, index = [], []
        for part in (queries, keys):  # in numpy: a tensor for each segment takes too long
            counts.append(np.array([[len(each)] for each in part]))
            is_there = np.arange(counts[-1].max()) < counts[-1]
            index.append(np.zeros(is_there.shape, np.int64))
            index[-1][is_there] = np.concatenate(part)
        (num_queries, num_keys), number = counts, np.arange(index[0].shape[1])
        # A query without keys would be NaN: padding sees what the last query does.
        last_key = num_keys - num_queries + np.minimum(number, num_queries - 1)
        places = np.flatnonzero(number < num_queries)
        *index, last_key, places = (to_device(x, device) for x in (*index, last_key, places))
        last_key = last_key[:, None, :, None]
        is_later = torch.arange(index[1].shape[1], device=device) > last_key
        mask = torch.zeros(is_later.shape, device=device)
        return cls(*index, last_key, mask.masked_fill_(is_later, float("-inf")), places)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attend as Packed does."""
        # In bf16 the backward pass of a CPU's kernel takes eight times as long as in fp32.
        dtype = torch.promote_types(value.dtype, torch.float32)
        queries, *both = (
            x.to(dtype).index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
            for x, index in ((query, self.queries), (key, self.keys), (value, self.keys))
        )  # (S, heads, A, D), and twice (S, heads, B, D)
        group = query.shape[1] // key.shape[1]
        if group > 1 and query.is_cuda:  # with a mask its kernels want equal numbers of heads
            both = (x.repeat_interleave(group, dim=1) for x in both)
        mask = self.mask.to(dtype)
        if window is not None:
            number = torch.arange(mask.shape[-1], device=mask.device)
            mask = mask.masked_fill(number <= self.last_key - window, float("-inf"))
        how = dict(scale=scale, enable_gqa=group > 1 and not query.is_cuda)
        with torch.autocast(query.device.type, enabled=False):
            out = F.scaled_dot_product_attention(queries, *both, mask, **how)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.places).to(value.dtype)


def check_attention(model: torch.nn.Module) -> None:
    """Raise UserError for a model, perhaps on the meta device, that does not attend by attend()."""
    asked, token = [], torch.zeros(1, dtype=torch.long, device=model.device)

    def note(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        asked.append(query)
        return query[..., : value.shape[-1]]

    row = Row(token, token, SimpleNamespace(attend=note), np.arange(0))
    try:
        with torch.no_grad():
            run_flat(model.eval(), row)
    except Exception as error:
        if isinstance(error, UserError):
            raise
        if "meta tensor" in str(error):  # it looks at numbers, of which there are none: once loaded
            return
    kinds = {*(getattr(model.config, "layer_types", None) or ())}
    if not asked or kinds - {"full_attention", "sliding_attention"}:
        what = "attends in a way of its own, for which models/attention.py has no place"
        raise UserError(f"--model: {type(model).__name__} {what}: use another architecture")
