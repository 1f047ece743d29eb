"""Checkpoints are written beside the training, and what goes wrong costs only one of them."""

import dataclasses
import errno
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PATIENCE
from safetensors import SafetensorError
from test_trainer import make_rows, make_trainer

from config import Config
from launch import launcher, resume
from launch.launcher import SAVE_SECONDS, Run
from runtime.checkpoints import checkpoint, writer
from runtime.checkpoints.writer import NICENESS, write_tensors
from tba import main
from trainer import Trainer


class Disk:
    """The disk under a checkpoint's tensors: it stands still until it may go on, or is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.may_go_on, self.is_full = threading.Event(), False
        self.may_go_on.set()
        save_file = writer.save_file

        def save_slowly(tensors: dict[str, torch.Tensor], path: Path) -> None:
            if not self.may_go_on.wait(PATIENCE):
                self.may_go_on.set()  # nobody else will: the trainer waits for this write
            save_file(tensors, path)
            if self.is_full:
                os.truncate(path, 1000)  # in the middle of the file
                raise SafetensorError("No space left on device (os error 28)")

        monkeypatch.setattr(writer, "save_file", save_slowly)

    def stand_still(self, seconds: float) -> None:
        self.may_go_on.clear()
        threading.Timer(seconds, self.may_go_on.set).start()


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def trainer(untied_model, tmp_path) -> Trainer:
    return make_trainer(untied_model, tmp_path)


def names(trainer: Trainer) -> list[str]:
    return sorted(path.name for path in Path(trainer.checkpoints.run_dir, "checkpoints").iterdir())


def saved(trainer: Trainer, step: int) -> dict[str, torch.Tensor]:
    directory = Path(trainer.checkpoints.run_dir, "checkpoints", f"step-{step:08}")
    return checkpoint.load_tensors(directory, "learner")


def save(trainer: Trainer, step: int) -> None:
    """Write a checkpoint to its end, as of that step."""
    trainer.learner.step = step
    trainer.save_checkpoint()
    trainer.checkpoints.wait()


def test_training_goes_on_while_a_checkpoint_is_written_of_its_own_step(trainer, disk):
    rows = make_rows(4, 3)
    trainer.learner.update(rows)
    trainer.metrics.figures["reward"] = 1.0
    before = {name: tensor.clone() for name, tensor in trainer.learner.state()}
    disk.may_go_on.clear()
    trainer.save_checkpoint()
    for _ in range(3):
        trainer.learner.update(rows)
        trainer.metrics.figures["reward"] = 2.0
        trainer.save_checkpoint_if_due()
    assert names(trainer) == ["unfinished"] and trainer.step == 4
    disk.may_go_on.set()
    trainer.checkpoints.wait()
    assert names(trainer) == ["step-00000001"]
    torch.testing.assert_close(saved(trainer, 1), before, rtol=0, atol=0)
    now = dict(trainer.learner.state())
    assert not torch.equal(now["policy.lm_head.weight"], before["policy.lm_head.weight"])
    state = checkpoint.load_state(resume.newest_whole(trainer.checkpoints.run_dir)[0])
    assert (state["step"], state["figures"]["reward"]) == (1, 1.0)


def test_a_checkpoint_that_comes_during_a_write_waits_for_it_and_takes_its_memory(trainer, disk):
    places = []
    for _ in range(2):
        trainer.learner.update(make_rows(4, 3))
        disk.stand_still(seconds=0.3)
        trainer.save_checkpoint()
        places.append([copy.data_ptr() for copy in trainer.checkpoints.copies.values()])
    trainer.checkpoints.wait()
    assert names(trainer) == ["step-00000001", "step-00000002"]
    assert resume.newest_whole(trainer.checkpoints.run_dir)[1] == []
    heads = [saved(trainer, step)["policy.lm_head.weight"] for step in (1, 2)]
    assert not torch.equal(*heads)
    assert places[0] == places[1]


@pytest.mark.parametrize("is_shutdown", [False, True])
def test_the_final_checkpoint_is_waited_for_and_needs_no_copy(is_shutdown, trainer, disk):
    trainer.learner.update(make_rows(4, 3))
    trainer.save_checkpoint()
    first = {key: copy.clone() for key, copy in trainer.checkpoints.copies.items()}
    trainer.learner.update(make_rows(4, 3))
    disk.stand_still(seconds=0.3)
    trainer.status.shutdown = is_shutdown  # which ends other waits
    trainer.finish()
    assert names(trainer) == ["step-00000001", "step-00000002"]
    # What does not change any more was written as it is.
    torch.testing.assert_close(trainer.checkpoints.copies, first, rtol=0, atol=0)
    trained = dict(trainer.learner.state())
    torch.testing.assert_close(saved(trainer, 2), trained, rtol=0, atol=0)


@pytest.fixture
def impatient(untied_model, tmp_path) -> Trainer:
    """A trainer whose waits end after 3 s without progress."""
    trainer = make_trainer(untied_model, tmp_path, searcher_timeout=3.0)
    trainer.status.mark_ready("searcher 0")
    trainer.learner.update(make_rows(4, 3))
    return trainer


def test_model_and_last_checkpoint_are_waited_for_while_work_is_done(impatient, monkeypatch):
    """By a clock that goes on by 1 s with each piece of work, and else stands still."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    save_file = writer.save_file

    def save_slowly(*arguments) -> None:
        for _ in range(8):
            time.sleep(0.02)  # so that the trainer looks
            sum(range(300_000))  # CPU time, and nothing else, shows that it goes on
            clock.now += 1.0
        save_file(*arguments)

    def save_model_slowly(directory: Path) -> None:
        directory.with_suffix(".unfinished").mkdir()
        with open(directory.with_suffix(".unfinished") / "weights", "wb", buffering=0) as file:
            file.truncate(8 << 16)  # as the library does before it writes
            for _ in range(8):
                time.sleep(0.02)
                file.write(bytes(1 << 16))
                clock.now += 1.0

    monkeypatch.setattr(impatient.learner, "save_model", save_model_slowly)
    monkeypatch.setattr(writer, "save_file", save_slowly)
    monkeypatch.setattr("runtime.transport.status.time", clock)
    impatient.finish()
    assert clock.now >= 8 + 8 and names(impatient) == ["step-00000001"]


@pytest.mark.parametrize("model_fails", [False, True])
def test_model_and_checkpoint_fail_one_by_one(model_fails, impatient, disk, tmp_path, monkeypatch):
    """By a clock that goes on only while the disk stands still."""
    save = impatient.learner.save_model

    def save_or_fail(directory: Path) -> None:
        if model_fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(directory)
        disk.may_go_on.clear()

    clock = SimpleNamespace(monotonic=lambda: 0.0 if disk.may_go_on.is_set() else time.monotonic())
    monkeypatch.setattr("runtime.transport.status.time", clock)
    monkeypatch.setattr(impatient.learner, "save_model", save_or_fail)
    with pytest.raises(SystemExit if model_fails else TimeoutError):
        impatient.finish()
    disk.may_go_on.set()
    assert (tmp_path / "model" / "model.safetensors").exists() != model_fails
    assert (names(impatient) == ["step-00000001"]) == model_fails


def test_a_full_disk_costs_one_checkpoint_and_another_error_the_run(trainer, disk, monkeypatch):
    said = []
    monkeypatch.setattr(trainer.checkpoints, "say", said.append)
    for step in (1, 2, 3):
        disk.is_full = step == 3
        save(trainer, step)
    assert names(trainer) == ["step-00000001", "step-00000002"]
    assert trainer.checkpoints.written_step == 2, "the end of a run tries again"
    (line,) = said
    assert re.match("step 3: no checkpoint was written.* No space left on device", line)
    disk.is_full = False
    save(trainer, step=4)
    assert names(trainer) == ["step-00000002", "step-00000004"]
    monkeypatch.setattr(writer, "write_checkpoint", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(trainer, step=5)


def test_a_resume_deletes_only_its_own_and_if_it_fails_nothing(trainer, tmp_path, monkeypatch):
    root = tmp_path / "checkpoints"
    save(trainer, step=1)
    # The user's: a copy, and a note that happens to have such a name.
    shutil.copytree(root / "step-00000001", root / "step-best")
    (root / "step-00000009").write_text("better than step 8")
    for step in (2, 3):
        save(trainer, step)
    assert names(trainer) == ["step-00000002", "step-00000003", "step-00000009", "step-best"]
    (root / "step-00000003" / "checksums.json").write_text("{}")
    newest, (complaint,) = resume.newest_whole(str(tmp_path))
    assert newest.name == "step-00000002"
    assert re.search("step-00000003 cannot be used: .* does not name buffer.npz", complaint)
    config = Config(resume=str(tmp_path), output_dir=str(tmp_path))
    run = SimpleNamespace(config=config, asked=config, given=config, resume=str(newest))
    (tmp_path / "config.json").write_text("of the first start")
    with monkeypatch.context() as patch, pytest.raises(UnicodeError):
        patch.setattr(json, "dumps", lambda *_, **__: "\ud83d")  # which no file takes
        launcher.open_run_dir(run)
    assert (tmp_path / "config.json").read_text() == "of the first start"
    launcher.open_run_dir(run)
    assert names(trainer) == ["step-00000002", "step-00000009", "step-best"], "damaged: deleted"


def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(trainer, tmp_path, capsys):
    *parts, state = trainer.state.collect()
    del state["format"]
    trainer.checkpoints.begin(1, *parts, state)
    trainer.checkpoints.wait()
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(trainer.config)))
    assert main(["--resume", str(tmp_path)]) == 2
    name = str(tmp_path / "checkpoints" / "step-00000001")
    assert re.fullmatch(f"error: '{name}' is of another version .*\n", capsys.readouterr().err)


def test_a_slow_step_a_slow_save_and_a_larger_model_have_more_time_at_the_end(trainer, disk):
    run, status = Run.__new__(Run), trainer.status  # one without processes
    run.config, run.status, run.trainers = trainer.config, status, []
    run.can_save, run.longest_silence, run.parameters = True, 0.0, 100_000
    assert run.grace_seconds() == 0.0, "nothing to save while it loads"
    status.mark_ready("trainer")
    small = run.grace_seconds()
    disk.stand_still(seconds=0.3)
    save(trainer, step=0)
    assert status.get("trainer", "save_seconds") > 0.3
    run.parameters = 10**9
    assert run.grace_seconds() > small + 300
    run.parameters = 100_000
    status.set("trainer", "save_seconds", 20.0)  # one that was slower
    save(trainer, step=1)
    assert run.grace_seconds() == 3 * 20.0 > small >= SAVE_SECONDS
    run.check_trainer()
    status.watchdogs["trainer"].seconds = 100.0  # as if a step took so long
    run.check_trainer()
    status.beat("trainer")
    run.check_trainer()
    assert 360.0 <= run.grace_seconds() < 400.0


def test_files_are_on_the_disk_before_the_rename_and_old_ones_go_last(trainer, monkeypatch):
    done = []

    def record(owner: object, name: str, describe) -> None:
        function = getattr(owner, name)

        def recorded(*arguments, **keywords) -> None:
            done.append(describe(*arguments))
            function(*arguments, **keywords)

        monkeypatch.setattr(owner, name, recorded)

    record(os, "fsync", lambda number: Path(os.readlink(f"/proc/self/fd/{number}")).name)
    record(Path, "rename", lambda path, to: f"rename to {to.name}")
    record(shutil, "rmtree", lambda path: f"remove {path.name}")
    for step in (1, 2, 3):
        done.clear()
        save(trainer, step)
    # What is removed first is not there: it would be of a run that was killed.
    assert set(done[1:6]) == resume.FILES | {"checksums.json"}
    last = "unfinished, remove step-00000003, rename to step-00000003, checkpoints"
    assert ", ".join(done[6:]) == f"{last}, remove step-00000001"


def test_tensors_and_arrays_of_any_kind_are_read_as_they_were_and_few_are_copied(trainer, tmp_path):
    neighbours = torch.arange(12.0)
    tensors = {
        "odd ⟨1⟩": torch.randn(3, 5).bfloat16(),
        "count": torch.tensor(7),
        "turned": torch.randn(4, 3).t(),
        "none": torch.empty(0, 2),
        "half": torch.randn(3).half(),
        "first": neighbours[:5],
        "rest": neighbours[5:],
    }
    arrays = {"all_tokens": np.arange(3_000_000), "rng": np.array("{}"), "none": np.empty(0)}
    both = {"learner": tensors.items()}, {"buffer": arrays, "torch": {}}
    trainer.checkpoints.begin(1, *both, {}, may_alias=True)
    trainer.checkpoints.wait()
    directory = tmp_path / "checkpoints" / "step-00000001"
    assert resume.find_corruption(directory) is None
    assert trainer.checkpoints.copies.keys() == {("learner", "turned")}
    torch.testing.assert_close(saved(trainer, 1), tensors, rtol=0, atol=0)
    np.testing.assert_equal(checkpoint.load_arrays(directory, "buffer"), arrays)
    assert len({path.stat().st_mode for path in directory.iterdir()}) == 1, "who may read them"


def test_tensors_are_written_without_a_second_copy_and_a_failure_is_an_error_of_the_disk(tmp_path):
    def peak_kib() -> int:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

    (tmp_path / "state.json").touch()
    tensors = {f"{i}": torch.ones(1 << 20) for i in range(16)}  # 64 MiB
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = peak_kib()
    write_tensors(tensors, tmp_path / "some.safetensors")
    assert peak_kib() - before < 16 << 10
    with pytest.raises(OSError, match="No such file or directory"):
        write_tensors(tensors, tmp_path / "missing" / "some.safetensors")


def test_the_writer_gives_way_to_the_trainer_but_for_the_last_checkpoint(trainer):
    def of_writer() -> int:
        return trainer.checkpoints.thread.submit(os.getpriority, os.PRIO_PROCESS, 0).result()

    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert of_writer() == max(NICENESS, own)
    trainer.checkpoints.start_thread(niceness=-20)
    assert of_writer() == own


@pytest.mark.parametrize("step, received, has_begun", [(0, 0, 0), (0, 12, 1), (3, 40, 1)])
def test_only_what_has_begun_can_go_on(step, received, has_begun, tmp_path):
    assert not resume.has_begun(str(tmp_path))
    directory = tmp_path / "checkpoints" / f"step-{step:08}"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text(json.dumps({"step": step, "received": received}))
    assert resume.has_begun(str(tmp_path)) == has_begun
