"""Which checkpoint a run can go on from."""

import json
import shutil
from pathlib import Path

from safetensors import safe_open

from runtime.checkpoints.checkpoint import checksum, list_checkpoints, load_state

# What each has; one of a run that resets its reference has that too.
FILES = {"learner.safetensors", "buffer.npz", "torch.npz", "state.json"}


def newest_whole(run_dir: str) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with each newer one."""
    complaints = []
    for directory in reversed(list_checkpoints(run_dir)):
        problem = find_corruption(directory)
        if problem is None:
            return directory, complaints
        complaints.append(f"{directory} cannot be used: {problem}")
    return None, complaints


def drop_newer(directory: str | Path) -> None:
    """Delete checkpoints newer than the one being resumed: they are damaged."""
    for other in list_checkpoints(str(Path(directory).parents[1])):
        if other.name > Path(directory).name:
            shutil.rmtree(other)


def has_begun(run_dir: str) -> bool:
    """Whether the run's newest checkpoint has anything to go on from: a step, or a response."""
    checkpoints = list_checkpoints(run_dir)
    state = load_state(checkpoints[-1]) if checkpoints else {"step": 0, "received": 0}
    return state["step"] > 0 or state["received"] > 0


def find_corruption(directory: Path) -> str | None:
    """Compare each file with its checksum; None if all are there and whole."""
    try:
        checksums = json.loads((directory / "checksums.json").read_text())
        if missing := FILES - checksums.keys():
            return f"checksums.json does not name {min(missing)}"
        for name, expected in checksums.items():
            if checksum(directory / name) != expected:
                return f"{name} is damaged"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def shape_mismatch(directory: str | Path, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """What keeps a model of these parameters from taking the checkpoint's; None if nothing does."""
    with safe_open(Path(directory) / "learner.safetensors", "pt") as file:
        saved = {
            key.removeprefix("policy."): tuple(file.get_slice(key).get_shape())
            for key in file.keys()  # noqa: SIM118 (no dict: it cannot be iterated)
            if key.startswith("policy.")
        }
    for name in saved | shapes:
        if saved.get(name) != shapes.get(name):
            return f"{name} has shape {shapes.get(name)}, in the checkpoint {saved.get(name)}"
    return None
