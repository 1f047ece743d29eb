"""What the benchmarks share: results, tables, figures of a run, texts and models.

To import this file puts the project's root on sys.path: import it before the project's modules.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from config import UserError  # noqa: E402 (the project's root must be on sys.path)
from launch.files import read_lines, read_spans  # noqa: E402
from rollouts import Group, Response, make_tokens  # noqa: E402
from tasks.gsm8k import PROMPT  # noqa: E402
from tasks.support.data import read_rows  # noqa: E402


def arguments(description: str, *more: tuple[str, object]) -> argparse.Namespace:
    """Parse the command line: --quick, and each of `more`, (flag, its default).

    A flag whose default is False takes no value.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="less, into benchmarks/results/quick/")
    for flag, default in more:
        kind = {"action": "store_true"} if default is False else {"default": default}
        parser.add_argument(flag, **kind)
    return parser.parse_args()


def as_flags(**settings: object) -> list[str]:
    """Write settings as flags of tba.py, in this order."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def processor() -> str:
    """Name the processor, and what torch's kernels use of it: results depend on both."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def machine() -> str:
    """Describe the machine: cores, processor, GPUs and date."""
    cores = len(os.sched_getaffinity(0))
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"{cores} cores of an {processor()}, {gpus or 'no GPU'}, {datetime.date.today()}"


def results_dir(quick: bool) -> Path:
    """The directory of results: benchmarks/results/, with `quick` results/quick/."""
    return RESULTS / "quick" if quick else RESULTS


def save(name: str, quick: bool, *parts: str, command: str = "") -> None:
    """Print the parts and write them to <name>.md, after the command and the machine.

    command: the script with its flags, where it is not <name>.py.
    """
    directory = results_dir(quick)
    directory.mkdir(exist_ok=True)
    command = (command or f"{name}.py") + (" --quick" if quick else "")
    text = "\n\n".join([f"`python benchmarks/{command}` on {machine()}", *parts]) + "\n"
    (directory / f"{name}.md").write_text(text)
    print(text)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Write a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table_of(rows: list[dict[str, str]]) -> str:
    """Write a table in Markdown. rows: title of the column -> cell, in the same order."""
    return table(list(rows[0]), [list(row.values()) for row in rows])


def show(row: dict[str, str]) -> dict[str, str]:
    """Print a row of a table as soon as it is measured, and return it."""
    print(" | ".join(row.values()), flush=True)
    return row


def mean_and_each(values: Sequence[float]) -> str:
    """Write the mean, and the value of each seed, with three significant digits."""
    shown = ", ".join(f"{value:.3g}" for value in values)
    return f"{sum(values) / len(values):.3g} ({shown})"


def means(runs: Sequence[dict[str, float]]) -> dict[str, str]:
    """Write each figure of some runs as mean_and_each() does."""
    return {name: mean_and_each([run[name] for run in runs]) for name in runs[0]}


def steps_of(run_dir: Path | str) -> list[dict]:
    """Read the lines of metrics.jsonl that are of a step."""
    return [line for line in read_lines(Path(run_dir) / "metrics.jsonl") if "loss" in line]


def reached(run_dir: Path, target: float) -> float:
    """Find when the new responses of a run that has ended first had a mean reward of `target`."""
    return first_right(trained_on(run_dir), target)


def trained_on(run_dir: Path) -> list[tuple[float, int, float]]:
    """Read the new responses of each step of a run so far, as first_right() takes them."""
    if not (run_dir / "config.json").exists():
        return []
    steps = steps_of(run_dir)
    ends = [end for name, _, end in read_spans(str(run_dir)).get("trainer", []) if name == "step"]
    config = json.loads((run_dir / "config.json").read_text())
    new = np.diff([0] + [line["received"] for line in steps])
    if config["constant_staleness"] is not None:  # each step has a batch of its own
        new[:] = config["queries_per_batch"] * config["responses_per_query"]
    return list(zip(ends, new.tolist(), [line["reward"] for line in steps]))


def make_group(responses: int, tokens: int, vocabulary: range) -> Group:
    """Make a group of random tokens, all responses of one length."""
    rng, size = np.random.default_rng(0), responses * tokens
    ids = rng.integers(vocabulary.start, vocabulary.stop, size, dtype=np.int32)
    return Group(
        query_id=0,
        prompt=np.zeros(20, np.int32),
        version=0,
        last_version=0,
        temperature=1.0,
        lengths=np.full(responses, tokens, np.int32),
        tokens=make_tokens(ids, ref_logprob=-2.5, behavior_logprob=-2.5),
        finished=np.ones(responses, bool),
        rewards=rng.integers(0, 2, responses).astype(np.float32),
    )


def make_row(query: int, prompt: np.ndarray, ids: Sequence[int], rng: Generator) -> Response:
    """Make a row with random figures: about the log-probabilities that random weights give."""
    ref, behavior = rng.normal(-10, 1, (2, len(ids)))
    tokens, reward = make_tokens(ids, ref_logprob=ref, behavior_logprob=behavior), rng.integers(2)
    return Response(query_id=query, version=0, prompt=prompt, tokens=tokens, reward=float(reward))


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
    from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    hub = ("openai/gsm8k", "main", "train")
    try:
        rows = [row for _, row in read_rows(data_dir, "train", ("question", "answer"), hub=hub)]
    except UserError as error:
        sys.exit(f"error: {error}")
    prompts = [PROMPT.format(question=row["question"]) for row in rows]
    solutions = [row["answer"] for row in rows]
    tokenizer = ByteLevelBPETokenizer()
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    settings = dict(min_frequency=0, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(prompts + solutions, vocabulary, **settings)
    ends = dict(eos_token="<eos>", pad_token="<eos>")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **ends)
    return prompts, solutions, fast


def counting_model(directory: Path, lengths: list[int], tokenizer, intermediate: int) -> None:
    """Make a Llama whose responses have these lengths, end-of-sequence included.

    Token i of a response is "i", whatever the prompt; then the response goes on or ends as often as
    the lengths say. The model computes as much as any of its size; its attention and MLPs add
    nothing until they are trained. The tokenizer gets a token for each number.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    longest, eos = max(lengths), tokenizer.eos_token_id
    hidden = 512  # at least the longest: each number has a dimension of its own
    first = len(tokenizer) - 1  # the token of number i is first + i
    tokenizer.add_tokens([f"⟨{i}⟩" for i in range(1, longest)])
    sizes = dict(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=8, vocab_size=len(tokenizer))
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=eos)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    counts = np.bincount(lengths)
    at_least = np.cumsum(counts[::-1])[::-1]  # at_least[n]: responses of n tokens or more
    # ending[i]: the share of the responses with i numbers that end there.
    ending = torch.from_numpy(counts[1:] / np.maximum(at_least[1:], 1)).float()
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding.zero_()
        embedding[:, 0] = 1.0  # a prompt's last token is number 0
        head.fill_(-30.0)
        numbers = torch.arange(1, longest)
        embedding[first + numbers, 0], embedding[first + numbers, numbers] = 0.0, 1.0
        head[eos, :longest] = ending.clamp(min=1e-9).log()
        head[first + numbers, numbers - 1] = (1 - ending[:-1]).clamp(min=1e-9).log()
        head /= hidden**0.5  # what the last norm makes of a 1
    model.generation_config.pad_token_id = eos
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
