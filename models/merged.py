"""A policy's weights as a policy without adapters has them: LoRA's are merged in.

A policy that has no adapters has its own parameters. peft puts an adapter into layers of its own:
a weight W is then called ….base_layer.weight and stands beside ….lora_A.default.weight.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

ADAPTER = "default"  # peft's name for one that has none
BASE, OF_ADAPTER = ".base_layer", ".lora_"  # in a parameter's name


@torch.no_grad()
def merged(policy: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each weight, W + alpha / rank B A, one at a time."""
    for name, parameter in policy.named_parameters():
        if OF_ADAPTER in name:
            continue
        layer, _, kind = name.rpartition(".")
        if layer.endswith(BASE) and kind == "weight":
            adapted = policy.get_submodule(layer.removesuffix(BASE))
            parameter = parameter + adapted.get_delta_weight(ADAPTER)
        yield name.replace(BASE, ""), parameter


def under_names_of(policy: torch.nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give merged weights the names that they have in this policy, whose adapters then add nothing.

    They come in its dtypes and on its device. A and B of 0 add nothing.
    """
    return {
        name: torch.zeros_like(parameter)
        if OF_ADAPTER in name
        else weights[name.replace(BASE, "")].to(parameter.device, parameter.dtype)
        for name, parameter in policy.named_parameters()
    }
