"""What is checked before anything starts: each mistake ends here, in one line (UserError)."""

import dataclasses
import fcntl
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from config import Config, UserError, first_line
from models.device import compute_dtype, device, onednn_multiplies
from models.hub import fetch_model, find_model, identify_weights
from models.policy import encode_prompt, encode_reply, load_tokenizer, policy_without_weights
from runtime.check_objective import check_objective
from runtime.checkpoints import checkpoint
from tasks import LazyQueries, Messages, Task, is_chat, load_task, sampling_for_tests


def check_machine() -> None:
    """Say where this was never tried: weights.py relies on the order of stores on x86-64."""
    if (machine := platform.machine()) not in ("x86_64", "AMD64"):
        print(f"warning: never tried on {machine}, only on x86-64", file=sys.stderr)


def load_data(config: Config) -> tuple[Task, dict[str, int], list[str | Messages]]:
    """Load the task; returns it, the number of queries per split, and a prompt of each kind.

    Of texts the first, and of chats with the same sequence of roles, which a template treats alike.

    The data is read once here, so that a bad row shows now and not in a searcher. Raises UserError.
    """
    task, sizes = load_task(config.task, **config.options), {}
    prompts: dict[tuple[str, ...], str | Messages] = {}
    for split in ("train", "test"):
        try:
            queries = task.queries(split)
        except UserError:
            raise
        except Exception as error:
            problem = f"its queries({split!r}) fail: {type(error).__name__}: {error}"
            raise UserError(f"task {config.task!r}: {problem}") from error
        if not queries:
            raise UserError(f"task {config.task!r} has no {split} queries")
        sizes[split], ids = len(queries), set()
        for query in [queries[0]] if isinstance(queries, LazyQueries) else queries:
            name = f"task {config.task!r}, {split} query {query.id!r:.60}"
            if type(query.id) is not int or abs(query.id) >= 2**63 or query.id in ids:
                raise UserError(f"{name}: its id must be an int of 64 bits that no other has")
            ids.add(query.id)
            if isinstance(query.prompt, str):
                prompts.setdefault((), query.prompt)
                continue
            if not is_chat(query.prompt):
                raise UserError(
                    f"{name}: its prompt is {query.prompt!r:.60}: it must be a string, or a list "
                    'of messages {"role": …, "content": …}'
                )
            roles = tuple(message["role"] for message in query.prompt)
            prompts.setdefault(roles, query.prompt)
    return task, sizes, list(prompts.values())


def check_tokenizer(config: Config, prompts: list[str | Messages]) -> str:
    """Return the first prompt as the model reads it.

    prompts: one of each kind. Raises UserError for a model whose responses cannot end, or which
    cannot take the prompts.
    """
    tokenizer, policy = load_tokenizer(config), policy_without_weights(config)
    if tokenizer.eos_token_id is None and policy.config.eos_token_id is None:
        raise UserError(
            f"--model {config.model!r} has no end-of-sequence token, in neither its tokenizer nor "
            "its config.json: no response could end; use a model that has one"
        )
    known, end = len(policy.get_input_embeddings().weight), tokenizer.eos_token_id
    if end is not None and end >= known:
        raise UserError(
            f"--model {config.model!r} knows {known} tokens, and its tokenizer's end of sequence "
            f"{tokenizer.eos_token!r} is none of them but token {end}: use a model that knows it"
        )
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if chats and not tokenizer.chat_template:
        raise UserError(
            f"the prompts of task {config.task!r} are chat messages, but the tokenizer of --model "
            f"{config.model!r} has no chat template: use a model that has one"
        )
    try:
        for messages in chats:
            encode_prompt(tokenizer, messages)
            if config.max_episode_tokens:
                encode_reply(tokenizer, messages, "?", last_token=0)
    except Exception as error:  # a template may refuse in words of its own
        raise UserError(
            f"the chat template of --model {config.model!r} does not take the prompts of task "
            f"{config.task!r}: {first_line(error)}"
        ) from error
    return tokenizer.decode(encode_prompt(tokenizer, prompts[0])) if prompts else ""


def check_sampling(config: Config, task: Task) -> None:
    """Raise UserError for a task that sets S, and for several samples of a greedy response."""
    if "n" in task.sampling(np.random.default_rng(0)):
        raise UserError(
            f"task {config.task!r}: its sampling() gives 'n', which --samples_per_query is for"
        )
    samples = config.evaluation_samples
    if samples > 1 and sampling_for_tests(config, task)["temperature"] == 0:
        raise UserError(
            f"--evaluation_samples is {samples}, but responses to test queries are greedy, and so "
            "all alike: give an --evaluation_temperature above 0, or --evaluation_samples 1"
        )


def check_model(config: Config, task: Task, revision: str | None = None) -> Config:
    """Check the objective and the models; the configuration with the model's name or path.

    revision: of the hub, that a run to resume began with: its branch may have moved.
    """
    check_objective(config)
    check_sampling(config, task)
    if device().type == "cpu" and not onednn_multiplies(compute_dtype(config)):
        print("bfloat16 is slow here: this processor does not multiply in it", file=sys.stderr)
    model = find_model("--model", config.model or task.base_model())
    if revision and not Path(model).is_dir():
        model = f"{model.partition('@')[0]}@{revision}"
    fetch_model("--model", model, weights=False)  # enough for the checks
    task.prepare()
    return dataclasses.replace(config, model=model)


def fetch(config: Config, task: Task, began: str | None = None) -> Config:
    """Fetch the whole policy; the configuration with its directory. Raises UserError.

    began: the weights that a run to resume began with, as identify_weights names them.
    Processes that start from now on do not ask the hub: it might have something else by then.
    """
    config = dataclasses.replace(config, model=fetch_model("--model", config.model))
    if began and identify_weights(config.model) != began:
        raise UserError(
            f"--resume {config.resume!r} began with other weights in --model {config.model!r}: put "
            "back what was there"
        )
    if not task.asks_hub_in_load:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return config


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
