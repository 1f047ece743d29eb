"""What goes wrong in runs of hours, done on purpose to whole runs: `make test-faults`.

Nothing is lost, nothing hangs, nothing is left behind. Each test takes minutes.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM

import numpy as np
import pytest
from conftest import FOREVER, PATIENCE, ROOT, SMALL, Run, flags, living, read, shared_files, tba
from safetensors.numpy import load_file, save_file
from test_runs import metrics_of, own_task

from launch import resume
from runtime.checkpoints import checkpoint
from tasks import load_task
from tba import main

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("flag", ["--steps=5", "--eval_only"])
def test_a_nan_weight_ends_a_run_or_an_evaluation_in_one_line(flag, untied_model, tmp_path):
    model = shutil.copytree(untied_model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = np.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    result = tba("arithmetic", "--model", model, flag, "--output_dir", tmp_path / "run", code=1)
    assert "accuracy" not in result.stdout and "Traceback" not in result.stderr
    expected = f"error: the weight model.norm.weight of --model '{model}' is NaN or infinite"
    assert expected in result.stderr.splitlines()


def newest(run: Run) -> Path | None:
    """Its newest checkpoint that is whole."""
    return resume.newest_whole(str(run.run_dir))[0]


# Searchers

VISITS = """
    # Who scored which query is written down beside this file.
    def score(self, queries, responses, finished):
        with open(Path(__file__).with_suffix(".visits"), "a") as file:
            for query in dict.fromkeys(query.id for query in queries):
                print(os.getpid(), query, file=file)
        return super().score(queries, responses, finished)
"""
TINY_TASK = [*SMALL, *flags(beta=0.1, temperature=1.0, learning_rate=1e-4)]
TINY_TASK += flags(max_prompt_tokens=16, max_response_tokens=8)
TINY_TASK += flags(responses_per_query=4, samples_per_query=12)


def visits(task: Path) -> tuple[set[str], set[int]]:
    """The processes that have scored something by a task of VISITS, and the ids of the queries."""
    path = task.with_suffix(".visits")
    lines = path.read_text().splitlines() if path.exists() else []
    whole = [words for words in map(str.split, lines) if len(words) == 2]
    return {process for process, _ in whole}, {int(query) for _, query in whole}


def share(ids: list[int], rank: int, searchers: int) -> list[int]:
    """A searcher's first epoch of query ids, in order (QueryShare), seed 0."""
    own = np.random.default_rng(0).permutation(len(ids))[rank::searchers]
    return [ids[i] for i in np.random.default_rng((0, rank, 0)).permutation(own)]


def test_killed_searchers_are_replaced_and_no_query_of_theirs_is_lost(tmp_path, record_property):
    """kill -9 to all at once: steps go on, and the searchers come back."""
    task, searchers = own_task(tmp_path / "visits.py", VISITS), 2
    with Run(tmp_path / "run", task, *TINY_TASK, "--searchers", searchers, *FOREVER) as run:
        run.is_at(20)
        run.until(lambda: len(visits(task)[0]) == searchers, "groups of all searchers")
        before = {run.pid(f"searcher {rank}") for rank in range(searchers)} - {None}
        assert len(before) == searchers
        for pid in before:
            os.kill(pid, SIGKILL)
        killed, at = time.monotonic(), run.step()
        run.is_at(at + 20)  # from the buffer, long before a new searcher has loaded
        assert len(visits(task)[0]) == searchers, "only those that are dead have scored so far"
        run.until(lambda: len(visits(task)[0]) == 2 * searchers, "groups of the new searchers")
        seconds = round(time.monotonic() - killed)
        record_property("seconds until groups of all new searchers", seconds)
        record_property("steps meanwhile", run.step() - at)
        ids = [query.id for query in load_task("arithmetic").queries("train")]
        orders = [share(ids, rank, searchers) for rank in range(searchers)]

        def have_gone_on() -> bool:
            """Whether each share is searched far beyond what was in flight at the kill."""
            return all(len(visits(task)[1] & set(order[:500])) > 150 for order in orders)

        run.until(have_gone_on, "150 queries of each share")
        assert run.steps()[-1]["searcher_restarts"] == searchers
        out, _ = run.end()
        assert out.count("ended with exit code -9: it is started again") == searchers
    state = checkpoint.load_state(checkpoint.list_checkpoints(str(run.run_dir))[-1])
    for rank, order in enumerate(orders):
        # What lies behind it may be in flight: in any order, as responses end.
        cursor = int(state["status"][f"searcher {rank}"]["cursor"])
        assert set(order[:cursor]) <= visits(task)[1] and cursor > 50


def test_a_searcher_that_is_stopped_is_replaced_after_the_timeout(tmp_path, record_property):
    with Run(tmp_path / "run", "arithmetic", *SMALL, *FOREVER, "--searcher_timeout", 15) as run:
        run.is_at(20)
        first = run.pid("searcher 0")
        stopped = time.monotonic()
        run.kill("searcher 0", SIGSTOP)
        run.until(lambda: run.pid("searcher 0") not in (first, None), "another searcher")
        seconds = time.monotonic() - stopped
        record_property("seconds until another is started, of a timeout of 15", round(seconds))
        assert seconds > 14
        run.is_at(run.step() + 50)
        assert "sent no heartbeat" in run.end()[0]


def test_a_searcher_that_waits_on_a_full_queue_is_not_taken_for_dead(tmp_path):
    settings = flags(searcher_timeout=10, sync_period=1_000_000, checkpoint_every=0)
    with Run(tmp_path / "run", "arithmetic", *SMALL, *FOREVER, *settings) as run:
        run.is_at(20)
        # Nobody empties the queue: no sync does, and no checkpoint.
        run.until(lambda: run.steps()[-1]["searcher_busy"] < 0.05, "a searcher that waits")
        time.sleep(15)
        assert run.steps()[-1]["searcher_restarts"] == 0 and run.steps()[-1]["queue_depth"] > 100
        run.end()


SURVIVE = """
import os, queue, random, sys, time
from pathlib import Path
import numpy as np
from config import Config
from launch.places import Place
from launch.supervisor import Supervisor
from rollouts import Group, make_tokens
from runtime.transport.status import StatusTable

class Weights:
    def unpin(self, reader):
        pass

def write(config, rank, weights, outgoing, status, run_dir):
    status.set("searcher 0", "ready", 1)
    i = 0
    while True:
        status.beat("searcher 0")
        tokens = make_tokens(np.full(1_000_000, i))
        outgoing.put(Group(query_id=os.getpid(), version=i, tokens=tokens))
        i += 1

if __name__ == "__main__":
    status, run_dir = StatusTable(["trainer", "searcher 0"]), str(Path(__file__).parent)
    place = Place("searcher 0", None, [0, 1])
    run = Supervisor(Config(), [place], Weights(), status, run_dir, "survive:write", print)
    for kill in range(30):
        deadline = time.monotonic() + float(sys.argv[1])
        fresh = 0
        while fresh < 20:  # groups of this writer
            assert time.monotonic() < deadline, kill
            try:
                item = run.rollout_queue.get(timeout=1)
            except queue.Empty:
                continue
            if isinstance(item, Group):
                assert item.tokens["token"][999_999] == item.version, "a torn group"
                assert (item.tokens == item.tokens[:1]).all(), "a torn group"
                fresh += item.query_id == run.searchers[0].pid
        time.sleep(random.random() * 0.01)
        run.searchers[0].kill()
        run.searchers[0].join()
        status.set("searcher 0", "beat", 0.0)
        run.check()
        assert status.get("searcher 0", "beat") > 0.0, "being started is a heartbeat"
    status.stop = True
    run.stop()
    print("survived 30")
"""


def test_a_queue_survives_thirty_writers_killed_in_the_midst_of_a_group(tmp_path, monkeypatch):
    """The supervisor with its real queues and processes.

    A writer puts large groups without pause, so that it dies in the midst of one.
    """
    (tmp_path / "logs").mkdir()
    (tmp_path / "survive.py").write_text(SURVIVE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, str(tmp_path / "survive.py"), str(PATIENCE)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert "survived 30" in result.stdout, result.stderr


def test_a_run_that_was_paused_whole_goes_on_whoever_wakes_first(tmp_path):
    settings = ["--synchronous", *flags(steps=30, checkpoint_every=0, searcher_timeout=12)]
    with Run(tmp_path / "run", "arithmetic", *SMALL, *settings) as run:
        run.is_at(5)
        group = run.process.pid
        for first in (group, run.pid("trainer"), run.pid("searcher 0")):
            at = run.step()
            os.killpg(group, SIGSTOP)
            time.sleep(15)
            os.kill(first, SIGCONT)
            time.sleep(1)
            os.killpg(group, SIGCONT)
            run.is_at(at + 2)
        run.ends_with(0)
    assert run.step() == 30


# The parent and the trainer

HEARS = ["env", "--default-signal=HUP"]  # even where these tests run under nohup
ENDS = [(SIGINT, 0, ["nohup"]), (SIGTERM, 5, HEARS), (SIGHUP, 0, HEARS)]


@pytest.mark.parametrize("how, every, prefix", ENDS)
def test_a_signal_ends_a_run_that_is_saved(how, every, prefix, tmp_path, capsys, record_property):
    settings = [*SMALL, *FOREVER, "--checkpoint_every", every]
    with Run(tmp_path / "run", "arithmetic", *settings, prefix=prefix) as run:
        run.is_at(10)
        assert main(["--resume", str(run.run_dir)]) == 2
        problem = f"--resume '{run.run_dir}': this run has not ended, its processes are alive"
        assert capsys.readouterr().err == f"error: {problem}\n"
        if prefix == ["nohup"]:
            os.killpg(run.process.pid, SIGHUP)  # a closed terminal: the run goes on
        run.is_at(run.step() + 20)
        start = time.monotonic()
        if how == SIGHUP:  # a closed terminal: to all, and once more by the shell
            os.killpg(run.process.pid, how)
            time.sleep(0.5)  # two that come at once are one
        _, err = run.end(how)
        seconds = time.monotonic() - start
        record_property("seconds to the end, and to the first step", (seconds, run.start_seconds))
        assert seconds < run.start_seconds
        assert "to finish a step and to save may take up to " in err
        assert f"stopped by {how.name}" in err
        assert f"to go on: python tba.py --resume {run.run_dir}" in err
        assert newest(run).name == f"step-{run.step():08}"
        run.nothing_is_left()


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_trainer_that_does_not_end_at_a_signal_is_killed(is_repeated, tmp_path, record_property):
    with Run(tmp_path / "run", "arithmetic", *SMALL, *FOREVER) as run:
        run.is_at(10)
        run.kill("trainer", SIGSTOP)  # so that it cannot end by itself
        if is_repeated:
            run.process.send_signal(SIGINT)
            time.sleep(0.5)
        start = time.monotonic()
        _, err = run.end()
        seconds = time.monotonic() - start
        if is_repeated:
            record_property("seconds to the end", round(seconds, 2))
            assert seconds < run.start_seconds / 2 and "did not save" not in err
        else:
            allowed = re.search(r"take up to (\d+) s; a second Ctrl-C ends it at once", err)[1]
            assert f"the trainer did not save and end within {allowed} s: it is killed" in err
            assert int(allowed) >= 10
        run.nothing_is_left()


def test_a_trainer_has_time_to_finish_as_slow_a_step_and_to_save(tmp_path, monkeypatch):
    settings = flags(checkpoint_every=10)
    with planted("time.sleep(15)", "trainer", tmp_path, monkeypatch, settings) as run:

        def has_made_slow_step() -> bool:
            return np.diff([line["seconds"] for line in run.steps()]).max() > 15

        run.until(has_made_slow_step, "a slow step")
        _, err = run.end()
        assert "did not save" not in err
        assert int(re.search(r"take up to (\d+) s", err)[1]) >= 3 * 15
        assert newest(run).name == f"step-{run.step():08}"
        assert (run.run_dir / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("where", ["head -1", "a full disk", "a closed terminal"])
def test_a_run_whose_output_is_lost_goes_on_to_its_end(where, tmp_path, monkeypatch):
    task = own_task(tmp_path / "задача.py", "    pass\n")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    terminal, other_end = os.openpty()
    os.set_blocking(terminal, False)

    def is_shown() -> bool:
        with suppress(BlockingIOError):
            return b"steps behind" in os.read(terminal, 1 << 16)
        return False

    path = "/dev/full" if where == "a full disk" else os.ttyname(other_end)
    prefix = () if where == "head -1" else ["sh", "-c", f'exec "$@" > {path} 2>&1', "sh"]
    with Run(tmp_path / "run", task, *TINY_TASK, "--steps", 30, prefix=prefix) as run:
        if where == "head -1":
            first = run.process.stdout.readline()
            assert "/\\u0437\\u0430\\u0434\\u0430\\u0447\\u0430.py: 9000 queries" in first
            run.process.stdout.close()
        elif where == "a closed terminal":
            run.until(is_shown, "the live view")
        os.close(other_end)
        os.close(terminal)
        assert run.process.wait(PATIENCE) == 0
    assert newest(run).name == "step-00000030"
    assert (run.run_dir / "model" / "model.safetensors").exists()
    assert any("final_accuracy" in line for line in read(run.run_dir, "metrics.jsonl"))


def test_a_signal_while_the_searchers_load_leaves_no_semaphore(tmp_path):
    for second in range(5, 11):
        with Run(tmp_path / f"run-{second}", "arithmetic", *SMALL, *FOREVER) as run:
            time.sleep(second)
            run.end()


# A trainer of several processes

PLANT = """
import sys, threading, time
from pathlib import Path

def fail(learner):
    {fault}

def name():
    return Path("/proc/self/comm").read_text().strip()

def plant():
    # What a process is given is read before it has its name, and imports the learner.
    while not hasattr(sys.modules.get("learner"), "Learner") or not name().startswith("tba "):
        time.sleep(0.1)
    if name() != "tba {name}":
        return
    while not Path({sign!r}).exists():
        time.sleep(0.1)
    sys.modules["learner"].Learner.step_optimizer = fail

threading.Thread(target=plant, daemon=True).start()
"""
TWO = flags(trainer_processes=2, checkpoint_every=10, searcher_timeout=12)


def check_end(run: Run, cause: str, record_property) -> str:
    """The run ends by itself, says why, and keeps the checkpoint of before. Returns stderr."""
    start = time.monotonic()
    _, err = run.ends_with(1)
    record_property("seconds to the end", round(time.monotonic() - start, 1))
    assert cause in err and "to go on: python tba.py --resume" in err, err
    whole, complaints = resume.newest_whole(str(run.run_dir))
    assert complaints == [] and checkpoint.load_state(whole)["step"] >= 10
    run.nothing_is_left()
    return err


FAULTS = {SIGKILL: "ended with exit code -9", SIGSTOP: "is stopped: no heartbeat for 12 s"}
STRUCK = [
    (SIGKILL, "trainer", 1),
    (SIGKILL, "trainer", 2),
    (SIGKILL, "trainer 1", 2),
    (SIGSTOP, "trainer", 2),
    (SIGSTOP, "trainer 1", 2),
]


@pytest.mark.parametrize("how, name, processes", STRUCK)
def test_a_trainer_killed_or_stopped_ends_the_run(how, name, processes, tmp_path, record_property):
    settings = flags(trainer_processes=processes, checkpoint_every=10, searcher_timeout=12)
    with Run(tmp_path / "run", "arithmetic", *SMALL, *settings, *FOREVER) as run:
        run.is_at(10)
        run.until(lambda: newest(run), "a checkpoint")
        run.kill(name, how)
        err = check_end(run, f"error: {name} {FAULTS[how]}", record_property)
        assert f"{name.replace(' ', '-')}.log:" in err


@pytest.mark.parametrize("name", ["trainer", "trainer 1"])
def test_a_trainer_process_that_is_killed_while_it_loads_ends_the_run(name, tmp_path):
    with Run(tmp_path / "run", "arithmetic", *SMALL, *TWO, *FOREVER) as run:
        run.until(lambda: shared_files(living(run.tag)), "shared memory")
        run.kill(name)
        _, err = run.ends_with(1)
        assert f"error: {name} ended with exit code -9" in err
        run.nothing_is_left()


@pytest.mark.parametrize("name", ["trainer", "trainer 1"])
def test_a_trainer_process_that_raises_ends_the_run(name, tmp_path, monkeypatch, record_property):
    fault = 'raise ValueError("planted")'
    with planted(fault, name, tmp_path, monkeypatch) as run:
        err = check_end(run, f"error: {name} ended with exit code 1", record_property)
        assert "ValueError: planted" in err


def test_a_collective_that_hangs_ends_the_run_and_is_shown(tmp_path, monkeypatch, record_property):
    with planted("time.sleep(1e6)", "trainer 1", tmp_path, monkeypatch) as run:
        err = check_end(run, "error: the trainer sent no heartbeat for 12 s", record_property)
        assert "in fail" in err.split("trainer-1.log:")[1], "where trainer 1 sleeps"
        assert "step_optimizer" in err.split("trainer-1.log:")[0], "where the trainer waits for it"


@contextmanager
def planted(fault: str, name: str, tmp_path: Path, monkeypatch, settings=TWO) -> Iterator[Run]:
    """A run in which a statement was put into the next optimizer step of one process."""
    sign = tmp_path / "now"
    text = PLANT.format(fault=fault, name=name, sign=str(sign))
    (tmp_path / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Run(tmp_path / "run", "arithmetic", *SMALL, *settings, *FOREVER) as run:
        run.until(lambda: newest(run), "a checkpoint")
        sign.touch()
        yield run


def test_a_run_of_two_trainer_processes_is_interrupted_and_resumed_by_one_and_by_four(tmp_path):
    with Run(tmp_path / "run", "arithmetic", *SMALL, *TWO, *FOREVER) as run:
        run.until(lambda: newest(run), "a checkpoint")
        _, err = run.end()
        assert "to go on" in err
        run.nothing_is_left()
    for processes in (1, 4):
        state, at = checkpoint.load_state(newest(run)), run.step()
        assert state["step"] == at, "it was saved at the end"
        settings = flags(steps=at + 10, trainer_processes=processes)
        tba("--resume", run.run_dir, *settings)
        assert run.step() == at + 10


# Checkpoints


@pytest.mark.long
def test_a_run_killed_at_random_goes_on_from_its_last_whole_checkpoint(tmp_path, record_property):
    rng, reached, lost, unfinished = random.Random(0), 0, [], 0
    run_dir = tmp_path / "run"
    metrics, writing = run_dir / "metrics.jsonl", run_dir / "checkpoints" / "unfinished"
    for attempt in range(21):
        whole = resume.newest_whole(str(run_dir))[0]
        saved, arrays, inode = {"step": 0}, {}, 0
        if whole:
            saved, arrays = checkpoint.load_state(whole), checkpoint.load_arrays(whole, "buffer")
            inode = metrics.stat().st_ino
        lost.append(reached - saved["step"])
        # One that is being written may be lost, with the steps until the next, which waits for it.
        assert lost[-1] <= 2 * 3, "no more is lost than the steps since the checkpoint before"
        unfinished += writing.exists()
        first = ["arithmetic", *SMALL, *FOREVER, "--checkpoint_every", 3]
        with Run(run_dir, *(() if attempt else first), resume=attempt > 0) as run:

            def is_back(inode: int = inode) -> bool:
                return metrics.exists() and metrics.stat().st_ino != inode

            run.until(is_back, "the metrics, back at the checkpoint")
            run.is_at(saved["step"] + 1)
            lines = [line["step"] for line in run.steps()]
            assert lines == list(range(1, lines[-1] + 1)), "no step twice, none left out"
            if whole:  # the first step comes before anything new can: the buffer is what was saved
                line = run.steps()[saved["step"]]
                assert line["buffer_responses"] == len(arrays["all_versions"])
                assert line["received"] == saved["received"]
            time.sleep(rng.random() * 3)
            if attempt % 2:  # every other time in the midst of a checkpoint
                run.until(writing.exists, "a checkpoint")
            run.process.kill()
            run.nothing_is_left()
            reached = run.step()
    record_property("steps lost at each kill", lost[1:])
    record_property("kills while a checkpoint was being written", unfinished)
    assert reached > 20 and unfinished


@contextmanager
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that is soon full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    if subprocess.run(mount).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)])


def fill(path: Path) -> None:
    """Write to a file until the disk is full."""
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))


def test_a_full_disk_costs_checkpoints_and_metrics_and_no_more(tmp_path, record_property, capsys):
    with small_disk(tmp_path) as disk:
        with Run(disk / "run", "arithmetic", *SMALL, *FOREVER, "--checkpoint_every", 20) as run:
            run.until(lambda: newest(run), "a checkpoint")
            whole = newest(run)
            fill(disk / "other")
            pids = [run.pid(name) for name in ("trainer", "searcher 0")]
            time.sleep(15)
            assert all(pids), "both were there"
            assert pids == [run.pid(name) for name in ("trainer", "searcher 0")], "and go on"
            _, complaints = resume.newest_whole(str(run.run_dir))
            assert newest(run) and complaints == [], "the previous checkpoint is intact"
            at = run.step()
            os.remove(disk / "other")
            run.until(lambda: run.steps()[-1]["step"] > at + 60, "steps after that")
            gap = int(max(np.diff([line["step"] for line in run.steps()])))
            record_property("steps made while the disk was full, their metrics lost", gap - 1)
            assert gap > 10, "they were made at the machine's pace"
            run.until(lambda: newest(run).name > whole.name, "a newer checkpoint")
            fill(disk / "other")
            out, err = run.end()
            assert "no checkpoint was written, the one before stays" in out
            assert "the model could not be saved: " in out
            assert "error: the trainer could not save the model\n" in err
            assert f"to go on: python tba.py --resume {run.run_dir}" in err
            assert "Traceback" not in err
        os.remove(disk / "other")
        # Read-only from here on.
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        capsys.readouterr()
        assert main(["--resume", str(run.run_dir)]) == 2
        problem = f"error: {str(run.run_dir)!r} cannot be written: [Errno 30] Read-only file system"
        err = capsys.readouterr().err
        assert err.startswith(problem) and err.count("\n") == 1


@pytest.mark.parametrize("room, exit_code", [(1 << 20, 0), (200 << 10, 1)])
def test_a_run_whose_disk_fills_ends_and_fails_only_without_its_model(room, exit_code, tmp_path):
    """First there is room for the model and for no checkpoint, then for neither."""
    settings = [*SMALL, "--steps", 20]
    with small_disk(tmp_path) as disk, Run(disk / "run", "arithmetic", *settings) as run:
        run.until((run.run_dir / "starts.jsonl").exists, "a start")
        fill(disk / "other")
        os.truncate(disk / "other", (disk / "other").stat().st_size - room)
        out, err = run.ends_with(exit_code)
        assert "step 20: no checkpoint was written" in out
        assert "step 20/20" in out and "Traceback" not in err
        assert (run.run_dir / "model").exists() == (exit_code == 0)
        assert ("final accuracy" in out) == (exit_code == 0)
        assert ("error: the trainer could not save the model\n" in err) == (exit_code == 1)


# Scores


def test_a_run_whose_final_evaluation_fails_has_failed_and_keeps_its_model(tmp_path):
    tried = "{'x': [1 / (len(queries) == 2)] * 2}"  # on two responses, at the start
    evaluate = f"    def evaluate(self, queries, *_):\n        return {tried}\n"
    task = own_task(tmp_path / "own.py", evaluate)
    settings = flags(max_prompt_tokens=16, max_response_tokens=8, steps=1, eval_every=0)
    result = tba(task, *SMALL, *settings, "--output_dir", tmp_path / "run", code=1)
    assert "ZeroDivisionError" in result.stderr
    assert (tmp_path / "run" / "model" / "config.json").exists()


OWN_TASK = """
from tasks import Query, Task

class Capitals(Task):
    def queries(self, split):
        return [Query(i, f"query {i}", i) for i in range(40)]

    def score(self, queries, responses, finished):
        if any(query.id % 10 == 3 for query in queries):
            raise ValueError("no score for a 3")
        capitals = [float(sum(c.isupper() for c in response)) for response in responses]
        return [float("nan") if q.id % 10 == 7 else c for q, c in zip(queries, capitals)]
"""


def test_queries_without_scores_are_dropped_and_counted_in_training_and_in_evaluation(
    tmp_path, tied_model
):
    (tmp_path / "capitals.py").write_text(OWN_TASK)
    run_dir = tmp_path / "run"
    settings = flags(max_response_tokens=10, steps=30, model=tied_model, output_dir=run_dir)
    result = tba(tmp_path / "capitals.py", *SMALL, *settings)
    line = [line for line in read(run_dir, "metrics.jsonl") if "loss" in line][-1]
    assert line["unscored_groups"] > 0 and "groups were dropped" in result.stdout
    log = (run_dir / "logs" / "searcher-0.log").read_text()
    assert "query 3 is dropped" in log and "no score for a 3" in log and "query 7 is dropped" in log
    samples = read(run_dir, "samples.jsonl")
    assert not [line for line in samples if line["query_id"] % 10 in (3, 7)]
    assert "on 32 test queries; 8 left out, they got no score" in result.stdout


BAD_SCORES = """
    score_timeout = 5.0
    def score(self, queries, responses, finished):
        if {bad} and queries[0].id % 20 == 3:
            raise ValueError("no score for this one")
        if {bad} and queries[0].id % 20 == 7:
            return [float("nan")] * len(queries)
        if {bad}:  # one of the two workers hangs, half of the time
            try:
                Path(__file__).with_name("hang-%d" % (time.monotonic() // 10)).touch(exist_ok=False)
                time.sleep(60)
            except FileExistsError:
                pass
        return super().score(queries, responses, finished)
"""


def test_queries_without_scores_are_dropped_and_others_keep_pace(tmp_path, record_property):
    """Both runs at once, so that they share whatever pace the machine has.

    For a minute, and up to two more: tests on the same cores may hold up one run more than the
    other. With one worker, held up, it would be a third in each.
    """

    def start(kind: str) -> Run:
        task = own_task(tmp_path / f"{kind}.py", BAD_SCORES.format(bad=kind == "bad"))
        return Run(tmp_path / f"run-{kind}", task, *TINY_TASK, *FOREVER)

    with start("clean") as clean, start("bad") as bad:
        runs = clean, bad
        for run in runs:
            metrics = run.run_dir / "metrics.jsonl"
            run.until(lambda run=run: run.step() >= 20, "20 steps")
            run.until(lambda path=metrics: '"accuracy"' in path.read_text(), "an evaluation")
        for _ in range(3):
            before = {run: run.steps()[-1]["received"] for run in runs}
            time.sleep(60)
            of_clean, of_bad = (run.steps()[-1]["received"] - before[run] for run in runs)
            of_good = of_bad / 0.9  # a tenth of its queries is bad
            if of_good >= 0.5 * of_clean:
                break
        for run in runs:
            line = run.steps()[-1]
            # On a busy machine score() may take longer than score_timeout: two groups each.
            assert (line["unscored_groups"] > 10) == (run is bad)
            assert line["searcher_restarts"] == 0
            log = (run.run_dir / "logs" / "searcher-0.log").read_text()
            out, _ = run.end()
            run.nothing_is_left()  # the workers neither
    received = of_clean, round(of_good)
    record_property("responses in 60 s of the clean run and of the other's good queries", received)
    assert "no score for this one" in log and "finite numbers" in log and "TimeoutError" in log
    assert of_good >= 0.5 * of_clean
    assert " left out, they got no score)" in out


DIES = """
    def score(self, *_):
        os.write(2, b'the last words of a searcher')
        os._exit(7)
"""
FAILS = """
    def score(self, queries, *rest):
        if queries[0].id % 4:
            raise ValueError("three of four fail")
        return super().score(queries, *rest)
"""
DIED = "error: searcher 0 ended with exit code 7"
FATAL = [
    (DIES, [], f"{DIED}, 3 times without a group\n", "the last words of a searcher"),
    (DIES, ["--constant_staleness", 2], f"{DIED}\n", "the last words of a searcher"),
    (FAILS, [], "groups got no scores: the run ends", "three of four fail"),
]


@pytest.mark.parametrize("body, settings, problem, cause", FATAL, ids=["dies", "once", "raises"])
def test_a_score_that_dies_or_mostly_raises_ends_the_run(body, settings, problem, cause, tmp_path):
    task = own_task(tmp_path / "fatal.py", body)
    result = tba(task, *TINY_TASK, *FOREVER, *settings, "--output_dir", tmp_path / "run", code=1)
    assert problem in result.stderr and cause in result.stderr


# Long runs, and several

FEW = """
    def queries(self, split):
        return super().queries(split)[:200]
"""


@pytest.mark.long
def test_thirty_thousand_groups_leave_memory_and_open_files_alone(tmp_path, record_property):
    """The slope of memory behind the first 12,000 groups, in which buffer and caches fill up."""
    settings = flags(capacity_per_query=12, checkpoint_every=0, sync_period=10)
    task, thousands = own_task(tmp_path / "few.py", FEW), range(2, 31, 2)
    measured = {"trainer": [], "searcher 0": []}  # MiB of resident memory, file descriptors
    with Run(tmp_path / "run", task, *TINY_TASK, *settings, *FOREVER) as run:
        for thousand in thousands:
            groups = 1000 * thousand

            def has_come(responses: int = 12 * groups) -> bool:
                return bool(run.steps()) and run.steps()[-1]["received"] > responses

            run.until(has_come, f"{groups} groups")
            for name, sizes in measured.items():
                process = Path(f"/proc/{run.pid(name)}")
                lines = (process / "status").read_text().splitlines()
                resident = next(int(line.split()[1]) for line in lines if "VmRSS" in line)
                sizes.append((resident / 1024, len(os.listdir(process / "fd"))))
    for name, sizes in measured.items():
        memory, num_files = zip(*sizes[5:])  # from 12,000 on
        slope = float(np.polyfit(thousands[5:], memory, 1)[0])
        figures = f"{memory[0]:.0f} to {memory[-1]:.0f} MiB, {slope:.2f} MiB a thousand groups"
        record_property(f"{name}, 12,000 to 30,000 groups", figures)
        assert slope < 1.0, "MiB a thousand groups"
        assert num_files[-1] <= num_files[0], "file descriptors"


def test_two_runs_at_once_do_not_disturb_each_other(tmp_path):
    settings = ["arithmetic", "--synchronous", *SMALL, *flags(steps=10, seed=3)]
    tba(*settings, "--output_dir", tmp_path / "alone")
    with Run(tmp_path / "first", *settings) as first, Run(tmp_path / "second", *settings) as second:
        for run in (first, second):
            run.ends_with(0)
            assert metrics_of(run.run_dir) == metrics_of(tmp_path / "alone")
