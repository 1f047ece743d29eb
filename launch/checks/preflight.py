"""What is checked before anything starts: each mistake ends here, in one line (UserError)."""

import dataclasses
import fcntl
import hashlib
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from config import Config, UserError, first_line
from launch import resuming
from launch.checks.objective import check_objective
from launch.checks.settings import check_scorer
from models.architecture import policy_without_weights
from models.device import compute_dtype, device, onednn_multiplies
from models.folder import fetch_weights
from models.hub import fetch_model, find_model, identify_weights
from models.tokens import encode_prompt, load_tokenizer
from tasks import LazyQueries, Messages, Task, load_task, sampling_for_tests
from tasks.support.data import is_chat

# With these parameters of vLLM a sampler is still the policy at --temperature: some say where a
# response ends, and the others have the values that change nothing.
HARMLESS = set("max_tokens stop stop_token_ids include_stop_str_in_output ignore_eos seed".split())
HARMLESS |= {"skip_special_tokens", "spaces_between_special_tokens"}
NEUTRAL = dict(top_p=(1,), top_k=(0, -1), min_p=(0,), min_tokens=(0,), repetition_penalty=(1,))
NEUTRAL |= dict(presence_penalty=(0,), frequency_penalty=(0,), bad_words=([],), logit_bias=({},))
ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of an object, in a repr


def check_machine() -> None:
    """Say where this was never tried: weights.py relies on the order of stores on x86-64."""
    if (machine := platform.machine()) not in ("x86_64", "AMD64"):
        print(f"warning: never tried on {machine}, only on x86-64", file=sys.stderr)


def load_data(config: Config) -> tuple[Task, dict[str, int], list[str | Messages], str]:
    """Load the task; returns it, the number of queries per split, their prompts, and a digest.

    The data is read once here, so that a bad row shows now and not in a searcher. The digest is of
    all prompts and answers. Raises UserError.
    """
    task, sizes, prompts = load_task(config.task, **config.options), {}, []
    check_scorer(config, task)
    digest = hashlib.blake2b(digest_size=6)
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
        digest.update(f"{split} {len(queries)}".encode())
        for query in [queries[0]] if isinstance(queries, LazyQueries) else queries:
            name = f"task {config.task!r}, {split} query {query.id!r:.60}"
            if type(query.id) is not int or abs(query.id) >= 2**63 or query.id in ids:
                raise UserError(f"{name}: its id must be an int of 64 bits that no other has")
            ids.add(query.id)
            if not isinstance(query.prompt, str) and not is_chat(query.prompt):
                raise UserError(
                    f"{name}: its prompt is {query.prompt!r:.60}: it must be a string, or a list "
                    'of messages {"role": …, "content": …}'
                )
            prompts.append(query.prompt)
            row = ADDRESS.sub("", repr((query.prompt, query.answer)))
            digest.update(row.encode(errors="surrogatepass"))
    return task, sizes, prompts, digest.hexdigest()


def check_tokenizer(config: Config, prompts: list[str | Messages]) -> str:
    """Return the first prompt as the model reads it.

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
    texts: list[str] = []
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
    has_replies = config.max_episode_tokens is not None
    if has_replies:
        from extras.replies import encode_reply
    try:
        read = [encode_prompt(tokenizer, prompt) for prompt in kinds.values()]
        for messages in chats if has_replies else ():
            encode_reply(tokenizer, messages, "?", last_token=0)
    except Exception as error:  # a template may refuse in words of its own
        raise UserError(
            f"the chat template of --model {config.model!r} does not take the prompts of task "
            f"{config.task!r}: {first_line(error)}"
        ) from error
    known, added = len(policy.get_input_embeddings().weight), tokenizer.get_added_vocab()
    wanted = {number for ids in read for number in ids} | {tokenizer.eos_token_id or 0}
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
    return tokenizer.decode(read[0]) if read else ""


def check_sampling(config: Config, task: Task) -> None:
    """Raise UserError for what vLLM or the objective refuses, for S, and for greedy samples.

    Eight of the task's samplings are looked at.
    """
    for_tests, rngs = sampling_for_tests(config, task), map(np.random.default_rng, range(8))
    default = {"temperature": config.temperature, "max_tokens": config.max_response_tokens}
    try:
        all_kinds = [*(default | task.sampling(rng) for rng in rngs), for_tests]
        if any("n" in sampling for sampling in all_kinds):
            raise ValueError("--samples_per_query is for 'n'")
        if not all(map(is_plain, all_kinds)):
            from models.engine import request_parameters  # it takes seconds, and is seldom wanted

            for sampling in all_kinds:
                request_parameters(sampling)
    except Exception as error:  # a user's code, and what vLLM says of it
        problem = f"the sampling() or evaluation_sampling of task {config.task!r} cannot be used"
        raise UserError(f"{problem}: {type(error).__name__}: {first_line(error)}") from error
    if config.takes_sampler_for_policy:
        neutral = NEUTRAL | {"temperature": (config.temperature,)}
        given = [(name, value) for kind in all_kinds[:-1] for name, value in kind.items()]
        for name, value in given:
            if name not in HARMLESS and value not in (None, *neutral.get(name, ())):
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
    """Check the objective and the models; the configuration with the model's name or path.

    revision: of the hub, that a run to resume began with: its branch may have moved.
    """
    check_objective(config)
    check_sampling(config, task)
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
    trust = config.trust_remote_code
    model = fetch_weights("--model", config.model, trust_remote_code=trust, is_policy=True)
    config = dataclasses.replace(config, model=model, base_model=identify_weights(model))
    if began and config.base_model != began:
        raise UserError(
            f"--resume {config.resume!r} began with other weights in --model {config.model!r}: put "
            "back what was there"
        )
    if not task.asks_hub_in_load:
        os.environ["HF_HUB_OFFLINE"] = "1"
    if device().type == "cpu" and not onednn_multiplies(compute_dtype(config)):
        print("bfloat16 is slow here: this processor does not multiply in it", file=sys.stderr)
    return config


def find_checkpoint(config: Config) -> str:
    """Find the newest whole checkpoint of the run to resume, and name those that are damaged.

    Takes the lock of that run. Raises UserError if there is none.
    """
    lock(config.resume)
    directory, complaints = resuming.newest_whole(config.resume)
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
