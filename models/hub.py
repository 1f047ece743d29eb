"""Finding and fetching models: a local directory, or a repository of the hub.

A model is named by a directory, by organisation/name or, for a branch, by organisation/name@branch.
What comes from the hub is fetched once, before any process starts; then it is a directory.
"""

import hashlib
import json
import re
import sys
from functools import cache, partial
from pathlib import Path

import huggingface_hub as hub
from huggingface_hub import DatasetInfo, ModelInfo, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects

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


def fetch_model(flag: str, model: str, weights: bool = True) -> str:
    """Return the local directory of a model; fetch what of it is not in the hub's cache.

    weights: without them its configuration and tokenizer are enough. Done before processes start: a
    download's silence would be taken for death. Raises UserError, as find_model does too.
    """
    model = find_model(flag, model)
    if Path(model).is_dir():
        return model
    name, _, branch = model.partition("@")
    try:
        info = ask_hub(name, "model", branch or None)
        sizes = {file.rfilename: (file.size or 0) / 1e6 for file in info.siblings}
        needed = needed_files(list(sizes), weights)
        find = partial(hub.try_to_load_from_cache, name, revision=info.sha)
        missing = [sizes[file] for file in needed if not isinstance(find(file), str)]
        if weights and missing:
            what = f"{len(missing)} files, {sum(missing):,.1f} MB"
            print(f"fetching {model} from the hub: {what}", file=sys.stderr, flush=True)
        return hub.snapshot_download(name, revision=branch or None, allow_patterns=needed)
    except Exception as error:  # the many ways of having no network
        return cached_model(flag, model, weights, explain(error))


def cached_model(flag: str, model: str, weights: bool, problem: str = "the run has begun") -> str:
    """Return the directory of a model in the hub's cache, without asking the hub.

    Whoever put it there, it is taken if all is there that is needed. problem: why the hub is not
    asked. Raises UserError.
    """
    name, _, branch = model.partition("@")
    found = hub.try_to_load_from_cache(name, "config.json", revision=branch or None)
    if isinstance(found, str):
        directory = Path(found).parent
        files = [directory / file for file in weight_files(directory)] if weights else [directory]
        if files and all(file.exists() for file in files):
            return str(directory)
    raise UserError(
        f"{flag} {model!r} is not whole in the hub's cache ({constants.HF_HUB_CACHE}), and cannot "
        f"be fetched: {problem}"
    )


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


def needed_files(files: list[str], weights: bool) -> list[str]:
    """Choose what is to be fetched of a repository's files: of its weights one format alone.

    transformers takes that one too: one file, or an index and the shards that are named like it.
    """
    rest = list(filter_repo_objects(files, ignore_patterns=[*NOT_NEEDED, *WEIGHTS]))
    found = [name for names in FORMATS for name in names if name in files]
    first = found[0] if found and weights else ""
    stem, _, ending = first.removesuffix(".index.json").rpartition(".")
    shards = f"{stem}-*.{ending}" if first.endswith(".index.json") else first
    return rest + list(filter_repo_objects(files, allow_patterns=[first, shards]))


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


@cache
def ask_hub(name: str, kind: str, branch: str | None = None) -> ModelInfo | DatasetInfo:
    """Ask the hub what a repository holds. Raises whatever keeps it from answering.

    kind: "model" or "dataset". Where it does not answer in a few seconds, this process works
    offline from then on: the hub's client would ask each further question five times.
    """
    if constants.HF_HUB_OFFLINE:
        raise Offline
    print(f"asking the hub, {constants.ENDPOINT}, for {name}", file=sys.stderr, flush=True)
    try:
        how = dict(repo_type=kind, revision=branch, files_metadata=kind == "model")
        return hub.HfApi().repo_info(name, timeout=ANSWER_SECONDS, **how)
    except HfHubHTTPError:  # an answer, of a kind
        raise
    except Exception as error:
        Offline.reason = f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
        constants.HF_HUB_OFFLINE = True
        raise Offline from error


class Offline(Exception):
    """The hub is not asked, for a reason that holds for all of this process."""

    reason = "HF_HUB_OFFLINE is set"

    def __str__(self) -> str:
        return Offline.reason


def explain(error: Exception) -> str:
    """Say in one line why something could not be fetched, in the words of the hub's client."""
    causes = [error]  # the client may wrap what happened in an error of its own
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    told = (HfHubHTTPError, Offline)
    error = next((e for e in causes if isinstance(e, told) or "No space left" in str(e)), error)
    return " ".join(f"{type(error).__name__}: {error}".split())
