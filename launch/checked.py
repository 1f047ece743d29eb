"""All checks of a run, in their order, and what they have found: then the run may begin."""

import sys
from dataclasses import dataclass, replace

from config import Config, UserError
from launch import resuming
from launch.checks import preflight
from launch.checks.settings import check_extras
from launch.places import Place, find_places, resolve
from launch.planning.plan import check_plan
from models.architecture import trained_shapes, weight_shapes
from runtime.checkpoints import checkpoint

Shapes = dict[str, tuple[int, ...]]  # by a parameter's name


@dataclass(frozen=True)
class CheckedRun:
    """A run that may begin.

    The settings come three times: given, by the user; asked, with the directory and the model that
    config.json is to name; config, as the run has them on this machine.
    """

    given: Config
    asked: Config
    config: Config
    places: list[Place]
    sizes: dict[str, int]  # queries, by split
    prompt: str  # the first one, as the model reads it
    shapes: Shapes  # of all parameters
    trained: Shapes  # of those that are trained
    resume: str | None  # the checkpoint to go on from


def check_run(given: Config) -> CheckedRun:
    """Check a run, and fetch its model. Starts and writes nothing. Raises UserError."""
    preflight.check_machine()
    check_extras(given)
    resume = preflight.find_checkpoint(given) if given.resume else None
    state = checkpoint.load_state(resume) if resume else {}
    task, sizes, prompts, digest = preflight.load_data(given)
    began = state["base_model"] if resume else None
    goes_on_there = resume and given.output_dir == given.resume
    run_dir = given.output_dir if goes_on_there else preflight.find_run_dir(given)
    asked = preflight.check_model(replace(given, output_dir=run_dir), task, began)
    searchers = asked.searchers
    if resume and searchers is None and not asked.ray:
        # Their shares of the queries, and the cursors in those, are part of the checkpoint.
        searchers = len(state["status"])
    places = find_places(replace(asked, searchers=searchers))
    shapes = weight_shapes(asked)
    prompt = preflight.check_tokenizer(asked, prompts)
    planned = check_plan(resolve(asked, places), task, places)
    trained = trained_shapes(planned)
    if resume and (mismatch := resuming.shape_mismatch(resume, trained)):
        raise UserError(
            f"--resume {given.resume!r}: --model {asked.model!r} has changed since: {mismatch}"
        )
    fetched = preflight.fetch(planned, task, began)
    config = replace(fetched, data_digest=f"{digest} {prompt}")
    before = state["data_digest"] if resume else config.data_digest
    if before != config.data_digest:  # other prompts alone: a chat template may write the date
        rows, _, was = before.partition(" ")
        what = "rows of the task" if rows != digest else f"first prompt, {was!r:.200},"
        print(f"warning: the {what} changed since that checkpoint", file=sys.stderr)
    return CheckedRun(given, asked, config, places, sizes, prompt, shapes, trained, resume)
