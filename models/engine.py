"""vLLM inside the searcher's own process. Nothing else imports vLLM.

Groups go in, and come out with their responses; new weights go in between two steps.
"""

import gc
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from vllm import LLM, RequestOutput, SamplingParams, _custom_ops
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.models.transformers.base import Base
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor import uniproc_executor

from config import ENGINE_ROWS, Config
from models.device import compute_dtype, device, onednn_multiplies
from models.tokens import tokens_left_out
from rollouts import TOKEN, Group

CPU_BLOCK = 32  # tokens in a block of the prefix cache: the fewest that vLLM takes on a CPU
CPU_BATCHED_TOKENS = 4096


class Engine:
    """A streaming engine: requests join and leave between two steps; no batch is waited for.

    config.model is loaded, in the dtype that the run computes in. seed: of the sampling of requests
    that bring no seed of their own.
    """

    def __init__(self, config: Config, seed: int = 0):
        # A model that vLLM has no code of its own for (GPT-NeoX: Pythia) runs through transformers'
        # class. vLLM would rewrite that class to compile it, and then no other instance, such as
        # the reference policy, could be made in this process.
        Base._decorate_for_torch_compile = lambda self: None
        # One worker needs no semaphore, which a process killed while it loads would leave behind.
        uniproc_executor.Lock = threading.Lock
        gc.freeze()  # vLLM collects garbage five times while it starts: leave out what is imported
        on_gpu = device().type == "cuda"
        self.llm = LLM(
            config.model,
            seed=seed,
            dtype=str(compute_dtype(config)).removeprefix("torch."),
            trust_remote_code=config.trust_remote_code,
            # Or vLLM takes Mistral's own format where a folder has that too.
            **dict.fromkeys(("config_format", "load_format", "tokenizer_mode"), "hf"),
            max_model_len=sum(config.longest_row),
            max_num_seqs=ENGINE_ROWS,
            # No worker process: nothing to orphan, and weights go in without serialisation.
            distributed_executor_backend="uni",
            # Behaviour log-probabilities at the sampling temperature.
            logprobs_mode="processed_logprobs",
            **(gpu_settings(config) if on_gpu else cpu_settings(config)),
        )
        if not on_gpu:
            self.llm.apply_model(_multiply_unpacked)
        # vLLM draws from global generators, which a task's code may seed: these are its own.
        self.random = torch.get_rng_state(), np.random.MT19937(seed)
        self.set_version(0)  # config.model is the trainer's version 0

    def set_version(self, version: int) -> None:
        """Note the version of the weights. vLLM reports with each response which have sampled it.

        On a GPU a token that is under way while they change may count to the newer ones.
        """
        self.version = version
        self.llm.llm_engine.set_weight_version(str(version))

    def add(self, request: str, prompt: list[int], **sampling) -> None:
        """Start a request. request: its id; prompt: token ids; sampling: of vllm.SamplingParams."""
        # The prefix cache holds keys and values of the weights that computed them. The salt keeps
        # those of other versions out of reach; the cache cannot be emptied while requests run.
        salted = {"prompt_token_ids": prompt, "cache_salt": str(self.version)}
        self.llm.llm_engine.add_request(request, salted, request_parameters(sampling))

    @property
    def rows(self) -> int:
        """Responses that are not finished, those that wait for room included."""
        return self.llm.llm_engine.get_num_unfinished_requests()

    def step(self) -> list:
        """Generate one token of every running response.

        Returns the requests that finished with it, as vllm.RequestOutput.
        """
        self.swap_random()
        try:
            return self.llm.llm_engine.step()
        finally:
            self.swap_random()

    def swap_random(self) -> None:
        """Exchange the states of the global generators and those of vLLM."""
        of_others = torch.get_rng_state(), np.random.get_bit_generator()
        torch.set_rng_state(self.random[0])
        np.random.set_bit_generator(self.random[1])
        self.random = of_others

    def load(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load a version's weights in place, by their transformers names, while requests run.

        For models whose weights vLLM keeps as they are: dense and not quantized.
        """
        self.llm.apply_model(lambda model: model.load_weights(tensors))
        self.set_version(version)


class Generation:
    """Has the engine generate the responses of groups, many at once.

    task: the Task, which says how responses end, and what score() sees of them.
    """

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, engine: Engine, task: Any
    ):
        self.config, self.tokenizer, self.engine = config, tokenizer, engine
        # Appended to responses that were cut off, where the task wants that.
        self.final_token = tokenizer.eos_token_id if task.append_eos else None
        pad_is_eos = task.pad_is_eos and tokenizer.pad_token is None
        self.padding_token = tokenizer.eos_token_id if pad_is_eos else None
        self.left_out = tokens_left_out(tokenizer, task.keep_special_tokens)
        self.generating: dict[str, Any] = {}  # groups by request

    @property
    def rows(self) -> int:
        """Responses that are not finished, those that wait for room included."""
        return self.engine.rows

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing for step() to do."""
        return not self.engine.rows

    def start(self, group: Group) -> None:
        """Begin to generate the responses of a group, which has its prompt and sampling."""
        group.version, group.temperature = self.engine.version, group.sampling["temperature"]
        self.engine.add(group.request, group.prompt.tolist(), **group.sampling)
        self.generating[group.request] = group

    def step(self) -> list[Group]:
        """Generate one token of every response. Returns the groups that ended with it."""
        ended = []
        for output in self.engine.step():
            group = self.generating.pop(output.request_id)
            group.last_version, responses = newest_version(output), output.outputs
            group.lengths = np.array([self.length(each) for each in responses], np.int32)
            group.tokens = np.zeros(group.lengths.sum(), TOKEN)
            cut = np.split(group.tokens, np.cumsum(group.lengths)[:-1])
            group.texts = [self.read(*each) for each in zip(responses, cut)]
            group.finished = np.array([each.finish_reason == "stop" for each in responses])
            ended.append(group)
        return ended

    def length(self, completion: Any) -> int:
        """Count the tokens of a vllm.CompletionOutput, an end that is appended included."""
        is_appended = self.final_token is not None and completion.finish_reason == "length"
        return len(completion.token_ids) + is_appended

    def read(self, completion: Any, tokens: np.ndarray) -> str:
        """Write what was generated into its tokens, (T,) of TOKEN, all 0. Returns its text."""
        ids = completion.token_ids
        sampled = tokens[: len(ids)]
        sampled["token"], sampled["sampled"] = ids, True
        sampled["behavior_logprob"] = [row[i].logprob for i, row in zip(ids, completion.logprobs)]
        if len(ids) < len(tokens):  # its log-probability is 0: nothing else can stand there
            tokens["token"][-1] = self.final_token
        tokens["in_loss"] = tokens["token"] != self.padding_token
        return self.tokenizer.decode([token for token in ids if token not in self.left_out])


def newest_version(output: RequestOutput) -> int:
    """Return the newest version that sampled a token of a request."""
    spans = (span for completion in output.outputs for span in completion.weight_versions)
    return max(int(span.version) for span in spans)


def make_generation(
    config: Config, tokenizer: PreTrainedTokenizerBase, engine: Engine, scorer: Any
) -> Generation:
    """Make the generation that the task wants. scorer: where an environment replies."""
    if config.max_episode_tokens is None:
        return Generation(config, tokenizer, engine, scorer.task)
    from extras.episodes import Episodes

    return Episodes(config, tokenizer, engine, scorer)


def request_parameters(sampling: dict) -> SamplingParams:
    """Make what vLLM takes for a request. Raises whatever it refuses: TypeError, ValueError, …"""
    finds_text = bool(sampling.get("stop"))  # stop strings are looked for in the text
    own = dict(logprobs=0, detokenize=finds_text, output_kind=RequestOutputKind.FINAL_ONLY)
    return SamplingParams(**sampling, **own)


def gpu_settings(config: Config) -> dict:
    """Return vLLM's further settings on a GPU."""
    # Autotuning would only delay the start: FlashInfer's kernels are not used.
    settings = {"enable_flashinfer_autotune": False}
    if config.kv_cache_bytes is None:
        return settings | {"gpu_memory_utilization": config.gpu_memory_utilization}
    # vLLM's profiling would count what the trainer allocates meanwhile. And it refuses to start
    # where less than its share is free: so that share is nominal.
    room = {"kv_cache_memory_bytes": config.kv_cache_bytes}
    return settings | room | {"gpu_memory_utilization": 0.01}


def cpu_settings(config: Config) -> dict:
    """Switch off vLLM's packing of weights, and return its further settings on a CPU."""
    # vLLM's CPU build would pack each matrix, for oneDNN or for the tiles of some processors (AMX),
    # and free it. Then a load would pack all of them anew, ten times as slow as a copy.
    _custom_ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *shape: False
    # vLLM's attention in bf16 uses those tiles. The operating system must grant them first; oneDNN,
    # which is switched off here, would have asked.
    torch.cpu._init_amx()
    return {
        "enforce_eager": True,
        # Prompts enter whole: for a prompt in chunks vLLM rewinds the request's generator, which a
        # CPU generator cannot.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, sum(config.longest_row)),
        # Responses share the blocks that their prompt fills. Most fill none of 128, the default.
        "block_size": CPU_BLOCK,
    }


def _multiply_unpacked(model: torch.nn.Module) -> None:
    """Multiply by the matrices as they are: by oneDNN, which is faster than torch where it can."""
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            if not module.weight.numel():
                what = f"this vLLM has packed {type(module).__name__} and can take no new weights"
                raise RuntimeError(f"{what}: install requirements/cpu.txt")
            is_fast = onednn_multiplies(module.weight.dtype)
            module.cpu_linear = _multiply if is_fast else torch.nn.functional.linear


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
