"""Models and data from a hub: through the command line, against one on localhost (hub.py).

Repositories have the ids, the files and the columns of the real ones, and tiny models.
"""

import json
import time
from pathlib import Path

import pandas
import pytest
from conftest import steps_of, tba
from hub import Hub
from test_preset_starts import CUT, make

RHO = "realtreetune/rho-1b-sft-GSM8K"
SHORT = [*CUT, "--max_response_tokens", 8, "--max_prompt_tokens", 300]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory, gsm8k_data) -> Path:
    """The directory that the hub serves: what gsm8k wants by default."""
    root = tmp_path_factory.mktemp("hub")
    models = tmp_path_factory.mktemp("models")
    put(root, RHO, Path(make(models, "LlamaForCausalLM")))
    data = root / "datasets" / "openai" / "gsm8k"
    (data / "main").mkdir(parents=True)
    for split in ("train", "test"):
        rows = pandas.read_json(gsm8k_data / f"{split}.jsonl", lines=True)
        rows.to_parquet(data / "main" / f"{split}-00000-of-00001.parquet")
    (data / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - {split: train, path: main/train-*}\n  - {split: test, path: main/test-*}\n---\n"
    )
    return root


def put(root: Path, name: str, model: Path) -> Path:
    """Publish a model under a name. Returns the directory of the repository."""
    repository = root / "models" / name
    repository.parent.mkdir(parents=True, exist_ok=True)
    model.rename(repository)
    return repository


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
    print(result.stderr, [r for r in hub.requests])
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


@pytest.mark.parametrize("fault", ERRORS)
@pytest.mark.parametrize("is_data_there", [True, False], ids=["data", "nothing"])
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
