"""Rehearse a whole GSM8K run at the size of Qwen2.5-0.5B, without a GPU.

    python benchmarks/rehearsal.py --data_dir DIR         # 12 minutes, 23 GiB
    python benchmarks/rehearsal.py --quick                # tiny models, in three minutes

GSM8K comes from the hub without --data_dir.

The model is random; half of its layers are stored in fp32, the rest in bf16. It runs in bf16; in
fp32 with 20 of its 24 layers, as 24 GiB have no room for all; and with half of them, for
checkpoints beside the training: they come every other step where the plan has room for their copy.
The run is one of the command line. It is interrupted (SIGINT) in mid-run, which leaves a checkpoint
too, and resumed with more steps; then the saved model is evaluated. So it shows whether each part
works at such a size, what each takes, and whether the plan of memory (--plan) is right. It shows
nothing of learning: the model never answers right.

Seconds come from the run's own spans, or from when its processes begin and end. Memory is what
/proc/PID/status says, read every 0.1 s.
Writes benchmarks/results/rehearsal.md; with --quick benchmarks/results/quick/.
"""

import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from common import ROOT, arguments, as_flags, gsm8k, save, table
from transformers import Qwen2Config, Qwen2ForCausalLM

from config import Config
from models.policy import load_policy, weight_shapes
from runtime.command_line import build_config
from runtime.planning.needs import GIB, MEMORY
from runtime.planning.plan import Plan, make_plan, this_machine
from runtime.processes.places import find_places, resolve
from runtime.record.timeline import read_lines, read_spans
from tasks import load_task
from tasks.support.data import read_rows
from weights import num_elements

# Computed in, and with how many of 24 layers: what 24 GiB have room for.
RUNS = (("bfloat16", 24), ("float32", 20), ("bfloat16", 12))
SHAPE = dict(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
)
SHAPE_QUICK = dict(
    vocab_size=8192,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
)
SETTINGS = dict(
    master_dtype="float32",
    queries_per_batch=4,
    responses_per_query=2,
    samples_per_query=2,
    initial_responses=8,
    max_prompt_tokens=96,
    max_response_tokens=48,
    low_memory="off",
)
# The command line, with a searcher that is at most two steps ahead, as on the trainer's own GPU.
THROTTLED = """
import sys, tba
from runtime.processes import places
places.search_ahead = lambda *_: 2
sys.exit(tba.main(sys.argv[1:]))
"""
STEPS, RESUMED_STEPS, CHECKPOINT_EVERY = 4, 6, 2
INTERRUPTED = 3  # the step behind which the run is interrupted
TOKENIZER_VOCABULARY = 8192
ROWS = {"train": 64, "test": 4}
LONGEST = 200  # characters of a question
PERIOD = 0.1  # seconds between two looks at the processes
COMMAND_LINE, TOGETHER = "command line", "all together"


class Span(NamedTuple):
    """What a process did from one moment to another."""

    name: str
    begin: float
    end: float


class Memory(NamedTuple):
    """The resident memory of a process at one moment, in GiB.

    own: its own; shared: what it has used of shared memory; most: the most until then of these two
    and of mapped files together.
    """

    clock: float
    own: float
    shared: float
    most: float


class Part(NamedTuple):
    """A part of the run, the words for how long it took, and the most memory of its process."""

    name: str
    time: str
    gib: float


class Watch:
    """Notes what memory processes have while they run, by name."""

    def __init__(self):
        self.seen: dict[str, list[Memory]] = defaultdict(list)

    def look(self, pids: dict[int, str]) -> None:
        """Look at processes once. pids: process id -> name."""
        clock, now = time.monotonic(), []
        for pid, name in pids.items():
            if memory := read_memory(pid, clock):
                self.seen[name].append(memory)
                now.append(memory)
        if now:
            shared = max(memory.shared for memory in now)
            total = sum(memory.own for memory in now) + shared
            self.seen[TOGETHER].append(Memory(clock, total, shared, total))

    def most(self, process: str, kind: str, spans: Iterable[Span] | None = None) -> float:
        """Find the most that a process had of one kind of memory, in these spans of its time."""
        spans = [Span("", 0.0, float("inf"))] if spans is None else list(spans)
        return max(
            (
                getattr(memory, kind)
                for memory in self.seen[process]
                for span in spans
                if span.begin - PERIOD <= memory.clock <= span.end + PERIOD
            ),
            default=float("nan"),
        )

    def end(self, process: str) -> float:
        """Tell when a process was last seen."""
        return self.seen[process][-1].clock


def read_memory(pid: int, clock: float) -> Memory | None:
    """Read /proc/PID/status; None for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    if "VmHWM" not in fields:  # a zombie
        return None
    own, shared, most = (
        int(fields[name].split()[0]) * 1024 / GIB for name in ("RssAnon", "RssShmem", "VmHWM")
    )
    return Memory(clock, own, shared, most)


def processes_of(pid: int) -> dict[int, str]:
    """Find the processes of a run: id -> the name it gives itself. pid: of its command line."""
    try:
        names = {child.pid: child.name() for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:  # one has just ended
        return {}
    own = {child: name.removeprefix("tba ") for child, name in names.items() if "tba " in name}
    return {pid: COMMAND_LINE} | own


def make_files(directory: Path, model: Path, data_dir: str) -> None:
    """Write a tokenizer beside the model and a few rows of each split into directory/data."""
    _, _, tokenizer = gsm8k(data_dir, TOKENIZER_VOCABULARY)
    tokenizer.save_pretrained(model)
    (directory / "data").mkdir()
    for split, count in ROWS.items():
        hub = ("openai/gsm8k", "main", split)
        rows = [row for _, row in read_rows(data_dir, split, ("question", "answer"), hub)]
        few = [row for row in rows if len(row["question"]) <= LONGEST][:count]
        text = "".join(json.dumps(row) + "\n" for row in few)
        (directory / "data" / f"{split}.jsonl").write_text(text)


def make_model(directory: str, shape: dict[str, int]) -> None:
    """Write a random Qwen2, every second layer of it in bf16."""
    torch.manual_seed(0)
    config = Qwen2Config(**shape, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0)
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers[1::2]:
        layer.to(torch.bfloat16)
    model.save_pretrained(directory)


def load_model(directory: str) -> None:
    """Load the model as trainer and searchers do."""
    load_policy(Config(model=directory), torch.device("cpu"))


def measure_alone(name: str, target: Callable, *values) -> Part:
    """Measure what a function takes in a process of its own, imports included."""
    watch, begin = Watch(), time.monotonic()
    process = multiprocessing.get_context("spawn").Process(target=target, args=values)
    process.start()
    while process.is_alive():
        watch.look({process.pid: name})
        process.join(PERIOD)
    if process.exitcode:
        sys.exit(f"{name}: exit code {process.exitcode}")
    return Part(name, f"{time.monotonic() - begin:.3g}", watch.most(name, "own"))


def step_lines(run_dir: Path) -> list[dict]:
    """Read the lines of metrics.jsonl that are of a step."""
    return [line for line in read_lines(run_dir / "metrics.jsonl") if "loss" in line]


class Rehearsal:
    """One run, from its start to its interruption and from its resumption to its end.

    directory: has data/; model: its directory; dtype: what it computes in.
    """

    def __init__(self, directory: Path, model: Path, dtype: str):
        self.run_dir, self.log = directory / "run", directory / "log"
        where = as_flags(model=model, data_dir=directory / "data", output_dir=self.run_dir)
        self.watch = Watch()
        self.spans: dict[str, list[Span]] = defaultdict(list)  # by process
        self.begins: list[float] = []  # of the two command lines
        for period in (CHECKPOINT_EVERY, 0):
            settings = SETTINGS | dict(dtype=dtype, steps=STEPS, checkpoint_every=period)
            self.flags = ["gsm8k", *where, *as_flags(**settings)]
            self.plan = self.make_plan()
            if not self.plan.is_short(MEMORY):
                break

    def make_plan(self) -> Plan:
        """Make the plan that the start of the run makes."""
        config = build_config(self.flags)
        task, places = load_task(config.task, **config.options), find_places(config)
        return make_plan(resolve(config, places), task, places, this_machine(config, places))

    def launch(self, flags: list[str], expected: int, interrupt_behind: int | None = None) -> Span:
        """Run the command line to its end. Returns when it ended, counted from the interruption.

        expected: its exit code; interrupt_behind: the step after which it is sent SIGINT.
        """
        interrupted = time.monotonic()
        self.begins.append(interrupted)
        with open(self.log, "a") as log:
            command = [sys.executable, "-c", THROTTLED, *flags]
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            while process.poll() is None:
                self.watch.look(processes_of(process.pid))
                if interrupt_behind and len(step_lines(self.run_dir)) >= interrupt_behind:
                    process.send_signal(signal.SIGINT)
                    interrupt_behind, interrupted = None, time.monotonic()
                time.sleep(PERIOD)
        finally:
            process.kill()
        if process.returncode != expected:
            output = self.log.read_text()[-3000:]
            sys.exit(f"the run ended with exit code {process.returncode}:\n{output}")
        for name, spans in read_spans(str(self.run_dir)).items():
            self.spans[name.replace("-", " ")] += [Span(*span) for span in spans]
        return Span("end", interrupted, time.monotonic())

    def parts(self) -> list[Part]:
        """Make the run and measure its parts."""
        interrupt = self.launch(self.flags, 128 + signal.SIGINT, INTERRUPTED)
        first = [
            self.start("start to the trainer's first publish", "trainer"),
            self.start("start to the searcher's first token", "searcher 0"),
            self.generation(),
        ]
        self.launch(as_flags(resume=self.run_dir, steps=RESUMED_STEPS), 0)
        resumed = [span for span in self.spans["trainer"] if span.begin > self.begins[1]]
        step = next(span for span in resumed if span.name == "step")
        resume = Span("resume", self.begins[1], step.begin)
        evaluation = Span("final", self.watch.end("trainer"), self.watch.end("evaluation"))
        return [
            *first,
            self.repeated("reference log-probabilities", "reference", "searcher 0"),
            self.repeated("a trainer's step", "step", "trainer"),
            self.repeated("a publish", "publish", "trainer"),
            self.repeated("a load into vLLM", "load", "searcher 0"),
            self.repeated("a checkpoint begun (its copy)", "checkpoint", "trainer"),
            self.once("SIGINT to the end: the step, a checkpoint, model/", "trainer", interrupt),
            self.once("the resume: start to first step", "trainer", resume),
            self.once("model/", "trainer", self.model_saved()),
            self.once("the final evaluation: engine, responses", "evaluation", evaluation),
        ]

    def once(self, name: str, process: str, span: Span) -> Part:
        """Measure one span."""
        return Part(name, f"{span.end - span.begin:.3g}", self.watch.most(process, "own", [span]))

    def repeated(self, name: str, span_name: str, process: str) -> Part:
        """Measure the spans of one name: their mean, and how many there are."""
        spans = [span for span in self.spans[process] if span.name == span_name]
        if not spans:
            return Part(name, "none", float("nan"))
        mean = sum(span.end - span.begin for span in spans) / len(spans)
        return Part(name, f"{mean:.3g} × {len(spans)}", self.watch.most(process, "own", spans))

    def start(self, name: str, process: str) -> Part:
        """Measure the time from the command line to the first thing that a process did."""
        span = Span("start", self.begins[0], self.spans[process][0].begin)
        return self.once(name, process, span)

    def generation(self) -> Part:
        """Measure how the groups were generated that the trainer had at the latest step.

        The responses to test queries are generated beside them, and count too.
        """
        received = [span for span in self.spans["trainer"] if span.name == "receive"][-1].begin
        scored = [span.end for span in self.spans["searcher 0"] if span.name == "reference"]
        done = max(end for end in scored if end <= received)
        spans = [
            span
            for span in self.spans["searcher 0"]
            if span.name in ("search", "eval") and span.end <= done
        ]
        last = step_lines(self.run_dir)[-1]
        tokens = (last["received"] + ROWS["test"]) * last["response_tokens"]
        seconds = sum(span.end - span.begin for span in spans)
        groups = last["received"] / SETTINGS["samples_per_query"]
        return Part(
            "generation of a group",
            f"{seconds / groups:.3g}; {tokens / seconds:.3g} tokens/s",
            self.watch.most("searcher 0", "own", spans),
        )

    def model_saved(self) -> Span:
        """Find when model/ was written: from the last step's end to that of its last file."""
        clock = time.monotonic() - time.time()
        step = max(span.end for span in self.spans["trainer"] if span.name == "step")
        written = max(file.stat().st_mtime for file in (self.run_dir / "model").iterdir())
        return Span("model", step, written + clock)

    def against_plan(self) -> list[list[str]]:
        """Make the rows of a table: process, what the plan says, and what was measured."""
        planned: dict[str, float] = defaultdict(float)  # by process
        for need in self.plan.needs:
            if need.place == MEMORY:
                planned[need.process] += need.bytes / GIB
        copies, watch = planned.pop("all"), self.watch
        rows = [
            [
                name,
                f"{gib:.2f}",
                f"{watch.most(name, 'own'):.2f}",
                f"{watch.most(name, 'most'):.2f}",
            ]
            for name, gib in planned.items()
        ]
        shared = f"{watch.most(TOGETHER, 'shared'):.2f}"
        together = f"{watch.most(TOGETHER, 'most'):.2f}"
        rows.append(["copies of the weights", f"{copies:.2f}", shared, ""])
        rows.append([TOGETHER, f"{self.plan.total(MEMORY) / GIB:.2f}", together, ""])
        for name in ("evaluation", COMMAND_LINE):
            own, most = watch.most(name, "own"), watch.most(name, "most")
            rows.append([name, "", f"{own:.2f}", f"{most:.2f}"])
        return rows


def main() -> None:
    options = arguments(__doc__, ("--data_dir", ""), ("--layers", 24))
    # In the background of a script it is ignored, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shape = SHAPE_QUICK if options.quick else SHAPE
    parts, rows = {}, []
    for dtype, layers in RUNS:
        layers = layers * shape["num_hidden_layers"] // 24
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            model = directory / "model"
            make_files(directory, model, options.data_dir)
            changed = shape | dict(num_hidden_layers=layers)
            alone = [
                measure_alone("making the model", make_model, str(model), changed),
                measure_alone("loading it with transformers, in fp32", load_model, str(model)),
            ]
            parameters = num_elements(weight_shapes(Config(model=str(model))))
            run = f"{parameters / 1e6:.3g} M, {dtype}"
            rehearsal = Rehearsal(directory, model, dtype)
            parts[run] = [*alone, *rehearsal.parts()]
            rows += [[run, *row] for row in rehearsal.against_plan()]
        report(options.quick, parts, rows)  # the next may be refused


def report(quick: bool, parts: dict[str, list[Part]], rows: list[list[str]]) -> None:
    """Save the tables. parts: by run; rows: of Rehearsal.against_plan(), with the run."""
    header = ["", *(f"{run}, {unit}" for run in parts for unit in ("seconds", "GiB"))]
    lines = []
    for same in zip(*parts.values()):
        cells = [cell for part in same for cell in (part.time, f"{part.gib:.2f}")]
        lines.append([same[0].name, *cells])
    save(
        "rehearsal",
        quick,
        f"{STEPS} steps, then {RESUMED_STEPS}, of "
        f"{SETTINGS['queries_per_batch']} queries × {SETTINGS['responses_per_query']} responses of "
        f"at most {SETTINGS['max_prompt_tokens']} + {SETTINGS['max_response_tokens']} tokens; "
        f"{ROWS['test']} test queries.",
        "Seconds (the mean × how often), and the most memory of the process in that part, without "
        "shared memory and mapped files:",
        table(header, lines),
        "The plan (`--plan`) against the most that was measured, in GiB. *own*: without shared "
        "memory and mapped files; *VmHWM*: with them. All together is the most at one moment, the "
        "copies counted once:",
        table(["", "", "plan, GiB", "own", "VmHWM"], rows),
    )


if __name__ == "__main__":
    sys.exit(main())
