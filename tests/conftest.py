"""What the tests share.

The environment that a searcher gets, tiny models made on the spot, and the command line as a
subprocess.
"""

import gc
import importlib.metadata
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from common import as_flags as flags
from common import steps_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from config import Config, UserError
from launch import children
from launch.places import Place
from learner import find_objective
from models import logprobs
from models.policy import load_policy
from rollouts import Group, make_tokens

ROOT = Path(__file__).parents[1]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
# Whether the vLLM for GPUs is installed: then these are the tests of make test-gpu.
ON_GPU = any(package.name == "vllm" for package in importlib.metadata.distributions())
# What a searcher finds in its environment, before a test imports vLLM.
GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if ON_GPU else None
os.environ.update(children.environment(Place("tests", GPU, [0])))
torch.set_num_threads(1)  # it is imported already, and did not find this
# Progress bars push what matters out of a CI's record. Of this process alone: a run has them.
transformers.utils.logging.disable_progress_bar()


# Seconds that a test waits for what must happen before it fails. Far more than it takes: the tests
# pass beside other work on all cores. Less than --searcher_timeout, so that a death is seen as one
# and not as silence. How soon something comes is asserted as a ratio within one run.
PATIENCE = 500.0
WHOLE_RUN = 3 * PATIENCE


# Those that take longest, longest first: two workers that each take file by file end together.
LONGEST = "runs plan hub pretended_gpu sharding engine dtype faults tiny_runs tracking".split()


def pytest_addoption(parser: pytest.Parser) -> None:
    with suppress(ValueError):  # test_pretended_gpu.py has this file as a plugin besides
        parser.addoption("--loss", help="a .py file, to test its objective as those of LOSSES")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--loss"):
        from extras.objectives import LOSSES  # here, as a fork may have deleted it

        if (name := Path(file).stem) in LOSSES:
            raise pytest.UsageError(f"--loss {file}: {name} is one of ours: give it another name")
        try:
            LOSSES[name] = find_objective(file)
        except UserError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(trylast=True)  # once -m has chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order by LONGEST; each worker's share (--dist worksteal) begins with tests marked long."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0))
    if not workers:
        return
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    long = [item for item in items if item.get_closest_marker("long")]
    rest = [item for item in items if item not in long]
    items[:] = []
    for worker in range(workers):
        share = slice(len(rest) * worker // workers, len(rest) * (worker + 1) // workers)
        items += long[worker::workers] + rest[share]


@pytest.fixture
def record_property(record_property):
    """As pytest's, of any value: a worker sends it to the process that prints it."""
    return lambda name, value: record_property(name, str(value))


def pytest_terminal_summary(terminalreporter) -> None:
    """The figures that tests have measured (record_property), for the tables that quote them."""
    for passed in terminalreporter.getreports("passed"):
        for name, value in passed.user_properties:
            terminalreporter.write_line(f"{passed.nodeid.split('::')[-1]}: {name} {value}")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and an end-of-sequence token that is the padding token too."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


# As Qwen2.5's: a turn begins and ends with a token of its own, and one that opens the text would be
# a second one. Refuses what it does not know, as Gemma's does.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ raise_exception('no system messages') }}{%- endif -%}"
    "{{ '<|start|>' + message.role + '\n' + message.content + '<|end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start|>assistant\n' }}{%- endif -%}"
)


# Of the tiny models. 32 a head: the fewest that vLLM takes on a CPU.
SHAPE = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
SHAPE |= dict(num_hidden_layers=2, intermediate_size=64, max_position_embeddings=512)
TOY = dict(intermediate_size=128, max_position_embeddings=1024, initializer_range=0.2)


def make(directory: Path, kind: str, template: str | None = CHAT_TEMPLATE, **settings) -> str:
    """Save a random model of that class, of 0.1 M parameters, that reads and writes bytes."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    end, model_class = tokenizer.eos_token_id, getattr(transformers, kind)
    tokens = dict(vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=end, bos_token_id=None)
    model = model_class(model_class.config_class(**SHAPE | tokens | settings))
    for part in (model, tokenizer):
        part.save_pretrained(directory / kind)
    return str(directory / kind)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory) -> Path:
    return Path(make(tmp_path_factory.mktemp("models"), "LlamaForCausalLM", None, **TOY))


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory) -> Path:
    models = tmp_path_factory.mktemp("models")
    return Path(make(models, "Qwen2ForCausalLM", None, tie_word_embeddings=True, **TOY))


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> Path:
    """The model of untied_model, with a tokenizer that has a chat template."""
    return Path(make(tmp_path_factory.mktemp("models"), "LlamaForCausalLM", **TOY))


def make_group(query: int, version: int, lengths, ids, tokens=None, **fields) -> Group:
    """Make a group whose log-probabilities and rewards are 0, but for the fields that are given.

    ids: of the tokens. tokens: what differs of them, by the names of TOKEN's fields.
    """
    plain = dict(
        version=version,
        last_version=version,
        temperature=1.0,
        prompt=np.array([query, query], np.int32),
        lengths=np.array(lengths, np.int32),
        rewards=np.zeros(len(lengths), np.float32),
        finished=np.ones(len(lengths), bool),
    )
    return Group(query_id=query, tokens=make_tokens(ids, **tokens or {}), **plain | fields)


@pytest.fixture
def logits_made(monkeypatch) -> list[int]:
    """The number of positions of each tensor of logits that is made."""
    positions, made = [], logprobs._logits

    def counted(states, weight, bias):
        positions.append(len(states))
        return made(states, weight, bias)

    monkeypatch.setattr(logprobs, "_logits", counted)
    return positions


@pytest.fixture(scope="session")
def gsm8k_data(tmp_path_factory) -> Path:
    """Real rows where they are at hand, rows of our own making otherwise; few, for short runs."""
    directory = tmp_path_factory.mktemp("gsm8k")
    aside = (
        " He likes them green, and keeps them in a basket by the door, where it is cool, "
        "until it is time to bake."
    )
    for split in ("train", "test"):
        lines, real = [], GSM8K / f"{split}.jsonl"
        if real.exists():
            lines = real.read_text(encoding="utf-8").splitlines()[:40]
        for i in range(len(lines), 40):
            story = f"Tom has {i} apples and buys {i + 2}.{aside * (i % 3)} How many has he?"
            answer = f"{i}+{i + 2}\n#### {2 * i + 2}"
            lines.append(json.dumps({"question": story, "answer": answer}))
        (directory / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return directory


def start_tba(*arguments, tag="", directory=None, prefix=()) -> subprocess.Popen:
    """`python tba.py ARGUMENTS`. Every process of the run carries `tag` in its environment.

    prefix: a command that starts this one. The process group is its own, the session is not: of two
    sessions on a core one may get nothing for a minute (Linux's autogroups).
    """
    command = [*prefix, sys.executable, str(ROOT / "tba.py"), *map(str, arguments)]
    how = dict(cwd=directory or ROOT, env={**os.environ, "TBA_TEST_TAG": tag}, process_group=0)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, **how, **pipes)


def tba(*arguments, code: int = 0, **settings) -> subprocess.CompletedProcess:
    """`python tba.py ARGUMENTS`, to its end, with that exit code. settings: as of start_tba."""
    process = start_tba(*arguments, **settings)
    try:
        out, err = process.communicate(timeout=WHOLE_RUN)
    finally:
        process.kill()
    assert process.returncode == code, (out, err)
    return subprocess.CompletedProcess(process.args, code, out, err)


def python(*words, code: int = 0, **settings) -> subprocess.CompletedProcess:
    """Python with these arguments, to its end, with that exit code. settings: subprocess.run's."""
    how = dict(cwd=ROOT, capture_output=True, text=True, timeout=WHOLE_RUN) | settings
    done = subprocess.run([sys.executable, *map(str, words)], **how)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def living(tag: str) -> list[int]:
    """Process ids of all processes with that tag in their environment."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or a zombie, or not ours
            if f"TBA_TEST_TAG={tag}".encode() in (process / "environ").read_bytes().split(b"\0"):
                pids.append(int(process.name))
    return pids


SHARED_MEMORY = "/dev/shm"


def shared_files(pids: list[int]) -> set[str]:
    """The named files in shared memory that these processes have mapped."""
    names = set()
    for pid in pids:
        with suppress(OSError):  # gone meanwhile
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, is_shared, name = line.partition(f"{SHARED_MEMORY}/")
                if is_shared and not name.endswith("(deleted)"):
                    names.add(name)
    return names


SMALL = flags(queries_per_batch=8, initial_responses=100)
FOREVER = flags(steps=1_000_000)


def read(run_dir: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


class Run:
    """A run in the background. Whatever happens, nothing of it is left when the block ends.

    start_seconds: until its first step; what a test says of a time is measured by that.
    """

    def __init__(self, run_dir: Path | None, *arguments, resume: bool = False, **settings):
        """run_dir: None for what the run itself chooses. settings: as of start_tba."""
        self.run_dir, self.tag = run_dir, uuid.uuid4().hex
        self.shared: set[str] = set()  # files in shared memory that this run's processes have made
        self.began, self.start_seconds = time.monotonic(), 0.0
        where = ("--resume" if resume else "--output_dir", run_dir) if run_dir else ()
        self.process = start_tba(*arguments, *where, tag=self.tag, **settings)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        for pid in [self.process.pid, *living(self.tag)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def until(self, condition, what: str):
        """What condition() gives once that is true; it fails as soon as the run has ended."""

        def check():
            if not (found := condition()) and self.process.poll() is not None:
                raise AssertionError(f"ended, waiting for: {what}\n{self.process.communicate()}")
            return found

        found = wait_for(check, what)
        self.shared |= shared_files(living(self.tag))
        return found

    def steps(self) -> list[dict]:
        return steps_of(self.run_dir)

    def step(self) -> int:
        return max((line["step"] for line in self.steps()), default=0)

    def is_at(self, step: int) -> None:
        self.until(self.step, "a first step")
        self.start_seconds = self.start_seconds or time.monotonic() - self.began
        self.until(lambda: self.step() >= step, f"step {step}")

    def pid(self, name: str) -> int | None:
        """Of the living process that calls itself so."""
        for pid in living(self.tag):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == f"tba {name}":
                    return pid
        return None

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        os.kill(self.until(lambda: self.pid(name), f"a process {name}"), how)

    def ends_with(self, exit_code: int) -> tuple[str, str]:
        """Wait until the run ends, with that exit code; its output."""
        out, err = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == exit_code, err
        return out, err

    def end(self, how: int = signal.SIGINT) -> tuple[str, str]:
        """Asks the run to end; its output."""
        self.process.send_signal(how)
        out, err = self.ends_with(128 + how)
        assert "resource_tracker" not in err, err  # a warning of semaphores left behind
        return out, err

    def nothing_is_left(self) -> None:
        """Wait until no process of the run lives; then nothing of it is in shared memory either.

        That is no longer than three ways to the first step, where a test waited for that.
        """
        assert self.shared, "it was looked at while the run lived"
        start = time.monotonic()
        wait_for(lambda: not living(self.tag), "all processes to end")
        # Python's resource tracker cleans up last.
        wait_for(lambda: not self.shared & set(os.listdir(SHARED_MEMORY)), "shared memory")
        assert not self.start_seconds or time.monotonic() - start < 3 * self.start_seconds


def wait_for(condition, what: str):
    """What condition() gives once that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE:.0f} s: {what}"
        time.sleep(0.05)
    return found


VERSIONS = itertools.count(100)  # one for each test: it meets no keys and values of others


def drain(engine) -> dict:
    """Step until nothing is in flight. Returns the outputs by request."""
    outputs = {}
    while engine.rows:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


@pytest.fixture(scope="module")
def one_engine(tied_model):
    from models.engine import Engine  # here, as importing vLLM takes seconds

    gc.collect()  # the end of an engine of the tests above would be that of vLLM's process groups
    return Engine(Config(model=str(tied_model), max_prompt_tokens=900, max_response_tokens=100))


@pytest.fixture
def engine(one_engine):
    """The engine of all tests that leave the weights of tied_model in it."""
    one_engine.set_version(next(VERSIONS))
    yield one_engine
    drain(one_engine)  # what a searcher has left unfinished


@pytest.fixture
def policy(tied_model) -> torch.nn.Module:
    """The model in the engine, as transformers loads it."""
    return load_policy(Config(model=str(tied_model)), torch.device("cpu"))


@pytest.fixture
def gpus(monkeypatch):
    """A function that makes this a machine with so many GPUs."""

    def have(count: int, usable: bool = True) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)

    return have
