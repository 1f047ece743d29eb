"""What is looked at before anything starts: a mistake that can be seen without loading a model ends here, in one line (UserError)."""

import fcntl
import os
import sys
import tempfile
import time
from pathlib import Path

from config import Config, UserError


def load_data(config: Config) -> tuple:
    """The task, and its number of queries per split: read once here, so that a bad row shows now and not in a searcher. Raises UserError."""
    from tasks import load_task

    task = load_task(config.task, **config.options)
    sizes = {split: len(task.queries(split)) for split in ("train", "test")}
    for split, size in sizes.items():
        if not size:
            raise UserError(f"task {config.task!r} has no {split} queries")
    return task, sizes


def check_loss(config: Config) -> None:
    from loss import LOSSES

    if config.loss not in LOSSES:
        raise UserError(f"--loss is {config.loss!r}: it is one of {', '.join(LOSSES)}")


def find_model(flag: str, model: str) -> str:
    """A local directory as an absolute path, or a hub id. Raises UserError for a path that does not exist."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{flag} {model!r} holds no model: it has no config.json")
        return str(path.resolve())
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise UserError(
            f"{flag} {model!r} does not exist: give a local directory or a hub id like organisation/name"
        )
    return model


def fetch_model(flag: str, model: str) -> str:
    """A local directory as it is; a hub model into the hub's cache, before processes start whose silence would be taken for death."""
    if Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download

    print(f"fetching {model} from the hub", file=sys.stderr, flush=True)
    try:
        return snapshot_download(
            model, ignore_patterns=["*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"]
        )
    except Exception as error:  # the many ways of having no network
        raise UserError(
            f"{flag} {model!r} could not be fetched from the hub: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def find_checkpoint(config: Config) -> str:
    """The newest checkpoint of the run to go on with that is whole; those that are not are named. Raises UserError if there is none."""
    import checkpoint

    lock(config.resume)
    directory, complaints = checkpoint.newest_whole(config.resume)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    if directory is None:
        raise UserError(
            f"--resume {config.resume!r} has no checkpoint" + " that is whole" * bool(complaints)
        )
    return str(directory)


def find_run_dir(config: Config) -> str:
    """Raises UserError for a directory that cannot be written to or already holds a run. Creates nothing yet."""
    directory = Path(
        config.output_dir or f"runs/{Path(config.task).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(
            f"--output_dir {str(directory)!r} already holds a run: give another one, or remove it"
        )
    existing = next(
        parent for parent in [directory, *directory.absolute().parents] if parent.exists()
    )
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(
            f"--output_dir {str(directory)!r} cannot be written: {error.strerror} in {str(existing)!r}"
        ) from error
    return str(directory)


def lock(run_dir: str) -> None:
    """The directory, until this process ends, however it ends. Raises UserError if another run has it."""
    try:
        fcntl.flock(os.open(run_dir, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"--resume {run_dir!r}: this run has not ended, its processes are alive"
        ) from None
