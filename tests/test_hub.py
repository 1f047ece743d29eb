"""Models and data from a hub: through the command line, against one on localhost (hub.py).

Repositories have the ids, the files and the columns of the real ones, and tiny models.
"""

import errno
import json
import shutil
import signal
import time
from pathlib import Path

import pandas
import pytest
from conftest import read, start_tba, steps_of, tba
from hub import Hub
from huggingface_hub import HfApi, constants, snapshot_download
from test_preset_starts import CUT, make
from transformers import AutoTokenizer

from config import UserError
from models import hub as models_hub
from models.classifier import Classifier, prepare_classifier
from models.hub import explain, fetch_model, needed_files
from tasks.support.data import read_rows

RHO = "realtreetune/rho-1b-sft-GSM8K"
SHORT = [*CUT, "--max_response_tokens", 8, "--max_prompt_tokens", 300]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory, gsm8k_data) -> Path:
    """The directory that the hub serves: what gsm8k, redteam and tldr want by default."""
    root = tmp_path_factory.mktemp("hub")

    def publish(name: str, kind: str, **settings) -> Path:
        return put(root, name, Path(make(tmp_path_factory.mktemp("models"), kind, **settings)))

    publish(RHO, "LlamaForCausalLM")
    put_dataset(
        root, "openai/gsm8k", "main", [gsm8k_data / "train.jsonl", gsm8k_data / "test.jsonl"]
    )

    gpt2 = publish("openai-community/gpt2", "GPT2LMHeadModel")
    publish("vicgalle/gpt2-alpaca", "GPT2LMHeadModel")
    for name in ("rust_model.ot", "tf_model.h5", "64-8bits.tflite", "flax_model.msgpack"):
        (gpt2 / name).write_bytes(bytes(1000))
    (gpt2 / "pytorch_model.bin").write_bytes(bytes(1000))  # the same once more
    (gpt2 / "onnx").mkdir()
    (gpt2 / "onnx" / "decoder_model.onnx").write_bytes(bytes(1000))
    hate = publish(
        "facebook/roberta-hate-speech-dynabench-r4-target",
        "RobertaForSequenceClassification",
        id2label={0: "nothate", 1: "hate"},
    )
    settings = json.loads((hate / "config.json").read_text())
    (hate / "config.json").write_text(json.dumps(settings | {"label2id": None}))
    publish("sentence-transformers/all-MiniLM-L6-v2", "BertModel")
    return root


def put(root: Path, name: str, model: Path) -> Path:
    """Publish a model under a name. Returns the directory of the repository."""
    repository = root / "models" / name
    repository.parent.mkdir(parents=True, exist_ok=True)
    model.rename(repository)
    return repository


def put_dataset(root: Path, name: str, configuration: str, files: list[Path]) -> None:
    """Publish rows of JSON as parquet, a split for each file, named after it."""
    data = root / "datasets" / name
    (data / configuration).mkdir(parents=True)
    lines = ["---", "configs:", f"- config_name: {configuration}", "  data_files:"]
    for file in files:
        rows = pandas.read_json(file, lines=True)
        rows.to_parquet(data / configuration / f"{file.stem}-00000-of-00001.parquet")
        lines.append(f"  - {{split: {file.stem}, path: {configuration}/{file.stem}-*}}")
    (data / "README.md").write_text("\n".join([*lines, "---", ""]))


@pytest.fixture
def hub(repositories, tmp_path, monkeypatch):
    """The hub, and an empty cache; both for whatever is started from here."""
    served = Hub(repositories)
    monkeypatch.setenv("HF_ENDPOINT", served.address)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield served
    served.close()


def test_gsm8k_is_fetched_trained_evaluated_by_id_and_started_again_offline(
    hub, tmp_path, monkeypatch
):
    result = tba("gsm8k", *SHORT, "--output_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert len(steps_of(tmp_path / "run")) == 2
    assert "fetching realtreetune/rho-1b-sft-GSM8K from the hub: 1 files, 0." in result.stderr
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["model"] == RHO
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    again = tba("gsm8k", "--eval_only", "--json", *SHORT, "--model", RHO)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["model"] == RHO
    assert hub.requests == [] and "fetching" not in again.stderr


ERRORS = {
    "gated": "it is gated: request access on {hub}/{model}, then log in (hf auth login)",
    403: "{hub} answers 403 Forbidden: log in (hf auth login)",
    429: "{hub} answers 429 Too Many Requests: try again later",
    503: "{hub} answers 503 Service Unavailable: try again later",
    "silent": "{hub} does not answer (ReadTimeout)",
    "refused": "{hub} does not answer (ConnectError)",
}


QUICK = {("gated", True), ("silent", True), (503, False), ("refused", False)}
CASES = [
    pytest.param(fault, is_there, marks=[] if (fault, is_there) in QUICK else [pytest.mark.runs])
    for fault in ERRORS
    for is_there in (True, False)
]


@pytest.mark.parametrize("fault, is_data_there", CASES)
def test_what_cannot_be_fetched_is_one_line_with_its_cause_within_15_seconds(
    fault, is_data_there, hub, gsm8k_data, record_property
):
    data = ["--data_dir", gsm8k_data] if is_data_there else []
    if fault == "refused":
        hub.close()
    hub.faults["*"] = fault
    start = time.monotonic()
    result = tba("gsm8k", *data)
    seconds = time.monotonic() - start
    asking, error = result.stderr.splitlines()
    record_property(f"{fault}, {'data at hand' if data else 'nothing'}: seconds", round(seconds, 1))
    record_property("line", error)
    model = RHO if is_data_there else "datasets/openai/gsm8k"
    assert result.returncode == 2
    assert asking == f"asking the hub, {hub.address}, for {model.removeprefix('datasets/')}"
    assert ERRORS[fault].format(hub=hub.address, model=model) in error
    assert seconds < 15


def test_redteam_starts_with_its_published_models_and_fetches_only_what_it_reads(hub, tmp_path):
    """The classifier is published with label2id: null, gpt2 in seven formats."""
    result = tba("redteam", *SHORT, "--victim_tokens", 4, "--output_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert len(steps_of(tmp_path / "run")) == 2
    fetched = {path.split("/")[-1] for _, path, _ in hub.requests if "gpt2/resolve" in path}
    assert fetched == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    began = read(tmp_path / "run", "metrics.jsonl")
    assert any(name.startswith("final_") for name in began[-1])


def test_of_a_repositorys_files_those_are_needed_that_transformers_reads():
    tokenizer = ["config.json", "tokenizer.json", "merges.txt", "added_tokens.json"]
    safe, torch_ = ["model.safetensors"], ["pytorch_model.bin"]
    assert needed_files(tokenizer + safe + torch_, weights=True) == tokenizer + safe
    assert needed_files(tokenizer + torch_, weights=True) == tokenizer + torch_
    assert needed_files(tokenizer + safe + torch_, weights=False) == tokenizer
    shards = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    index = ["pytorch_model.bin.index.json"]
    stray = ["model-00001-of-00003.safetensors"]
    assert needed_files(tokenizer + shards + index + stray, weights=True) == (
        tokenizer + shards + index
    ), "one published reward model has a stray shard beside a complete set"
    left = ["training_args.bin", "optimizer.pt", "rust_model.ot", "64.tflite", "README.md"]
    left += ["checkpoint-500/model.safetensors", "checkpoint-500/optimizer.pt", "onnx/model.onnx"]
    assert needed_files(tokenizer + safe + left, weights=True) == tokenizer + safe


def in_process(hub, monkeypatch, tmp_path) -> None:
    """Have this process ask the hub of the tests, with an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models_hub, "HfApi", lambda: HfApi(endpoint=hub.address))
    models_hub.ask_hub.cache_clear()


def fetched_files(directory: str) -> set[str]:
    return {path.name for path in Path(directory).iterdir()}


def test_a_model_that_another_program_cached_is_taken_if_it_is_whole(hub, monkeypatch, tmp_path):
    """Other programs leave out README.md, say; the hub's client takes that for incomplete."""
    in_process(hub, monkeypatch, tmp_path)
    cache = {"cache_dir": str(tmp_path / "cache"), "endpoint": hub.address}
    patterns = ["config.json", "model.safetensors", "tokenizer*"]
    snapshot = snapshot_download(RHO, allow_patterns=patterns, **cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_model("--model", RHO) == snapshot
    (Path(snapshot) / "model.safetensors").unlink()
    with pytest.raises(UserError, match="not whole in the hub's cache .*HF_HUB_OFFLINE is set"):
        fetch_model("--model", RHO)
    assert fetch_model("--model", RHO, weights=False) == snapshot


def test_a_branch_is_named_after_an_at_sign(hub, monkeypatch, tmp_path, repositories):
    in_process(hub, monkeypatch, tmp_path)
    branch = repositories / "models" / f"{RHO}@seed-2"
    if not branch.exists():
        shutil.copytree(repositories / "models" / RHO, branch)
        (branch / "only_here.json").write_text("{}")
    assert "only_here.json" in fetched_files(fetch_model("--model", f"{RHO}@seed-2"))
    assert "only_here.json" not in fetched_files(fetch_model("--model", RHO))
    with pytest.raises(UserError, match="it has no such branch"):
        fetch_model("--model", f"{RHO}@seed-3")
    with pytest.raises(UserError, match="there is no such repository, or it is private"):
        fetch_model("--model", "nobody/nothing")


def test_ctrl_c_ends_a_download_at_once_and_the_next_start_goes_on_from_there(
    hub, gsm8k_data, tmp_path
):
    hub.faults[RHO] = 20e3  # bytes a second: the weights would take 20 s
    process = start_tba("gsm8k", "--data_dir", gsm8k_data, "--output_dir", tmp_path / "run")
    weights = wait_for(lambda: [r for r in hub.requests if r[1].endswith("model.safetensors")])
    assert weights, "the download has begun"
    time.sleep(3.0)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert time.monotonic() - start < 2 and process.returncode == 130
    assert error.endswith("interrupted before the run began: what was fetched is kept\n")
    hub.faults.clear()
    hub.requests.clear()
    again = start_tba("gsm8k", "--data_dir", gsm8k_data, "--output_dir", tmp_path / "run")
    ranges = wait_for(lambda: [r[2] for r in hub.requests if r[0] == "GET" and r[2]])
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)
    assert int(ranges[0].removeprefix("bytes=").rstrip("-")) > 20e3, "what came was kept"


def wait_for(condition, seconds: float = 60.0):
    """Wait until the condition holds; returns what it gave."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    "change, message",
    [
        ("no tokenizer", "has no files of a tokenizer, and the one made up for it knows no"),
        ("no end", "has no end-of-sequence token, in neither its tokenizer nor its config.json"),
        ("quantized", "it is quantized, and the trainer needs plain weights"),
        ("code", "it brings code of its own: --trust_remote_code lets that of --model run"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_line_before_anything_is_loaded(
    change, message, gsm8k_data, tmp_path
):
    kind = "GPT2LMHeadModel" if change == "no tokenizer" else "LlamaForCausalLM"
    model = Path(make(tmp_path, kind))
    settings = json.loads((model / "config.json").read_text())
    if change == "no tokenizer":
        for file in model.glob("tokenizer*"):
            file.unlink()
    if change == "no end":
        settings["eos_token_id"] = None
        (model / "generation_config.json").unlink()
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.eos_token = None
        tokenizer.save_pretrained(model)
    if change == "quantized":
        settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    if change == "code":
        settings["model_type"] = "own"
        settings["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}
    (model / "config.json").write_text(json.dumps(settings))
    result = tba("gsm8k", "--data_dir", gsm8k_data, "--model", model, *SHORT)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and message in result.stderr, result.stderr


def test_a_reward_model_without_a_tokenizer_is_refused_and_may_have_anothers(tmp_path):
    reward = Path(make(tmp_path, "GPTNeoXForSequenceClassification", num_labels=1))
    other = Path(make(tmp_path, "GPTNeoXForCausalLM"))
    for file in reward.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="--reward_model .* has no files of a tokenizer"):
        prepare_classifier("--reward_model", str(reward), labels=1)
    prepare_classifier("--reward_model", str(reward), labels=1, tokenizer=str(other))
    scores = Classifier(str(reward), str(other)).rewards(["one text", "quite another one"])
    assert scores[0] != scores[1]


def test_a_damaged_data_file_is_one_line(hub, repositories, tmp_path):
    damaged = repositories / "datasets" / "openai" / "gsm8k" / "main"
    whole = (damaged / "test-00000-of-00001.parquet").read_bytes()
    (damaged / "test-00000-of-00001.parquet").write_bytes(whole[: len(whole) // 2])
    try:
        result = tba("gsm8k")
    finally:
        (damaged / "test-00000-of-00001.parquet").write_bytes(whole)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "error: openai/gsm8k train could not be loaded from the hub" in result.stderr


def test_only_the_columns_that_are_asked_for_are_kept(tmp_path, hub, monkeypatch, repositories):
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps({"query": "q", "reference_response": "r", "tokens": [1] * 999}))
    put_dataset(repositories, "some/wide", "default", [rows])
    in_process(hub, monkeypatch, tmp_path)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.address)
    found = read_rows("", "train", ("query", "reference_response"), ("some/wide", None, "train"))
    assert [row for _, row in found] == [{"query": "q", "reference_response": "r"}]


def test_a_full_disk_is_said_to_be_full():
    cause = OSError(errno.ENOSPC, "No space left on device")
    assert explain(cause, "a/b") == (
        "the disk is full: make room, or set HF_HOME to a directory elsewhere"
    )
