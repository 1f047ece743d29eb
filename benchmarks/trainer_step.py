"""Measure what the way to the log-probabilities costs in one optimizer step.

The step is on 140 ragged responses: 7 queries x 20, lengths of real GSM8K solutions, limit 512.

    python benchmarks/trainer_step.py --data_dir DIR      # 10 minutes on 2 cores
    python benchmarks/trainer_step.py --quick             # 2 queries, in two minutes

GSM8K comes from the hub without --data_dir.

padded      every response padded to 512 tokens, a full fp32 log-softmax of all positions, as in the
            official code
trimmed     the same, padded to the longest row of the micro-batch
a query     models/logprobs.py, a query at a time
ours        the same, by micro-batches of --tokens_per_micro_batch: by default 10,752
two passes  the same with --low_memory on
floor       the matrix products of ours alone, nothing padded or made twice, at the rate of one
            large matrix product on this machine

All but the floor are the same Learner.update: the same rows, trajectory-balance loss, backward
pass, clipping and AdamW. Each has a process of its own, for its peak of memory.
CPU: 30 M parameters, 32,000 tokens, fp32. GPU: the shape of RhoMath-1B (TinyLlama), bf16 autocast
over fp32 weights.
Counted besides: the passes of a step at a GPU's size of them, and the tokens that run in these.
Writes benchmarks/results/trainer_step.md; with --quick benchmarks/results/quick/.
"""

import dataclasses
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import arguments, gsm8k, save, table
from transformers import LlamaConfig, LlamaForCausalLM

import learner as learner_module
from buffer import Row
from config import Config
from learner import Learner
from models.device import device
from models.logprobs import TOKENS_PER_FORWARD, micro_batches, response_logprobs, split_rows
from runtime.processes import children
from runtime.processes.places import find_places

QUERIES, RESPONSES, LIMIT, VOCABULARY = 7, 20, 512, 32_000
TOKENS = (10_752, 21_504)  # the first is one query of full length, the default
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    tie_word_embeddings=True,
)
SHAPE_GPU = dict(
    vocab_size=VOCABULARY,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
)


def padded(
    model: torch.nn.Module,
    prompts: list[np.ndarray],
    responses: list[np.ndarray],
    temperature: float,
    dtype: torch.dtype,
    limit: int = LIMIT,
) -> torch.Tensor:
    """Compute log-probabilities (N, limit), as models/logprobs.py does, of padded responses.

    Prompts are padded on the left, responses on the right.
    """
    device, width = next(model.parameters()).device, max(map(len, prompts))
    ids, mask = (torch.zeros(len(prompts), width + limit, dtype=torch.long) for _ in range(2))
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        row = slice(width - len(prompt), width + len(response))
        ids[i, row], mask[i, row] = torch.from_numpy(np.concatenate([prompt, response])).long(), 1
    ids, mask = ids.to(device), mask.to(device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    logprobs = (logits[:, width - 1 : -1].float() / temperature).log_softmax(-1)
    return torch.where(
        mask[:, width:].bool(), logprobs.gather(-1, ids[:, width:, None])[..., 0], 0.0
    )


def trimmed(
    model: torch.nn.Module,
    prompts: list[np.ndarray],
    responses: list[np.ndarray],
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the same as padded(), padded to the longest response."""
    return padded(model, prompts, responses, temperature, dtype, max(map(len, responses)))


A_QUERY, TWO_PASSES = "a query", "two passes"
VARIANTS = {"padded": padded, "trimmed": trimmed}
VARIANTS |= dict.fromkeys((A_QUERY, "ours", TWO_PASSES), response_logprobs)


def a_query_at_a_time(rows: list[Row], group_size: int, *_) -> list[list[Row]]:
    """Split rows as micro_batches does, with a query in each."""
    return [rows[start : start + group_size] for start in range(0, len(rows), group_size)]


def count_passes(rows: list[Row]) -> list[list]:
    """Count passes on a GPU and their padded tokens, of micro-batches of several sizes."""
    per_pass, lines = TOKENS_PER_FORWARD["cuda"], []
    for tokens in (0, *TOKENS):
        parts = micro_batches(rows, RESPONSES, tokens, per_pass)
        responses = [[row.tokens for row in part] for part in parts]
        prompts = [[row.prompt for row in part] for part in parts]
        passes = [split_rows(*both, per_pass) for both in zip(prompts, responses)]
        padded = sum(
            len(few) * len(own[few[0]]) for own, split in zip(responses, passes) for few in split
        )
        counts = map(str, (len(parts), sum(map(len, passes)), padded))
        lines.append([str(tokens or "a query"), *counts])
    return lines


def measure(variant: str, directory: str, rows: list[Row]) -> dict:
    """Measure a variant, in a process of its own.

    seconds: one step; gib: peak memory of the process until then (on a GPU: what torch allocated
    there).
    """
    config = Config(
        model=directory,
        responses_per_query=RESPONSES,
        max_grad_norm=1.0,
        temperature=0.7,
        learning_rate=0.0,
        low_memory="on" if variant == TWO_PASSES else "off",
    )
    if variant in ("padded", "trimmed", A_QUERY):
        learner_module.micro_batches = a_query_at_a_time
    learner = Learner(config, print)
    learner.policy_logprobs = partial(VARIANTS[variant], learner.policy)
    learner.update(rows[:RESPONSES])  # warms up, and makes gradients and moments
    start = time.perf_counter()
    loss = learner.update(rows)["loss"]
    seconds = time.perf_counter() - start
    if device().type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    # The learning rate is 0: AdamW's first moments are the gradients of the two steps, in the same
    # proportion for each variant.
    gradient = np.concatenate(
        [state["exp_avg"].cpu().numpy().ravel() for state in learner.optimizer.state.values()]
    )
    return {
        "seconds": seconds,
        "gib": peak,
        "loss": loss,
        "gradient": gradient / np.linalg.norm(gradient),
    }


def matrix_product_rate(device: torch.device) -> float:
    """Measure FLOP/s of one large matrix product, the best of several."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        b = a @ a
        b[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def floor_flops(shape: dict, rows: list[Row]) -> float:
    """Count FLOP of the matrix products of a forward pass and, twice that, a backward pass.

    Each prompt counts once, nothing is padded, and logits are of response tokens only.
    """
    h, layers, heads = (
        shape[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    keys = 2 * h * shape.get("num_key_value_heads", heads) // heads
    per_token = 2 * layers * (h * (2 * h + keys) + 3 * h * shape["intermediate_size"])
    prompts = {row.query_id: len(row.prompt) for row in rows}
    prompt_tokens, tokens = sum(prompts.values()), sum(len(row.tokens) for row in rows)
    attention = sum(len(row.tokens) * (len(row.prompt) + len(row.tokens) / 2) for row in rows)
    attention += sum(length * length / 2 for length in prompts.values())
    logits = tokens * 2 * h * VOCABULARY
    return 3 * ((prompt_tokens + tokens) * per_token + 4 * layers * h * attention + logits)


def make_rows(data_dir: str, queries: int) -> list[Row]:
    """Draw prompts and solutions of GSM8K, and make rows of them with random figures."""
    prompts, solutions, tokenizer = gsm8k(data_dir, VOCABULARY)
    rng = np.random.default_rng(0)
    rows = []
    for query in range(queries):
        prompt = np.array(tokenizer(prompts[rng.integers(len(prompts))]).input_ids, np.int32)
        for solution in rng.integers(len(solutions), size=RESPONSES):
            tokens = np.array(tokenizer(solutions[solution] + "<eos>").input_ids[:LIMIT], np.int32)
            # About the log-probabilities that random weights give.
            logprobs = rng.normal(-10, 1, (2, len(tokens))).astype(np.float32)
            arrays = prompt, tokens, *logprobs, *np.ones((2, len(tokens)), bool)
            rows.append(Row(query, 0, 0, *arrays, float(rng.integers(2))))
    return rows


def main() -> None:
    options = arguments(__doc__, ("--data_dir", ""))
    on = device()
    place = find_places(Config())[0]
    place = dataclasses.replace(place, cores=sorted(os.sched_getaffinity(0)))
    os.environ.update(children.environment(place))  # for the children
    shape = SHAPE_GPU if on.type == "cuda" else SHAPE
    rows = make_rows(options.data_dir, 2 if options.quick else QUERIES)

    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        architecture = LlamaConfig(**shape, max_position_embeddings=2048)
        LlamaForCausalLM(architecture).save_pretrained(Path(directory))
        results = {}
        for variant in VARIANTS:
            # A fresh process: its peak of memory is its own.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                result = results[variant] = pool.apply(measure, (variant, directory, rows))
            print(f"{variant}: {result['seconds']:.2f} s, {result['gib']:.2f} GiB", flush=True)
    report(options.quick, rows, results, floor_flops(shape, rows), matrix_product_rate(on))


def report(
    quick: bool, rows: list[Row], results: dict[str, dict], flops: float, rate: float
) -> None:
    """Save the table. results: of measure(), by variant; rate: FLOP/s of a matrix product."""
    slow, floor = results["padded"], flops / rate  # floor: in seconds
    lines = []
    for variant, result in results.items():
        difference = np.linalg.norm(result["gradient"] - slow["gradient"])
        line = [
            variant,
            f"{result['seconds']:.2f}",
            f"{slow['seconds'] / result['seconds']:.2f}",
            f"{result['gib']:.2f}",
            f"{result['gib'] / slow['gib']:.3f}",
            f"{floor / result['seconds']:.2f}",
            f"{difference:.1e}",
        ]
        lines.append(line)
    lines.append(["floor", f"{floor:.2f}", f"{slow['seconds'] / floor:.2f}", "", "", "1", ""])
    header = [
        "",
        "seconds",
        "times as fast as padded",
        "peak memory, GiB",
        "of padded's",
        "share of the matrix-product rate",
        "difference of gradient, relative",
    ]
    lengths = [len(row.tokens) for row in rows]
    save(
        "trainer_step",
        quick,
        f"{len(rows)} responses of {np.mean(lengths):.0f} tokens on average, {max(lengths)} at "
        f"most, behind prompts of {np.mean([len(row.prompt) for row in rows]):.0f}; "
        f"floor: {flops / 1e12:.2f} TFLOP at {rate / 1e12:.3f} TFLOP/s",
        table(header, lines),
        table(
            ["tokens, at most", "micro-batches", "passes", "padded response tokens"],
            count_passes(rows),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
