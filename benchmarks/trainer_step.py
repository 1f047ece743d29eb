"""One optimizer step on 140 ragged responses (7 queries x 20, lengths of real GSM8K solutions, limit 512): what the way to the log-probabilities costs.

    python benchmarks/trainer_step.py --data_dir DIR      # 10 minutes on 2 cores; GSM8K from the hub without the flag
    python benchmarks/trainer_step.py --quick             # 2 queries, in two minutes

padded    every response padded to 512 tokens, a full fp32 log-softmax of all positions, as in the official code
trimmed   the same, padded to the longest row of the micro-batch
ours      models/logprobs.py
floor     the matrix products of ours alone, nothing padded or made twice, at the rate of one large matrix product on this machine

All but the floor are the same Learner.update: the same rows, trajectory-balance loss, backward pass, clipping and AdamW; a process each, for its peak of
memory. CPU: 30 M parameters, 32,000 tokens, fp32. GPU: the shape of RhoMath-1B (TinyLlama), bf16 autocast over fp32 weights.
Writes benchmarks/results/trainer_step.md; with --quick benchmarks/results/quick/.
"""

import dataclasses
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import arguments, gsm8k, save, table

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import learner as learner_module
from models.logprobs import response_logprobs
from runtime import processes
from buffer import Row
from config import Config
from learner import Learner

QUERIES, RESPONSES, LIMIT, VOCABULARY = 7, 20, 512, 32_000
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


def padded(model, prompts, responses, temperature, limit: int = LIMIT):
    """(N, limit). Prompts are padded on the left, responses on the right."""
    device, width = next(model.parameters()).device, max(map(len, prompts))
    ids, mask = (torch.zeros(len(prompts), width + limit, dtype=torch.long) for _ in range(2))
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        row = slice(width - len(prompt), width + len(response))
        ids[i, row], mask[i, row] = torch.from_numpy(np.concatenate([prompt, response])).long(), 1
    ids, mask = ids.to(device), mask.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).logits
    logprobs = (logits[:, width - 1 : -1].float() / temperature).log_softmax(-1)
    return torch.where(
        mask[:, width:].bool(), logprobs.gather(-1, ids[:, width:, None])[..., 0], 0.0
    )


def trimmed(model, prompts, responses, temperature):
    return padded(model, prompts, responses, temperature, limit=max(map(len, responses)))


VARIANTS = {"padded": padded, "trimmed": trimmed, "ours": response_logprobs}


def measure(variant: str, directory: str, rows: list[Row]) -> dict:
    """In a process of its own. seconds: one step; gib: peak memory of the process until then (on a GPU: what torch allocated there)."""
    learner_module.response_logprobs = VARIANTS[variant]
    config = Config(
        model=directory,
        responses_per_query=RESPONSES,
        max_grad_norm=1.0,
        temperature=0.7,
        learning_rate=0.0,
    )
    learner = Learner(config, print)
    learner.update(rows[:RESPONSES])  # warms up, and makes gradients and moments
    start = time.perf_counter()
    loss = learner.update(rows)["loss"]
    seconds = time.perf_counter() - start
    cuda = learner_module.device().type == "cuda"
    peak = (
        torch.cuda.max_memory_allocated() / 2**30
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    )
    # The learning rate is 0: AdamW's first moments are the gradients of the two steps, in the same proportion for each variant.
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
    """FLOP/s of one large matrix product, the best of several."""
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
    """Of the matrix products of a forward pass and, twice that, a backward pass: each prompt once, nothing padded, logits of response tokens only."""
    h, layers = shape["hidden_size"], shape["num_hidden_layers"]
    keys = (
        2
        * h
        * shape.get("num_key_value_heads", shape["num_attention_heads"])
        // shape["num_attention_heads"]
    )
    per_token = 2 * layers * (h * (2 * h + keys) + 3 * h * shape["intermediate_size"])
    prompts = {row.query_id: len(row.prompt) for row in rows}
    tokens = sum(len(row.tokens) for row in rows)
    attention = sum(len(r.tokens) * (len(r.prompt) + len(r.tokens) / 2) for r in rows) + sum(
        p * p / 2 for p in prompts.values()
    )
    return 3 * (
        (sum(prompts.values()) + tokens) * per_token
        + 4 * layers * h * attention
        + tokens * 2 * h * VOCABULARY
    )


def main() -> None:
    options = arguments(__doc__, ("--data_dir", ""))
    queries = 2 if options.quick else QUERIES
    device = learner_module.device()
    place = dataclasses.replace(
        processes.places(Config())[0], cores=sorted(os.sched_getaffinity(0))
    )
    os.environ.update(processes.environment(place))  # for the children
    shape = SHAPE_GPU if device.type == "cuda" else SHAPE
    prompts, solutions, tokenizer = gsm8k(options.data_dir, VOCABULARY)
    rng = np.random.default_rng(0)
    rows = []
    for query in range(queries):
        prompt = np.array(tokenizer(prompts[rng.integers(len(prompts))]).input_ids, np.int32)
        for solution in rng.integers(len(solutions), size=RESPONSES):
            tokens = np.array(tokenizer(solutions[solution] + "<eos>").input_ids[:LIMIT], np.int32)
            noise = rng.normal(-10, 1, (2, len(tokens))).astype(
                np.float32
            )  # ... of the log-probabilities of random weights
            rows.append(Row(query, 0, 0, prompt, tokens, *noise, float(rng.integers(2))))

    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=2048)).save_pretrained(
            Path(directory)
        )
        results = {}
        for variant in VARIANTS:
            with multiprocessing.get_context("spawn").Pool(
                1
            ) as pool:  # a fresh process: its peak of memory is its own
                results[variant] = pool.apply(measure, (variant, directory, rows))
            print(
                f"{variant}: {results[variant]['seconds']:.2f} s, {results[variant]['gib']:.2f} GiB",
                flush=True,
            )
    flops, rate = floor_flops(shape, rows), matrix_product_rate(device)

    slow = results["padded"]
    lines = []
    for variant, r in results.items():
        difference = np.linalg.norm(r["gradient"] - slow["gradient"])
        lines.append(
            [
                variant,
                f"{r['seconds']:.2f}",
                f"{slow['seconds'] / r['seconds']:.2f}",
                f"{r['gib']:.2f}",
                f"{r['gib'] / slow['gib']:.3f}",
                f"{flops / rate / r['seconds']:.2f}",
                f"{difference:.1e}",
            ]
        )
    lines.append(
        ["floor", f"{flops / rate:.2f}", f"{slow['seconds'] / (flops / rate):.2f}", "", "", "1", ""]
    )
    lengths = [len(row.tokens) for row in rows]
    save(
        "trainer_step",
        options.quick,
        f"{len(rows)} responses of {np.mean(lengths):.0f} tokens on average, {max(lengths)} at most, behind prompts of "
        f"{np.mean([len(row.prompt) for row in rows]):.0f}; floor: {flops / 1e12:.2f} TFLOP at {rate / 1e12:.3f} TFLOP/s",
        table(
            [
                "",
                "seconds",
                "times as fast as padded",
                "peak memory, GiB",
                "of padded's",
                "share of the matrix-product rate",
                "difference of gradient, relative",
            ],
            lines,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
