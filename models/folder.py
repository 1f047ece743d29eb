"""What a model's folder holds, asked before anything starts: files, names, shapes, tokenizer.

Trainer and vLLM must read the same files, and all of them: from_pretrained makes up weights that
are missing. Only the headers of the weights are read here.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub.utils import filter_repo_objects
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_utils import load_state_dict
from transformers.utils import logging

from config import UserError, first_line
from models.hub import cached_model, fetch_model, shards_of, weight_files

SAMPLE = "What is 2 + 3?\n\n  Naïve: 12,345 "  # on which tokenizers differ
SHOWN = 3  # names in a message
NOT_WEIGHTS = ("training_args.bin", "optimizer.bin")  # for vLLM
# What is saved with a model as it came: tokenizer, chat template, code.
COMPANIONS = (
    "*token* vocab* merges* *bpe* *.model *.tiktoken tekken.json chat_template* *.py "
    "generation_config.json"
).split()
TEMPLATES = "additional_chat_templates"


def fetch_weights(
    flag: str,
    model: str,
    kind: type = AutoModelForCausalLM,
    trust_remote_code: bool = False,
    is_policy: bool = False,
) -> str:
    """Fetch a whole model and return its directory, if its files make a model of that kind.

    kind: the class of transformers for it. transformers decides: it loads the headers of the files
    onto the meta device. is_policy: vLLM reads the files too, and the model is saved at the end.
    Raises UserError.
    """
    directory, name = Path(fetch_model(flag, model)), f"{flag} {model!r}"
    if (directory / "adapter_config.json").exists() and find_spec("peft"):
        raise UserError(
            f"{name}: for its adapter_config.json transformers loads an adapter over another "
            "model: merge it (peft's merge_and_unload), or move that file elsewhere"
        )
    files, headers = weight_files(directory), {}
    lacking = [file for file in files if not (directory / file).exists()]
    if lacking or not files:
        raise UserError(f"{name} lacks {list_names(lacking or ['weights for transformers'])}")
    if is_policy:
        refuse_strays(name, directory)
    for file in files:
        try:
            headers |= load_state_dict(directory / file, map_location="meta")
        except Exception as error:  # each library has its own
            why = explain(directory / file, error)
            raise UserError(f"{name} has no whole {file}: {why}") from error
    with quiet():
        try:
            made, info = load_headers(directory, headers, kind, trust_remote_code)
        except Exception as error:  # such as one expert less than are to be stacked
            problem = f"cannot be loaded as {kind.__name__}: {first_line(error)}"
            raise UserError(f"{name} {problem}") from error
        refuse_misfit(name, made, info)
        try:
            if is_policy:
                with tempfile.TemporaryDirectory() as to:
                    save_model(made, {}, str(directory), Path(to))
        except Exception as error:
            raise UserError(f"{name} cannot be saved again: {first_line(error)}") from error
    return str(directory)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from showing reports and progress: each fault is one line here."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def load_headers(
    directory: Path, headers: dict[str, Tensor], kind: type, trust_remote_code: bool
) -> tuple[torch.nn.Module, dict[str, set]]:
    """Load meta tensors as transformers would load the weights; the model, and what it says."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        try:
            empty = kind.from_config(config, trust_remote_code=trust_remote_code)
        except AttributeError:  # of a model for more than text its part for text is loaded
            config = config.get_text_config()
            empty = kind.from_config(config, trust_remote_code=trust_remote_code)
    how = dict(config=config, device_map="meta", ignore_mismatched_sizes=True)
    return type(empty).from_pretrained(None, state_dict=headers, output_loading_info=True, **how)


def load_model(flag: str, model: str, kind: type = AutoModelForCausalLM, **how) -> torch.nn.Module:
    """Load a model that was fetched, in evaluation mode. kind, how: as of from_pretrained.

    Raises UserError for weights that would be made up or left out.
    """
    how |= dict(ignore_mismatched_sizes=True, output_loading_info=True)
    made, info = kind.from_pretrained(cached_model(flag, model), **how)
    refuse_misfit(f"{flag} {model!r}", made, info)
    return made.eval()


def refuse_misfit(name: str, made: torch.nn.Module, info: dict[str, set]) -> None:
    """Raise UserError for weights that a model lacks, has in another shape, or has no place for.

    info: what from_pretrained says of the loading, after its renaming, tying and ignoring.
    """
    unknown, kind = sorted(info["unexpected_keys"]), type(made).__name__
    # Of an encoder (AutoModel) the hidden states are read, and no pooler.
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith("pooler.")):
        ends = [key for key in missing if unknown and unknown[0].endswith(f".{key}")]
        prefix = unknown[0].removesuffix(ends[0]) if ends else ""
        advice = f"take {prefix!r} off the names in it" if ends else "save it whole"
        raise UserError(f"{name} lacks {list_names(missing)} of its {kind}: {advice}")
    for key, in_file, expected in sorted(info["mismatched_keys"]):
        shapes = f"{tuple(in_file)}, and by its config.json {tuple(expected)}"
        raise UserError(f"{name}: {key} has the shape {shapes}: use the config.json of its own")
    if left_out := [key for key in unknown if is_of_layer(made, key)]:
        problem = f"its config.json, of a {kind}, has no place for {list_names(left_out)}"
        raise UserError(f"{name}: {problem}: use the config.json of its own")


def is_of_layer(made: torch.nn.Module, key: str) -> bool:
    """Whether a key without a place is a weight of a layer, or of one more than there are.

    Buffers of old files (GPT-2's masked_bias) and unused heads are not.
    """
    modules = dict(made.named_modules())
    for name in (key, f"{made.base_model_prefix}.{key}"):
        layer, (owner, _, own) = re.match(r"(.+?)\.\d+(?=\.)", name), name.rpartition(".")
        if layer and layer[1] in modules:
            # A bias that is None is listed there too.
            slots = getattr(modules.get(owner), "_parameters", {})
            return layer[0] not in modules or own == "weight" or own in slots
    return False


def refuse_strays(name: str, directory: Path) -> None:
    """Raise UserError for files that vLLM would read for weights, and transformers does not."""
    own, index = weight_files(directory), directory / "model.safetensors.index.json"
    read = {file.name for file in directory.glob("*.safetensors")}
    if read and index.exists():  # transformers looks for model.safetensors first
        read = {*shards_of(index)}
    read = read or {f.name for f in directory.glob("*.bin") if not f.name.endswith(NOT_WEIGHTS)}
    if strays := sorted(read - {*own}):
        problem = f"vLLM would read {list_names(strays)}, the trainer {list_names(own)}"
        raise UserError(f"{name}: {problem}: move what vLLM reads elsewhere, or remove it")


def list_names(names: list[str]) -> str:
    """Write the first few of some names."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def explain(file: Path, error: Exception) -> str:
    """Say in one line why a file cannot be read."""
    if file.is_file():
        with open(file, "rb") as opened:
            if opened.read(23) == b"version https://git-lfs":
                return f"{file.name} is git-lfs's pointer to it: run git lfs pull there"
    return f"{first_line(error)}: download it again"


def read_tokenizer(
    flag: str, model: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, so that it gives the ids of tokenizer.json. Raises UserError.

    Of some classes transformers rebuilds parts of that file. Where a repository has no files of a
    tokenizer, it makes an empty one up for some architectures: it reads every text alike.
    """
    directory = Path(cached_model(flag, model, weights=False))
    file, how = directory / "tokenizer.json", dict(trust_remote_code=trust_remote_code)
    try:
        if not file.exists() and (directory / "tekken.json").exists():  # Mistral's own format
            raise ValueError("it has tekken.json alone: use one that has tokenizer.json too")
        tokenizer = AutoTokenizer.from_pretrained(directory, mistral_format=False, **how)
        if file.exists() and not encodes_as(tokenizer, file):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
            if not encodes_as(tokenizer, file):
                raise ValueError("it does not give the ids of its tokenizer.json")
    except Exception as error:  # the library tokenizers has no other
        problem = f"the tokenizer of {flag} {model!r} cannot be used"
        raise UserError(f"{problem}: {explain(file, error)}") from error
    if not set(tokenizer.get_vocab()) - {*tokenizer.all_special_tokens}:
        raise UserError(
            f"{flag} {model!r} has no files of a tokenizer, and the one made up for it knows no "
            "ordinary token: use a model that brings them"
        )
    return tokenizer


def encodes_as(tokenizer: PreTrainedTokenizerBase, file: Path) -> bool:
    """Whether a tokenizer gives the ids that a tokenizer.json does."""
    plain = Tokenizer.from_file(str(file))
    plain.no_truncation()
    plain.no_padding()
    ids = plain.encode(SAMPLE, add_special_tokens=False).ids
    return ids == tokenizer(SAMPLE, add_special_tokens=False).input_ids


def save_model(
    model: torch.nn.Module, weights: dict[str, Tensor] | None, came_from: str, to: Path
) -> None:
    """Save a model, and with it as they came tokenizer, chat template and generation_config.

    weights: None for its own.
    """
    model.generation_config = GenerationConfig()  # not every one that can be read can be written
    model.save_pretrained(to, state_dict=weights)
    (to / "generation_config.json").unlink(missing_ok=True)
    for name in filter_repo_objects(os.listdir(came_from), allow_patterns=COMPANIONS):
        if (file := Path(came_from, name)).is_file():
            shutil.copyfile(file, to / name)
    if (templates := Path(came_from, TEMPLATES)).is_dir():
        shutil.copytree(templates, to / TEMPLATES, dirs_exist_ok=True)
