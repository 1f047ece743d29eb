"""Models and tokenizers, loaded from and saved into directories.

Trainer and vLLM must read the same weights, and all of them: from_pretrained makes up what is
missing. So each load is checked by what transformers says of it.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from config import UserError

SAMPLE = "What is 2 + 3?\n\n  Naïve: 12,345 "  # on which tokenizers differ
# What is saved with a model as it came: tokenizer, chat template, code.
COMPANIONS = (
    "*token* vocab* merges* *bpe* *.model *.tiktoken tekken.json chat_template* *.py "
    "generation_config.json"
).split()


def directory_of(flag: str, model: str, weights: bool = True) -> str:
    """Return the directory of a model that was fetched. Raises UserError where it was not."""
    if Path(model).is_dir():
        return model
    from models import hub  # only a task's own models, and checks at the start, are repositories

    return hub.cached_model(flag, model, weights)


def load_model(flag: str, model: str, kind: type = AutoModelForCausalLM, **how) -> torch.nn.Module:
    """Load a model that was fetched, in evaluation mode. kind, how: as of from_pretrained.

    Raises UserError for weights that would be made up or left out.
    """
    how |= dict(ignore_mismatched_sizes=True, output_loading_info=True)
    made, info = kind.from_pretrained(directory_of(flag, model), **how)
    if any(info[f"{kind}_keys"] for kind in ("missing", "mismatched", "unexpected")):
        from models.loading_errors import check_loaded_keys  # few models have such

        check_loaded_keys(f"{flag} {model!r}", made, info)
    return made.eval()


def read_tokenizer(
    flag: str, model: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, so that it gives the ids of tokenizer.json. Raises UserError.

    For some classes transformers rebuilds parts of that file, or makes up an empty tokenizer.
    """
    directory = Path(directory_of(flag, model, weights=False))
    file = directory / "tokenizer.json"
    how = dict(trust_remote_code=trust_remote_code, mistral_format=False)
    try:
        if not file.exists() and (directory / "tekken.json").exists():  # Mistral's own format
            raise ValueError("it has tekken.json alone: use one that has tokenizer.json too")
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **how)
        if file.exists() and not encodes_as(tokenizer, file):
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
            if not encodes_as(tokenizer, file):
                raise ValueError("it does not give the ids of its tokenizer.json")
    except Exception as error:  # the library tokenizers has no other
        from models.loading_errors import explain

        problem = f"the tokenizer of {flag} {model!r} cannot be used"
        raise UserError(f"{problem}: {explain(file, error)}") from error
    if not set(tokenizer.get_vocab()) - {*tokenizer.all_special_tokens}:
        problem = "has no files of a tokenizer, and the one made up for it knows no ordinary token"
        raise UserError(f"{flag} {model!r} {problem}: use a model that brings them")
    return tokenizer


def encodes_as(tokenizer: PreTrainedTokenizerBase, file: Path) -> bool:
    """Whether a tokenizer gives the ids that a tokenizer.json does."""
    plain = Tokenizer.from_file(str(file))
    plain.no_truncation()
    plain.no_padding()
    ids = plain.encode(SAMPLE, add_special_tokens=False).ids
    return ids == tokenizer(SAMPLE, add_special_tokens=False).input_ids


def save_model(
    model: torch.nn.Module, weights: dict[str, Tensor], came_from: str, to: Path
) -> None:
    """Save a model with these weights; copy tokenizer, chat template and generation_config."""
    # Not every generation_config that can be read can be written.
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(to, state_dict=weights)
    (to / "generation_config.json").unlink(missing_ok=True)
    for name in filter_repo_objects(os.listdir(came_from), allow_patterns=COMPANIONS):
        if (file := Path(came_from, name)).is_file():
            shutil.copyfile(file, to / name)
    templates = "additional_chat_templates"
    if Path(came_from, templates).is_dir():
        shutil.copytree(Path(came_from, templates), to / templates, dirs_exist_ok=True)


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Give a directory to write beside this one. It takes its place when the block ends."""
    unfinished = directory.with_suffix(".unfinished")
    yield unfinished
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
