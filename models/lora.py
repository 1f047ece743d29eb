"""LoRA (arXiv 2106.09685), by peft: beside each frozen matrix W two small ones are trained.

They count as W + alpha / rank B A. What is published, becomes the reference policy and is saved as
model/ is merged: searchers, slots and vLLM know nothing of it. The reference policy at the start is
the base model. A policy that has no adapters has its own parameters. peft puts an adapter into
layers of its own: a weight W is then called ….base_layer.weight and stands beside
….lora_A.default.weight.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from config import Config, UserError, first_line
from models.folder import save_model
from models.hub import cached_model
from models.policy import load_policy, policy_without_weights

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER = "default"  # peft's name for one that has none
BASE, OF_ADAPTER = ".base_layer", ".lora_"  # in a parameter's name


def check_peft(config: Config) -> None:
    """Raise UserError where --lora_rank wants peft and it is not installed."""
    if config.lora_rank and not find_spec("peft"):
        raise UserError(
            f"--lora_rank {config.lora_rank} needs peft: pip install -r requirements-lora.txt"
        )


def load_trained_policy(
    config: Config, dtype: torch.dtype
) -> tuple[torch.nn.Module, "PeftModel | None"]:
    """Load the policy to train, on the CPU. With LoRA its base is frozen; then also peft's view.

    dtype: what is computed in. Raises ValueError as load_policy does, and UserError.
    """
    cpu = torch.device("cpu")
    if not config.lora_rank:
        return load_policy(config, cpu), None
    policy = load_policy(config, cpu, linear_dtype=dtype)
    return policy, add_adapters(policy, config)


def add_adapters(policy: torch.nn.Module, config: Config) -> "PeftModel":
    """Freeze a policy and put an adapter beside each of its linear layers, the head aside.

    B is 0 at first: the policy stays what it was. Adapters are held in --master_dtype. Returns
    peft's view of the same policy. Raises UserError for a policy without a linear layer, or with
    experts, which are none and which merged() does not know.
    """
    import peft

    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        target_modules="all-linear",
        # As GPT-2 has it; peft would say in a warning that it sets this itself.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in policy.modules()),
    )
    model = f"--lora_rank {config.lora_rank}: --model {config.model!r}, a {type(policy).__name__},"
    try:
        adapted = peft.get_peft_model(policy, settings)
    except ValueError as error:
        problem = f"has no linear layer besides its head ({first_line(error)})"
        raise UserError(f"{model} {problem}: train all weights (--lora_rank 0)") from error
    if any(BASE + BASE in name for name, _ in policy.named_parameters()):
        problem = "has experts, whose adapters could not be merged"
        raise UserError(f"{model} {problem}: train all weights (--lora_rank 0)")
    for parameter in trained_parameters(policy).values():
        parameter.data = parameter.data.to(getattr(torch, config.master_dtype))
    return adapted


def trained_parameters(policy: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained, by name: the adapters' where there are any."""
    named = policy.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def trained_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters to train. Nothing is loaded. Raises UserError."""
    policy = policy_without_weights(config)
    if config.lora_rank:
        add_adapters(policy, config)
    return {name: tuple(value.shape) for name, value in trained_parameters(policy).items()}


@torch.no_grad()
def merged(policy: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each weight, W + alpha / rank B A, one at a time."""
    for name, parameter in policy.named_parameters():
        if OF_ADAPTER in name:
            continue
        if name.endswith(f"{BASE}.weight"):
            adapted = policy.get_submodule(name.removesuffix(f"{BASE}.weight"))
            parameter = parameter + adapted.get_delta_weight(ADAPTER)
        yield name.replace(BASE, ""), parameter


def save(
    config: Config,
    policy: torch.nn.Module,
    adapted: "PeftModel | None",
    weights: Iterable[tuple[str, Tensor]] | None,
    directory: Path,
) -> None:
    """Save a policy for from_pretrained and for vLLM; tokenizer and the like as they came with it.

    adapted: then its adapters too, beside it in adapter/, for peft's PeftModel.from_pretrained.
    weights: merged and whole, where the policy's own are not; in the dtype of what is trained.
    """
    whole = None
    if weights is not None:
        dtype = next(iter(trained_parameters(policy).values())).dtype
        parameters = {name for name, _ in policy.named_parameters(remove_duplicate=False)}
        whole = {name: tensor.to("cpu", dtype) for name, tensor in weights}
        whole |= {  # its buffers
            name: tensor for name, tensor in policy.state_dict().items() if name not in parameters
        }
    if adapted:
        with replacing(directory.with_name("adapter")) as unfinished:
            adapted.save_pretrained(unfinished, save_embedding_layers=False)
    with replacing(directory) as unfinished:
        save_model(policy, whole, cached_model("--model", config.model), unfinished)


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Give a directory to write beside this one. It takes its place when the block ends."""
    unfinished = directory.with_suffix(".unfinished")
    yield unfinished
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
