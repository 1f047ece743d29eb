"""Finding and fetching models: a local directory, or a repository of the hub.

A model is named by a directory, by organisation/name or, for a branch, by organisation/name@branch.
What comes from the hub is fetched once, before any process starts; then it is a directory.
"""

import hashlib
import json
import re
from functools import cache
from pathlib import Path

import huggingface_hub as hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_session

from config import UserError, find_path

PIECES, PIECE_BYTES = 64, 1 << 20  # that are read of a large file to tell its weights from others
ANSWER_SECONDS = 5.0  # that the hub has for its first answer
NAME = re.compile(r"[^/@]+/[^/@]+(@[^@]+)?")
# Other programs' formats, adapters, and what training left beside a model.
NOT_NEEDED = (
    "*.pth *.pt *.ot *.gguf *.h5 *.msgpack *.onnx *.tflite *.md training_args.bin optimizer* "
    "scheduler* rng_state* adapter_* .gitattributes */*"
).split()
WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")
# In the order in which transformers looks for them: one file, or an index of several.
FORMATS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def find_model(flag: str, model: str) -> str:
    """Return a local directory as an absolute path, or the name of a repository as it is.

    Raises UserError for a path that does not exist or holds no model.
    """
    path = find_path(flag, model)
    if path.is_dir():
        if not find_path(flag, path / "config.json").is_file():
            raise UserError(f"{flag} {model!r} holds no model: it has no config.json")
        return str(path.resolve())
    if path.is_absolute() or model.startswith((".", "~")) or not NAME.fullmatch(model):
        advice = "give a local directory or a hub id like organisation/name"
        raise UserError(f"{flag} {model!r} does not exist: {advice}")
    return model


def fetch_model(flag: str, model: str, weights: bool = True, local: bool = False) -> str:
    """Return the local directory of a model; fetch what of it is not in the hub's cache.

    weights: without them its configuration and tokenizer are enough. local: the hub is not asked.
    All is fetched before processes start: a download's silence would be taken for death. Raises
    UserError, as find_model does too.
    """
    model = find_model(flag, model)
    if Path(model).is_dir():
        return model
    name, _, branch = model.partition("@")
    offline = "the run has begun" if local else why_offline()
    ignored = [*NOT_NEEDED, *(() if weights else WEIGHTS)]
    how = dict(revision=branch or None, ignore_patterns=ignored, local_files_only=bool(offline))
    try:
        return hub.snapshot_download(name, **how)
    except Exception as error:  # of many kinds
        raise UserError(
            f"{flag} {model!r} is not whole in the hub's cache ({constants.HF_HUB_CACHE}), and "
            f"cannot be fetched: {offline or explain(error)}"
        ) from error


@cache
def why_offline() -> str:
    """Say why the hub is not asked, "" if it is. Its client would wait for an answer for ever."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except Exception as error:  # the many ways of having no network
        return f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
    return ""


def explain(error: Exception) -> str:
    """Say in one line why something could not be fetched, in the words of the hub's client."""
    causes = [error]  # the client may wrap what happened in an error of its own
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    told = (e for e in causes if isinstance(e, HfHubHTTPError) or "No space left" in str(e))
    error = next(told, error)
    return " ".join(f"{type(error).__name__}: {error}".split())


def identify_weights(directory: str) -> str:
    """Name the weights in a model's directory: two machines may train one recipe to different ones.

    The hub's revision in its cache, else a hash of the files: of a large one of PIECES of it.
    """
    path = Path(directory)
    if path.parent.name == "snapshots":
        return path.name
    digest = hashlib.blake2b(digest_size=6)
    for name in weight_files(path):
        size = (path / name).stat().st_size
        digest.update(f"{name} {size}".encode())
        with open(path / name, "rb") as file:
            for i in range(PIECES):
                file.seek(max(i * PIECE_BYTES, size // PIECES * i))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def weight_files(directory: Path) -> list[str]:
    """Name the files that hold the weights, in the order of their names; [] if there are none.

    Every reader reads these and no others. Raises UserError for a file that is no index.
    """
    for whole, index in FORMATS:
        if (directory / whole).is_file():
            return [whole]
        if (directory / index).is_file():
            return shards_of(directory / index)
    return []


def shards_of(index: Path) -> list[str]:
    """Name the files in an index of weights. Raises UserError for a file that is no index."""
    try:
        return sorted({*json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"{index} is no index of weights: {error}: download it again") from error
