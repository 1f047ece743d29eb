"""Tiny models and data from a hub on localhost (hub.py), with the ids and files of real ones."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
import safetensors.torch
import torch
from conftest import FOREVER, PATIENCE, ROOT, Run, flags, read, start_tba, steps_of, tba, wait_for
from hub import Hub, commit_of
from test_command_line import refused
from test_preset_starts import CUT, make
from transformers import AutoTokenizer

from config import UserError
from models.hub import needed_files
from tasks.gsm8k import PROMPT
from tasks.support.classifier import Classifier, prepare_classifier

RHO = "realtreetune/rho-1b-sft-GSM8K"
TLDR = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
GOLD = "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
STRAY = "model-00001-of-00003.safetensors"  # beside a complete .bin file
SHORT = [*CUT, *flags(max_response_tokens=8, max_prompt_tokens=300)]
HATE = "facebook/roberta-hate-speech-dynabench-r4-target"
LABELS = {0: "nothate", 1: "hate"}
QUANTIZED = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
OWN_CLASSES = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}
OWN_CODE = {"model_type": "own", "auto_map": OWN_CLASSES}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory, gsm8k_data) -> Path:
    """The directory that the hub serves: what gsm8k, redteam and tldr want by default."""
    root = tmp_path_factory.mktemp("hub")

    def publish(name: str, kind: str, **settings) -> Path:
        repository = root / "models" / name
        repository.parent.mkdir(parents=True, exist_ok=True)
        return Path(make(tmp_path_factory.mktemp("models"), kind, **settings)).rename(repository)

    publish(RHO, "LlamaForCausalLM")
    splits = [gsm8k_data / "train.jsonl", gsm8k_data / "test.jsonl"]
    put_dataset(root, "openai/gsm8k", "main", splits)

    gpt2 = publish("openai-community/gpt2", "GPT2LMHeadModel")
    publish("vicgalle/gpt2-alpaca", "GPT2LMHeadModel")
    fill(gpt2, "tf_model.h5", "onnx/decoder_model.onnx", "pytorch_model.bin")
    hate = publish(HATE, "RobertaForSequenceClassification", id2label=LABELS)
    change_config(hate, label2id=None)
    publish("sentence-transformers/all-MiniLM-L6-v2", "BertModel")

    publish("mnoukhov/pythia410m-sft-tldr", "GPTNeoXForCausalLM")
    scoring = dict(kind="GPTNeoXForSequenceClassification", num_labels=1)
    checkpoint = publish("mnoukhov/pythia410m-rm-tldr6.9b", **scoring) / "checkpoint-500"
    fill(checkpoint, "model.safetensors", "optimizer.pt")
    gold = publish(GOLD, **scoring)
    weights = safetensors.torch.load_file(gold / "model.safetensors")
    torch.save(weights, gold / "pytorch_model.bin")
    (gold / "model.safetensors").rename(gold / STRAY)
    rows = tmp_path_factory.mktemp("tldr")
    for split in ("train", "validation", "test"):
        row = {"query": f"POST: {split}\n\nTL;DR:", "reference_response": " a b<eos>"}
        (rows / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 4)
    put_dataset(root, TLDR, "default", sorted(rows.iterdir()))
    return root


def fill(directory: Path, *names: str) -> None:
    """Make files of these names that nobody reads."""
    for file in (directory / name for name in names):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(1000))


def put_dataset(root: Path, name: str, configuration: str, files: list[Path]) -> None:
    """Publish rows of JSON as parquet, a split for each file, named after it."""
    data = root / "datasets" / name
    (data / configuration).mkdir(parents=True)
    for file in files:
        rows = pandas.read_json(file, lines=True)
        rows.to_parquet(data / configuration / f"{file.stem}-00000-of-00001.parquet")
    paths = [{"split": file.stem, "path": f"{configuration}/{file.stem}-*"} for file in files]
    configs = json.dumps([{"config_name": configuration, "data_files": paths}])
    (data / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")


def change_config(model: Path | str, **settings) -> None:
    """Set these in a model's config.json."""
    file = Path(model, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def python(*lines: str) -> subprocess.CompletedProcess:
    """Run Python in a process of its own: the hub's client reads its environment only once."""
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture
def hub(repositories, tmp_path, monkeypatch):
    """The hub, and an empty cache; both for whatever is started from here."""
    served = Hub(repositories)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", served.address)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield served
    served.close()


def test_gsm8k_is_fetched_and_trained_and_counts_prompts_too_long(hub, tmp_path, gsm8k_data):
    def too_long(split: str) -> int:
        prompts = [PROMPT.format(**row) for row in read(gsm8k_data, f"{split}.jsonl")]
        return sum(len(prompt.encode()) > 250 for prompt in prompts)

    run_dir, skipped, left_out = tmp_path / "run", too_long("train"), too_long("test")
    metrics = run_dir / "metrics.jsonl"
    batch = flags(responses_per_query=3, samples_per_query=4, initial_responses=30)
    lengths = flags(max_prompt_tokens=250, max_response_tokens=40)
    with Run(run_dir, "gsm8k", *batch, *lengths, *FOREVER) as run:
        run.is_at(6)
        run.until(lambda: '"accuracy"' in metrics.read_text(), "the base model's evaluation")
        run.until(lambda: run.steps()[-1]["long_prompts"] >= skipped, "each query once")
        out, err = run.end()
    assert f"fetching {RHO} from the hub: 1 files, 0." in err
    assert json.loads((run_dir / "config.json").read_text())["model"] == RHO
    assert hub.requests[-1][1].endswith("model.safetensors"), "its processes asked nothing"
    assert run.steps()[-1]["long_prompts"] == skipped > 0
    assert f"test queries (few: the interval is wide); {left_out} left out, prompt over" in out


@pytest.mark.runs
def test_a_dead_network_is_asked_twice_at_most_for_what_is_in_the_cache(hub, tmp_path, monkeypatch):
    tba("gsm8k", *SHORT, *flags(model=RHO, output_dir=tmp_path / "first"))
    hub.faults["*"] = "silent"
    hub.requests.clear()
    tba("gsm8k", *SHORT, *flags(output_dir=tmp_path / "again"))  # the task's own model
    assert len(hub.requests) <= 2, "of data and model, a timeout each"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    offline = tba("gsm8k", "--eval_only", *SHORT)
    assert json.loads(offline.stdout.splitlines()[-1])["model"] == RHO
    assert hub.requests == [] and "fetching" not in offline.stderr


@pytest.mark.parametrize(
    "fault, fetched, cause",
    [
        ("gated", "model", "Cannot access gated repo"),
        (503, "data", "503 Service Unavailable"),
        ("refused", "data", "does not answer (ConnectError)"),
        pytest.param(403, "data", "403 Forbidden", marks=pytest.mark.runs),
        pytest.param(429, "model", "429 Too Many Requests", marks=pytest.mark.runs),
        pytest.param("silent", "model", "does not answer (ReadTimeout)", marks=pytest.mark.runs),
    ],
)
def test_a_failed_fetch_says_why_in_a_line(fault, fetched, cause, hub, gsm8k_data):
    if fault == "refused":
        hub.close()
    hub.faults["*"] = fault
    result = tba("gsm8k", *(flags(data_dir=gsm8k_data) if fetched == "model" else []), code=2)
    asking, error = result.stderr.splitlines()
    kind, name = ("models", RHO) if fetched == "model" else ("datasets", "openai/gsm8k")
    assert asking == f"asking the hub, {hub.address}, for {name}"
    assert cause in error and hub.address in error
    if fault not in ("silent", "refused"):
        assert f"/api/{kind}/{name}" in error


@pytest.mark.runs
@pytest.mark.long
def test_redteam_starts_with_its_published_models_and_fetches_only_what_it_reads(hub, tmp_path):
    """The classifier is published with label2id: null, gpt2 in four formats."""
    tba("redteam", *SHORT, *flags(victim_tokens=4, output_dir=tmp_path / "run"))
    assert len(steps_of(tmp_path / "run")) == 2
    fetched = {path.split("/")[-1] for _, path in hub.requests if "gpt2/resolve" in path}
    configs = {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert fetched == configs | {"model.safetensors", "tokenizer.json", "chat_template.jinja"}


@pytest.mark.runs
def test_tldr_starts_with_its_published_models_and_fetches_only_what_it_reads(hub, tmp_path):
    """The reward model is published with its checkpoints, the gold model with a stray shard."""
    tba("tldr", *SHORT, *flags(output_dir=tmp_path / "run"))
    assert len(steps_of(tmp_path / "run")) == 2
    paths = [path for command, path in hub.requests if command == "GET"]
    own = [path for path in paths if path.startswith(("/mnoukhov", "/cleanrl"))]
    fetched = {path.split("/main/")[-1].split("/", 5)[-1] for path in own}
    assert "pytorch_model.bin" in fetched
    assert not any(name.startswith(("checkpoint-", STRAY)) for name in fetched), fetched
    prompts = {sample["prompt"] for sample in read(tmp_path / "run", "samples.jsonl")}
    assert prompts <= {"POST: train\n\nTL;DR:", "POST: validation\n\nTL;DR:"}


def test_of_a_repositorys_files_those_are_needed_that_transformers_reads():
    tokenizer = ["config.json", "tokenizer.json", "merges.txt", "added_tokens.json"]
    safe, torch_ = ["model.safetensors"], ["pytorch_model.bin"]
    # One published reward model has a stray shard beside a complete set.
    shards = [f"pytorch_model{part}" for part in ("-1-of-2.bin", "-2-of-2.bin", ".bin.index.json")]
    others = "optimizer.pt rust_model.ot 64.tflite README.md onnx/model.onnx"
    others += " checkpoint-500/model.safetensors checkpoint-500/optimizer.pt adapter_config.json"
    others += " consolidated.safetensors model.fp16.safetensors adapter_model.safetensors"
    kinds = [(safe, torch_), (torch_, ["training_args.bin"]), (shards, [STRAY])]
    for weights, left in [*kinds, (safe, others.split())]:
        assert needed_files(tokenizer + weights + left, weights=True) == tokenizer + weights
    assert needed_files(tokenizer + safe + torch_, weights=False) == tokenizer


def fetch(model: str, weights: bool = True) -> tuple[set[str], str]:
    """Fetch a model elsewhere. Returns the names of its files, or what a UserError says."""
    call = f"print(fetch_model('--model', {model!r}, {weights}))"
    result = python("from models.hub import fetch_model", call)
    if result.returncode:
        kind, problem = result.stderr.splitlines()[-1].split(": ", 1)
        assert kind == "config.UserError"
        return set(), problem
    return {path.name for path in Path(result.stdout.strip()).iterdir()}, ""


def test_a_model_that_another_program_cached_is_taken_if_it_is_whole(hub, monkeypatch, tmp_path):
    """Other programs leave out README.md, say; the hub's client takes that for incomplete."""
    fetch(RHO)
    [snapshot] = (tmp_path / "cache" / "hub").glob("models--*/snapshots/*")
    (snapshot / "generation_config.json").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files, problem = fetch(RHO)
    assert not problem and {"config.json", "model.safetensors", "tokenizer.json"} <= files
    (snapshot / "model.safetensors").unlink()
    assert "is not whole in the hub's cache" in fetch(RHO)[1]
    assert fetch(RHO)[1].endswith("and cannot be fetched: Offline: HF_HUB_OFFLINE is set")
    assert not fetch(RHO, weights=False)[1]


def test_a_branch_is_named_after_an_at_sign_and_what_is_not_there_is_named(hub, repositories):
    branch = repositories / "models" / f"{RHO}@seed-2"
    shutil.copytree(repositories / "models" / RHO, branch)
    (branch / "only_here.json").write_text("{}")
    assert "only_here.json" in fetch(f"{RHO}@seed-2")[0]
    assert "only_here.json" not in fetch(RHO)[0]
    assert f"Revision Not Found for url: {hub.address}" in fetch(f"{RHO}@seed-3")[1]
    absent = fetch("nobody/nothing")[1]
    assert f"Repository Not Found for url: {hub.address}" in absent and "authenticated" in absent


@pytest.mark.runs
def test_a_resumed_run_keeps_the_revision_it_began_with_where_its_branch_moved(hub, repositories):
    now, before = repositories / "models" / RHO, repositories / "models" / f"{RHO}@before"
    shutil.copytree(now, before)
    result = python(
        "from config import Config; from tasks import load_task",
        "from launch import checks",
        "from models.hub import identify_weights",
        f"config = Config(model={RHO!r}); task = load_task('arithmetic')",
        f"config = checks.check_model(config, task, {commit_of(before)!r})",
        "print(identify_weights(checks.fetch(config, task, None).model))",
    )
    assert result.stdout.strip() == commit_of(before) != commit_of(now)


def test_ctrl_c_ends_a_download_and_keeps_whole_files(hub, repositories, gsm8k_data, tmp_path):
    size, rate = 30_000_000, 2e5  # bytes, and bytes a second
    slow = repositories / "models/some/slow"
    shutil.copytree(repositories / "models" / RHO, slow)
    (slow / "large.json").write_bytes(bytes(size))
    hub.faults["some/slow"] = rate
    settings = flags(data_dir=gsm8k_data, model="some/slow", output_dir=tmp_path / "run")
    process = start_tba("gsm8k", *settings)

    def is_asked_for_large() -> bool:
        return any(how == "GET" and path.endswith("large.json") for how, path in hub.requests)

    wait_for(is_asked_for_large, "the download of the large file")
    time.sleep(4.0)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - start < size / rate / 10 and process.returncode == 130
    assert error.endswith("interrupted before the run began: nothing of it was written\n")
    assert list(tmp_path.rglob("config.json")) and not list(tmp_path.rglob("*.incomplete"))


def remove_tokenizer(model: str) -> None:
    for file in Path(model).glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "has no files of a tokenizer, and the one made up for it knows no"),
        ({"eos_token_id": None}, "has no end-of-sequence token, in neither its tokenizer nor its"),
        (QUANTIZED, "it is quantized, and the trainer needs plain"),
        (OWN_CODE, "it brings code of its own: --trust_remote_code lets that of --model run"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_line(settings, message, gsm8k_data, tmp_path, capfd):
    model = make(tmp_path, "LlamaForCausalLM" if settings else "GPT2LMHeadModel")
    change_config(model, **settings)
    if not settings:
        remove_tokenizer(model)
    if "eos_token_id" in settings:
        Path(model, "generation_config.json").unlink()
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.eos_token = None
        tokenizer.save_pretrained(model)
    capfd.readouterr()  # making the model
    refused(["gsm8k", *flags(data_dir=gsm8k_data, model=model), *SHORT], message, capfd)


def test_a_reward_model_may_have_the_tokenizer_of_another_but_no_code_of_its_own(tmp_path, capsys):
    reward = make(tmp_path, "GPTNeoXForSequenceClassification", num_labels=1)
    other = make(tmp_path, "GPTNeoXForCausalLM")
    remove_tokenizer(reward)
    with pytest.raises(UserError, match="--reward_model .* has no files of a tokenizer"):
        prepare_classifier("--reward_model", reward)
    prepare_classifier("--reward_model", reward, tokenizer=other)
    scores = Classifier(reward, other).rewards(["one text", "quite another one"])
    assert scores[0] != scores[1]
    change_config(reward, **OWN_CODE)
    with pytest.raises(UserError, match="--reward_model .* brings code of its own"):
        prepare_classifier("--reward_model", reward, tokenizer=other)
    assert "[y/N]" not in capsys.readouterr().out, "nobody is asked"


def test_a_classifier_that_is_published_without_label2id_is_read_by_its_id2label(tmp_path):
    model = make(tmp_path, "RobertaForSequenceClassification", id2label=LABELS)
    change_config(model, label2id=None)
    prepare_classifier("--classifier", model, label="hate")
    classifier = Classifier(model)
    both = [classifier.probabilities(["some text"], label)[0] for label in LABELS.values()]
    assert sum(both) == pytest.approx(1.0)


def test_a_damaged_data_file_is_one_line(hub, repositories):
    damaged = repositories / "datasets/openai/gsm8k/main/test-00000-of-00001.parquet"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    try:
        result = tba("gsm8k", code=2)
    finally:
        damaged.write_bytes(whole)
    assert "Traceback" not in result.stderr
    assert "error: openai/gsm8k train could not be loaded from the hub" in result.stderr


def test_only_the_columns_that_are_asked_for_are_read(tmp_path, hub, repositories):
    """Of TL;DR all columns took 8.5 GB: the others are gone before rows become Python's."""
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps({"query": "q", "reference_response": "r", "tokens": [1] * 999}))
    put_dataset(repositories, "some/wide", "default", [rows])
    result = python(
        "import datasets",
        "from tasks.support.data import read_rows",
        "datasets.Dataset.to_list = lambda rows: print(rows.column_names) or list(rows)",
        "columns, hub = ('query', 'reference_response'), ('some/wide', None, 'train')",
        "print([row for _, row in read_rows('', 'train', columns, hub)])",
    )
    assert result.returncode == 0, result.stderr
    columns, row = result.stdout.splitlines()
    assert columns == "['query', 'reference_response']"
    assert row == "[{'query': 'q', 'reference_response': 'r'}]"
