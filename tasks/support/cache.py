"""Models that are made on the spot, once, and kept in the user's cache."""

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from config import UserError


def cached(name: str, recipe: str, build: Callable[[Path], None]) -> Path:
    """Return the directory that build(directory) has filled; it is filled once for each recipe.

    recipe: what decides what build makes, as text; pretraining.py is added. Another one fills
    another directory. Raises UserError where nothing can be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tba"
    recipe += Path(__file__).with_name("pretraining.py").read_text(encoding="utf-8")
    directory = cache / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if directory.is_dir():
        return directory
    try:
        cache.mkdir(parents=True, exist_ok=True)
        place = TemporaryDirectory(dir=cache)
    except OSError as error:
        what = f"the cache {str(cache)!r} cannot be written: {error.strerror}"
        raise UserError(f"{what}; set XDG_CACHE_HOME to another directory") from error
    print(f"building the models of {name} (once, less than a minute) …", file=sys.stderr)
    with place as unfinished:
        made = Path(unfinished) / "models"
        build(made)
        with suppress(OSError):  # another run was first
            made.rename(directory)
    return directory
