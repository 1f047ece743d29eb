"""Rows of a task's data: a local .jsonl file a split, or a dataset of the hub."""

import json
from pathlib import Path

from config import UserError


def read_rows(
    data_dir: str, split: str, columns: tuple[str, ...], hub: tuple[str, str | None, str]
) -> list[tuple[str, dict]]:
    """Read data_dir/<split>.jsonl, or hub's (dataset, configuration, split) if data_dir is "".

    Returns (where it stands, row) for each row; the `columns` are strings. Raises UserError.
    """
    if data_dir:
        path = Path(data_dir) / f"{split}.jsonl"
        rows = [(f"{path} line {number}", row) for number, row in _read_jsonl(path)]
    else:
        rows = [
            (f"{hub[0]} {hub[2]} row {number}", row)
            for number, row in enumerate(_load_hub(*hub), start=1)
        ]
    for place, row in rows:
        for column in columns:
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                wanted = ", ".join(f'"{name}": "…"' for name in columns)
                raise UserError(f"{place} has no {column!r}: each row must be {{{wanted}}}")
    return rows


def _load_hub(name: str, configuration: str | None, split: str):
    import datasets  # only here: it is slow to import, and not needed with --data_dir

    try:
        return datasets.load_dataset(name, configuration, split=split)
    except Exception as error:  # the many ways of having no network
        raise UserError(
            f"{name} {split} could not be loaded from the hub ({type(error).__name__}): "
            "give --data_dir with train.jsonl and test.jsonl"
        ) from error


def _read_jsonl(path: Path) -> list[tuple[int, object]]:
    """Line number and content of each line that is not blank."""
    if not path.is_file():
        raise UserError(
            f"data file {path} does not exist: --data_dir must hold train.jsonl and test.jsonl"
        )
    rows, number = [], 0
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append((number, json.loads(line)))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8
        raise UserError(f"{path} line {number} is not JSON: {error}") from error
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror}") from error
    if not rows:
        raise UserError(f"data file {path} is empty")
    return rows
