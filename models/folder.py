"""What a model's folder holds, asked before anything starts: files, names and shapes.

Only the headers of the weights are read here. Each load is checked again (models/loading.py).
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import load_state_dict
from transformers.utils import logging

from config import UserError, first_line
from models.hub import fetch_model, shards_of, weight_files
from models.loading import save_model
from models.loading_errors import check_loaded_keys, explain, list_names

NOT_WEIGHTS = ("training_args.bin", "optimizer.bin")  # for vLLM


def fetch_weights(
    flag: str,
    model: str,
    kind: type = AutoModelForCausalLM,
    trust_remote_code: bool = False,
    is_policy: bool = False,
) -> str:
    """Fetch a whole model and return its directory, if its files make a model of that kind.

    kind: a class of transformers, which loads the headers of the files onto the meta device.
    is_policy: vLLM reads the files too, and the model is saved at the end. Raises UserError.
    """
    directory, name = Path(fetch_model(flag, model)), f"{flag} {model!r}"
    if (directory / "adapter_config.json").exists() and find_spec("peft"):
        problem = "for its adapter_config.json transformers loads an adapter over another model"
        advice = "merge it (peft's merge_and_unload), or move that file elsewhere"
        raise UserError(f"{name}: {problem}: {advice}")
    logging.set_verbosity(logging.CRITICAL)  # instead of transformers' reports a line
    logging.disable_progress_bar()
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
    doing = f"loaded as {kind.__name__}"
    try:
        made, info = load_headers(directory, headers, kind, trust_remote_code)
        check_loaded_keys(name, made, info)
        doing = "saved again"
        if is_policy:
            with tempfile.TemporaryDirectory() as to:
                save_model(made, {}, str(directory), Path(to))
    except UserError:
        raise
    except Exception as error:  # such as one expert less than are to be stacked
        raise UserError(f"{name} cannot be {doing}: {first_line(error)}") from error
    return str(directory)


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
