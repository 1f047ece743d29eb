"""--track: the real trackers get what a run writes, and cost it nothing when they fail."""

import html
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import PATIENCE, ROOT, SMALL, Run, flags, read, steps_of, tba, wait_for
from test_command_line import refused

from config import Config
from extras import tracking
from extras.tracking import Tracking, as_code, grouped
from launch.command_line import build_config
from launch.files import rewind
from runtime.record.lines import Lines

NAMES = ("wandb", "tensorboard")
MISSING = "no {}: pip install -r requirements/track.txt"
needs = {n: pytest.mark.skipif(not find_spec(n), reason=MISSING.format(n)) for n in NAMES}
TINY = ["arithmetic", *SMALL, *flags(eval_every=20)]
CODE = "**bold** <b>x</b> | a | `b`\n```\n    # c\n</code>\u2028&amp;"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """wandb asks nobody, and finds no key of the user's."""
    for variable in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def step_line(step: int, **more) -> dict:
    return {"step": step, "loss": 1 / step, "reward": 0.5, "staleness_mean": 2.0, **more}


def evaluation(version: int, score: float) -> dict:
    return {"step": version, "reward": score, "base_model": "0a1b"}


def make_run(directory: Path) -> Path:
    """The files of a run; the evaluation of version 2 arrives after step 6."""
    run_dir = directory / "a-run"
    (run_dir / "logs").mkdir(parents=True)
    settings = {"steps": 1000, "options": {"data_dir": CODE}}
    (run_dir / "config.json").write_text(json.dumps(settings))
    malformed = [3], {"step": "7", "loss": 1.0}  # no tracker gets those
    steps = [step_line(step) for step in range(1, 7)]
    append(run_dir, evaluation(0, 0.25), *steps, evaluation(2, 0.5), *malformed)
    sample = {"query_id": 3, "prompt": CODE, "answer": "4", "response": CODE, "extracted": None}
    samples = [{"version": version, "reward": 1.0, **sample} for version in range(5)]
    Lines(run_dir / "samples.jsonl").write(*samples)
    return run_dir


def append(run_dir: Path, *lines: dict) -> None:
    Lines(run_dir / "metrics.jsonl").write(*lines)


def feed(name: str, run_dir: Path, exit_code: int = 0) -> list[str]:
    """Give a tracker what there is. Returns what the user is told."""
    said = []
    tracker = Tracking(Config(track=name, output_dir=str(run_dir)), said.append)
    tracker.finish(exit_code, seconds=PATIENCE)  # one that does not end ends this process
    return said


def tensorboard_events(run_dir: Path):
    """What TensorBoard itself reads of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "tensors": 0}
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance=everything).Reload()


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """For each name in TensorBoard its steps and values."""
    events = tensorboard_events(run_dir)
    names = events.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def wandb_records(file: Path, kind: str) -> list:
    """The records of a kind in a .wandb file: LevelDB's log format, behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts, records = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768  # a part does not cross the end of a block
        if left < 7:
            position += left
            continue
        _, length, part = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (1, 4):  # the whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return [getattr(record, kind) for record in records if record.HasField(kind)]


def wandb_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/*run-*/*.wandb"))


def logged_figures(file: Path) -> list[dict]:
    """What was logged but for samples, a dictionary for each call, without wandb's own figures."""
    rows = []
    for record in wandb_records(file, "history"):
        values = {item.key or item.nested_key[0]: item.value_json for item in record.item}
        rows.append({k: json.loads(v) for k, v in values.items() if not k.startswith("_")})
    return [row for row in rows if "samples" not in row]


def check_all_is_there(name: str, run_dir: Path) -> None:
    """The latest start of a run has given its tracker all that was written, once."""
    lines = [(line["step"], grouped(line)) for line in read(run_dir, "metrics.jsonl")]
    if name == "wandb":
        file = max(wandb_files(run_dir), key=lambda file: file.stat().st_mtime)
        assert [(row.pop("trainer_step"), row) for row in logged_figures(file)] == lines
        return
    expected = {}
    for step, figures in lines:
        for metric, value in figures.items():
            expected.setdefault(metric, []).append((step, pytest.approx(value)))
    assert scalars(run_dir) == expected


def go_on(run_dir: Path) -> None:
    """The run goes on from step 4: what came after it is made again, with another loss."""
    rewind(str(run_dir), 4)
    assert [line["step"] for line in read(run_dir, "metrics.jsonl")] == [0, 1, 2, 3, 4, 2]
    append(run_dir, *(step_line(step, loss=7.0) for step in (5, 6, 7)), evaluation(4, 0.75))


METRICS = dict(
    reward="reward reward_of_level_4",
    loss="grad_norm my_objectives_own",
    staleness="ess_tokens staleness_90",
    speed="received searcher_tokens_per_second",
    policy="kl",
)


def test_each_metric_has_a_group_a_new_one_too():
    for group, metrics in METRICS.items():
        for metric in metrics.split():
            figures = grouped({"step": 1, "loss": 2.0, metric: 3.0})
            assert figures == {"loss/loss": 2.0, f"{group}/{metric}": 3.0}
    assert grouped({"step": 5, "loss": None}) == {}, "one that was not finite"


@needs["tensorboard"]
@pytest.mark.filterwarnings("ignore:html5lib")
def test_tensorboard_shows_configuration_and_samples_as_they_are(tmp_path):
    from tensorboard.plugin_util import markdown_to_safe_html

    run_dir = make_run(tmp_path)
    feed("tensorboard", run_dir)
    for tag, shown, count in ("configuration", '"steps": 1000', 1), ("samples", "query_id: 3", 5):
        [event] = tensorboard_events(run_dir).Tensors(f"{tag}/text_summary")
        assert event.tensor_proto.string_val[0].decode().count(shown) == count
    page = markdown_to_safe_html(as_code(CODE))
    block = re.fullmatch(r"(?s)<pre><code>(.*?)\n?</code></pre>", page)
    assert block and html.unescape(block.group(1)) == CODE


@needs["wandb"]
def test_wandb_keeps_all_figures_at_once_and_groups_a_resumed_run(tmp_path):
    """A kill costs a second of them. The resumed run has all steps."""
    run_dir, said = make_run(tmp_path), []
    tracker = Tracking(Config(track="wandb", output_dir=str(run_dir)), said.append)
    wait_for(lambda: said, "wandb")
    (file,) = wandb_files(run_dir)
    wait_for(lambda: len(logged_figures(file)) == 8, "all figures")
    tracker.finish(exit_code=130, seconds=PATIENCE)
    assert said == [f"--track wandb: offline, see wandb sync {file.parent}"]
    rows = logged_figures(file)
    assert rows[0] == {"trainer_step": 0, "evaluation/reward": 0.25}, "what cannot be drawn is out"
    assert rows[7] == {"trainer_step": 2, "evaluation/reward": 0.5}, "though it came after step 6"
    figures = {"loss/loss": 0.25, "reward/reward": 0.5, "staleness/staleness_mean": 2.0}
    assert rows[4] == {"trainer_step": 4, **figures}
    run, (end,) = wandb_records(file, "run")[0], wandb_records(file, "exit")
    assert (run.project, run.display_name) == ("tba", "a-run")
    assert end.exit_code == 130, "shown as failed"
    config = {item.key: item.value_json for item in run.config.update}
    assert json.loads(config["options"]) == {"data_dir": CODE}
    assert "trainer_step" in {metric.step_metric for metric in wandb_records(file, "metric")}
    (table,) = file.parent.glob("files/media/table/samples*.json")
    table = json.loads(table.read_text())
    assert [row[table["columns"].index("response")] for row in table["data"]] == [CODE] * 5
    go_on(run_dir)
    feed("wandb", run_dir)
    (second,) = set(wandb_files(run_dir)) - {file}
    assert wandb_records(second, "run")[0].run_group == run.run_group == "a-run"
    steps = [row["trainer_step"] for row in logged_figures(second)]
    assert steps == [0, 1, 2, 3, 4, 2, 5, 6, 7, 4], "nothing twice"


def test_samples_are_bounded_in_number(tmp_path, monkeypatch):
    run_dir, shown, versions = make_run(tmp_path), [], iter(range(5, 1000))
    sample = dict.fromkeys(tracking.FIELDS, "")

    def wait(_) -> bool:
        """Whether the run is over."""
        if (version := next(versions, None)) is not None:
            Lines(run_dir / "samples.jsonl").write(*[sample | {"version": version}] * 20)
        return version is None

    tracker = SimpleNamespace(where="here", log=print, close=print)
    tracker.show = lambda step, samples: shown.append(len(samples))
    monkeypatch.setitem(tracking.TRACKERS, "mine", lambda *_: tracker)
    run = SimpleNamespace(name="mine", run_dir=run_dir, say=print, exit_code=0)
    run.is_over = SimpleNamespace(wait=wait)
    Tracking.follow(run)
    assert shown == [tracking.SAMPLES] * tracking.TABLES


@needs["tensorboard"]
@pytest.mark.parametrize("given", [0, 3, 9])
def test_a_resumed_run_goes_on_in_its_curves_in_tensorboard(given, tmp_path):
    """Whatever an earlier tracker was given of its lines: nothing is there twice or missing."""
    run_dir = make_run(tmp_path)
    append(run_dir, evaluation(5, 0.1))
    whole = (run_dir / "metrics.jsonl").read_text()
    if given:
        (run_dir / "metrics.jsonl").write_text("".join(whole.splitlines(keepends=True)[:given]))
        feed("tensorboard", run_dir)
    (run_dir / "metrics.jsonl").write_text(whole)
    go_on(run_dir)
    feed("tensorboard", run_dir)
    read_back = scalars(run_dir)
    kept = [(step, pytest.approx(1 / step)) for step in range(1, 5)]
    assert read_back["loss/loss"] == [*kept, (5, 7.0), (6, 7.0), (7, 7.0)]
    assert read_back["evaluation/reward"] == [(0, 0.25), (2, 0.5), (4, 0.75)]


def test_a_resumed_run_keeps_its_tracker_and_may_change_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"task": "arithmetic", "track": "wandb"}))
    resumed = ["--resume", str(tmp_path)]
    assert build_config(resumed).track == "wandb"
    for track in ("", "tensorboard"):
        assert build_config([*resumed, "--track", track]).track == track


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_that_is_unknown_or_not_installed_is_one_line(name, monkeypatch, capfd, tmp_path):
    refused(["arithmetic", "--track", "mlflow"], "'mlflow': it is wandb or tensorboard", capfd)
    problem = f"{name}: it is not installed: pip install -r requirements/track.txt"
    monkeypatch.setitem(sys.modules, name, None)
    refused(["arithmetic", "--track", name], problem, capfd)
    monkeypatch.delitem(sys.modules, name)
    (tmp_path / name).mkdir()  # such as wandb leaves where a run of it was started
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    refused(["arithmetic", "--track", name], problem, capfd)


@needs["wandb"]
def test_a_tracker_that_raises_is_one_warning(tmp_path, monkeypatch, capfd):
    """wandb without a key, and without a question for one though there is a terminal."""
    monkeypatch.delenv("WANDB_MODE")
    run_dir, (own, other) = make_run(tmp_path), os.openpty()
    with open(own, "r+b", buffering=0), open(other) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        (line,) = feed("wandb", run_dir)
    assert "--track wandb: it failed" in line and "wandb login" in line
    log = run_dir / "logs" / "tracker.log"
    assert f"see {log}" in line and "\n" not in line
    assert log.read_text().startswith("Traceback")
    assert capfd.readouterr() == ("", "")


HANGING = """
import multiprocessing, sys
from config import Config
from extras.tracking import Tracking
semaphore = multiprocessing.get_context("spawn").Lock()
tracker = Tracking(Config(track="wandb", output_dir=sys.argv[1]), print)
sys.stdin.read()  # until wandb waits for an answer
tracker.finish(7, seconds=1.0)
"""


@pytest.fixture
def silent_server(monkeypatch):
    """What wandb asks: it takes connections, and never answers."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


@needs["wandb"]
def test_a_tracker_that_hangs_is_cut_off_and_the_exit_code_is_the_runs(silent_server, tmp_path):
    command = [sys.executable, "-c", HANGING, str(make_run(tmp_path))]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    silent_server.accept()
    out, err = run.communicate(timeout=PATIENCE)
    assert err == "--track wandb: it did not end within 1 s and is cut off; metrics.jsonl has all\n"
    assert (run.returncode, out) == (7, "")


@pytest.mark.runs
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs[name]) for name in NAMES])
def test_after_ctrl_c_and_resume_a_tracker_has_all_that_was_written_once(name, tmp_path):
    run_dir = tmp_path / "run"
    with Run(run_dir, *TINY, *flags(steps=100_000, track=name)) as run:
        run.is_at(30)
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal sends it: to all of them
        out, err = run.ends_with(130)
        assert "--track" not in err, err
        assert "it failed" not in out, out
    run.nothing_is_left()
    check_all_is_there(name, run_dir)
    num_steps = run.step() + 20
    result = tba("--resume", run_dir, "--steps", num_steps)
    assert result.stderr == ""
    assert [line["step"] for line in steps_of(run_dir)] == list(range(1, num_steps + 1))
    check_all_is_there(name, run_dir)
    if name == "tensorboard":
        assert f"--track tensorboard: tensorboard --logdir {tmp_path}" in result.stdout


@pytest.mark.runs
@needs["wandb"]
def test_a_tracker_that_hangs_costs_no_step_and_a_second_ctrl_c_ends_at_once(
    silent_server, tmp_path
):
    with Run(tmp_path / "run", *TINY, *flags(steps=60, track="wandb")) as run:
        run.is_at(60)
        run.until((tmp_path / "run" / "report.html").exists, "its report")
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # two at once would be one
        start = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        _, err = run.ends_with(130)
    assert time.monotonic() - start < 5
    assert err.splitlines()[-1].endswith("within 0 s and is cut off; metrics.jsonl has all")
