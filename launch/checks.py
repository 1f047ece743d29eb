"""What is checked before anything starts: each mistake ends here, in one line (UserError)."""

import fcntl
import hashlib
import json
import math
import os
import pickle
import platform
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from config import Config, Extra, UserError, find_path, users_code
from launch.places import Place, find_places, resolve
from launch.planning.plan import check_plan
from launch.resume import newest_whole
from launch.settings import check_extras, check_modules
from learner import find_objective
from loss import LossInputs
from models.architecture import policy_without_weights, trained_shapes, weight_shapes
from models.device import compute_dtype, device, onednn_multiplies
from models.folder import fetch_weights
from models.hub import fetch_model, find_model, identify_weights
from models.tokens import encode_prompt, load_tokenizer
from runtime.checkpoints import checkpoint
from runtime.responses.final_metrics import evaluate
from tasks import ENDS, LazyQueries, Messages, Query, Task, load_task, sampling_for_tests
from tasks.support.data import chat_fault

Shapes = dict[str, tuple[int, ...]]  # by a parameter's name
Prompts = dict[str, list[str | Messages]]  # by split
PROMPTS_READ = 1000  # of a split, to tell how long they are
LAZY_READ = 32  # of LazyQueries
# With these parameters of vLLM a sampler is still the policy at --temperature: some say where a
# response ends, and the others have values that change nothing, as a 0 or none does.
HARMLESS = {*ENDS, "seed", "skip_special_tokens", "spaces_between_special_tokens"}
NEUTRAL = dict(top_p=1, top_k=-1, repetition_penalty=1)
# What metrics.jsonl has already, and an objective might take for its own.
COLUMNS = "step", "loss", "grad_norm", "learning_rate", "beta", "reward", "kl", "entropy"


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
    if (machine := platform.machine()) not in ("x86_64", "AMD64"):
        # weights.py relies on the order of stores on x86-64.
        print(f"warning: never tried on {machine}, only on x86-64", file=sys.stderr)
    check_extras(given)
    resume = find_checkpoint(given) if given.resume else None
    state = checkpoint.load_state(resume) if resume else {}
    task, sizes, queries, digest = load_data(given)
    prompts = {split: [query.prompt for query in own] for split, own in queries.items()}
    began = state.get("base_model")
    goes_on_there = resume and given.output_dir == given.resume
    run_dir = given.output_dir if goes_on_there else find_run_dir(given)
    asked = check_model(replace(given, output_dir=run_dir), task, began)
    searchers = asked.searchers
    if resume and searchers is None and not asked.ray:
        # Their shares of the queries, and the cursors in those, are part of the checkpoint.
        searchers = len(state["status"])
    places = find_places(replace(asked, searchers=searchers))
    shapes = weight_shapes(asked)
    tokenizer, prompt = check_tokenizer(asked, [*prompts["train"], *prompts["test"]])
    check_lengths(asked, prompts, tokenizer)
    planned = check_plan(resolve(asked, places), task, places)
    trained = trained_shapes(planned)
    fetched = fetch(planned, task, queries["test"][0], began)
    config = replace(fetched, data_digest=f"{digest} {prompt}")
    before = state.get("data_digest", config.data_digest)
    if before != config.data_digest:  # other prompts alone: a chat template may write the date
        rows, _, was = before.partition(" ")
        what = "rows of the task" if rows != digest else f"first prompt, {was!r:.200},"
        print(f"warning: the {what} changed since that checkpoint", file=sys.stderr)
    trained_on = {*map(repr, prompts["train"])}
    shared = sum(repr(prompt) in trained_on for prompt in prompts["test"])
    if shared and len(trained_on) > 1:  # else the task has one prompt
        of_all = f"{shared} of {len(prompts['test'])} test prompts"
        print(f"warning: {of_all} are trained on too", file=sys.stderr)
    return CheckedRun(given, asked, config, places, sizes, prompt, shapes, trained, resume)


def check_for_plan(config: Config) -> tuple[Config, Task]:
    """Check a run that is only planned (--plan), without its data and weights. Raises UserError.

    Returns its settings with the model's name or path, and its task.
    """
    check_extras(replace(config, track="", ray=""))  # a plan needs no tracker and no cluster
    check_objective(config)
    task = make_task(config)
    try:
        config = find_policy(config, task)
    except UserError as error:
        hint = "a directory with its config.json, and nothing else, is enough as --model here"
        raise UserError(f"{error}; {hint}") from error
    weight_shapes(config)  # raises UserError for a model that cannot be used
    return config, task


def make_task(config: Config) -> Task:
    """Make the task. Raises UserError where it scores in worker processes, and no extra has those.

    A task's own setting may decide that: so it is no matter of flags.
    """
    task = load_task(config.task, **config.options)
    if task.score_timeout is not None:
        check_modules(f"task {config.task}, as it has a score_timeout,", Extra("score_workers"))
    return task


def load_data(config: Config) -> tuple[Task, dict[str, int], dict[str, list[Query]], str]:
    """Load the task; returns it, the number of queries per split, the queries, and a digest.

    The data is read once here, so that a bad row shows now and not in a searcher; of LazyQueries
    LAZY_READ. The digest is of all prompts and answers that are read. Raises UserError.
    """
    task, sizes, read = make_task(config), {}, {}
    digest = hashlib.blake2b(digest_size=6)
    for split in ("train", "test"):
        with users_code(f"task {config.task!r}: reading its {split} queries"):
            queries = task.queries(split)
            sizes[split] = len(queries)
            is_lazy = isinstance(queries, LazyQueries)
            step = max(1, math.ceil(len(queries) / LAZY_READ)) if is_lazy else 1
            read[split] = [queries[i] for i in range(0, len(queries), step)]
            check_queries(f"task {config.task!r}", split, read[split])
            digest.update(f"{split} {sizes[split]}".encode())
            for query in read[split]:
                # Of what is no JSON, such as a set, the type alone: its repr may differ by process.
                how = dict(skipkeys=True, default=lambda part: str(type(part)))
                row = repr(query.prompt) + json.dumps(query.answer, **how)
                digest.update(row.encode(errors="surrogatepass"))
        if task.score_timeout is not None:
            with users_code(f"task {config.task!r}: pickling a query, as score_timeout wants it,"):
                pickle.loads(pickle.dumps(read[split][0]))
    return task, sizes, read, digest.hexdigest()


def check_queries(task: str, split: str, queries: list[Query]) -> None:
    """Raise UserError where there are none, or one that cannot be used."""
    if not queries:
        raise UserError(f"{task} has no {split} queries")
    ids = set()
    for query in queries:
        if not isinstance(query, Query):
            raise UserError(f"{task}: {query!r:.60} is no tasks.Query")
        name = f"{task}, {split} query {query.id!r:.60}"
        if type(query.id) is not int or abs(query.id) >= 2**63 or query.id in ids:
            raise UserError(f"{name}: its id must be an int of 64 bits that no other has")
        ids.add(query.id)
        if not isinstance(query.prompt, str) and (fault := chat_fault(query.prompt)):
            raise UserError(f"{name}: its prompt is {query.prompt!r:.60}: {fault}")


def check_tokenizer(
    config: Config, prompts: list[str | Messages]
) -> tuple[PreTrainedTokenizerBase, str]:
    """Return the tokenizer, and the first prompt as the model reads it.

    One is read of each kind: a text, and chats with one sequence of roles, which a template treats
    alike. Raises UserError for a model whose responses cannot end, or that cannot take the prompts.
    """
    tokenizer, policy = load_tokenizer(config), policy_without_weights(config)
    if tokenizer.eos_token_id is None and policy.config.eos_token_id is None:
        raise UserError(
            f"--model {config.model!r} has no end-of-sequence token, in neither its tokenizer nor "
            "its config.json: no response could end; use a model that has one"
        )
    kinds: dict[tuple[str, ...], str | Messages] = {}
    texts = []
    for prompt in prompts:
        messages = [] if isinstance(prompt, str) else prompt
        kinds.setdefault(tuple(message["role"] for message in messages), prompt)
        texts += [message["content"] for message in messages] or [prompt]
    chats = [prompt for prompt in kinds.values() if not isinstance(prompt, str)]
    if chats and not tokenizer.chat_template:
        raise UserError(
            f"the prompts of task {config.task!r} are chat messages, but the tokenizer of --model "
            f"{config.model!r} has no chat template: use a model that has one"
        )
    # A template may refuse in words of its own.
    with users_code(f"the chat template of --model {config.model!r}, on a prompt of the task,"):
        read = [encode_prompt(tokenizer, prompt) for prompt in kinds.values()]
        if config.max_episode_tokens is not None:
            from extras.replies import encode_reply

            for messages in chats:
                encode_reply(tokenizer, messages, "?", last_token=0)
    known, added = len(policy.get_input_embeddings().weight), tokenizer.get_added_vocab()
    wanted = {tokenizer.eos_token_id or 0}.union(*read)
    for token, number in tokenizer.get_vocab().items():
        # Added ones may be there that no text has: those of images are, in models for text.
        if number >= known and (token not in added or any(token in text for text in texts)):
            wanted.add(number)
    if (number := max(wanted)) >= known:
        raise UserError(
            f"--model {config.model!r} knows {known} tokens, and its tokenizer's "
            f"{tokenizer.convert_ids_to_tokens(number)!r} is none of them but token {number}: use "
            "a model that knows it, or a tokenizer of this one"
        )
    return tokenizer, tokenizer.decode(read[0]) if read else ""


def check_lengths(config: Config, prompts: Prompts, tokenizer: PreTrainedTokenizerBase) -> None:
    """Say how many prompts can have no response: they are too long, or have no tokens.

    Of each split PROMPTS_READ at most are read. Raises UserError if all of them are so.
    """
    limit = config.max_prompt_tokens
    for split, own in prompts.items():
        own = random.Random(0).sample(own, min(len(own), PROMPTS_READ))
        with users_code(f"the chat template of --model {config.model!r}, on a {split} prompt,"):
            lengths = [
                len(encode_prompt(tokenizer, prompt))
                for prompt in own
                # A text has no more tokens than bytes.
                if not isinstance(prompt, str)
                or not 0 < len(prompt.encode(errors="replace")) < limit
            ]
        if unfit := sum(not 0 < length <= limit for length in lengths):
            what = f"--max_prompt_tokens {limit} (the longest has {max(lengths)}), or none"
            found = f"{unfit} of {len(own)} {split} prompts have more tokens than {what}"
            if unfit == len(own):
                raise UserError(found)
            print(f"warning: {found}: they are left out", file=sys.stderr)


def check_sampling(config: Config, task: Task) -> None:
    """Raise UserError for what vLLM or the objective refuses, for S, and for greedy samples.

    Eight of the task's samplings are looked at.
    """
    default = {"temperature": config.temperature, "max_tokens": config.max_response_tokens}
    with users_code(f"the sampling() or evaluation_sampling of task {config.task!r}"):
        own = [default | task.sampling(np.random.default_rng(seed)) for seed in range(8)]
        for_tests = sampling_for_tests(config, task)
        all_kinds = [*own, for_tests]
        if any("n" in sampling for sampling in all_kinds):
            raise ValueError("--samples_per_query is for 'n'")
        if not all(map(is_plain, all_kinds)):
            from models.engine import request_parameters  # it takes seconds, and is seldom wanted

            for sampling in all_kinds:
                request_parameters(sampling)
    takes_sampler_for_policy = False
    if config.loss != "tb" and not config.loss.endswith(".py"):
        from extras.objectives import EXACT_SAMPLING

        takes_sampler_for_policy = config.loss in EXACT_SAMPLING
    if takes_sampler_for_policy:
        neutral = NEUTRAL | {"temperature": config.temperature}
        for name, value in chain.from_iterable(kind.items() for kind in own):
            is_off = not value and name != "temperature"
            if name not in HARMLESS and not is_off and value != neutral.get(name):
                raise UserError(
                    f"--loss {config.loss} takes the sampler for the policy, but task "
                    f"{config.task!r} samples with {name} {value!r}: give another --loss"
                )
    samples = config.evaluation_samples
    if samples > 1 and for_tests["temperature"] == 0:
        raise UserError(
            f"--evaluation_samples is {samples}, but responses to test queries are greedy, and so "
            "all alike: give an --evaluation_temperature above 0, or --evaluation_samples 1"
        )


def is_plain(sampling: dict) -> bool:
    """Whether a sampling is surely one that vLLM takes."""
    names = {"temperature", "max_tokens", "min_tokens"}
    has_room = 0 <= sampling.get("min_tokens", 0) <= sampling["max_tokens"]
    return sampling.keys() <= names and has_room and 0 <= sampling["temperature"] <= 2


def check_model(config: Config, task: Task, revision: str | None = None) -> Config:
    """Check the objective and the sampling; the settings with the model's name or path.

    revision: of the hub, that a run to resume began with: a branch may move.
    """
    check_objective(config)
    check_sampling(config, task)
    return find_policy(config, task, revision)


def check_evaluate(config: Config, task: Task, query: Query) -> None:
    """Raise UserError for an evaluate() that fails on two responses: a run calls it at its end."""
    texts = ["", "1"] if config.max_episode_tokens is None else [[""], ["1"]]
    task.load()
    try:
        queries = [query, replace(query, id=query.id + 1)]
        evaluate(task, queries, texts, [True, False], np.zeros(2))
    except UserError as error:
        raise UserError(f"tried on two responses, {texts}: {error}") from error


def find_policy(config: Config, task: Task, revision: str | None = None) -> Config:
    """Find the policy without its weights; the settings with its name or path."""
    with users_code("base_model()"):
        model = find_model("--model", config.model or task.base_model())
    if revision and not Path(model).is_dir():
        model = f"{model.partition('@')[0]}@{revision}"
    fetch_model("--model", model, weights=False)  # enough for the checks
    return replace(config, model=model)


def check_objective(config: Config) -> None:
    """Try the objective on two groups of responses of three tokens. Raises UserError."""
    name, objective, inputs = f"--loss {config.loss}", find_objective(config.loss), example(config)
    with users_code(f"{name}, which must return a loss and a dict of metrics,"):
        loss, metrics = objective(inputs)
        loss = torch.as_tensor(loss)
        metrics = {metric: torch.as_tensor(value) for metric, value in metrics.items()}
        if loss.requires_grad and not loss.shape:
            loss.backward()
    if loss.shape or not loss.isfinite():
        what = f"of shape {tuple(loss.shape)}" if loss.shape else loss.item()
        raise UserError(f"{name}: its loss must be one finite number; of an example it is {what}")
    for metric, value in metrics.items():
        if value.numel() != 1 or metric in COLUMNS:
            raise UserError(
                f"{name}: its metric {metric!r} must be one number, under a name that is none of "
                f"{', '.join(COLUMNS)}"
            )
    if inputs.logprobs.grad is None:
        raise UserError(f"{name}: its loss has no gradient with respect to logprobs")


def example(config: Config) -> LossInputs:
    """Make two groups of responses of three tokens."""
    rows, length = 2 * config.responses_per_query, 3
    return LossInputs(
        logprobs=torch.full((rows, length), -1.0, requires_grad=True),
        ref_logprobs=torch.full((rows, length), -1.1),
        behavior_logprobs=torch.full((rows, length), -0.9),
        mask=torch.ones(rows, length),
        rewards=torch.arange(rows) / rows,
        group_size=config.responses_per_query,
        beta=config.beta,
        max_response_length=length,
        prompt_lengths=torch.ones(rows),
        sampled=torch.ones(rows, length),
        staleness=torch.arange(rows),
    )


def fetch(config: Config, task: Task, query: Query, began: str | None = None) -> Config:
    """Fetch the task's models and the policy; the settings with its directory. Raises UserError.

    query: a test query. began: the weights that a run to resume began with, as identify_weights
    names them. Processes that start from now on do not ask the hub: it might have something else by
    then.
    """
    is_own = config.task.endswith(".py") and type(task).evaluate is not Task.evaluate
    with users_code(f"preparing task {config.task!r}"):
        task.prepare()
        if is_own and not task.models():
            check_evaluate(config, task, query)
    trust = config.trust_remote_code
    model = fetch_weights("--model", config.model, trust_remote_code=trust, is_policy=True)
    config = replace(config, model=model, base_model=identify_weights(model))
    if began and config.base_model != began:
        raise UserError(
            f"--resume {config.resume!r} began with other weights in --model {config.model!r}: put "
            "back what was there"
        )
    os.environ["HF_HUB_OFFLINE"] = "1"
    if device().type == "cpu" and not onednn_multiplies(compute_dtype(config)):
        print("bfloat16 is slow here: this processor does not multiply in it", file=sys.stderr)
    return config


def find_checkpoint(config: Config) -> str:
    """Find the newest whole checkpoint of the run to resume, and name those that are damaged.

    Takes the lock of that run. Raises UserError if there is none.
    """
    lock(config.resume)
    directory, complaints = newest_whole(config.resume)
    if complaints:
        print(*complaints, sep="\n", file=sys.stderr)
    if directory is None:
        condition = " that is whole" if complaints else ""
        raise UserError(f"--resume {config.resume!r} has no checkpoint{condition}")
    return str(directory)


def find_run_dir(config: Config) -> str:
    """Choose the directory of a new run. Creates nothing yet.

    Raises UserError for one that cannot be written to or already holds a run.
    """
    default = f"runs/{Path(config.task).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory, problem = find_path("--output_dir", config.output_dir or default), ""
    existing = next(filter(Path.exists, [directory, *directory.absolute().parents]))
    try:
        if directory.is_dir() and any(directory.iterdir()):
            problem = "already holds a run: give another one, or remove it"
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        problem = f"cannot be written: {error.strerror} in {str(existing)!r}"
    if problem:
        raise UserError(f"--output_dir {str(directory)!r} {problem}")
    return str(directory)


def lock(run_dir: str) -> None:
    """Take the directory until this process ends, however it ends.

    Raises UserError if another run has it.
    """
    try:
        fcntl.flock(os.open(run_dir, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_taken = isinstance(error, BlockingIOError)
        problem = "this run has not ended, its processes are alive" if is_taken else error.strerror
        raise UserError(f"--resume {run_dir!r}: {problem}") from None
