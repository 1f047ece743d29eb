"""A base model is known by its weights: two machines may train one recipe to different ones."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from conftest import TOY, make
from safetensors.torch import load_file, save_file
from test_trainer import make_trainer

from launch.files import read_lines
from models import hub
from models.hub import identify_weights
from runtime.checkpoints import checkpoint
from runtime.transport.messages import Evaluation
from tba import main


def change(directory, which: slice = slice(-1, None)) -> None:
    """Change these numbers, else the last one, of one tensor of a model."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[which] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("piece_bytes, which", [(1 << 20, slice(-1, None)), (256, slice(None))])
def test_weights_are_named_by_their_numbers(piece_bytes, which, tied_model, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "PIECE_BYTES", piece_bytes)  # of a small one the file is a large one
    name = identify_weights(str(tied_model))
    copy = shutil.copytree(tied_model, tmp_path / "copy")
    (copy / "tokenizer_config.json").write_text("{}")
    assert identify_weights(str(copy)) == name
    change(copy, which)
    assert identify_weights(str(copy)) != name
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abc"  # as in the hub's cache
    shutil.copytree(tied_model, snapshot)
    assert identify_weights(str(snapshot)) == "0123abc", "the revision"


@pytest.mark.parametrize("layers", [2, 1])
def test_a_run_names_its_base_model_and_is_not_resumed_on_another(layers, tmp_path, capsys):
    model = Path(make(tmp_path, "LlamaForCausalLM", **TOY))
    run_dir, name = tmp_path / "run", identify_weights(str(model))
    trainer = make_trainer(model, run_dir, base_model=name)
    trainer.rollout_queue.put(Evaluation(0, {"accuracy": (0.5, 0.4, 0.6)}, 10))
    trainer.receive()
    trainer.save_checkpoint()
    trainer.checkpoints.wait()
    assert [line["base_model"] for line in read_lines(run_dir / "metrics.jsonl")] == [name]
    assert checkpoint.load_state(run_dir / "checkpoints" / "step-00000000")["base_model"] == name
    settings = dataclasses.asdict(trainer.config) | {"task": "arithmetic", "checkpoint_every": 0}
    (run_dir / "config.json").write_text(json.dumps(settings))
    make(tmp_path, "LlamaForCausalLM", **TOY | dict(num_hidden_layers=layers))  # in its place
    change(model)
    assert main(["--resume", str(run_dir)]) == 2
    assert f"began with other weights in --model {str(model)!r}: put" in capsys.readouterr().err
