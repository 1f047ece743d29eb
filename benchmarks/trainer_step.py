"""Measure an optimizer step: ways to the log-probabilities, or (--sharded) two processes.

    python benchmarks/trainer_step.py --data_dir DIR   # 10 minutes on 2 cores
    python benchmarks/trainer_step.py --sharded        # 10 minutes
    python benchmarks/trainer_step.py --quick          # 2 queries, or the smallest model: 2 minutes

GSM8K, from the hub without --data_dir, gives 140 ragged responses: 7 queries x 20, limit 512.

padded      every response padded to 512 tokens, a full fp32 log-softmax of all positions, as in the
            official code
trimmed     the same, padded to the longest row of the micro-batch
a query     models/logprobs.py, a query at a time
ours        the same, by micro-batches of --tokens_per_micro_batch: by default 10,752
two passes  the same with --low_memory on
floor       the matrix products of ours alone, nothing padded or made twice, at the rate of one
            large matrix product on this machine

All but the floor are the same Learner.update, each in a process of its own, for its peak of memory.
CPU: 30 M parameters, fp32. GPU: the shape of RhoMath-1B (TinyLlama), bf16 autocast over fp32.

--sharded: --trainer_processes 2 with a core each against one process with both, in turns, so that
the machine's pace is the same: 4 queries x 8 responses of 64 + 64 tokens, fp32, and a publish.
"""

import multiprocessing
import os
import resource
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing
from common import arguments, gsm8k, make_row, save, show, table_of
from transformers import LlamaConfig, LlamaForCausalLM

import learner as learner_module
from config import Config
from extras.sharding import Rank, connect
from launch import children
from launch.places import Place, find_places
from launch.planning.plan import GIB
from learner import Learner, make_learner
from models.architecture import weight_shapes
from models.device import device
from models.logprobs import response_logprobs
from rollouts import Response
from runtime.memory_trial import largest_micro_batch
from weights import SharedWeights, num_elements

QUERIES, RESPONSES, LIMIT, VOCABULARY = 7, 20, 512, 32_000
SHAPE = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4)
SHAPE |= dict(num_attention_heads=8, tie_word_embeddings=True)
SHAPE_GPU = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22)
SHAPE_GPU |= dict(num_attention_heads=32, num_key_value_heads=4)
SHARDED_SIZES = ((256, 4), (512, 8), (1024, 8))  # hidden size, layers
STEPS, TIMEOUT = 7, 600.0


def padded(
    model: torch.nn.Module,
    prompts: list[np.ndarray],
    responses: list[np.ndarray],
    temperature: float,
    dtype: torch.dtype,
    limit: int | None = LIMIT,
) -> torch.Tensor:
    """Compute log-probabilities (N, limit), as models/logprobs.py does, of padded responses.

    Prompts are padded on the left, responses on the right. limit: None for the longest response.
    """
    device, width = next(model.parameters()).device, max(map(len, prompts))
    length = width + (limit or max(map(len, responses)))
    ids, mask = (torch.zeros(len(prompts), length, dtype=torch.long) for _ in range(2))
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        row = slice(width - len(prompt), width + len(response))
        ids[i, row], mask[i, row] = torch.from_numpy(np.concatenate([prompt, response])).long(), 1
    ids, mask = ids.to(device), mask.to(device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    logprobs = (logits[:, width - 1 : -1].float() / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, width:, None])[..., 0]
    return torch.where(mask[:, width:].bool(), chosen, 0.0)


trimmed = partial(padded, limit=None)
A_QUERY, TWO_PASSES = "a query", "two passes"
VARIANTS = {"padded": padded, "trimmed": trimmed}
VARIANTS |= dict.fromkeys((A_QUERY, "ours", TWO_PASSES), response_logprobs)


def a_query_at_a_time(prompts: list, responses: list, most_tokens: int, together: int) -> list:
    """Split rows as split_rows does, with a query in each part."""
    return [range(start, start + together) for start in range(0, len(prompts), together)]


def measure(variant: str, directory: str, rows: list[Response]) -> dict:
    """Measure the seconds of a step, and the peak memory of the process or the GPU: a process."""
    settings = dict(max_grad_norm=1.0, temperature=0.7, learning_rate=0.0)
    settings["low_memory"] = "on" if variant == TWO_PASSES else "off"
    config = Config(model=directory, responses_per_query=RESPONSES, **settings)
    if variant in ("padded", "trimmed", A_QUERY):
        learner_module.split_rows = a_query_at_a_time
    learner = Learner(config, print)
    learner.response_logprobs = partial(VARIANTS[variant], learner.policy)
    learner.update(rows[:RESPONSES])  # warms up, and makes gradients and moments
    start = time.perf_counter()
    learner.update(rows)
    seconds = time.perf_counter() - start
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if device().type == "cuda" else own
    # The learning rate is 0: AdamW's first moments are the gradients of the two steps, in the same
    # proportion for each variant.
    moments = [state["exp_avg"].cpu().numpy().ravel() for state in learner.optimizer.state.values()]
    gradient = np.concatenate(moments)
    gradient /= np.linalg.norm(gradient)
    return {"seconds": seconds, "gib": peak / GIB, "gradient": gradient}


def matrix_product_rate(device: torch.device) -> float:
    """Measure FLOP/s of one large matrix product, the best of several."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def floor_flops(shape: dict, rows: list[Response]) -> float:
    """Count FLOP of the matrix products of a forward pass and, twice that, a backward pass.

    Each prompt counts once, nothing is padded, and logits are of response tokens only.
    """
    h, layers, heads = map(shape.get, ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    keys = 2 * h * shape.get("num_key_value_heads", heads) // heads
    per_token = 2 * layers * (h * (2 * h + keys) + 3 * h * shape["intermediate_size"])
    prompts = {row.query_id: len(row.prompt) for row in rows}
    prompt_tokens, tokens = sum(prompts.values()), sum(len(row.tokens) for row in rows)
    attention = sum(len(row.tokens) * (len(row.prompt) + len(row.tokens) / 2) for row in rows)
    attention += sum(length * length / 2 for length in prompts.values())
    logits = tokens * 2 * h * VOCABULARY
    return 3 * ((prompt_tokens + tokens) * per_token + 4 * layers * h * attention + logits)


def make_model(directory: str, **shape: int) -> None:
    """Make a random Llama."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=VOCABULARY)).save_pretrained(directory)


def make_rows(data_dir: str, queries: int) -> list[Response]:
    """Draw prompts and solutions of GSM8K, and make rows of them with random figures."""
    prompts, solutions, tokenizer = gsm8k(data_dir, VOCABULARY)
    rng = np.random.default_rng(0)
    rows = []
    for query in range(queries):
        prompt = np.array(tokenizer(prompts[rng.integers(len(prompts))]).input_ids, np.int32)
        for solution in rng.integers(len(solutions), size=RESPONSES):
            ids = tokenizer(solutions[solution] + "<eos>").input_ids[:LIMIT]
            rows.append(make_row(query, prompt, ids, rng))
    return rows


def compare_variants(quick: bool, data_dir: str) -> None:
    """Measure a step of each variant, and save the results."""
    place = replace(find_places(Config())[0], cores=sorted(os.sched_getaffinity(0)))
    os.environ.update(children.environment(place))  # for the children
    shape = SHAPE_GPU if device().type == "cuda" else SHAPE
    rows = make_rows(data_dir, 2 if quick else QUERIES)
    flops, rate = floor_flops(shape, rows), matrix_product_rate(device())
    floor, lines, slow = flops / rate, [], None  # floor: in seconds
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory, **shape)
        for variant in VARIANTS:
            # A fresh process: its peak of memory is its own.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                result = pool.apply(measure, (variant, directory, rows))
            slow = slow or result
            difference = np.linalg.norm(result["gradient"] - slow["gradient"])
            line = {
                "": variant,
                "seconds": f"{result['seconds']:.2f}",
                "times as fast as padded": f"{slow['seconds'] / result['seconds']:.2f}",
                "peak memory, GiB": f"{result['gib']:.2f}",
                "of padded's": f"{result['gib'] / slow['gib']:.3f}",
                "share of the matrix-product rate": f"{floor / result['seconds']:.2f}",
                "difference of gradient, relative": f"{difference:.1e}",
            }
            lines.append(show(line))
    cells = ["floor", f"{floor:.2f}", f"{slow['seconds'] / floor:.2f}", "", "", "1", ""]
    lines.append(dict(zip(lines[0], cells)))
    lengths = [len(row.tokens) for row in rows]
    save(
        "trainer_step",
        quick,
        f"{len(rows)} responses of {np.mean(lengths):.0f} tokens on average, {max(lengths)} at "
        f"most, behind prompts of {np.mean([len(row.prompt) for row in rows]):.0f}; "
        f"floor: {flops / 1e12:.2f} TFLOP at {rate / 1e12:.3f} TFLOP/s",
        table_of(lines),
    )


def compete(
    config: Config, rank: Rank | None, turns: list, results: torch.multiprocessing.Queue
) -> None:
    """Make steps in turn with the other size, and send the seconds of each and of a publish.

    A process. turns: semaphores, of one process and of two. The other ranks do as rank 0 says.
    """
    learner, mine = make_learner(config, print, rank), config.trainer_processes - 1
    if rank and rank.rank:
        rank.follow(learner, beat=lambda: None)
        return
    slots = SharedWeights(weight_shapes(config), torch.float32, readers=1)
    for step in range(STEPS):
        rng, rows = np.random.default_rng(step), []
        for row in largest_micro_batch(config, VOCABULARY) * config.queries_per_batch:
            tokens = row.tokens.copy()
            tokens["token"] = rng.integers(VOCABULARY, size=config.max_response_tokens)
            rows.append(replace(row, tokens=tokens))
        turns[mine].acquire()
        begin = time.perf_counter()
        learner.update(rows)
        stepped = time.perf_counter()
        slots.publish(step, learner.weights())
        results.put((stepped - begin, time.perf_counter() - stepped))
        turns[1 - mine].release()
    turns[mine].acquire()  # the end of this process would slow the other's last step


def start(config: Config, turns: list, results: torch.multiprocessing.Queue, run_dir: str) -> list:
    """Start as many processes as the configuration says. Returns them."""
    size, cores = config.trainer_processes, sorted(os.sched_getaffinity(0))[:2]
    started = []
    for i, rank in enumerate(connect(size, TIMEOUT) if size > 1 else [None]):
        place = Place(f"{size} {i}", None, cores[i::size])
        its_arguments = config, rank, turns, results
        started.append(children.start(place, "trainer_step:compete", its_arguments, run_dir))
    return started


def compare_processes(hidden: int, layers: int, directory: str) -> dict[str, str]:
    """Measure a model in one process and in two. Returns a row of the table."""
    shape = dict(hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers)
    make_model(directory, **shape, num_attention_heads=hidden // 64)
    (Path(directory) / "logs").mkdir()
    sizes = dict(queries_per_batch=4, responses_per_query=8, samples_per_query=8)
    limits = dict(max_prompt_tokens=64, max_response_tokens=64, low_memory="off")
    one = Config(model=directory, **sizes, **limits)
    spawn = torch.multiprocessing.get_context("spawn")
    turns, queues = [spawn.Semaphore(1), spawn.Semaphore(0)], [spawn.Queue(), spawn.Queue()]
    started = start(one, turns, queues[0], directory)
    started += start(replace(one, trainer_processes=2), turns, queues[1], directory)
    try:
        deadline = time.monotonic() + TIMEOUT
        while min(queue.qsize() for queue in queues) < STEPS:
            time.sleep(0.5)
            assert time.monotonic() < deadline, f"not done after {TIMEOUT:.0f} s"
            if dead := [process.name for process in started if process.exitcode]:
                sys.exit(children.log_tail(directory, dead[0]))
        found = [[queue.get() for _ in range(STEPS)] for queue in queues]
    finally:
        for process in started:
            children.kill(process)
    times = np.array(found)  # (one process or two, steps, a step and a publish)
    # The first of each makes moments, and fills slots for the first time.
    steps, publishes = np.median(times[:, 2:, 0], axis=1), np.median(times[:, 3:, 1], axis=1)
    ratios = times[1, 2:, 0] / times[0, 2:, 0]
    return {
        "parameters": f"{num_elements(weight_shapes(one)) / 1e6:.0f} M",
        "a step, one process": f"{steps[0]:.2f} s",
        "two": f"{steps[1]:.2f} s",
        "two / one (range)": f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})",
        "a publish, one": f"{publishes[0]:.3f} s",
        "by two": f"{publishes[1]:.3f} s",
    }


def main() -> None:
    options = arguments(__doc__, ("--data_dir", ""), ("--sharded", False))
    if not options.sharded:
        return compare_variants(options.quick, options.data_dir)
    rows = []
    for size in SHARDED_SIZES[:1] if options.quick else SHARDED_SIZES:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(show(compare_processes(*size, directory)))
    caption, command = f"Medians of {STEPS - 2} steps, in turns.", "trainer_step.py --sharded"
    save("sharded_step", options.quick, caption, table_of(rows), command=command)


if __name__ == "__main__":
    sys.exit(main())
