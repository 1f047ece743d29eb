"""What is checked before anything starts: each mistake ends here, in one line (UserError)."""

import fcntl
import os
import sys
import tempfile
import time
from pathlib import Path

from config import Config, UserError
from loss import LOSSES
from runtime import checkpoint
from tasks import Task, load_task


def load_data(config: Config) -> tuple[Task, dict[str, int]]:
    """Load the task, and count its queries per split.

    The data is read once here, so that a bad row shows now and not in a searcher. Raises UserError.
    """
    task = load_task(config.task, **config.options)
    sizes = {split: len(task.queries(split)) for split in ("train", "test")}
    for split, size in sizes.items():
        if not size:
            raise UserError(f"task {config.task!r} has no {split} queries")
    return task, sizes


def check_loss(config: Config) -> None:
    if config.loss not in LOSSES:
        raise UserError(f"--loss is {config.loss!r}: it is one of {', '.join(LOSSES)}")


def find_checkpoint(config: Config) -> str:
    """Find the newest whole checkpoint of the run to resume, and name those that are damaged.

    Takes the lock of that run. Raises UserError if there is none.
    """
    lock(config.resume)
    directory, complaints = checkpoint.newest_whole(config.resume)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    if directory is None:
        condition = " that is whole" if complaints else ""
        raise UserError(f"--resume {config.resume!r} has no checkpoint{condition}")
    return str(directory)


def find_run_dir(config: Config) -> str:
    """Choose the directory of a new run. Creates nothing yet.

    Raises UserError for one that cannot be written to or already holds a run.
    """
    default = f"runs/{Path(config.task).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = Path(config.output_dir or default)
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(
            f"--output_dir {str(directory)!r} already holds a run: give another one, or remove it"
        )
    ancestors = [directory, *directory.absolute().parents]
    existing = next(ancestor for ancestor in ancestors if ancestor.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(
            f"--output_dir {str(directory)!r} cannot be written: "
            f"{error.strerror} in {str(existing)!r}"
        ) from error
    return str(directory)


def lock(run_dir: str) -> None:
    """Take the directory until this process ends, however it ends.

    Raises UserError if another run has it.
    """
    try:
        fcntl.flock(os.open(run_dir, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"--resume {run_dir!r}: this run has not ended, its processes are alive"
        raise UserError(message) from None
