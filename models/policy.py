"""The policy as transformers loads it: trainer and reference policy both come from here."""

import logging
import os
from collections.abc import Iterable

import torch

from config import Config, UserError, first_line
from models.loading import load_model
from models.logprobs import check_architecture


def load_policy(
    config: Config, device: torch.device, linear_dtype: torch.dtype | None = None
) -> torch.nn.Module:
    """Load config.model in --master_dtype and evaluation mode: pi is without dropout.

    linear_dtype: what a policy that is not trained computes in (cast_linear_layers). Raises
    ValueError for an architecture that response_logprobs does not know, and UserError for weights
    that are not finite, or not the model's.
    """
    how = dict(dtype=torch.float32, trust_remote_code=config.trust_remote_code)
    model = load_model("--model", config.model, **how)
    check_finite(model, config)
    check_architecture(model)  # in fp32, to compare to 1e-3
    model.to(getattr(torch, config.master_dtype))
    if linear_dtype:
        cast_linear_layers(model, linear_dtype)
    model.to(device)
    if config.compile:
        compile_layers(model)
    return model


def compile_layers(model: torch.nn.Module) -> None:
    """Have each layer compiled when it is called. Without a compiler they stay as they are."""
    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # set without a GPU, for vLLM's sampler
    try:
        torch.compile(lambda x: x.sin())(torch.ones(2, device=model.device))
    except Exception as error:  # one of many
        logging.warning("--compile: the layers stay as they are: %s", first_line(error))
        return
    torch._dynamo.config.suppress_errors = True  # a layer that cannot be compiled is a warning
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the layers of a model: what transformers would not split between two devices."""
    kinds = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in kinds]


def trained_parameters(policy: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained, by name: the adapters' where there are any."""
    return {name: value for name, value in policy.named_parameters() if value.requires_grad}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a parameter, gradient or moment: of a sharded one, of all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def fill(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Copy a whole tensor into a parameter or moment; of a sharded one only rank 0 needs it."""
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if value is not None:
            full.copy_(value)
        value = distribute_tensor(full, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def find_not_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Name the first weight with a NaN or an infinity, found by its sum, which is quick."""
    return next((name for name, weight in weights if not weight.sum().isfinite()), None)


def check_finite(model: torch.nn.Module, config: Config) -> None:
    """Raise UserError if a weight of the model, loaded from config.model, is NaN or infinite."""
    if name := find_not_finite(model.named_parameters()):
        raise UserError(f"the weight {name} of --model {config.model!r} is NaN or infinite")


def cast_linear_layers(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the matrices of linear layers to the dtype in which autocast multiplies by them.

    In bf16 they take half of the memory, and the products are the same. The input embedding stays
    as it is: it is read in fp32.
    """
    for layer in linear_layers(model):
        layer.to(dtype)


def linear_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """List the linear layers of a model, an output embedding that is the input's aside."""
    embedding = model.get_input_embeddings().weight
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return [layer for layer in layers if layer.weight is not embedding]
