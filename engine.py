"""vLLM inside the searcher's own process: requests in, finished responses out, new weights in between. Nothing else knows vLLM."""

from collections.abc import Iterable

import torch
from torch import Tensor

from config import Config
from processes import device

ENGINE_ROWS = 256  # responses that vLLM generates at a time


class Engine:
    """A streaming engine: requests join and leave between two steps; no batch is waited for."""

    def __init__(self, config: Config, seed: int = 0):
        import vllm  # not at the top: slow to import, and the trainer imports the searcher's messages

        length = config.max_prompt_tokens + config.max_response_tokens
        if device().type == "cuda":
            hardware = dict(dtype="bfloat16", gpu_memory_utilization=config.gpu_memory_utilization)
        else:
            # Prompts enter whole: for one that enters in chunks vLLM turns back the request's generator, which a CPU generator cannot.
            hardware = dict(dtype="float32", enforce_eager=True, enable_chunked_prefill=False, max_num_batched_tokens=max(4096, length))
        self.llm = vllm.LLM(
            config.model, seed=seed, trust_remote_code=config.trust_remote_code, max_model_len=length, max_num_seqs=ENGINE_ROWS,
            distributed_executor_backend="uni",  # no worker process: nothing to orphan, and weights go in without serialisation
            logprobs_mode="processed_logprobs",  # behaviour log-probabilities at the sampling temperature
            **hardware,
        )  # fmt: skip

    def add(self, request: str, prompt: list[int], version: int, **sampling) -> None:
        """Starts `request`. prompt: token ids; version: of the weights now in the engine; sampling: as in vllm.SamplingParams."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # The prefix cache holds keys and values of the weights that computed them. The salt keeps those of other versions out of
        # reach; to empty the cache instead is impossible while requests run.
        salted = {"prompt_token_ids": prompt, "cache_salt": str(version)}
        parameters = SamplingParams(**sampling, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
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
        """New weights, by their transformers names, while requests run. Its test compares log-probabilities with transformers'."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
        if device().type == "cpu":
            # With tied embeddings on a CPU the reload leaves the packed copy of the old output embedding in place: pack it anew.
            self.llm.apply_model(_repack_output_embedding)


def _repack_output_embedding(model: torch.nn.Module) -> None:
    if hasattr(model, "lm_head"):
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
