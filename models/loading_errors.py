"""Why a model's files are refused: weights that do not fit, and what cannot be read."""

import re
from pathlib import Path

import torch

from config import UserError, first_line

SHOWN = 3  # names in a message


def check_loaded_keys(name: str, made: torch.nn.Module, info: dict[str, set]) -> None:
    """Raise UserError for weights that a model lacks, has in another shape, or has no place for.

    info: what from_pretrained says of the loading, after its renaming, tying and ignoring.
    """
    unknown, kind = sorted(info["unexpected_keys"]), type(made).__name__
    # Of an encoder (AutoModel) the hidden states are read, and no pooler.
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith("pooler.")):
        ends = [key for key in missing if unknown and unknown[0].endswith(f".{key}")]
        prefix = unknown[0].removesuffix(ends[0]) if ends else ""
        advice = f"take {prefix!r} off the names in it" if ends else "save it whole"
        raise UserError(f"{name} lacks {list_names(missing)} of its {kind}: {advice}")
    for key, in_file, expected in sorted(info["mismatched_keys"]):
        shapes = f"{tuple(in_file)}, and by its config.json {tuple(expected)}"
        raise UserError(f"{name}: {key} has the shape {shapes}: use the config.json of its own")
    if left_out := [key for key in unknown if is_layer_weight(made, key)]:
        problem = f"its config.json, of a {kind}, has no place for {list_names(left_out)}"
        raise UserError(f"{name}: {problem}: use the config.json of its own")


def is_layer_weight(made: torch.nn.Module, key: str) -> bool:
    """Whether a key without a place is a weight of a layer, or of one more than there are.

    Buffers of old files (GPT-2's masked_bias) and unused heads are not.
    """
    modules = dict(made.named_modules())
    for name in (key, f"{made.base_model_prefix}.{key}"):
        layer, (owner, _, own) = re.match(r"(.+?)\.\d+(?=\.)", name), name.rpartition(".")
        if layer and layer[1] in modules:
            # A bias that is None is listed there too.
            slots = getattr(modules.get(owner), "_parameters", {})
            return layer[0] not in modules or own == "weight" or own in slots
    return False


def list_names(names: list[str]) -> str:
    """Write the first few of some names."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def explain(file: Path, error: Exception) -> str:
    """Say in one line why a file cannot be read."""
    if file.is_file():
        with open(file, "rb") as opened:
            if opened.read(23) == b"version https://git-lfs":
                return f"{file.name} is git-lfs's pointer to it: run git lfs pull there"
    return f"{first_line(error)}: download it again"
