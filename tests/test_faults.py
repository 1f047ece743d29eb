"""What goes wrong in runs of hours, done on purpose to whole runs.

Nothing is lost, nothing hangs, nothing is left behind.
Those marked `faults` take minutes each: `make test-faults`. The others are in `make test`.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import FOREVER, PATIENCE, ROOT, SMALL, Run, living, read, shared_files, steps_of, tba
from safetensors.numpy import load_file, save_file

from buffer import ReplayBuffer
from runtime.checkpoints import checkpoint
from runtime.record import timeline
from runtime.run import in_words
from tasks import load_task
from tba import main


@pytest.mark.faults
@pytest.mark.parametrize("flag", ["--steps=5", "--eval_only"])
def test_a_nan_weight_ends_a_run_or_an_evaluation_in_one_line(flag, untied_model, tmp_path):
    model = shutil.copytree(untied_model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = np.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    result = tba("arithmetic", "--model", model, flag, "--output_dir", tmp_path / "run")
    assert result.returncode == 1 and "accuracy" not in result.stdout
    assert "Traceback" not in result.stderr
    expected = f"error: the weight model.norm.weight of --model '{model}' is NaN or infinite"
    assert expected in result.stderr.splitlines()


# Searchers

VISITS = """
import os
from tasks import arithmetic

class Visits(arithmetic.Arithmetic):
    # The same task; who scored which query is written down.
    def score(self, queries, responses, finished):
        with open({path!r}, "a") as file:
            for query in dict.fromkeys(query.id for query in queries):
                print(os.getpid(), query, file=file)
        return super().score(queries, responses, finished)
Visits.__module__ = __name__
del arithmetic
"""


def visits_task(tmp_path: Path) -> tuple[Path, Path]:
    """A task file, and the file into which its score() writes (process, query id)."""
    path = tmp_path / "visits.txt"
    (tmp_path / "visits.py").write_text(
        "from tasks.arithmetic import Arithmetic\n" + VISITS.format(path=str(path))
    )
    return tmp_path / "visits.py", path


TINY_TASK = (
    "--beta 0.1 --temperature 1.0 --max_prompt_tokens 16 --max_response_tokens 8"
    " --responses_per_query 4 --samples_per_query 12 --learning_rate 1e-4 --queries_per_batch 8"
    " --initial_responses 100"
).split()


def share(ids: list[int], rank: int, searchers: int) -> list[int]:
    """A searcher's first epoch of query ids, in order (runtime/modes/free_running.py), seed 0."""
    own = np.random.default_rng(0).permutation(len(ids))[rank::searchers]
    return [ids[i] for i in np.random.default_rng((0, rank, 0)).permutation(own)]


# Of the metrics; the rest is repeatable.
TIMING = "seconds trainer_busy searcher_busy searcher_tokens_per_second queue_depth".split()


@pytest.mark.faults
def test_searchers_killed_in_mid_generation_are_replaced_and_no_query_of_their_shares_is_left_out(
    tmp_path, record_property
):
    """kill -9 to all at once: steps go on, and the searchers come back."""
    task, path = visits_task(tmp_path)
    with Run(tmp_path / "run", task, *TINY_TASK, "--searchers", searchers := 2, *FOREVER) as run:
        run.is_at(20)
        run.until(lambda: len(read_visits(path)) == searchers, "groups of all searchers")
        before = {pid for pid in (run.pid(f"searcher {rank}") for rank in range(searchers)) if pid}
        assert len(before) == searchers
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        killed, at = time.monotonic(), run.step()
        run.is_at(at + 20)  # from the buffer, long before a new searcher has loaded
        assert len(read_visits(path)) == searchers, "only those that are dead have scored so far"
        run.until(lambda: len(read_visits(path)) == 2 * searchers, "groups of the new searchers")
        record_property(
            "seconds until groups of all new searchers", round(time.monotonic() - killed)
        )
        record_property("steps meanwhile", run.step() - at)
        ids = [query.id for query in load_task("arithmetic").queries("train")]
        orders = [share(ids, rank, searchers) for rank in range(searchers)]

        def have_gone_on() -> bool:
            """Whether each share is searched far beyond what was in flight at the kill."""
            visited = {query for queries in read_visits(path).values() for query in queries}
            return all(len(visited & set(order[:500])) > 150 for order in orders)

        run.until(have_gone_on, "150 queries of each share")
        assert run.steps()[-1]["searcher_restarts"] == searchers
        out, _ = run.end()
        assert out.count("ended with exit code -9: it is started again") == searchers
    visited = {query for queries in read_visits(path).values() for query in queries}
    state = checkpoint.load_state(checkpoint.list_checkpoints(str(run.run_dir))[-1])
    for rank, order in enumerate(orders):
        # What lies behind it may be in flight: in any order, as responses end.
        cursor = int(state["board"][f"searcher {rank}"]["cursor"])
        assert all(query in visited for query in order[:cursor]) and cursor > 50


def read_visits(path: Path) -> dict[str, list[int]]:
    visits: dict[str, list[int]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        if len(line.split()) == 2:
            visits.setdefault(line.split()[0], []).append(int(line.split()[1]))
    return visits


@pytest.mark.faults
def test_a_searcher_that_is_stopped_is_replaced_after_the_timeout(tmp_path, record_property):
    with Run(tmp_path / "run", "arithmetic", *SMALL, *FOREVER, "--searcher_timeout", 15) as run:
        run.is_at(20)
        first = run.pid("searcher 0")
        stopped = time.monotonic()
        run.kill("searcher 0", signal.SIGSTOP)
        run.until(lambda: run.pid("searcher 0") not in (first, None), "another searcher")
        seconds = time.monotonic() - stopped
        record_property("seconds until another is started, of a timeout of 15", round(seconds))
        assert seconds > 14
        run.is_at(run.step() + 50)
        assert "gave no sign of life" in run.end()[0]


@pytest.mark.faults
def test_a_searcher_that_waits_on_a_full_queue_is_not_taken_for_dead(tmp_path):
    flags = "--searcher_timeout 10 --sync_period 1000000 --checkpoint_every 0".split()
    with Run(tmp_path / "run", "arithmetic", *SMALL, *FOREVER, *flags) as run:
        run.is_at(20)
        # Nobody empties the queue: no sync does, and no checkpoint.
        run.until(lambda: run.steps()[-1]["searcher_busy"] < 0.05, "a searcher that waits")
        time.sleep(15)
        assert run.steps()[-1]["searcher_restarts"] == 0 and run.steps()[-1]["queue_depth"] > 100
        run.end()


@pytest.mark.faults
@pytest.mark.parametrize(
    "flags, repeated", [((), ", 3 times without a group"), (("--constant_staleness", 2), "")]
)
def test_a_searcher_that_dies_three_times_without_a_group_or_in_lockstep_once_ends_the_run(
    flags, repeated, tmp_path
):
    (tmp_path / "dies.py").write_text(
        "import os\nfrom tasks.arithmetic import Arithmetic as A\n\n"
        "class Dies(A):\n    def score(self, *a):\n"
        "        os.write(2, b'the last words of a searcher')\n        os._exit(7)\n"
    )
    result = tba(tmp_path / "dies.py", *TINY_TASK, *flags, "--output_dir", tmp_path / "run")
    assert result.returncode == 1
    assert f"error: searcher 0 ended with exit code 7{repeated}\n" in result.stderr
    assert "the last words of a searcher" in result.stderr


SURVIVE = """
import queue, random, sys, time
sys.path[:0] = [{root!r}, {directory!r}]
import writer
from buffer import Group
from config import Config
from runtime.processes import children
from runtime.transport.board import Board
from runtime.processes.supervisor import Supervisor

if __name__ == "__main__":
    place = children.Place("searcher 0", None, [0, 1])
    board = Board(["trainer", "searcher 0"])
    run = Supervisor(Config(), [place], writer.Weights(), board, {directory!r}, "writer:run")
    got = 0
    for kill in range(30):
        deadline = time.monotonic() + {patience}
        fresh = 0
        while fresh < 20:  # groups of this writer
            assert time.monotonic() < deadline, (kill, got)
            try:
                item = run.rollout_queue.get(timeout=1)
            except queue.Empty:
                continue
            if isinstance(item, Group):
                assert len(item.tokens) == 300_000, "a torn group"
                assert (item.tokens == item.version).all(), "a torn group"
                fresh += item.query_id == run.searchers[0].pid
                got += 1
        time.sleep(random.random() * 0.01)
        run.searchers[0].kill()
        run.searchers[0].join()
        run.check()
    board.stop = True
    run.stop()
    print("survived 30,", got, "groups")
"""

WRITER = """
import os
import numpy as np
from buffer import Group

class Weights:
    def unpin(self, reader):
        pass

def run(config, share, pin, row, weights, rollout_queue, board, run_dir):
    board.set(row, "ready", 1)
    i = 0
    while True:
        board.beat(row)
        rollout_queue.put(Group(os.getpid(), i, i, 0, None, *[np.full(300_000, i)] * 7, 1.0))
        i += 1
"""


@pytest.mark.faults
def test_a_queue_survives_thirty_writers_killed_in_the_midst_of_a_group(tmp_path):
    """The supervisor with its real queues and processes.

    A writer puts large groups without pause, so that it dies in the midst of one.
    """
    (tmp_path / "logs").mkdir()
    (tmp_path / "writer.py").write_text(WRITER)
    script = tmp_path / "survive.py"
    script.write_text(SURVIVE.format(root=str(ROOT), directory=str(tmp_path), patience=PATIENCE))
    command = [sys.executable, str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert "survived 30" in result.stdout, result.stderr


@pytest.mark.faults
def test_a_run_that_was_paused_whole_goes_on_whoever_wakes_first(tmp_path):
    flags = ["--synchronous", "--steps", 30, "--checkpoint_every", 0, "--searcher_timeout", 12]
    with Run(tmp_path / "run", "arithmetic", *SMALL, *flags) as run:
        run.is_at(5)
        group = run.process.pid
        for first in (group, run.pid("trainer"), run.pid("searcher 0")):
            at = run.step()
            os.killpg(group, signal.SIGSTOP)
            time.sleep(15)
            os.kill(first, signal.SIGCONT)
            time.sleep(1)
            os.killpg(group, signal.SIGCONT)
            run.is_at(at + 2)
        _, err = run.process.communicate(timeout=PATIENCE)
        assert run.process.returncode == 0, err
    assert steps_of(run.run_dir)[-1]["step"] == 30


# The parent and the trainer


@pytest.mark.faults
def test_a_trainer_that_is_killed_takes_all_the_others_along_and_leaves_nothing_in_shared_memory(
    tmp_path, record_property
):
    with Run(tmp_path / "run", "arithmetic", *SMALL, *FOREVER) as run:
        run.is_at(10)
        run.kill("trainer")
        start = time.monotonic()
        _, err = run.process.communicate(timeout=PATIENCE)
        record_property("seconds until the run has ended", round(time.monotonic() - start, 1))
        assert run.process.returncode == 1 and "the trainer ended with exit code -9" in err
        run.nothing_is_left()


@pytest.mark.faults
@pytest.mark.parametrize(
    "how, every", [(signal.SIGINT, 0), (signal.SIGTERM, 5), (signal.SIGHUP, 0)]
)
def test_a_run_cannot_be_resumed_while_it_lives_and_a_signal_ends_it_with_a_checkpoint(
    how, every, tmp_path, capsys, record_property
):
    flags = [*SMALL, *FOREVER, "--checkpoint_every", every]
    heard = ["env", "--default-signal=HUP"]  # even where these tests run under nohup
    with Run(tmp_path / "run", "arithmetic", *flags, prefix=heard) as run:
        run.is_at(10)
        assert main(["--resume", str(run.run_dir)]) == 2
        problem = f"--resume '{run.run_dir}': this run has not ended, its processes are alive"
        assert capsys.readouterr().err == f"error: {problem}\n"
        run.is_at(run.step() + 10)
        start = time.monotonic()
        if how == signal.SIGHUP:  # a closed terminal: to all, and once more by the shell
            os.killpg(run.process.pid, how)
            time.sleep(0.5)  # two that come at once are one
        _, err = run.end(how)
        seconds = time.monotonic() - start
        record_property("seconds to the end, and to the first step", (seconds, run.start_seconds))
        assert seconds < run.start_seconds
        assert "to finish a step and to save may take up to " in err
        assert f"stopped by {how.name}" in err
        assert f"to go on: python tba.py --resume {run.run_dir}" in err
        assert checkpoint.newest_whole(str(run.run_dir))[0].name == f"step-{run.step():08}"
        run.nothing_is_left()


@pytest.mark.faults
def test_a_second_signal_ends_a_run_at_once(tmp_path, record_property):
    with Run(tmp_path / "run", "arithmetic", *SMALL, *FOREVER) as run:
        run.is_at(10)
        run.kill("trainer", signal.SIGSTOP)  # so that it cannot end by itself
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        start = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        _, err = run.process.communicate(timeout=PATIENCE)
        seconds = time.monotonic() - start
        record_property("seconds to the end", round(seconds, 2))
        assert run.process.returncode == 130 and "resource_tracker" not in err
        assert seconds < run.start_seconds / 2 and "did not save" not in err
        run.nothing_is_left()


@pytest.mark.faults
def test_a_trainer_that_does_not_end_at_a_signal_is_killed_and_named(tmp_path):
    with Run(tmp_path / "run", "arithmetic", *SMALL, *FOREVER) as run:
        run.is_at(10)
        run.kill("trainer", signal.SIGSTOP)
        _, err = run.end()
        allowed = re.search(r"take up to (\d+) s; a second Ctrl-C ends it at once", err)[1]
        assert f"the trainer did not save and end within {allowed} s: it is killed" in err
        assert int(allowed) >= 10
        run.nothing_is_left()


@pytest.mark.faults
def test_a_trainer_has_time_to_finish_a_step_as_slow_as_those_before_and_to_save(
    tmp_path, monkeypatch
):
    flags = ["--checkpoint_every", 10]
    with planted("time.sleep(15)", "trainer", tmp_path, monkeypatch, flags) as run:

        def has_made_slow_step() -> bool:
            return np.diff([line["seconds"] for line in run.steps()]).max() > 15

        run.until(has_made_slow_step, "a slow step")
        _, err = run.end()
        assert "did not save" not in err
        assert int(re.search(r"take up to (\d+) s", err)[1]) >= 3 * 15
        assert checkpoint.newest_whole(str(run.run_dir))[0].name == f"step-{run.step():08}"
        assert (run.run_dir / "model" / "model.safetensors").exists()


@pytest.mark.faults
def test_a_run_under_nohup_does_not_hear_that_the_terminal_is_closed(tmp_path):
    with Run(tmp_path / "run", "arithmetic", *SMALL, *FOREVER, prefix=["nohup"]) as run:
        run.is_at(10)
        os.killpg(run.process.pid, signal.SIGHUP)
        run.is_at(run.step() + 20)
        run.end()


@pytest.mark.faults
@pytest.mark.parametrize("where", ["head -1", "a full disk", "a closed terminal"])
def test_a_run_whose_output_is_lost_goes_on_to_its_end(where, tmp_path, monkeypatch):
    task = tmp_path / "задача.py"
    task.write_text("from tasks.arithmetic import Arithmetic as A\n\nclass Own(A):\n    pass\n")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    terminal, other_end = os.openpty()
    os.set_blocking(terminal, False)

    def is_shown() -> bool:
        with suppress(BlockingIOError):
            return b"sign of life" in os.read(terminal, 1 << 16)
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
    assert checkpoint.newest_whole(str(run.run_dir))[0].name == "step-00000030"
    assert (run.run_dir / "model" / "model.safetensors").exists()
    assert any("final_accuracy" in line for line in read(run.run_dir, "metrics.jsonl"))


@pytest.mark.faults
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

def plant():
    while "learner" not in sys.modules or not hasattr(sys.modules["learner"], "Learner"):
        time.sleep(0.1)
    if Path("/proc/self/comm").read_text().strip() != "tba {name}":
        return
    while not Path({sign!r}).exists():
        time.sleep(0.1)
    sys.modules["learner"].Learner.step_optimizer = fail

threading.Thread(target=plant, daemon=True).start()
"""
TWO = ["--trainer_processes", 2, "--checkpoint_every", 10, "--searcher_timeout", 12]


def check_end(run: Run, cause: str, record_property) -> str:
    """The run ends by itself, says why, and keeps the checkpoint of before. Returns stderr."""
    start = time.monotonic()
    _, err = run.process.communicate(timeout=PATIENCE)
    took = time.monotonic() - start
    assert run.process.returncode == 1 and cause in err, err
    assert "to go on: python tba.py --resume" in err
    newest, complaints = checkpoint.newest_whole(str(run.run_dir))
    assert complaints == [] and checkpoint.load_state(newest)["step"] >= 10
    record_property("seconds to the end", round(took, 1))
    run.nothing_is_left()
    return err


@pytest.mark.faults
@pytest.mark.parametrize("name", ["trainer", "trainer 1"])
@pytest.mark.parametrize(
    "signal_number, fault",
    [
        (signal.SIGKILL, "ended with exit code -9"),
        (signal.SIGSTOP, "is stopped: no sign of life for 12 s"),
    ],
)
def test_a_trainer_process_that_is_killed_or_stopped_ends_the_run_with_its_log(
    signal_number, fault, name, tmp_path, record_property
):
    with Run(tmp_path / "run", "arithmetic", *SMALL, *TWO, *FOREVER) as run:
        run.until(lambda: checkpoint.newest_whole(str(run.run_dir))[0], "a checkpoint")
        run.kill(name, signal_number)
        err = check_end(run, f"error: {in_words(name)} {fault}", record_property)
        assert f"{name.replace(' ', '-')}.log:" in err


@pytest.mark.faults
@pytest.mark.parametrize("name", ["trainer", "trainer 1"])
def test_a_trainer_process_that_is_killed_while_it_loads_ends_the_run(name, tmp_path):
    with Run(tmp_path / "run", "arithmetic", *SMALL, *TWO, *FOREVER) as run:
        run.until(lambda: shared_files(living(run.tag)), "shared memory")
        run.kill(name)
        _, err = run.process.communicate(timeout=PATIENCE)
        assert (
            run.process.returncode == 1
            and f"error: {in_words(name)} ended with exit code -9" in err
        )
        run.nothing_is_left()


@pytest.mark.faults
@pytest.mark.parametrize("name", ["trainer", "trainer 1"])
def test_a_trainer_process_that_raises_ends_the_run_with_its_traceback(
    name, tmp_path, monkeypatch, record_property
):
    fault = 'raise ValueError("planted")'
    with planted(fault, name, tmp_path, monkeypatch) as run:
        err = check_end(run, f"error: {in_words(name)} ended with exit code 1", record_property)
        assert "ValueError: planted" in err


@pytest.mark.faults
def test_a_collective_that_hangs_ends_the_run_and_shows_where_each_process_is(
    tmp_path, monkeypatch, record_property
):
    with planted("time.sleep(1e6)", "trainer 1", tmp_path, monkeypatch) as run:
        err = check_end(run, "error: the trainer gave no sign of life for 12 s", record_property)
        assert "in fail" in err.split("trainer-1.log:")[1], "where trainer 1 sleeps"
        assert "step_optimizer" in err.split("trainer-1.log:")[0], "where the trainer waits for it"


@contextmanager
def planted(fault: str, name: str, tmp_path: Path, monkeypatch, flags=TWO) -> Iterator[Run]:
    """A run in which a statement was put into the next optimizer step of one process."""
    sign = tmp_path / "now"
    text = PLANT.format(fault=fault, name=name, sign=str(sign))
    (tmp_path / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Run(tmp_path / "run", "arithmetic", *SMALL, *flags, *FOREVER) as run:
        run.until(lambda: checkpoint.newest_whole(str(run.run_dir))[0], "a checkpoint")
        sign.touch()
        yield run


@pytest.mark.faults
def test_a_run_of_two_trainer_processes_is_interrupted_and_resumed_by_one_and_by_four(tmp_path):
    run_dir = tmp_path / "run"
    with Run(run_dir, "arithmetic", *SMALL, *TWO, *FOREVER) as run:
        run.until(lambda: checkpoint.newest_whole(str(run.run_dir))[0], "a checkpoint")
        _, err = run.end()
        assert "to go on" in err
        run.nothing_is_left()
    for processes in (1, 4):
        state = checkpoint.load_state(checkpoint.list_checkpoints(str(run_dir))[-1])
        at = max(line["step"] for line in steps_of(run_dir))
        assert state["step"] == at, "it was saved at the end"
        flags = ["--steps", at + 10, "--trainer_processes", processes]
        done = tba("--resume", run_dir, *flags)
        assert done.returncode == 0, done.stderr
        assert max(line["step"] for line in steps_of(run_dir)) == at + 10


# Checkpoints


def metrics_of(run_dir: Path) -> list[str]:
    lines = [
        {k: v for k, v in line.items() if k not in TIMING}
        for line in read(run_dir, "metrics.jsonl")
        if line["step"] <= 16
    ]
    return sorted(json.dumps(line, sort_keys=True) for line in lines)


def tensors_of(run_dir: Path, step: int) -> dict:
    return checkpoint.load_tensors(run_dir / "checkpoints" / f"step-{step:08}", "learner")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([], id="all weights", marks=pytest.mark.faults),
        pytest.param(["--lora_rank", 4], id="LoRA", marks=pytest.mark.runs),
    ],
)
def resumed(request, tmp_path_factory) -> dict[str, Path]:
    """A synchronous run killed behind step 16; one killed behind step 8, resumed, killed at 16."""
    directory = tmp_path_factory.mktemp("resumed")
    flags = "--synchronous --seed 7 --checkpoint_every 4 --reference_reset_period 5".split()
    settings = ["arithmetic", *flags, *SMALL, *FOREVER, *request.param]

    def last(run: Run, step: int) -> None:
        run.until(
            lambda: (run.run_dir / "checkpoints" / f"step-{step:08}").exists(),
            f"the checkpoint of step {step}",
        )
        run.process.kill()
        run.nothing_is_left()

    with Run(directory / "whole", *settings) as run:
        last(run, 16)
    with Run(directory / "killed", *settings) as run:
        last(run, 8)
    with Run(directory / "killed", resume=True) as run:
        last(run, 16)
    return {"whole": directory / "whole", "killed": directory / "killed"}


def test_a_synchronous_run_killed_and_resumed_gives_the_metrics_and_weights_of_one_that_was_not(
    resumed,
):
    assert metrics_of(resumed["killed"]) == metrics_of(resumed["whole"])
    lines = steps_of(resumed["whole"])[:16]
    assert len(metrics_of(resumed["whole"])) == 16 + 1 and all(
        line["staleness_max"] == 0 and line["mismatch"] < 1e-4 for line in lines
    )
    whole, killed = tensors_of(resumed["whole"], 16), tensors_of(resumed["killed"], 16)
    assert whole.keys() == killed.keys() and all(
        (whole[name] == killed[name]).all() for name in whole
    )
    kept = [path.name for path in checkpoint.list_checkpoints(str(resumed["whole"]))]
    # A kill may come before the one before them is deleted.
    assert kept[-2:] == ["step-00000012", "step-00000016"], "the last two are kept"


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            "--responses_per_query 4",
            "--responses_per_query is 4, but the run to resume has 8: only steps, learning_rate",
        ),
        ("--model {model}", "--model is '{model}', but the run to resume has "),
        ("gsm8k", "--task is 'gsm8k', but the run to resume has 'arithmetic'"),
        ("--beta 3", "--beta is 3.0, but the run to resume has 0.1"),
    ],
)
def test_a_run_is_resumed_with_the_settings_that_it_began_with(
    flags, expected, resumed, untied_model, capsys
):
    arguments = flags.format(model=untied_model).split()
    assert main([*arguments, "--resume", str(resumed["killed"])]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and expected.format(model=untied_model) in err


CHANGED = """
from tasks import Query
from tasks.arithmetic import Arithmetic as A

class Changed(A):
    def queries(self, split):
        return [Query(q.id, "0" + q.prompt, q.answer) for q in super().queries(split)]
"""


def test_a_resumed_run_trains_on_the_changed_prompts_of_its_task(resumed, tmp_path):
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", str(resumed["killed"]), str(copy)], check=True)
    (tmp_path / "changed.py").write_text(CHANGED)
    settings = json.loads((copy / "config.json").read_text())
    settings |= {"task": str(tmp_path / "changed.py")}  # as if the task's file had changed
    (copy / "config.json").write_text(json.dumps(settings))
    (copy / "samples.jsonl").unlink()
    done = tba("--resume", copy, "--steps", 18)
    assert done.returncode == 0, done.stderr
    # All that a synchronous run trains on was generated since.
    assert steps_of(copy)[-1]["step"] == 18
    prompts = [line["prompt"] for line in read(copy, "samples.jsonl")]
    assert {(prompt[0], len(prompt)) for prompt in prompts} == {("0", len("0" + "12+34="))}


def test_steps_and_learning_rate_may_change_and_another_vocabulary_is_refused(
    resumed, untied_model, tmp_path, capsys
):
    from config import UserError
    from runtime.command_line import build_config

    config = build_config(
        ["--resume", str(resumed["killed"]), "--steps", "20", "--learning_rate", "0.5"]
    )
    assert (
        config.steps,
        config.learning_rate,
        config.queries_per_batch,
        config.constant_staleness,
    ) == (20, 0.5, 8, 0)
    settings = json.loads((resumed["killed"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"constant_staleness": 2}))
    with pytest.raises(UserError, match="--steps is 20, but the run to resume has 1000000"):
        build_config(["--resume", str(tmp_path), "--steps", "20"])

    settings = json.loads((resumed["killed"] / "config.json").read_text())
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", str(resumed["killed"]), str(copy)], check=True)
    (copy / "config.json").write_text(
        json.dumps(settings | {"model": str(untied_model)})
    )  # as if the directory's content had changed
    assert main(["--resume", str(copy)]) == 2
    words = "lm_head.weight has shape (257, 64), in the checkpoint (14, 64)"
    if settings["lora_rank"]:
        words = "down_proj.lora_A.default.weight has shape (4, 128), in the checkpoint (4, 256)"
    err = capsys.readouterr().err
    assert "has changed since: " in err and words in err


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used_and_without_one_nothing_starts(
    resumed, tmp_path, capsys
):
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", str(resumed["killed"]), str(copy)], check=True)
    newest, previous = (copy / "checkpoints" / f"step-{step:08}" for step in (16, 12))
    # The kill may have come before this one was deleted.
    shutil.rmtree(copy / "checkpoints" / "step-00000008", ignore_errors=True)
    data = bytearray((newest / "learner.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "learner.safetensors").write_bytes(data)
    directory, complaints = checkpoint.newest_whole(str(copy))
    assert directory == previous and complaints == [
        f"{newest} cannot be used: learner.safetensors is damaged"
    ]

    (previous / "buffer.npz").write_bytes((previous / "buffer.npz").read_bytes()[:-1])
    assert main(["--resume", str(copy)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{newest} cannot be used: learner.safetensors is damaged",
        f"{previous} cannot be used: buffer.npz is damaged",
        f"error: --resume {str(copy)!r} has no checkpoint that is whole",
    ]


@pytest.mark.faults
@pytest.mark.long
def test_a_run_killed_at_twenty_random_moments_goes_on_from_its_last_whole_checkpoint_each_time(
    tmp_path, record_property
):
    rng = random.Random(0)
    run_dir, reached, lost, unfinished = tmp_path / "run", 0, [], 0
    for attempt in range(21):
        newest = checkpoint.newest_whole(str(run_dir))[0]
        saved, arrays = (
            (checkpoint.load_state(newest), checkpoint.load_arrays(newest, "buffer"))
            if newest
            else ({"step": 0}, {})
        )
        lost.append(reached - saved["step"])
        # One that is being written may be lost, with the steps until the next, which waits for it.
        assert lost[-1] <= 2 * 3, "no more is lost than the steps since the checkpoint before"
        unfinished += (run_dir / "checkpoints" / "unfinished").exists()
        metrics = run_dir / "metrics.jsonl"
        inode = metrics.stat().st_ino if newest else 0
        first = ["arithmetic", *SMALL, *FOREVER, "--checkpoint_every", 3]
        with Run(run_dir, *(() if attempt else first), resume=attempt > 0) as run:

            def is_back(inode: int = inode) -> bool:
                path = run_dir / "metrics.jsonl"
                return path.exists() and path.stat().st_ino != inode

            run.until(is_back, "the metrics, back at the checkpoint")
            run.is_at(saved["step"] + 1)
            lines = [line["step"] for line in run.steps()]
            assert lines == list(range(1, lines[-1] + 1)), "no step twice, none left out"
            if newest:  # the first step comes before anything new can: the buffer is what was saved
                line = run.steps()[saved["step"]]
                assert (line["buffer_responses"], line["received"]) == (
                    len(arrays["all_versions"]),
                    saved["received"],
                )
                buffer = ReplayBuffer(100, 0.0, 1)
                buffer.load_state_dict(arrays)
                again = buffer.state_dict()
                assert arrays.keys() == again.keys() and all(
                    (arrays[name] == again[name]).all() for name in arrays
                )
            time.sleep(rng.random() * 3)
            if attempt % 2:  # every other time in the midst of a checkpoint
                run.until((run_dir / "checkpoints" / "unfinished").exists, "a checkpoint")
            run.process.kill()
            run.nothing_is_left()
            reached = run.step()
    record_property("steps lost at each kill", lost[1:])
    record_property("kills while a checkpoint was being written", unfinished)
    assert reached > 20 and unfinished


@contextmanager
def small_disk(tmp_path: Path, size: str) -> Iterator[Path]:
    """A file system of its own that is soon full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
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


@pytest.mark.faults
def test_a_full_disk_costs_checkpoints_and_lines_of_metrics_and_nothing_else(
    tmp_path, record_property, capsys
):
    with small_disk(tmp_path, "6m") as disk:
        with Run(disk / "run", "arithmetic", *SMALL, *FOREVER, "--checkpoint_every", 20) as run:
            run.until(lambda: checkpoint.newest_whole(str(run.run_dir))[0], "a checkpoint")
            whole = checkpoint.newest_whole(str(run.run_dir))[0]
            fill(disk / "other")
            before = {name: run.pid(name) for name in ("trainer", "searcher 0")}
            time.sleep(15)
            assert before == {name: run.pid(name) for name in before} and all(before.values()), (
                "all go on"
            )
            assert (
                checkpoint.find_corruption(checkpoint.list_checkpoints(str(run.run_dir))[-1])
                is None
            ), "the previous checkpoint is intact"
            at = run.step()
            os.remove(disk / "other")
            run.until(lambda: run.steps()[-1]["step"] > at + 60, "steps after that")
            steps = [line["step"] for line in run.steps()]
            gap = max(np.diff(steps))
            record_property(
                "steps made while the disk was full, their lines of metrics lost", int(gap) - 1
            )
            assert gap > 10, "they were made at the machine's pace"
            run.until(
                lambda: checkpoint.newest_whole(str(run.run_dir))[0].name > whole.name,
                "a newer checkpoint",
            )
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


@pytest.mark.faults
@pytest.mark.parametrize("room, exit_code", [(1 << 20, 0), (200 << 10, 1)])
def test_a_run_whose_disk_fills_goes_on_to_its_end_and_fails_only_without_its_model(
    room, exit_code, tmp_path
):
    """First there is room for the model and for no checkpoint, then for neither."""
    flags = [*SMALL, "--steps", 20]
    with small_disk(tmp_path, "6m") as disk, Run(disk / "run", "arithmetic", *flags) as run:
        run.until((run.run_dir / "starts.jsonl").exists, "a start")
        fill(disk / "other")
        os.truncate(disk / "other", (disk / "other").stat().st_size - room)
        out, err = run.process.communicate(timeout=PATIENCE)
        assert run.process.returncode == exit_code, err
        assert "step 20: no checkpoint was written" in out
        assert "step 20/20" in out and "Traceback" not in err
        assert (run.run_dir / "model").exists() == (exit_code == 0)
        assert ("final accuracy" in out) == (exit_code == 0)
        assert ("error: the trainer could not save the model\n" in err) == (exit_code == 1)


# Scores

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


@pytest.mark.faults
def test_queries_without_scores_are_dropped_and_counted_in_training_and_in_evaluation(
    tmp_path, tied_model
):
    (tmp_path / "capitals.py").write_text(OWN_TASK)
    run_dir = tmp_path / "run"
    flags = "--max_response_tokens 10 --steps 30".split()
    where = "--model", tied_model, "--output_dir", run_dir
    result = tba(tmp_path / "capitals.py", *SMALL, *flags, *where)
    assert result.returncode == 0, result.stderr
    assert steps_of(run_dir)[-1]["unscored_groups"] > 0 and "groups were dropped" in result.stdout
    log = (run_dir / "logs" / "searcher-0.log").read_text()
    assert "query 3 is dropped" in log and "no score for a 3" in log and "query 7 is dropped" in log
    samples = read(run_dir, "samples.jsonl")
    assert not [line for line in samples if line["query_id"] % 10 in (3, 7)]
    assert "on 32 test queries; 8 left out, they got no score" in result.stdout


BAD_SCORES = """
import time
from pathlib import Path
from tasks.arithmetic import Arithmetic as A

class Bad(A):
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


@pytest.mark.faults
def test_queries_whose_score_raises_or_hangs_are_dropped_and_the_others_keep_their_rate(
    tmp_path, record_property
):
    """Both runs at once, so that they share whatever pace the machine has.

    For a minute, and up to two more: tests on the same cores may hold up one run more than the
    other. With one worker, held up, it would be a third in each.
    """
    runs = {}
    with ExitStack() as stack:
        for kind in ("clean", "bad"):
            task = tmp_path / f"{kind}.py"
            task.write_text(BAD_SCORES.format(bad=kind == "bad"))
            runs[kind] = stack.enter_context(
                Run(tmp_path / f"run-{kind}", task, *TINY_TASK, *FOREVER)
            )
        for run in runs.values():
            run.until(partial(has_evaluated_its_base, run), "the base model's evaluation")
        for _ in range(3):
            before = {kind: run.steps()[-1]["received"] for kind, run in runs.items()}
            time.sleep(60)
            received = {k: run.steps()[-1]["received"] - before[k] for k, run in runs.items()}
            received["bad"] /= 0.9  # a tenth of its queries is bad
            if received["bad"] >= 0.5 * received["clean"]:
                break
        for kind, run in runs.items():
            line = run.steps()[-1]
            # On a busy machine score() may take longer than score_timeout: two groups each.
            assert (line["unscored_groups"] > 10) == (kind == "bad")
            assert line["searcher_restarts"] == 0
            log = (run.run_dir / "logs" / "searcher-0.log").read_text()
            out, _ = run.end()
            run.nothing_is_left()  # the workers neither
    record_property("responses in 60 s of the clean run and of the other's good queries", received)
    assert "no score for this one" in log and "finite numbers" in log and "TimeoutError" in log
    assert received["bad"] >= 0.5 * received["clean"]
    assert " left out, they got no score)" in out


def has_evaluated_its_base(run: Run) -> bool:
    lines = timeline.read_lines(run.run_dir / "metrics.jsonl")
    return run.step() >= 20 and any("accuracy" in line for line in lines)


@pytest.mark.faults
def test_a_task_whose_score_fails_most_of_the_time_ends_the_run_with_the_error(tmp_path):
    (tmp_path / "fails.py").write_text(
        "from tasks.arithmetic import Arithmetic as A\n\n"
        "class Fails(A):\n    def score(self, queries, *a):\n"
        "        if queries[0].id % 4:\n            raise ValueError('three of four fail')\n"
        "        return super().score(queries, *a)\n"
    )
    result = tba(tmp_path / "fails.py", *TINY_TASK, *FOREVER, "--output_dir", tmp_path / "run")
    assert result.returncode == 1
    assert (
        "groups got no scores: the run ends" in result.stderr
        and "three of four fail" in result.stderr
    )


# Long runs, and several


FEW = """
from tasks.arithmetic import Arithmetic as A

class Few(A):
    def queries(self, split):
        return super().queries(split)[:200]
"""


MIB_PER_THOUSAND_GROUPS = 1.0


def sizes(run: Run) -> dict[str, tuple[float, int]]:
    """MiB of resident memory and number of file descriptors, of the trainer and the searcher."""
    found = {}
    for name in ("trainer", "searcher 0"):
        process = Path(f"/proc/{run.pid(name)}")
        lines = process.joinpath("status").read_text().splitlines()
        resident = next(int(line.split()[1]) for line in lines if "VmRSS" in line)
        found[name] = (resident / 1024, len(os.listdir(process / "fd")))
    return found


@pytest.mark.faults
@pytest.mark.long
def test_thirty_thousand_groups_leave_memory_and_file_descriptors_as_they_were(
    tmp_path, record_property
):
    """The slope of memory behind the first 12,000 groups, in which buffer and caches fill up."""
    flags = ["--capacity_per_query", 12, "--checkpoint_every", 0, "--sync_period", 10]
    (tmp_path / "few.py").write_text(FEW)
    thousands, measured = range(12, 31, 2), []
    with Run(tmp_path / "run", tmp_path / "few.py", *TINY_TASK, *flags, *FOREVER) as run:
        for thousand in thousands:
            groups = 1000 * thousand

            def has_come(responses: int = 12 * groups) -> bool:
                return bool(run.steps()) and run.steps()[-1]["received"] > responses

            run.until(has_come, f"{groups} groups")
            measured.append(sizes(run))
    for name in measured[0]:
        memory = [found[name][0] for found in measured]
        slope = float(np.polyfit(thousands, memory, 1)[0])
        figures = f"{memory[0]:.0f} to {memory[-1]:.0f} MiB, {slope:.2f} MiB a thousand groups"
        record_property(f"{name}, 12,000 to 30,000 groups", figures)
        assert slope < MIB_PER_THOUSAND_GROUPS
        assert measured[-1][name][1] <= measured[0][name][1], "file descriptors"


@pytest.mark.faults
def test_two_runs_at_once_do_not_disturb_each_other(tmp_path):
    settings = ["arithmetic", "--synchronous", *SMALL, "--steps", 10, "--seed", 3]
    alone = tba(*settings, "--output_dir", tmp_path / "alone")
    assert alone.returncode == 0
    with Run(tmp_path / "first", *settings) as first, Run(tmp_path / "second", *settings) as second:
        for run in (first, second):
            run.process.communicate(timeout=PATIENCE)
            assert run.process.returncode == 0
    assert (
        metrics_of(tmp_path / "first")
        == metrics_of(tmp_path / "second")
        == metrics_of(tmp_path / "alone")
    )
