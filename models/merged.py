"""A policy's weights as a policy without adapters has them: LoRA's are merged in.

Of a policy that has none they are its parameters. peft puts an adapter into layers of its own, so
that a weight W is called ….base_layer.weight and stands beside ….lora_A.default.weight.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

ADAPTER = "default"  # peft's name for one that has none
BASE, OWN = ".base_layer", ".lora_"


@torch.no_grad()
def merged(policy: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each weight, W + alpha / rank B A, one at a time."""
    for name, parameter in policy.named_parameters():
        if OWN in name:
            continue
        layer, _, kind = name.rpartition(".")
        if layer.endswith(BASE) and kind == "weight":
            adapted = policy.get_submodule(layer.removesuffix(BASE))
            parameter = parameter + adapted.get_delta_weight(ADAPTER)
        yield name.replace(BASE, ""), parameter


def under_names_of(policy: torch.nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give merged weights the names that they have in this policy, whose adapters then add nothing.

    They come in its dtypes and on its device.
    """
    return {
        name: torch.zeros_like(own)
        if OWN in name
        else weights[name.replace(BASE, "")].to(own.device, own.dtype)
        for name, own in policy.named_parameters()
    }
