"""The benchmarks share this: where results go, the time to a target, texts and models.

The texts have the length of GSM8K's; the models were not trained. To import this file puts the
project's root on sys.path, so scripts import it before the project's modules.

torch, tokenizers and transformers are imported in the functions that use them: buffer_ops.py
measures without them, and a script that needs no model starts quickly.
"""

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from config import UserError  # noqa: E402 (the project's root must be on sys.path)
from tasks.gsm8k import PROMPT  # noqa: E402
from tasks.support.data import read_rows  # noqa: E402


def arguments(description: str, *more: tuple[str, str]) -> argparse.Namespace:
    """Parse the command line: --quick, and each of `more`, (flag, its default)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    for flag, default in more:
        parser.add_argument(flag, default=default)
    return parser.parse_args()


def as_flags(**settings: object) -> list[str]:
    """Write settings as flags of tba.py, in this order."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def processor() -> str:
    """Name the processor, and what torch's kernels use of it: results depend on both."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return (
        f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"
    )


def machine() -> str:
    """Describe the machine: cores, processor, GPUs and date."""
    import torch

    cores = len(os.sched_getaffinity(0))
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"{cores} cores of an {processor()}, {gpus or 'no GPU'}, {datetime.date.today()}"


def results_dir(quick: bool) -> Path:
    """The directory of results: benchmarks/results/, with `quick` results/quick/."""
    return RESULTS / "quick" if quick else RESULTS


def save(name: str, quick: bool, *parts: str) -> None:
    """Print the parts and write them to <name>.md, after the command and the machine."""
    directory = results_dir(quick)
    directory.mkdir(exist_ok=True)
    flag = " --quick" if quick else ""
    text = "\n\n".join([f"`python benchmarks/{name}.py{flag}` on {machine()}", *parts]) + "\n"
    (directory / f"{name}.md").write_text(text)
    print(text)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Write a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mean_and_values(values: Sequence[float], digits: int = 3) -> str:
    """Write the mean, and the value of each seed, with so many significant digits."""
    shown = ", ".join(f"{value:.{digits}g}" for value in values)
    return f"{sum(values) / len(values):.{digits}g} ({shown})"


def first_right(samples: list[tuple[float, int, float]], target: float, enough: int = 500) -> float:
    """Find when the latest `enough` responses, or a few more, first had a mean reward of `target`.

    Returns that clock, inf if it never happened. samples: (clock, number of responses, their mean
    reward) in order, as they were generated: no evaluation takes time from what is measured.
    """
    clocks, counts, rewards = np.array(samples).T
    for end in range(1, len(clocks) + 1):
        begin = end - 1 - int(np.searchsorted(np.cumsum(counts[:end][::-1]), enough))
        if begin >= 0 and np.average(rewards[begin:end], weights=counts[begin:end]) >= target:
            return float(clocks[end - 1])
    return float("inf")


def gsm8k(data_dir: str, vocabulary: int) -> tuple[list[str], list[str], object]:
    """Read the prompts and solutions of GSM8K's training rows, and train a tokenizer on them.

    The tokenizer is a byte-level BPE with `vocabulary` tokens; digits are tokens of their own, as
    in Llama. data_dir: as in tba.py gsm8k.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    hub = ("openai/gsm8k", "main", "train")
    try:
        rows = [row for _, row in read_rows(data_dir, "train", ("question", "answer"), hub=hub)]
    except UserError as error:
        sys.exit(f"error: {error}")
    prompts = [PROMPT.format(question=row["question"]) for row in rows]
    solutions = [row["answer"] for row in rows]
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prompts + solutions, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    return prompts, solutions, fast


def counting_model(
    directory: Path, lengths: list[int], tokenizer, layers: int, intermediate: int
) -> None:
    """Make a Llama whose responses have these lengths, end-of-sequence included.

    Token i of a response is "i", whatever the prompt; then the response goes on or ends as often as
    the lengths say. The model computes as much as any of its size; its attention and MLPs add
    nothing until they are trained. The tokenizer gets a token for each number.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    longest = max(lengths)
    tokenizer.add_tokens([f"⟨{i}⟩" for i in range(1, longest)])
    hidden = 512
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    assert longest <= hidden, "each number has a dimension of its own"
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    counts = np.bincount(lengths, minlength=longest + 1)
    at_least = np.cumsum(counts[::-1])[::-1]  # at_least[n]: responses of n tokens or more
    with torch.no_grad():
        _set_counting_weights(model, tokenizer, counts[1:] / np.maximum(at_least[1:], 1))
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _set_counting_weights(model, tokenizer, ending: np.ndarray) -> None:
    """Make the model count. ending[i]: share of the responses with i numbers that end there."""
    longest = len(ending)
    numbers = len(tokenizer) - longest  # the token of number i is numbers + i
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.zero_()
    embedding[:, 0] = 1.0  # a prompt's last token is number 0
    head.fill_(-30.0)
    for i in range(longest):
        if i:
            embedding[numbers + i, 0], embedding[numbers + i, i] = 0.0, 1.0
        head[tokenizer.eos_token_id, i] = float(np.log(max(ending[i], 1e-9)))
        if i + 1 < longest:
            head[numbers + i + 1, i] = float(np.log(max(1 - ending[i], 1e-9)))
    head /= model.config.hidden_size**0.5  # what the last norm makes of a 1


def byte_model(directory: str, **architecture) -> None:
    """Make a random Llama that reads bytes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(**architecture, bos_token_id=None, eos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(directory)
