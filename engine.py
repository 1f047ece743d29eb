"""vLLM inside the searcher's own process: requests in, finished responses out, new weights in between. Nothing else calls vLLM."""

import gc
from collections.abc import Iterable

import torch
from torch import Tensor

from config import Config
from processes import device

ENGINE_ROWS = 256  # responses that vLLM generates at a time


class Engine:
    """A streaming engine: requests join and leave between two steps; no batch is waited for."""

    def __init__(self, config: Config, seed: int = 0):
        from vllm import (
            LLM,
        )  # not at the top: slow to import, and evaluation.py, which the trainer imports, imports this file
        from vllm.model_executor.models.transformers.base import Base

        # A model that vLLM has no code of its own for (GPT-NeoX: Pythia) runs through transformers' class. To compile it vLLM makes over that class,
        # and then no other instance can be made in this process, such as the reference policy.
        Base._decorate_for_torch_compile = lambda self: None
        gc.freeze()  # vLLM collects garbage five times while it starts: not among all that has been imported
        length = config.max_prompt_tokens + config.max_response_tokens
        if device().type == "cuda":
            hardware = dict(dtype="bfloat16", gpu_memory_utilization=config.gpu_memory_utilization)
        else:
            from vllm import _custom_ops

            # vLLM's CPU build would pack each matrix for oneDNN and free it: a load would pack all of them anew, ten times as long as a copy takes.
            _custom_ops._supports_onednn = False
            # Prompts enter whole: for one that enters in chunks vLLM turns back the request's generator, which a CPU generator cannot.
            hardware = dict(
                dtype="float32",
                enforce_eager=True,
                enable_chunked_prefill=False,
                max_num_batched_tokens=max(4096, length),
            )
            # The responses to a query share the cache blocks that its prompt fills: blocks of 32 tokens, the fewest that vLLM takes on a CPU, because
            # of the default, 128, most prompts fill none.
            hardware["block_size"] = 32
        self.llm = LLM(
            config.model,
            seed=seed,
            trust_remote_code=config.trust_remote_code,
            max_model_len=length,
            max_num_seqs=ENGINE_ROWS,
            distributed_executor_backend="uni",  # no worker process: nothing to orphan, and weights go in without serialisation
            logprobs_mode="processed_logprobs",  # behaviour log-probabilities at the sampling temperature
            **hardware,
        )
        if device().type == "cpu":
            self.llm.apply_model(_multiply_unpacked)

    def add(self, request: str, prompt: list[int], version: int, **sampling) -> None:
        """Starts `request`. prompt: token ids; version: of the weights now in the engine; sampling: as in vllm.SamplingParams."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # The prefix cache holds keys and values of the weights that computed them. The salt keeps those of other versions out of
        # reach; to empty the cache instead is impossible while requests run.
        salted = {"prompt_token_ids": prompt, "cache_salt": str(version)}
        parameters = SamplingParams(
            **sampling, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self.llm.llm_engine.add_request(request, salted, parameters)

    @property
    def rows(self) -> int:
        """Responses that are not finished, those that wait for room included."""
        return self.llm.llm_engine.get_num_unfinished_requests()

    @property
    def running(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def step(self) -> list:
        """One token for every running response. Returns the requests that finished with it, as vllm.RequestOutput."""
        return self.llm.llm_engine.step()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """New weights, by their transformers names, in place, while requests run. For models whose weights vLLM keeps as they are: dense and not
        quantized. Its test compares log-probabilities with transformers'."""
        self.llm.apply_model(lambda model: model.load_weights(tensors))


def _multiply_unpacked(model: torch.nn.Module) -> None:
    """Has oneDNN multiply by the matrices as they are: on some processors that is faster than what torch takes by itself."""
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            if not module.weight.numel():
                raise RuntimeError(
                    f"this vLLM has packed {type(module).__name__} and can take no new weights: install requirements-cpu.txt"
                )
            module.cpu_linear = lambda x, weight, bias: torch.ops.mkldnn._linear_pointwise(
                x, weight, bias, "none", [], ""
            )
