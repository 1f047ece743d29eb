"""What is known of a policy before it is loaded: layers, and names and shapes of its weights."""

import math

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config import Config, UserError, first_line
from models.attention import check_attention
from models.loading import directory_of
from models.policy import trained_parameters


def policy_without_weights(config: Config) -> torch.nn.Module:
    """Make config.model on the meta device: names and shapes, nothing loaded.

    Raises UserError for a model that cannot be had.
    """
    try:
        directory = directory_of("--model", config.model, weights=False)
        how = dict(trust_remote_code=config.trust_remote_code)
        architecture = AutoConfig.from_pretrained(directory, **how)
        if getattr(architecture, "quantization_config", None):
            raise ValueError("it is quantized, and the trainer needs plain weights")
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(architecture, **how)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {config.model!r} cannot be used: {first_line(error)}") from error


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, a tied one once, with nothing loaded.

    Raises UserError for a model that cannot be had, has fewer positions than the run needs, or
    attends in a way of its own.
    """
    model = policy_without_weights(config)
    check_attention(model)
    limits = {getattr(model.config, "max_position_embeddings", None) or math.inf: "positions"}
    rope = getattr(model.config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):  # of all layers, or by their type
        if isinstance(each, dict) and each.get("rope_type") == "longrope":
            original = each["original_max_position_embeddings"]
            limits[original] = "positions up to which vLLM and transformers rotate alike (longrope)"
    if (tokens := sum(config.longest_row)) > (least := min(limits)):
        flags = "--max_prompt_tokens {} + --max_response_tokens {}".format(*config.longest_row)
        flags = "--max_episode_tokens" if config.max_episode_tokens else flags
        has = f"more than the {least} {limits[least]} of --model {config.model!r}"
        raise UserError(f"{flags} is {tokens}, {has}: lower it")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def trained_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters to train. Nothing is loaded. Raises UserError."""
    policy = policy_without_weights(config)
    if config.lora_rank:
        from extras.lora import add_adapters

        add_adapters(policy, config)
    return {name: tuple(value.shape) for name, value in trained_parameters(policy).items()}
