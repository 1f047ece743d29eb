"""LoRA (arXiv 2106.09685), by peft: beside each frozen matrix W two small ones are trained.

They count as W + alpha / rank B A. What is published, becomes the reference policy and is saved as
model/ is merged (models/merged.py): searchers, slots and vLLM know nothing of it. The reference
policy at the start is the base model.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.pytorch_utils import Conv1D

from config import Config, UserError
from models.merged import merged
from models.policy import load_policy, policy_without_weights

if TYPE_CHECKING:
    from peft import PeftModel


def load_trained_policy(
    config: Config, device: torch.device, dtype: torch.dtype
) -> tuple[torch.nn.Module, "PeftModel | None"]:
    """Load the policy to train. With LoRA its base is frozen; then also peft's view of it.

    dtype: what is computed in. Raises ValueError as load_policy does, and UserError.
    """
    if not config.lora_rank:
        return load_policy(config, device), None
    policy = load_policy(config, device, frozen=dtype)
    return policy, add_adapters(policy, config)


def add_adapters(policy: torch.nn.Module, config: Config) -> "PeftModel":
    """Freeze a policy and put an adapter beside each of its linear layers, the head aside.

    B is 0 at first: the policy stays what it was. Adapters are held in --master_dtype. Returns
    peft's view of the same policy. Raises UserError without peft, or without a linear layer.
    """
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"--lora_rank {config.lora_rank} needs peft: pip install -r requirements-lora.txt"
        ) from error
    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        target_modules="all-linear",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in policy.modules()),
    )
    try:
        adapted = peft.get_peft_model(policy, settings)
    except ValueError as error:
        raise UserError(
            f"--lora_rank {config.lora_rank}: --model {config.model!r}, a {type(policy).__name__}, "
            "has no linear layer besides its head: train all weights (--lora_rank 0)"
        ) from error
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, config.master_dtype))
    return adapted


def trained_parameters(policy: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """All parameters that are trained, by name: of a policy with adapters, theirs."""
    named = policy.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def fingerprint(policy: torch.nn.Module) -> torch.Tensor:
    """Sum up each frozen parameter: by that a base model is known again. (frozen ones,) float64."""
    frozen = [parameter for parameter in policy.parameters() if not parameter.requires_grad]
    return torch.stack([parameter.sum(dtype=torch.float64).cpu() for parameter in frozen])


def check_base(policy: torch.nn.Module, expected: torch.Tensor) -> None:
    """Raise ValueError for another base model than that of the fingerprint."""
    found = fingerprint(policy)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
        raise ValueError(
            "--model has changed since the checkpoint, whose adapters belong to what it was: "
            "name the model of that time, a branch by org/name@branch"
        )


def trained_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of all that is trained, with nothing loaded. Raises UserError."""
    policy = policy_without_weights(config)
    if config.lora_rank:
        add_adapters(policy, config)
    return {name: tuple(value.shape) for name, value in trained_parameters(policy).items()}


def save_policy(policy: torch.nn.Module, adapted: "PeftModel | None", directory: Path) -> None:
    """Save a policy for from_pretrained and for vLLM; one with adapters merged, in their dtype."""
    weights = None
    if adapted:
        dtype = next(iter(trained_parameters(policy).values())).dtype
        weights = {name: tensor.to("cpu", dtype) for name, tensor in merged(policy)}
    policy.save_pretrained(directory, state_dict=weights)


def save_adapter(adapted: "PeftModel", directory: Path) -> None:
    """Save adapters for peft's PeftModel.from_pretrained: written beside, then renamed."""
    unfinished = directory.with_suffix(".unfinished")
    adapted.save_pretrained(unfinished, save_embedding_layers=False)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
