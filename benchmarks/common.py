"""What benchmarks share: where results go and how they look, the time to a target, texts of the length of GSM8K's, and models that were not trained."""

import argparse
import datetime
import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))


def arguments(description: str, *more: tuple[str, str]) -> argparse.Namespace:
    """--quick, and each of `more`: (flag, its default)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    for flag, default in more:
        parser.add_argument(flag, default=default)
    return parser.parse_args()


def machine() -> str:
    """Processor, cores, GPUs and date."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"{len(os.sched_getaffinity(0))} cores of an {processor}, {gpus or 'no GPU'}, {datetime.date.today()}"


def save(name: str, quick: bool, *parts: str) -> None:
    """Prints the parts and writes them to benchmarks/results/<name>.md, behind the command and the machine; with `quick` to results/quick/."""
    directory = RESULTS / "quick" if quick else RESULTS
    directory.mkdir(exist_ok=True)
    text = (
        "\n\n".join([f"`python benchmarks/{name}.py{' --quick' * quick}` on {machine()}", *parts])
        + "\n"
    )
    (directory / f"{name}.md").write_text(text)
    print(text)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows]
    )


def mean_and_values(values, digits: int = 3) -> str:
    """Of each seed, digits significant ones."""
    return f"{sum(values) / len(values):.{digits}g} ({', '.join(f'{value:.{digits}g}' for value in values)})"


def first_right(samples: list[tuple[float, int, float]], target: float, enough: int = 500) -> float:
    """The clock at which the latest `enough` responses, or a few more, had a mean reward of `target` for the first time; inf if never. samples:
    (clock, number of responses, their mean reward) in order, as they were generated: no evaluation takes time from what is measured."""
    import numpy as np

    clocks, counts, rewards = np.array(samples).T
    for end in range(1, len(clocks) + 1):
        begin = end - 1 - int(np.searchsorted(np.cumsum(counts[:end][::-1]), enough))
        if begin >= 0 and np.average(rewards[begin:end], weights=counts[begin:end]) >= target:
            return float(clocks[end - 1])
    return float("inf")


def gsm8k(data_dir: str, vocabulary: int) -> tuple[list[str], list[str], object]:
    """Prompts and solutions of GSM8K's training rows, and a byte-level BPE tokenizer with that many tokens, trained on them: digits are tokens of
    their own, as in Llama. data_dir: as in tba.py gsm8k."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from config import UserError
    from tasks.support.data import read_rows
    from tasks.gsm8k import PROMPT

    try:
        rows = [
            row
            for _, row in read_rows(
                data_dir, "train", ("question", "answer"), hub=("openai/gsm8k", "main", "train")
            )
        ]
    except UserError as error:
        sys.exit(f"error: {error}")
    prompts, solutions = (
        [PROMPT.format(question=row["question"]) for row in rows],
        [row["answer"] for row in rows],
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        prompts + solutions,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<eos>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return (
        prompts,
        solutions,
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>"),
    )


def counting_model(
    directory: Path, lengths: list[int], tokenizer, layers: int, intermediate: int
) -> None:
    """A Llama whose responses have these lengths, end-of-sequence included, whatever the prompt: token i of a response is "i", and then it goes on or
    ends as often as they do. It computes as much as any model of its size; its attention and MLPs add nothing, until they are trained. The tokenizer
    gets a token for each number."""
    import numpy as np
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
    numbers = len(tokenizer) - longest  # the token of number i is numbers + i
    ending = np.bincount(lengths, minlength=longest + 1)[1:] / np.maximum(
        np.cumsum(np.bincount(lengths, minlength=longest + 1)[::-1])[::-1][1:], 1
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()
        embedding[:, 0] = 1.0  # a prompt's last token is number 0
        head.fill_(-30.0)
        for i in range(
            longest
        ):  # ending[i]: the share of the responses with i numbers that end there
            if i:
                embedding[numbers + i, 0], embedding[numbers + i, i] = 0.0, 1.0
            head[tokenizer.eos_token_id, i] = float(np.log(max(ending[i], 1e-9)))
            if i + 1 < longest:
                head[numbers + i + 1, i] = float(np.log(max(1 - ending[i], 1e-9)))
        head /= hidden**0.5  # what the last norm makes of a 1
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def byte_model(directory: str, **architecture) -> None:
    """A random Llama that reads bytes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.BPE(
            vocab={
                c: i for i, c in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
            },
            merges=[],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(**architecture, bos_token_id=None, eos_token_id=0)
    ).save_pretrained(directory)
