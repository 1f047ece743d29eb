"""Finding and fetching models: a local directory, or a repository of the hub."""

import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from config import UserError


def find_model(flag: str, model: str) -> str:
    """Return a local directory as an absolute path, or a hub id as it is.

    Raises UserError for a path that does not exist or holds no model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{flag} {model!r} holds no model: it has no config.json")
        return str(path.resolve())
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise UserError(
            f"{flag} {model!r} does not exist: "
            "give a local directory or a hub id like organisation/name"
        )
    return model


def fetch_model(flag: str, model: str) -> str:
    """Return the local directory of a model; fetch one of the hub into the hub's cache first.

    Done before processes start: a download's silence would be taken for death. Raises UserError.
    """
    if Path(model).is_dir():
        return model
    print(f"fetching {model} from the hub", file=sys.stderr, flush=True)
    try:
        ignored = ["*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"]
        return snapshot_download(model, ignore_patterns=ignored)
    except Exception as error:  # the many ways of having no network
        raise UserError(
            f"{flag} {model!r} could not be fetched from the hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
