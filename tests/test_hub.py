"""Models and data from a hub: through the command line, against one on localhost (hub.py).

Repositories have the ids, the files and the columns of the real ones, and tiny models.
"""

import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
from conftest import FOREVER, PATIENCE, ROOT, Run, read, start_tba, steps_of, tba, wait_for
from hub import Hub, commit_of
from test_preset_starts import CUT, make
from test_runs import check_outputs
from transformers import AutoTokenizer

from config import UserError
from models.classifier import Classifier, prepare_classifier
from models.hub import explain, needed_files
from runtime.processes import children
from runtime.record.timeline import read_lines
from tba import main

RHO = "realtreetune/rho-1b-sft-GSM8K"
TLDR = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
GOLD = "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
STRAY = "model-00001-of-00003.safetensors"  # beside a complete .bin file
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

    publish("mnoukhov/pythia410m-sft-tldr", "GPTNeoXForCausalLM")
    reward = publish(
        "mnoukhov/pythia410m-rm-tldr6.9b", "GPTNeoXForSequenceClassification", num_labels=1
    )
    (reward / "checkpoint-500").mkdir()
    for name in ("model.safetensors", "optimizer.pt"):
        (reward / "checkpoint-500" / name).write_bytes(bytes(1000))
    gold = publish(GOLD, "GPTNeoXForSequenceClassification", num_labels=1)
    weights = safetensors.torch.load_file(gold / "model.safetensors")
    torch.save(weights, gold / "pytorch_model.bin")
    (gold / "model.safetensors").rename(gold / STRAY)
    rows = tmp_path_factory.mktemp("tldr")
    for split in ("train", "validation", "test"):
        write_posts(rows / f"{split}.jsonl", split)
    put_dataset(root, TLDR, "default", sorted(rows.iterdir()))
    return root


def write_posts(path: Path, split: str) -> None:
    """Write rows with the columns of the real TL;DR data, tokens included."""
    post = {"id": "t3", "subreddit": "farm", "title": "a", "post": split, "summary": " b"}
    texts = {"query": f"POST: {split}\n\nTL;DR:", "reference_response": " a b<eos>"}
    texts["query_reference_response"] = "".join(texts.values())
    tokens = {f"{name}_token": [0] * 512 for name in texts}
    lengths = {f"{name}_token_len": 512 for name in tokens}
    path.write_text((json.dumps(post | texts | tokens | lengths) + "\n") * 4)


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
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", served.address)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield served
    served.close()


def test_gsm8k_is_fetched_and_trained_and_counts_the_prompts_that_are_too_long(
    hub, tmp_path, gsm8k_data
):
    run_dir, logs = tmp_path / "run", tmp_path / "run" / "logs"
    flags = ["--responses_per_query", 3, "--samples_per_query", 4, "--initial_responses", 30]
    flags += ["--max_prompt_tokens", 250, "--max_response_tokens", 40]

    def is_evaluated() -> bool:
        return any("accuracy" in line for line in read_lines(run_dir / "metrics.jsonl"))

    def has_loaded() -> bool:
        return any(name == "load" for name, *_ in read_lines(logs / "searcher-0.spans.jsonl"))

    with Run(run_dir, "gsm8k", *flags, *FOREVER) as run:
        run.is_at(6)
        run.until(is_evaluated, "the base model's evaluation")
        run.until(has_loaded, "a version of the weights that the searcher has loaded")
        out, err = run.end()
    check_outputs(run_dir, run.step())
    assert "fetching realtreetune/rho-1b-sft-GSM8K from the hub: 1 files, 0." in err
    settings = json.loads((run_dir / "config.json").read_text())
    assert settings["model"] == RHO
    assert hub.requests[-1][1].endswith("model.safetensors"), "its processes asked nothing"
    prompt = "[MATH TASK] Problem:\n{}\n\nSolution:\n"
    test, train = read(gsm8k_data, "test.jsonl"), read(gsm8k_data, "train.jsonl")
    long = sum(len(prompt.format(row["question"]).encode()) > 250 for row in test)
    skipped = sum(len(prompt.format(row["question"]).encode()) > 250 for row in train)
    assert steps_of(run_dir)[-1]["long_prompts"] == skipped > 0
    assert f"{skipped} queries were skipped: prompt over --max_prompt_tokens 250" in out
    left_out = f"{long} left out, prompt over --max_prompt_tokens, empty or not Unicode)"
    assert f" on {len(test) - long} test queries; {left_out}" in out


@pytest.mark.runs
def test_gsm8k_is_fetched_evaluated_by_id_and_started_again_offline(hub, monkeypatch):
    first = tba("gsm8k", "--eval_only", *SHORT, "--model", RHO)
    assert first.returncode == 0, first.stderr
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    again = tba("gsm8k", "--eval_only", *SHORT)  # the task's own model
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["model"] == RHO
    assert hub.requests == [] and "fetching" not in again.stderr


@pytest.mark.runs
def test_a_run_from_the_cache_asks_a_dead_network_at_most_twice_and_goes_on(
    hub, tmp_path, monkeypatch, record_property
):
    seconds = {}
    for network in ("there", "silent"):
        begin = time.monotonic()
        result = tba("gsm8k", *SHORT, "--output_dir", tmp_path / network)
        seconds[network] = round(time.monotonic() - begin, 1)
        assert result.returncode == 0, result.stderr
        if network == "there":
            last = hub.requests[-1][1]
            assert last.endswith("model.safetensors"), "to its end it asked nothing more"
            hub.faults, hub.requests = {"*": "silent"}, []
    assert len(hub.requests) <= 2, "of data and model, a timeout each"
    record_property("seconds of a run that fetches, and of one whose network is dead", seconds)
    assert seconds["silent"] < 3 * seconds["there"]


ERRORS = {
    "gated": "Cannot access gated repo for url {hub}/api/{model}",
    403: "403 Forbidden",
    429: "429 Too Many Requests",
    503: "503 Service Unavailable",
    "silent": "{hub} does not answer (ReadTimeout)",
    "refused": "{hub} does not answer (ConnectError)",
}
QUICK = {("gated", True), (503, False), ("refused", False)}
CASES = [
    pytest.param(fault, is_there, marks=[] if (fault, is_there) in QUICK else [pytest.mark.runs])
    for fault in ERRORS
    for is_there in (True, False)
]


@pytest.mark.parametrize("fault, is_data_there", CASES)
def test_what_cannot_be_fetched_is_one_line_with_its_cause(
    fault, is_data_there, hub, gsm8k_data, record_property
):
    data = ["--data_dir", gsm8k_data] if is_data_there else []
    if fault == "refused":
        hub.close()
    hub.faults["*"] = fault
    start = time.monotonic()
    result = tba("gsm8k", *data)
    record_property("seconds", round(time.monotonic() - start, 1))
    asking, error = result.stderr.splitlines()
    record_property("line", error)
    model = f"models/{RHO}" if is_data_there else "datasets/openai/gsm8k"
    assert result.returncode == 2
    assert asking == f"asking the hub, {hub.address}, for {model.partition('/')[2]}"
    assert ERRORS[fault].format(hub=hub.address, model=model) in error
    if fault not in ("silent", "refused"):
        assert f"{hub.address}/api/{model}" in error
        assert "log in (hf auth login) for what is gated or private, or try again later" in error


@pytest.mark.runs
@pytest.mark.long
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


@pytest.mark.runs
def test_tldr_starts_with_its_published_models_and_fetches_only_what_it_reads(hub, tmp_path):
    """The reward model is published with its checkpoints, the gold model with a stray shard."""
    result = tba("tldr", *SHORT, "--output_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert len(steps_of(tmp_path / "run")) == 2
    fetched = {
        path.split("/main/")[-1].split("/", 5)[-1]
        for command, path, _ in hub.requests
        if command == "GET" and path.startswith(("/mnoukhov", "/cleanrl"))
    }
    assert "pytorch_model.bin" in fetched
    assert not any(name.startswith(("checkpoint-", STRAY)) for name in fetched), fetched
    final = read(tmp_path / "run", "metrics.jsonl")[-1]
    assert {"final_win_rate", "final_perplexity", "final_reward"} <= set(final)
    prompts = {sample["prompt"] for sample in read(tmp_path / "run", "samples.jsonl")}
    assert prompts <= {"POST: train\n\nTL;DR:", "POST: validation\n\nTL;DR:"}


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


def fetch(model: str, weights: bool = True) -> tuple[set[str], str]:
    """Fetch a model in a process of its own. Returns the names of its files, or what is wrong."""
    code = (
        "import sys; from config import UserError; from models.hub import fetch_model\n"
        f"try: print(fetch_model('--model', {model!r}, {weights}))\n"
        "except UserError as error: sys.exit(str(error))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    if result.returncode:
        return set(), result.stderr.splitlines()[-1]
    return {path.name for path in Path(result.stdout.strip()).iterdir()}, ""


def test_a_model_that_another_program_cached_is_taken_if_it_is_whole(hub, monkeypatch, tmp_path):
    """Other programs leave out README.md, say; the hub's client takes that for incomplete."""
    fetch(RHO)
    snapshots = (tmp_path / "cache" / "hub").glob("models--*/snapshots/*")
    [snapshot] = snapshots
    (snapshot / "generation_config.json").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files, problem = fetch(RHO)
    assert not problem and {"config.json", "model.safetensors", "tokenizer.json"} <= files
    (snapshot / "model.safetensors").unlink()
    assert "is not whole in the hub's cache" in fetch(RHO)[1]
    assert fetch(RHO)[1].endswith("and cannot be fetched: Offline: HF_HUB_OFFLINE is set")
    assert not fetch(RHO, weights=False)[1]


def test_a_branch_is_named_after_an_at_sign(hub, repositories):
    branch = repositories / "models" / f"{RHO}@seed-2"
    if not branch.exists():
        shutil.copytree(repositories / "models" / RHO, branch)
        (branch / "only_here.json").write_text("{}")
    assert "only_here.json" in fetch(f"{RHO}@seed-2")[0]
    assert "only_here.json" not in fetch(RHO)[0]
    assert f"Revision Not Found for url: {hub.address}" in fetch(f"{RHO}@seed-3")[1]
    absent = fetch("nobody/nothing")[1]
    assert f"Repository Not Found for url: {hub.address}" in absent and "hf auth login" in absent


@pytest.mark.runs
def test_a_resumed_run_takes_the_revision_that_it_began_with_where_its_branch_has_moved(
    hub, repositories
):
    before = repositories / "models" / f"{RHO}@before"
    shutil.copytree(repositories / "models" / RHO, before)
    code = (
        "from config import Config; from tasks import load_task; from runtime import preflight\n"
        "from models.hub import identify_weights\n"
        f"config = Config(model={RHO!r}); task = load_task('arithmetic')\n"
        f"config = preflight.check_model(config, task, {commit_of(before)!r})\n"
        "print(identify_weights(preflight.fetch(config, task).model))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == commit_of(before) != commit_of(repositories / "models" / RHO)


def test_a_repository_without_weights_is_named_with_what_it_has(hub, repositories):
    bare = repositories / "models" / "some" / "bare"
    bare.mkdir(parents=True)
    (bare / "config.json").write_text("{}")
    (bare / "model.onnx").write_text("")
    problem = fetch("some/bare")[1]
    assert problem.endswith("has no weights that transformers reads: it has ['config.json']")


SIZE = 30_000_000  # bytes


def test_ctrl_c_ends_a_download_at_once_and_keeps_the_files_that_are_whole(
    hub, repositories, gsm8k_data, tmp_path, record_property
):
    slow = repositories / "models" / "some" / "slow"
    shutil.copytree(repositories / "models" / RHO, slow)
    (slow / "large.json").write_bytes(bytes(SIZE))
    rate = 2e5  # bytes a second
    hub.faults["some/slow"] = rate
    flags = ["--data_dir", gsm8k_data, "--model", "some/slow", "--output_dir", tmp_path / "run"]

    def is_fetching() -> bool:
        return "large.json" in gets()

    def gets() -> list[str]:
        paths = [path for method, path, _ in hub.requests if method == "GET"]
        return [path.split("/")[-1] for path in paths if "some/slow/resolve" in path]

    process = start_tba("gsm8k", *flags)
    wait_for(is_fetching, "the download of the large file")
    time.sleep(4.0)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    seconds = round(time.monotonic() - start, 1)
    record_property("seconds from Ctrl-C to the end", seconds)
    assert seconds < SIZE / rate / 10 and process.returncode == 130
    assert error.endswith("files that were fetched whole are kept\n")
    assert "config.json" in gets() and not list(tmp_path.rglob("*.incomplete"))
    hub.requests.clear()
    again = start_tba("gsm8k", *flags)
    wait_for(is_fetching, "the download of the large file")
    assert "config.json" not in gets()
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=PATIENCE)


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
    change, message, gsm8k_data, tmp_path, capfd
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
    flags = ["gsm8k", "--data_dir", gsm8k_data, "--model", model, *SHORT]
    capfd.readouterr()  # making the model
    assert main([*map(str, flags)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err, err


def test_a_reward_model_without_a_tokenizer_is_refused_and_may_have_anothers(tmp_path):
    reward = Path(make(tmp_path, "GPTNeoXForSequenceClassification", num_labels=1))
    other = Path(make(tmp_path, "GPTNeoXForCausalLM"))
    for file in reward.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="--reward_model .* has no files of a tokenizer"):
        prepare_classifier("--reward_model", str(reward))
    prepare_classifier("--reward_model", str(reward), tokenizer=str(other))
    scores = Classifier(str(reward), str(other)).rewards(["one text", "quite another one"])
    assert scores[0] != scores[1]


def test_a_reward_model_with_code_of_its_own_is_refused_and_nobody_is_asked(tmp_path, capsys):
    model = Path(make(tmp_path, "GPTNeoXForSequenceClassification", num_labels=1))
    settings = json.loads((model / "config.json").read_text())
    settings |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (model / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="--reward_model .* brings code of its own"):
        prepare_classifier("--reward_model", str(model))
    assert "[y/N]" not in capsys.readouterr().out


def test_the_end_of_a_log_is_shown_without_what_says_nothing(tmp_path):
    path = children.log_path(str(tmp_path), "searcher 0")
    path.parent.mkdir()
    noise = [
        "nanobind: leaked 2 functions!",
        ' - leaked function "add"',
        " - ... skipped remainder",
    ]
    path.write_text("\n".join(["ValueError: what went wrong", *noise * 20]))
    assert children.log_tail(str(tmp_path), "searcher 0").splitlines()[1:] == [
        "ValueError: what went wrong"
    ]


def test_a_classifier_that_is_published_without_label2id_is_read_by_its_id2label(tmp_path):
    labels = {"id2label": {0: "nothate", 1: "hate"}}
    model = Path(make(tmp_path, "RobertaForSequenceClassification", **labels))
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"label2id": None}))
    prepare_classifier("--classifier", str(model), label="hate")
    with pytest.raises(UserError, match="has no label 'toxic': it has nothate, hate"):
        prepare_classifier("--classifier", str(model), label="toxic")
    classifier = Classifier(str(model))
    both = [classifier.probabilities(["some text"], label)[0] for label in ("nothate", "hate")]
    assert sum(both) == pytest.approx(1.0)


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


def test_only_the_columns_that_are_asked_for_are_kept(tmp_path, hub, repositories):
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps({"query": "q", "reference_response": "r", "tokens": [1] * 999}))
    put_dataset(repositories, "some/wide", "default", [rows])
    code = (
        "from tasks.support.data import read_rows\n"
        "columns, hub = ('query', 'reference_response'), ('some/wide', None, 'train')\n"
        "print([row for _, row in read_rows('', 'train', columns, hub)])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "[{'query': 'q', 'reference_response': 'r'}]\n", result.stderr


@pytest.mark.runs
def test_tldr_rows_at_their_real_number_take_little_memory_and_time(
    hub, repositories, record_property
):
    """As many as are published, with as many tokens: all columns took 8.5 GB and 17 s."""
    data = repositories / "datasets" / "as_many" / "tldr"
    data.mkdir(parents=True)
    texts = {"query": "x" * 1500, "reference_response": "y" * 130}
    tokens = {name: list(range(length)) for name, length in (("a", 512), ("b", 53), ("c", 565))}
    rows = pyarrow.table({name: [value] * 1000 for name, value in (texts | tokens).items()})
    many = pyarrow.concat_tables([rows] * 117).slice(0, 116_722)
    pyarrow.parquet.write_table(many, data / "train-00000-of-00001.parquet", row_group_size=1000)
    code = (
        "import time, psutil\n"
        "from tasks.support.data import read_rows\n"
        "import datasets\n"
        "begin, before = time.monotonic(), psutil.Process().memory_info().rss\n"
        "columns, hub = ('query', 'reference_response'), ('as_many/tldr', None, 'train')\n"
        "rows = read_rows('', 'train', columns, hub)\n"
        "taken = psutil.Process().memory_info().rss - before\n"
        "print(len(rows), time.monotonic() - begin, taken / 1e6)"
    )
    command = [sys.executable, "-c", code]
    seconds = {}
    for source in ("fetched", "from the cache"):
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        count, seconds[source], megabytes = map(float, result.stdout.split())
    record_property("seconds", seconds)
    record_property("MB", round(megabytes))
    assert count == 116_722 and megabytes < 1000
    assert seconds["from the cache"] < seconds["fetched"]


def test_a_full_disk_is_said_to_be_full():
    line = explain(OSError(errno.ENOSPC, "No space left on device"))
    assert line.endswith("; make room, or set HF_HOME to a directory elsewhere")
