"""LoRA (--lora_rank, arXiv 2106.09685), by peft: adapters are trained, the weights are frozen.

Beside each matrix W stand two small ones, A and B: together they count as W + alpha / rank B A.
Adapters are merged before weights are published or saved, so searchers and vLLM never see them. The
reference policy at the start is the base model. peft puts an adapter into layers of its own: a
weight W is then called ….base_layer.weight and stands beside ….lora_A.default.weight.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from config import Config, UserError, first_line
from learner import Learner
from models.device import device
from models.loading import replacing
from models.policy import fill, load_policy, trained_parameters

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER = "default"  # peft's name for one that has none
BASE, OF_ADAPTER = ".base_layer", ".lora_"  # in a parameter's name


class LoraLearner(Learner):
    """A learner that trains adapters, and holds what they stand beside in the compute dtype."""

    def load_policy(self) -> torch.nn.Module:
        """Load a frozen base with adapters. Raises UserError as add_adapters() does too."""
        policy = load_policy(self.config, torch.device("cpu"), linear_dtype=self.dtype)
        self.adapted = add_adapters(policy, self.config)
        return policy.to(device())

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each weight, W + alpha / rank B A, one at a time."""
        for name, parameter in self.policy.named_parameters():
            if OF_ADAPTER in name:
                continue
            if name.endswith(f"{BASE}.weight"):
                layer = self.policy.get_submodule(name.removesuffix(f"{BASE}.weight"))
                parameter = parameter + layer.get_delta_weight(ADAPTER)
            yield name.replace(BASE, ""), parameter

    def fill_policy(self, weights: dict[str, Tensor]) -> None:
        """Give the policy other weights, to which the adapters add nothing."""
        for name, parameter in self.policy.named_parameters():
            if OF_ADAPTER in name:
                parameter.zero_()
            else:
                fill(parameter, weights[name.replace(BASE, "")])

    def save_model(self, directory: Path) -> None:
        """Save the merged policy, and beside it adapter/, for peft's PeftModel.from_pretrained."""
        with replacing(directory.with_name("adapter")) as unfinished:
            self.adapted.save_pretrained(unfinished, save_embedding_layers=False)
        super().save_model(directory)


def check(config: Config) -> None:
    """Raise UserError where peft is not installed."""
    if not find_spec("peft"):
        problem = f"--lora_rank {config.lora_rank} needs peft"
        raise UserError(f"{problem}: pip install -r requirements/lora.txt")


def add_adapters(policy: torch.nn.Module, config: Config) -> "PeftModel":
    """Freeze a policy and put an adapter beside each of its linear layers, the head aside.

    B is 0 at first: the policy stays what it was. Adapters are held in --master_dtype. Returns
    peft's view of the same policy. Raises UserError for a policy without linear layers, or with
    experts, whose adapters weights() could not merge.
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
