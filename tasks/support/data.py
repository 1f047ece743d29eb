"""Rows of a task's data: a local .jsonl file a split, or a dataset of the hub."""

import json
from codecs import BOM_UTF8
from decimal import Decimal
from pathlib import Path

from config import UserError, find_path


def read_rows(
    data_dir: str, split: str, columns: tuple[str, ...], hub: tuple[str, str | None, str]
) -> list[tuple[str, dict]]:
    """Read data_dir/<split>.jsonl, or hub's (dataset, configuration, split) if data_dir is "".

    Returns (where it stands, row) for each row; the `columns` are strings. Raises UserError.
    """
    path = find_path("--data_dir", data_dir) / f"{split}.jsonl"
    if data_dir and not path.is_file():
        raise UserError(
            f"data file {path} does not exist: --data_dir must hold train.jsonl and test.jsonl"
        )
    rows = read_jsonl(path) if data_dir else _load_hub(columns, *hub)
    for place, row in rows:
        for column in columns:
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                wanted = ", ".join(f'"{name}": "…"' for name in columns)
                raise UserError(f"{place} has no {column!r}: each row must be {{{wanted}}}")
    return rows


def _load_hub(
    columns: tuple[str, ...], name: str, configuration: str | None, split: str
) -> list[tuple[str, dict]]:
    """Load the columns, of those that are there; others may be many times their size."""
    # Only here: they are slow to import, and not needed with --data_dir.
    import datasets
    from huggingface_hub import constants

    from models import hub

    problem = None
    try:
        hub.ask_hub(name, "dataset")
    except Exception as error:  # the many ways of having no network
        problem = error
    before = constants.HF_HUB_OFFLINE  # from now on, where the hub does not answer at all
    # What is in the cache will do then: neither library is to ask once more.
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = problem is not None
    try:
        rows = datasets.load_dataset(name, configuration, split=split)
        rows = rows.select_columns([c for c in columns if c in rows.column_names]).to_list()
    except Exception as error:  # not in the cache, or a damaged file
        reason = hub.explain(problem or error)
        raise UserError(
            f"{name} {split} could not be loaded from the hub: {reason}; or give --data_dir with "
            "train.jsonl and test.jsonl"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before
    return [(f"{name} {split} row {number}", row) for number, row in enumerate(rows, start=1)]


def read_jsonl(path: Path | str) -> list[tuple[str, object]]:
    """Place and content, without null, of each line that is not blank. Raises UserError."""
    rows, number = [], 0
    try:
        # Decoded line by line: else the number is that of a block.
        with find_path("data file", path).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                line = line.removeprefix(BOM_UTF8) if number == 1 else line
                if line.strip():
                    # A Decimal is no answer: JSON has neither NaN nor infinity.
                    how = dict(object_hook=simplified, parse_constant=Decimal)
                    row = json.loads(line.decode().strip(), **how)
                    rows.append((f"{path} line {number}", row))
                    # An escape may be half of a character, as of an emoji, which nothing encodes.
                    json.dumps(row, ensure_ascii=False, default=str).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} line {number} cannot be read as JSON in UTF-8: {error}") from error
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror}") from error
    if not rows:
        raise UserError(f"data file {path} is empty")
    return rows


def simplified(row: dict) -> dict:
    """Leave out what is null, which the library datasets fills up rows and messages with.

    The text of a message may come in parts: they are joined.
    """
    row = {name: value for name, value in row.items() if value is not None}
    parts = row.get("content")
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        texts = [part.get("text") for part in parts if part.get("type") == "text"]
        if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
            row["content"] = "".join(texts)
    return row


def chat_fault(prompt: object) -> str | None:
    """Say why a prompt is no list of messages, {"role": …, "content": …} each; None if it is."""
    if not isinstance(prompt, list) or not prompt:
        return 'it must be a string, or a list of messages {"role": …, "content": …}'
    for number, message in enumerate(prompt, start=1):
        found = message if isinstance(message, dict) else {}
        if others := found.keys() - {"role", "content"}:
            return f"message {number} has {min(map(str, others))!r}, which is not read"
        for key in ("role", "content"):
            if not isinstance(found.get(key), str):
                return f"message {number} has no text as {key!r}"
    return None
