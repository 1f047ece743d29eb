"""Extras on the GPU of cuda.py: test_pretended_gpu.py runs this too."""

from dataclasses import replace

import cuda
import numpy as np
import pytest
import torch
from branches_on_gpu import ROWS, check_computes_in_bf16, check_gradient
from cuda import OnCuda
from test_lockstep import make_searcher, score
from test_loss import make_example, to_inputs, value_and_gradient
from test_trainer import make_trainer

from extras.lockstep_searcher import LockstepSearcher
from extras.objectives import LOSSES


@pytest.mark.parametrize("loss", LOSSES)
def test_an_objective_has_the_value_and_gradient_that_it_has_on_a_cpu(loss):
    inputs = to_inputs(make_example("mixed", "far"))
    expected = value_and_gradient(LOSSES[loss], inputs)
    with cuda.pretend():
        tensors = {name: t.detach() for name, t in vars(inputs).items() if torch.is_tensor(t)}
        inputs = replace(inputs, **{name: t.to("cuda") for name, t in tensors.items()})
        inputs.logprobs.requires_grad_()
        found = [tensor.cpu() for tensor in value_and_gradient(LOSSES[loss], inputs)]
    torch.testing.assert_close(found, [*expected])


def test_a_step_in_two_passes_has_the_gradient_that_it_has_on_a_cpu(tied_model):
    check_gradient(tied_model, low_memory="on")


def test_layers_compute_in_bf16_over_fp32_masters_in_two_passes(gpu, tied_model):
    check_computes_in_bf16(tied_model, low_memory="on")


def test_trained_adapters_are_published_and_saved_merged(gpu, untied_model, tmp_path, monkeypatch):
    trainer = make_trainer(untied_model, tmp_path, lora_rank=4, learning_rate=1e-2)
    before = dict(trainer.learner.weights())
    for _ in range(2):  # after the first step one of the two matrices is 0 still
        trainer.learner.update(ROWS)
    assert trainer.publish()
    with trainer.weights.read(0) as (_, tensors):
        moved = [name for name in tensors if not torch.equal(tensors[name], before[name].cpu())]
    assert moved and all("layers" in name for name in moved)
    learner, saved = trainer.learner, {}
    # What follows reads the memory of tensors, of which these have none.
    adapted, policy = type(learner.adapted), type(learner.policy)
    monkeypatch.setattr(adapted, "save_pretrained", lambda _, directory, **__: directory.mkdir())

    def save(_, directory, state_dict) -> None:
        directory.mkdir()
        saved.update(state_dict)

    monkeypatch.setattr(policy, "save_pretrained", save)
    learner.save_model(tmp_path / "model")
    assert before.keys() <= saved.keys()
    assert not any(isinstance(saved[name], OnCuda) for name in before), "one after the other"


def test_the_reference_is_on_the_gpu_and_takes_resets(gpu, untied_model, tmp_path):
    searcher, found = make_searcher(LockstepSearcher, untied_model, tmp_path), []
    assert all(p.is_cuda for p in searcher.reference.parameters())
    for version in (0, 3):
        changed = [(name, p.detach() * 1.1) for name, p in searcher.reference.named_parameters()]
        assert version == 0 or searcher.weights.reference.publish(version, changed)
        searcher.take_reset()
        group = score(searcher)
        assert group.reference_version == version
        found.append(group.tokens["ref_logprob"])
    assert np.isfinite(found).all() and (found[0] != found[1]).all()
