"""Measure on one GPU what a trainer does there: no vLLM is needed, and eight minutes are enough.

    python benchmarks/gpu_day.py --data_dir DIR   # GSM8K's rows; from the hub without it
    python benchmarks/gpu_day.py --quick          # a small model; without a GPU what does go

Each part is a process of its own, prints a line for each thing as it is known, and costs no other
part its result if it fails. The model has the shape of RhoMath-1B (TinyLlama, 1.1 B) and random
weights. The settings are those of `tba.py gsm8k`, with weights and moments in bf16.
"""

import io
import os
import queue
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing
from common import arguments, gsm8k, make_row, save, steps_of, table_of
from trainer_step import SHAPE_GPU, VOCABULARY, floor_flops, make_model, matrix_product_rate
from transformers import LlamaConfig, LlamaForCausalLM

import models.policy
from config import Config
from extras.sharding import Rank
from launch.files import read_spans
from launch.places import find_places, resolve
from launch.planning.plan import CUDA_BYTES, GIB, Plan
from learner import Learner, make_learner
from loss import LossInputs
from models.architecture import weight_shapes
from models.attention import lay_out
from models.device import device, lock_pages
from models.logprobs import TOKENS_IN_LOW_MEMORY, full_query_tokens, response_logprobs
from models.policy import compile_layers
from rollouts import Group, Response, join_tokens
from runtime.memory_trial import try_largest_batch
from runtime.transport.messages import Evaluation
from runtime.transport.status import StatusTable
from tasks.gsm8k import PRESETS
from trainer import Trainer
from weights import SharedWeights

QUICK = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
SHAPE_7B = dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
SHAPE_7B |= dict(num_attention_heads=32, num_key_value_heads=32)
ON_A_CPU = dict(
    dtype="float32", master_dtype="float32", queries_per_batch=1, max_response_tokens=99
)
CARD_GIB, GROUPS_ON_THE_WAY = 80, 20
# Queries of full length in a micro-batch, and tokens of a pass of --low_memory or 0.
VARIANTS = (1, 0), (2, 0), (4, 0), (1, 1024), (1, 2048), (1, 4096)

Say = Callable[[str, str], None]  # what was measured, and what came out


def shape_of(quick: bool) -> dict[str, int]:
    return QUICK if quick else SHAPE_GPU


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    """Append the seconds that the block takes, to its last kernel."""
    start = time.perf_counter()
    yield
    if device().type == "cuda":
        torch.cuda.synchronize()
    times.append(time.perf_counter() - start)


@contextmanager
def peak(found: list[float]) -> Iterator[None]:
    """Append the GiB that were allocated on the GPU at the peak of the block; 0 without one."""
    if device().type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield
    found.append(torch.cuda.max_memory_allocated() / GIB if device().type == "cuda" else 0.0)


def settings(root: str, **changed: object) -> Config:
    """The GSM8K run on the model made for it, as on a machine with four such cards."""
    if device().type == "cpu":
        changed |= ON_A_CPU
    config = Config(task="gsm8k", **PRESETS["figure1"] | dict(model=f"{root}/model") | changed)
    return resolve(config, find_places(config, list("0123")))


def read_rows(root: str) -> list[Response]:
    """Read the rows that main() made: 20 solutions to each of some GSM8K problems."""
    return torch.load(f"{root}/rows.pt", weights_only=False)


def batch_of(rows: list[Response], config: Config, step: int = 0) -> list[Response]:
    """The rows of a batch, others at each step."""
    size = config.queries_per_batch * config.responses_per_query
    first = step * size % (len(rows) - size + 1) // config.responses_per_query
    return rows[first * config.responses_per_query :][:size]


def counted(config: Config) -> float:
    """GiB that --plan counts of the trainer's tensors on a GPU."""
    places = find_places(config, list("0123"))
    plan = Plan(config, places, {f"GPU {gpu}": CARD_GIB * GIB for gpu in range(4)})
    return sum(nbytes for _, nbytes in plan.trainer()) / GIB


def correctness(root: str, quick: bool, say: Say) -> None:
    """Gradients of queries of several lengths against float64."""
    shape = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    shape |= dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.06)
    make_model(f"{root}/small", **shape)
    own = dict(model=f"{root}/small", responses_per_query=4, queries_per_batch=6)
    for longest in (90, 93):
        rng, rows = np.random.default_rng(0), []
        for number, width in enumerate((100, 3, 40, 77, 12, 64)):
            prompt = rng.integers(VOCABULARY, size=width)
            for length in (longest, *rng.integers(1, longest, size=3)):
                ids = rng.integers(VOCABULARY, size=length)
                rows.append(make_row(number, prompt, ids, rng))
        for dtype in ("float32", "bfloat16"):
            config = Config(dtype=dtype, tokens_per_micro_batch=10**6, low_memory="off", **own)
            learner = Learner(config, print)
            learner.accumulate(rows)
            found = torch.cat([p.grad.flatten().double().cpu() for p in learner.trained.values()])
            logprobs = learner.logprobs(rows).detach().double().cpu()
            inputs = vars(learner.loss_inputs(rows)).items()
            inputs = {k: v.cpu().detach() if torch.is_tensor(v) else v for k, v in inputs}
            exact = learner.policy.double().cpu()
            exact.zero_grad()
            texts = [row.prompt for row in rows], [row.tokens["token"] for row in rows]
            inputs["logprobs"] = response_logprobs(exact, *texts, config.temperature, torch.float64)
            learner.objective(LossInputs(**inputs))[0].backward()
            wanted = torch.cat([p.grad.flatten() for p in exact.parameters()])
            apart = (found - wanted).norm() / wanted.norm()
            cosine = torch.cosine_similarity(found, wanted, dim=0)
            worst = (logprobs - inputs["logprobs"]).abs().max()
            say(
                f"gradient in {dtype}, {99 + longest} keys",
                f"{apart:.1e} from float64's, relative (cosine {cosine:.6f}); log-probabilities "
                f"{worst:.1e} nats at most",
            )


def attention(root: str, quick: bool, say: Say) -> None:
    """The kernel for packed segments, in bf16, against a padded batch of them in fp32."""
    say("versions", f"torch {torch.__version__}, {torch.version.cuda}")
    prompts = [np.arange(length) for length in (128, 128, 128, 1, 60)]
    responses = [np.arange(length) for length in (65, 1, 200, 2, 30)]  # some of one token or two
    for score in (0.0, -200.0):  # of each key, about: exp(-88.7) is the last above 0 in fp32
        for window in (None, 40):
            found = []
            for dtype in (torch.bfloat16, torch.float32):
                packed = device().type == "cuda" and dtype == torch.bfloat16
                row = lay_out(prompts, responses, device(), packed)
                torch.manual_seed(0)
                shapes = (len(row.ids), 8, 64), *[(len(row.ids), 2, 64)] * 2
                q, k, v = (torch.randn(shape).bfloat16().to(device(), dtype) for shape in shapes)
                if score:
                    q, k = q * 0 + 1, k * 0.01 + score / 8  # 64 x score / 8 / sqrt(64)
                inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
                out = row.segments.attend(*inputs, None, window)
                out.float().square().sum().backward()
                found.append([each.detach().float() for each in (out, *(x.grad for x in inputs))])
            apart = [float((one - other).norm() / other.norm()) for one, other in zip(*found)]
            figures = ", ".join(f"{name} {x:.1e}" for name, x in zip(("out", *"qkv"), apart))
            say(f"attention, scores about {score:.0f}, window {window}", f"apart by {figures}")


def steps(root: str, quick: bool, say: Say) -> None:
    """Seconds of Learner.update by the size of a micro-batch, compiled too; where they go."""
    rows, rate = read_rows(root), matrix_product_rate(device())
    say("one large matrix product, bf16", f"{rate / 1e12:.0f} TFLOP/s")
    learner = Learner(settings(root), print)
    query_tokens = full_query_tokens(learner.config)
    for is_compiled in (False, True):
        if is_compiled:
            begin = time.perf_counter()
            compile_layers(learner.policy)
            say("to compile the layers", f"{time.perf_counter() - begin:.0f} s")
        for queries, low in VARIANTS[:2] if is_compiled else VARIANTS:
            tokens = queries * query_tokens
            learner.config = replace(learner.config, tokens_per_micro_batch=tokens)
            TOKENS_IN_LOW_MEMORY[device().type] = low
            learner.low_memory, times, most = bool(low), [], []
            what = f"a step, {queries} queries at once" + f", two passes of {low}" * bool(low)
            what += ", compiled" * is_compiled
            try:
                with peak(most):
                    for step in range(2 if quick else 5):
                        with timed(times):
                            learner.update(batch := batch_of(rows, learner.config, step))
            except torch.OutOfMemoryError:
                learner.optimizer.zero_grad()
                say(what, "does not fit")
                continue
            seconds = statistics.median(times[1:])
            share = floor_flops(shape_of(quick), batch) / rate / seconds
            figures = f"{seconds:.2f} s, {share:.0%} of the rate of that product"
            say(what, f"{figures}, peak {most[0]:.1f} GiB")
        learner.low_memory, learner.config = False, settings(root)
        with torch.profiler.profile() as profile:
            learner.update(batch_of(rows, learner.config))
        events = profile.key_averages()
        key = "self_device_time_total" if device().type == "cuda" else "self_cpu_time_total"
        total = sum(getattr(event, key) for event in events)
        say("  of a step: kernels" + ", compiled" * is_compiled, f"{total / 1e6:.2f} s")
        for event in sorted(events, key=lambda event: -getattr(event, key))[: 9 if quick else 14]:
            share = f"{getattr(event, key) / total:.1%} of the device's time, {event.count} times"
            say(f"  of a step: {event.key[:70]}", share)


def memory(root: str, quick: bool, say: Say) -> None:
    """The peak of the largest-batch trial against the plan."""
    for name, changed in {
        "bf16": {},
        "fp32 weights and moments": dict(master_dtype="float32"),
        "bf16, two passes": dict(low_memory="on"),
    }.items():
        config, most = settings(root, **changed), []
        learner = Learner(config, print)
        with peak(most):
            try_largest_batch(config, learner, print)
        say(
            f"largest batch of gsm8k, {name}",
            f"peak {most[0]:.1f} GiB, the plan counts {counted(config):.1f}",
        )
        if device().type == "cuda":
            free, total = torch.cuda.mem_get_info()
            beside = (total - free - torch.cuda.memory_reserved()) / GIB
            kept = torch.cuda.max_memory_reserved() / GIB - most[0]
            more = f"{beside:.2f} GiB beside torch's, {kept:.2f} of fragments at the peak"
            say("  what CUDA takes", f"{more}; the plan: {CUDA_BYTES / GIB:.2f}")
        del learner


def publishes(root: str, quick: bool, say: Say) -> None:
    """Seconds of a publish, fp32 weights on the GPU to bf16 ones in shared memory."""
    config = settings(root, master_dtype="float32")
    learner = Learner(config, print)
    weights = SharedWeights(weight_shapes(config), torch.bfloat16, readers=1)
    views, times = weights._views(weights.slots[0]), {}

    def uncast() -> None:
        for name, tensor in learner.weights():
            views[name].copy_(tensor.detach())

    for kind in ("pageable", "locked"):
        if kind == "locked":
            lock_pages(weights.memories, print)
        times = {"publish": [], "without the cast first": []}
        for version in range(7):
            with timed(times["publish"]):
                assert weights.publish(version, learner.weights())
            if version < 5:
                with timed(times["without the cast first"]), torch.no_grad():
                    uncast()
        for what, found in times.items():
            say(f"{what}, {kind} memory", f"{statistics.median(found[3:]):.3f} s")


def feed(root: str, weights: SharedWeights, rollouts: Queue) -> None:
    """Send groups of 24 as searchers do, of the weights that are the newest: a process."""
    rows, rng = read_rows(root), np.random.default_rng(0)
    queries = len(rows) // 20
    rollouts.put(Evaluation(version=0, metrics={}, queries=1))
    while torch.multiprocessing.parent_process().is_alive():
        query = int(rng.integers(queries))
        few = [rows[20 * query + i] for i in rng.integers(20, size=24)]
        tokens, version = join_tokens([row.tokens for row in few]), max(0, weights.version)
        # Distinct, or the buffer would keep one of equal ones.
        is_new = rng.random(len(tokens)) < 0.1
        tokens["token"] = np.where(is_new, rng.integers(VOCABULARY), tokens["token"])
        noise = rng.normal(-10, 1, (2, len(tokens)))
        tokens["ref_logprob"], tokens["behavior_logprob"] = noise
        group = Group(query_id=query, prompt=few[0].prompt, version=version, last_version=version)
        group.lengths = np.array([len(row.tokens) for row in few], np.int32)
        group.tokens, group.finished, group.temperature = tokens, np.ones(24, bool), 0.7
        group.rewards = rng.integers(2, size=24).astype(np.float32)
        with suppress(queue.Full):
            rollouts.put(group, timeout=1.0)


def whole_steps(root: str, quick: bool, say: Say) -> None:
    """The trainer's own loop, fed with groups of GSM8K's lengths; checkpoints and model/ too."""
    count = 8 if quick else 60
    config = settings(root, steps=count, checkpoint_every=count // 2, eval_every=0)
    config = replace(config, options=dict(data_dir=os.environ["GPU_DAY_DATA"]))
    weights = SharedWeights(weight_shapes(config), torch.bfloat16, readers=1)
    spawn, run_dir = torch.multiprocessing.get_context("spawn"), f"{root}/run"
    rollouts = spawn.Queue(GROUPS_ON_THE_WAY)
    status = StatusTable(["trainer", *(f"searcher {rank}" for rank in range(config.searchers))])
    Path(run_dir, "logs").mkdir(parents=True)
    feeder = spawn.Process(target=feed, args=(root, weights, rollouts), daemon=True)
    feeder.start()
    with open(f"{root}/run.txt", "w") as shown, redirect_stdout(shown):
        trainer = Trainer(config, weights, rollouts, status, run_dir)
        trainer.train()
    feeder.kill()
    spans, lines = read_spans(run_dir)["trainer"], steps_of(run_dir)
    begins = [begin for name, begin, _ in spans if name == "step"]
    gap = statistics.median(np.diff(begins)[4:])
    say("the trainer's loop", f"{gap:.2f} s from step to step: 700 in {700 * gap / 60:.0f} min")
    busy = {}
    for name, begin, end in spans:
        if begins[4] <= begin < begins[-1]:
            busy[name] = busy.get(name, 0.0) + end - begin
    whole = begins[-1] - begins[4]
    say("  its spans", ", ".join(f"{name} {took / whole:.1%}" for name, took in busy.items()))
    tokens = sum(len(row.tokens) for row in batch_of(read_rows(root), config))
    say(
        "  a batch", f"{tokens} response tokens, reported buffer of {lines[-1]['buffer_responses']}"
    )
    copies = [end - begin for name, begin, end in spans if name == "checkpoint"]
    say(
        "a checkpoint, bf16",
        f"the loop stops for {', '.join(f'{took:.2f}' for took in copies)} s; written beside it "
        f"in {status.get('trainer', 'save_seconds'):.1f} s",
    )
    files = sum(file.stat().st_size for file in Path(run_dir, "model").iterdir())
    say("  model/", f"{files / GIB:.2f} GiB")


def lora_7b(root: str, quick: bool, say: Say) -> None:
    """The peak of the largest-batch trial with LoRA of rank 32 at 7 B."""
    shape = QUICK if quick else SHAPE_7B
    architecture = LlamaConfig(**shape, vocab_size=VOCABULARY)
    architecture.save_pretrained(f"{root}/7b")
    # Random weights made where they are used: to write and load 27 GB would take minutes.
    with torch.device(device()):
        model = LlamaForCausalLM(architecture)
    models.policy.load_model = lambda *_, **__: model
    models.policy.check_architecture = lambda model: None  # is for a CPU
    config, most = settings(root, model=f"{root}/7b", lora_rank=32), []
    learner = make_learner(config, print)
    with peak(most):
        try_largest_batch(config, learner, print)
    passes = "two passes" if learner.low_memory else "one pass"
    say(
        "largest batch of gsm8k, LoRA of rank 32 at 7 B",
        f"{passes}, peak {most[0]:.1f} GiB, the plan counts {counted(config):.1f}",
    )


def sharded(root: str, quick: bool, say: Say) -> None:
    """FSDP2 on one rank against none: seconds of a step, and what two steps make of the weights."""
    rows, norms, seconds, ends = read_rows(root), {}, {}, {}
    for name, ranks in {"one process": None, "FSDP2, one rank": Rank(0, 1, [], 60.0)}.items():
        learner = make_learner(settings(root, master_dtype="float32"), print, ranks)
        times, most = [], []
        with peak(most):
            for step in range(2 if quick else 5):
                with timed(times):
                    found = learner.update(batch_of(rows, learner.config, step))
                if step == 0:
                    norms[name] = found["grad_norm"]
        seconds[name] = statistics.median(times[1:])
        ends[name] = torch.cat([one.flatten().cpu() for _, one in learner.weights()])
        say(f"a step, {name}", f"{seconds[name]:.2f} s, peak {most[0]:.1f} GiB")
        del learner
    plain, other = ends.values()
    say(
        "FSDP2 / none",
        f"{seconds['FSDP2, one rank'] / seconds['one process']:.2f} of the time; first gradient's "
        f"norm {norms['FSDP2, one rank'] / norms['one process'] - 1:+.1e}, weights at the end "
        f"{(plain - other).abs().max():.1e} apart at most",
    )


# With the seconds after which it is given up.
PARTS = {
    "Attention": (attention, 40),
    "Is it correct?": (correctness, 60),
    "A step": (steps, 150),
    "Memory": (memory, 90),
    "A publish": (publishes, 60),
    "The trainer's loop": (whole_steps, 170),
    "LoRA": (lora_7b, 120),
    "FSDP2": (sharded, 90),
}


def work(part: str, root: str, quick: bool, lines: Queue) -> None:
    """Run one part: a process."""
    try:
        PARTS[part][0](root, quick, lambda what, found: lines.put((what, found)))
    except Exception as error:
        traceback.print_exc()
        lines.put((part, f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"))
    lines.put(None)


def run(part: str, root: str, quick: bool) -> list[dict[str, str]]:
    """Run one part. Prints and returns its lines."""
    spawn, rows, begin = torch.multiprocessing.get_context("spawn"), [], time.monotonic()
    lines, limit = spawn.Queue(), PARTS[part][1] * (5 if quick else 1)
    process = spawn.Process(target=work, args=(part, root, quick, lines))
    process.start()
    while True:
        try:
            found = lines.get(timeout=max(0.1, begin + limit - time.monotonic()))
        except queue.Empty:
            found = part, f"given up after {limit} s"
            process.kill()
        if found is None:
            break
        print(f"{time.monotonic() - begin:6.1f} s  {': '.join(found)}", flush=True)
        rows.append(dict(zip((part, "on this card"), found)))
        if "given up" in found[1]:
            break
    process.join(10)
    process.kill()
    return rows


def make_on_device(directory: str, shape: dict[str, int]) -> None:
    with device():
        make_model(directory, **shape)


def main() -> None:
    options = arguments(__doc__, ("--data_dir", ""), ("--only", ""))
    os.environ["GPU_DAY_DATA"] = str(Path(options.data_dir).absolute())
    config = PRESETS["figure1"]
    with tempfile.TemporaryDirectory() as root:
        prompts, solutions, tokenizer = gsm8k(options.data_dir, VOCABULARY)
        rng, rows = np.random.default_rng(0), []
        for query in range(20 if options.quick else 200):
            prompt = np.array(tokenizer(prompts[query]).input_ids, np.int32)
            for solution in rng.integers(len(solutions), size=config["responses_per_query"]):
                ids = tokenizer(solutions[solution] + "<eos>").input_ids
                ids = ids[: 99 if device().type == "cpu" else config["max_response_tokens"]]
                rows.append(make_row(query, prompt, ids, rng))
        torch.save(rows, f"{root}/rows.pt")
        tokenizer.save_pretrained(f"{root}/model")
        parts = [part for part in PARTS if options.only in part]
        # Models too are made by a process: this one would hold some of the GPU's memory.
        with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(make_on_device, (f"{root}/model", shape_of(options.quick)))
        lengths = [len(row.tokens) for row in rows]
        tables = [f"Responses of {np.mean(lengths):.0f} tokens on average, {max(lengths)} at most."]
        for part in parts:
            tables.append(table_of(run(part, root, options.quick)))
            with redirect_stdout(io.StringIO()):  # what is there, if the rest is cut off
                save("gpu_day", options.quick, *tables)


if __name__ == "__main__":
    main()
