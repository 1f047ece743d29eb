"""report.html: what it shows of a run, whatever the run left, and that no text of a model runs."""

import dataclasses
import json
import math
import os
import re
import shlex
import sys
import time
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from conftest import byte_tokenizer, make_group, python, read
from transformers import ByT5Tokenizer

from config import Config, UserError
from launch import files, launcher, resume
from launch.display import html_report
from launch.display.html_report import GROUPS
from launch.supervisor import RunFailed
from models.tokens import token_texts
from rollouts import Group
from runtime.record import timeline
from runtime.responses.samples import SampleLog
from tasks import Query, Task, load_task

EMOJI = "👩‍🔬 \U0001f600"
HALF = "\ud83d"  # of an emoji: no encoding has it


class Page(HTMLParser):
    """What a browser would make of a page: tags with their attributes, and the text."""

    def __init__(self, path: Path):
        super().__init__()
        self.source, self.tags, self.texts = path.read_text(encoding="utf-8"), [], []
        self.feed(self.source)
        self.close()
        self.text = "".join(self.texts)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    def check(self) -> "Page":
        """Nothing in it can run or fetch, and it is of a size that a browser opens at once."""
        assert len(self.source.encode()) < 5_000_000
        assert not {tag for tag, _ in self.tags} & {"script", "iframe", "object", "link", "a"}
        for tag, attributes in self.tags:
            assert not [name for name in attributes if name.startswith("on")], tag
            assert "javascript:" not in "".join(value or "" for value in attributes.values())
            assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png")
        policy = next(a["content"] for _, a in self.tags if "http-equiv" in a)
        assert "default-src 'none'" in policy and "script" not in policy
        return self


def sample(version: int = 0, text: str = "12", **changed) -> dict:
    """A line of samples.jsonl, a token a character."""
    head = dict(version=version, query_id=7, prompt="5+7=", answer="12", response=text)
    score = dict(extracted=text, reward=1.0, finished=True, tokens=list(text), sampled=None)
    logprobs = dict(behavior_logprobs=[-0.5] * len(text), ref_logprobs=[-1.0] * len(text))
    return head | score | logprobs | changed


PICTURES = {"loss": b"a picture"}


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A function that makes the directory of a run, or makes it anew, with these samples.

    Pictures take a second: tests/test_pictures.py draws them, and a test below.
    """
    monkeypatch.setattr(html_report.pictures, "draw", lambda run_dir: PICTURES)

    def make(*samples: dict, **config) -> Path:
        run = tmp_path / "run"
        (run / "logs").mkdir(parents=True, exist_ok=True)
        settings = dataclasses.asdict(Config(steps=4, samples_per_query=24, **config))
        (run / "config.json").write_text(json.dumps(settings))
        steps = [{"step": i, "loss": 1 / i, "beta": 0.5, "seconds": i} for i in (1, 2, 3, 4)]
        base = dict(step=0, accuracy=0.25, accuracy_interval=[0.125, 0.375], base_model="0a1b")
        final = dict(step=4, final_accuracy=0.5, final_accuracy_interval=[0.375, 0.625])
        write_lines(run / "metrics.jsonl", [base, *steps, final])
        write_lines(run / "samples.jsonl", samples)
        write_lines(run / "logs" / "trainer.spans.jsonl", [["wait", 0, 1], ["step", 1, 4]])
        write_lines(run / "logs" / "searcher-0.spans.jsonl", [["search", 0, 2], ["load", 3, 4]])
        return run

    return make


def write_lines(path: Path, lines: list) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def report_of(run: Path) -> Page:
    html_report.write(str(run))
    return Page(run / "report.html").check()


def test_a_report_shows_results_first_then_alarms_curves_responses_and_starts(run_dir, monkeypatch):
    run = run_dir(sample(0), sample(2, "13", reward=0.0, finished=False), preset="demo")
    write_lines(run / "alarms.jsonl", [{"step": 3, "name": "mismatch", "text": "too large"}])
    for is_resumed in False, True:
        resume.write_start(str(run), is_resumed)
    page, command = report_of(run), shlex.join(sys.orig_argv)
    shown = ["4 of 4 steps, 4 s", "accuracy 0.25 → 0.5"]
    shown += ["base model (0.125 to 0.375), then step 4 (0.375 to 0.625)", "Step 3: too large"]
    shown += ["Curves", "mean reward 0 version 2", "Wanted answer: 12", "mean reward 1 version 0"]
    shown += ["Started", command[:1000], "torch", "Resumed", "All settings"]
    places = [re.sub(r"\s+", " ", page.text).find(text) for text in shown]
    assert -1 not in places and places == sorted(places)
    assert page.text.count("unfinished") == 1 and "not finished" not in page.text
    assert [a["alt"] for tag, a in page.tags if tag == "img"] == ["loss"]
    starts = read(run, "starts.jsonl")
    assert [start["resumed"] for start in starts] == [False, True]
    assert set(starts[0]["versions"]) >= {"Python", "torch", "transformers"}
    assert starts[0]["command"] == command and "cores" in starts[0]["machine"]
    monkeypatch.setattr(resume, "ROOT", run)
    assert resume.find_commit() == "", "a directory without git, such as an unpacked archive"


def test_a_report_leads_with_the_first_and_the_last_evaluation_of_the_tasks_metric(run_dir):
    run, names = run_dir(), ["final_accuracy", "final_pass@1", "final_pass@2"]
    lines = [{"step": step, "accuracy": step / 64} for step in range(8)]
    write_lines(run / "metrics.jsonl", lines[:1])
    assert "accuracy 0\n" in report_of(run).text, "of a run that was interrupted early"
    final = dict(zip(names, (0.5, 0.75, 0.875)))
    write_lines(run / "metrics.jsonl", [*lines, {"step": 8, **final}])
    text = report_of(run).text
    assert "accuracy 0 → 0.5\n" in text
    assert [name for name in names if name not in text] == [] and "0.875" in text


def test_groups_whose_rewards_differ_come_first_the_first_is_open_and_each_says_its_mean(run_dir):
    differ, equal = [sample(1, answer=None), sample(1, reward=0.0)], [sample(2), sample(2)]
    page = report_of(run_dir(*differ, *equal))
    assert re.findall("<details( open)?><summary>5", page.source) == [" open", ""]
    shown = [f"mean reward {mean}\nversion {i}, query 7, 2 of 24" for mean, i in ((0.5, 1), (1, 2))]
    assert page.text.index(shown[0]) < page.text.index(shown[1])
    assert page.text.count("Wanted answer") == 1, "where the task has one"


def test_responses_of_a_group_are_compared_and_a_tap_shows_the_figures_of_a_token(run_dir):
    right = sample(text="ab", behavior_logprobs=[-0.125, -3.0], ref_logprobs=[-4.0, -2.5])
    wrong = sample(text="c", reward=0.0, behavior_logprobs=[-1.0], ref_logprobs=[-1.0])
    page = report_of(run_dir(right, wrong))
    # beta is 0.5: 1 / 0.5 - 6.5 + 3.125 for the one, 0 for the other.
    assert "-1.38 (-0.69)" in page.text and "0.00 (+0.69)" in page.text, "log Z, less the mean"
    tokens = [a for tag, a in page.tags if tag == "i" and "title" in a]
    assert [(token["class"], token["title"]) for token in tokens] == [
        ("u4", "log b -0.12, log π_ref -4.00"),
        ("d2", "log b -3.00, log π_ref -2.50"),
        ("", "log b -1.00, log π_ref -1.00"),
    ]
    assert {token["tabindex"] for token in tokens} == {"-1"}, "what a tap gives the focus"
    assert "i:focus::after" in page.source
    page = report_of(run_dir(sample(ref_logprobs=None)))
    assert page.source.count('title="log b -0.50"') == 2 and "not known" in page.text


HOSTILE = [
    "<script>alert(1)</script>",
    "</td></table><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "{{ 7 * 7 }} &lt;b&gt; <!-- ",
    "<style>* { display: none }</style>",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_in_samples_alarms_commands_or_settings_is_shown_and_never_is_markup(run_dir, text):
    chat = [{"role": text, "content": text}]
    line = sample(0, tokens=[text, "."], prompt=chat, answer=text, extracted=text)
    run = run_dir(line, model=text)
    write_lines(run / "alarms.jsonl", [{"step": 1, "name": text, "text": text}])
    start = dict(time=text, command=text, commit=text, machine={text: text}, versions={text: text})
    write_lines(run / "starts.jsonl", [start])
    in_start, in_alarm, in_settings, in_line = 7, 2, 1, 6
    assert report_of(run).text.count(text) == in_start + in_alarm + in_settings + in_line


def test_what_is_invisible_gets_a_sign_and_cannot_turn_the_text_around(run_dir):
    text = f"\x00\x1b[2J\x7f\x9b\u202eabc\u2066 {EMOJI}\r\né\ud800"
    run = run_dir()
    (run / "samples.jsonl").write_text(json.dumps(sample(text=text)) + "\n")
    page = report_of(run)
    shown = f"␀␛[2J⟨U+007F⟩⟨U+009B⟩⟨U+202E⟩abc⟨U+2066⟩ {EMOJI}␍↵\né⟨U+D800⟩"
    assert shown in page.text
    assert not re.search("[\x00\x1b\x7f\x9b\u202e\u2066\r]", page.source)


def test_10000_tokens_are_shown_whole_where_there_is_room_and_no_report_is_over_5_mb(
    run_dir, monkeypatch
):
    page = report_of(run_dir(sample(text="<" * 10_000, extracted=None)))
    assert page.text.count("<") == 10_000 and "left out" not in page.text
    text = f"<&.{EMOJI}" * 1_250  # 10,000 tokens
    run = run_dir(*(sample(i // 4, text, prompt=text, answer=text) for i in range(4 * 26)))
    monkeypatch.setitem(PICTURES, "loss", os.urandom(1_000_000))
    page = report_of(run)
    assert page.text.count("version") == GROUPS and "version 0" in page.text, "a spread of them"
    (count,) = set(re.findall(r"(\d+) of 10000 tokens left out", page.text))
    assert 0 < int(count) < 10_000


def test_a_run_that_left_nothing_but_its_settings_has_a_report(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(Config())))
    text = report_of(tmp_path).text
    assert "0 of 1000 steps; not finished" in text and "samples.jsonl has none" in text
    assert "No evaluation" in text


MALFORMED = r"""
[3]
null
"loss"
{"loss": 1}
{"step": "3", "loss": 1}
{"step": 3, "loss": "1", "beta": 0.5}
{"step": 3, "loss": 1, "beta": [0.5, 1]}
{"step": 3, "accuracy": "high"}
{"step": 3, "accuracy": 1, "accuracy_interval": 1}
{"step": 3, "accuracy": 1, "accuracy_interval": [1]}
{"step": 3, "lo
"""


def test_a_malformed_line_of_metrics_or_one_cut_off_in_samples_costs_that_line_alone(
    run_dir, monkeypatch
):
    run = run_dir(sample(4))
    whole, samples = ((run / f"{name}.jsonl").read_bytes() for name in ("metrics", "samples"))
    expected = report_of(run).text
    bad = MALFORMED.encode() + b"[" * 9999 + b"\n\xff\n"
    (run / "metrics.jsonl").write_bytes(bad + whole + bad)
    (run / "samples.jsonl").write_bytes(samples + samples[:-9])
    assert report_of(run).text == expected
    monkeypatch.undo()
    assert html_report.show(str(run)) == 0, "with pictures"
    files.rewind(str(run), 5)
    assert (run / "metrics.jsonl").read_bytes() == whole


def test_what_is_not_finite_is_null_in_a_file_and_shown_as_such(run_dir, monkeypatch):
    run, nan = run_dir(sample(5)), math.nan
    lines = timeline.Lines(run / "metrics.jsonl")
    lines.write({"step": 5, "loss": nan, "reward": math.inf, "beta": nan, "seconds": nan})
    lines.write({"step": 5, "accuracy": nan, "accuracy_interval": (nan, -math.inf)})
    text = (run / "metrics.jsonl").read_text()
    *_, step, evaluation = files.read_metrics(str(run))
    assert step == {"step": 5} | dict.fromkeys(("loss", "reward", "beta", "seconds"))
    assert evaluation == {"step": 5, "accuracy": None, "accuracy_interval": [None, None]}
    assert "NaN" not in text and "Infinity" not in text
    monkeypatch.undo()
    assert html_report.show(str(run)) == 0, "with pictures"
    assert (
        "step 5accuracynot finitenot finite to not finite" in Page(run / "report.html").check().text
    )


def test_groups_of_one_version_and_query_stay_apart_and_beta_is_that_of_the_version(run_dir):
    page = report_of(run_dir(*(sample(text=str(number)) for number in range(8))))
    assert page.text.count("query 7, 4 of ") == 2
    run = run_dir(sample(0), sample(2), sample(4), beta=0.125)
    steps = [{"step": i, "loss": 1.0, "beta": beta} for i, beta in [(1, 0.5), (2, 0.4), (3, 0.3)]]
    write_lines(run / "metrics.jsonl", steps)
    assert re.findall(r"β (\d\S*)", report_of(run).text) == ["0.3", "0.3", "0.5"]
    write_lines(run / "metrics.jsonl", [])
    assert re.findall(r"β (\d\S*)", report_of(run).text) == ["0.125"] * 3


def test_report_draws_the_pictures_and_loads_no_library_of_models(run_dir):
    run = run_dir(sample())
    code = f"import sys, tba; assert tba.main(['--report', {str(run)!r}]) == 0\n"
    code += "assert not {'transformers', 'vllm'} & set(sys.modules)"
    python("-c", code)
    page = Page(run / "report.html").check()
    assert "version 0" in page.text and len([tag for tag, _ in page.tags if tag == "img"]) == 12
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_failed_has_a_report_before_its_tracker_ends(run_dir):
    run = run_dir(sample())
    failed = MagicMock(config=Config(output_dir=str(run)))
    failed.train.side_effect, failed.interrupt.signal = RunFailed("a searcher died"), 0
    # It may hang, and a second Ctrl-C may end it: all is on disk before.
    failed.tracking.finish = lambda code: Page(run / "report.html").check()
    assert launcher.supervise(failed) == 1


def test_a_report_that_cannot_be_written_costs_a_line_and_not_the_run(run_dir, capsys):
    run = run_dir()
    (run / "report.html").mkdir()
    launcher.report(str(run))
    (line,) = capsys.readouterr().err.splitlines()
    assert "report.html could not be written: IsADirectoryError" in line
    with pytest.raises(UserError, match="could not be written: .*report.html"):
        html_report.show(str(run))


# What searchers write


def a_group(texts: list[str], reference: float = -2.0) -> Group:
    """A group with these responses and rewards 0, 1, 2, …"""
    logprobs = dict(behavior_logprob=-1 / 3, ref_logprob=reference)
    tokens = byte_tokenizer()("".join(texts)).input_ids
    lengths = [len(text.encode()) for text in texts]
    rewards = np.arange(len(texts), dtype=np.float32)
    group = make_group(5, 3, lengths, tokens, logprobs, texts=texts, rewards=rewards)
    group.query = Query(5, "5+7=", "12")
    return group


@pytest.mark.parametrize("reference", [-2.0, float("nan")])
def test_a_line_of_samples_has_each_tokens_text_and_log_probabilities(tmp_path, reference):
    texts = [f"1 {EMOJI}\n", "13", "", "14", "15"]
    log = SampleLog(str(tmp_path), load_task("arithmetic"), byte_tokenizer(), [].append)
    group = a_group(texts, reference)
    group.query = Query(5, "5+7=", None)
    log.write(group)
    assert "NaN" not in (tmp_path / "samples.jsonl").read_text()
    lines = read(tmp_path, "samples.jsonl")
    assert [line["response"] for line in lines] == texts[:4]
    for line, reward in zip(lines, (0.0, 1.0, 2.0, 3.0)):
        assert "".join(line["tokens"]) == line["response"]
        num_tokens = len(line["response"].encode())
        assert line["behavior_logprobs"] == [-0.333] * num_tokens
        expected = None if np.isnan(reference) and num_tokens else [-2.0] * num_tokens
        assert line["ref_logprobs"] == expected
        assert (line["version"], line["query_id"], line["reward"]) == (3, 5, reward)
        assert line["answer"] is None, "the task has none"
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(Config())))
    assert f"1 {EMOJI}↵\n" in report_of(tmp_path).text


def test_no_answer_or_extract_of_a_task_ends_a_searcher_and_an_error_is_said_once(tmp_path, caplog):
    class Odd(Task):
        def extract(self, response):
            return {"1": np.float32(1), "2": b"2", "3": Decimal(3), HALF: None}[response]

    said, group = [], a_group(["1", "2", "3", "4"])
    log = SampleLog(str(tmp_path), Odd(), byte_tokenizer(), said.append)
    group.query = Query(5, "5+7=", f"12{HALF}")
    for group.texts in (["1", "2", "3", HALF], ["9", "1", "1", "1"], ["8", "1", "1", "1"]):
        log.is_due_at = 0.0
        log.write(group)
    lines = read(tmp_path, "samples.jsonl")
    assert [line["extracted"] for line in lines] == ["1.0", "b'2'", "3", None]
    assert lines[3]["response"] == "?" and {line["answer"] for line in lines} == {"12?"}
    [notice] = said
    assert "left out of samples.jsonl, see logs/" in notice.text and "KeyError: '9'" in notice.text
    assert len(caplog.records) == 1 and "Traceback" in caplog.text


def test_searchers_write_fewer_groups_where_responses_are_long(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("runtime.responses.samples.time", clock)
    log = SampleLog(str(tmp_path), load_task("arithmetic"), byte_tokenizer(), [].append)
    written = []
    for text in ("12", "1" * 250):  # 1,000 tokens: 5 s
        for _ in range(100):
            log.write(a_group([text] * 4))
            clock.now += 0.1
        written.append(len((tmp_path / "samples.jsonl").read_text().splitlines()) // 4)
    assert written == [10, 12]


def test_the_text_of_each_token_is_found_in_time_proportional_to_their_number():
    tokenizer = byte_tokenizer()
    ids = tokenizer(f"a {EMOJI} é<eos>").input_ids
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == f"a {EMOJI} é<eos>" and texts[-1] == "<eos>"
    assert len(texts) == len(ids) and texts[2:6] == ["", "", "", "👩"]
    half_a_character = tokenizer("é").input_ids[:1]
    seconds = []
    for length in (2_000, 20_000):
        start = time.thread_time()
        texts = token_texts(tokenizer, half_a_character * length)
        seconds.append(time.thread_time() - start)
    assert seconds[1] < 30 * seconds[0], "a policy that has gone wrong costs no time"
    assert set("".join(texts)) == {"\ufffd"}
    assert token_texts(ByT5Tokenizer(), ByT5Tokenizer()("ab").input_ids)[:2] == ["a", "b"]
