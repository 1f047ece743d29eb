"""report.html: a run in one file that opens without a network: results, curves, responses.

What models wrote is not trusted: jinja2 escapes it, control characters and those that turn the text
around get a sign, and the page has no script and forbids any.
"""

import base64
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean

import numpy as np
from jinja2 import Environment, FileSystemLoader

from config import UserError
from launch.display import pictures
from launch.files import find_evaluations, parse_lines, read_lines, read_metrics
from runtime.record.lines import SAMPLES

GROUPS = 24  # that are shown
TOKENS = 32_000  # of all responses that are shown; one with its log-probabilities takes 100 bytes
SHADES = (0.05, 0.25, 1.0, 2.5)  # |log b - log pi_ref| of a token, in nats, from which it is darker
HEAD = re.compile(rb'\{"version": \d+, "query_id": -?\d+, ')  # which tells a group's lines
# Control characters, what changes the direction of the text behind it, and halves of characters.
HIDDEN = [*range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
SIGNS = {code: f"⟨U+{code:04X}⟩" for code in [*HIDDEN, *range(0xD800, 0xE000)]}
SIGNS |= {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}


def show(run_dir: str) -> int:
    """--report: draw and write report.html of a run, ended or not. Returns the exit code.

    Raises UserError for a directory that is no run's, or that cannot be written.
    """
    try:
        is_run = "sync_period" in json.loads(Path(run_dir, "config.json").read_text())
    except (OSError, ValueError, TypeError):
        is_run = False
    if not is_run:
        raise UserError(f"--report {run_dir!r} is no run's directory: it has no config.json of one")
    try:
        write(run_dir)
    except OSError as error:
        raise UserError(f"--report {run_dir!r} could not be written: {error}") from None
    print(f"report: {Path(run_dir, 'report.html')}")
    return 0


def write(run_dir: str) -> None:
    """Draw the pictures and write report.html, from what the run has left so far."""
    run = Path(run_dir)
    config = json.loads((run / "config.json").read_text())
    metrics = read_metrics(run_dir)
    steps = [line for line in metrics if "loss" in line]
    groups = read_groups(run / "samples.jsonl", config["beta"], steps)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=make_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shorten": shorten, "cut_middle": cut_middle}
    page = environment.get_template("report.html.j2").render(
        name=run.resolve().name,
        config=config,
        starts=read_lines(run / "starts.jsonl"),
        alarms=read_lines(run / "alarms.jsonl"),
        last=steps[-1] if steps else {"step": 0},
        evaluations=[*find_evaluations(metrics)],
        pictures={
            title: base64.b64encode(picture).decode()
            for title, picture in pictures.draw(run_dir).items()
        },
        groups=groups,
        most_tokens=TOKENS // max(1, sum(len(group["lines"]) for group in groups)),
        shades=SHADES,
    )
    (run / "report.html.unfinished").write_text(page, encoding="utf-8")
    (run / "report.html.unfinished").rename(run / "report.html")


def make_visible(value: object) -> object:
    """Replace what a page would hide or obey by a sign for it: 0x00 is shown as ␀.

    Called for all that the template puts in.
    """
    is_text = type(value) is str  # and no Markup, which the template has made
    return value.translate(SIGNS) if is_text else value


def shorten(value: object, most_characters: int) -> str:
    """Cut the middle out of a long text; what is no text is shown as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    beginning, left_out, end = cut_middle(text, most_characters)
    return f"{beginning} … {left_out} characters left out … {end}" if left_out else text


def cut_middle(whole: Sequence, most: int) -> tuple[Sequence, int, Sequence]:
    """Return the beginning of a text or a list, how much is left out, and the end."""
    left_out = max(0, len(whole) - most)
    half = most // 2 if left_out else len(whole)
    return whole[:half], left_out, whole[half + left_out :]


def read_groups(path: Path, beta: float, steps: list[dict]) -> list[dict]:
    """Read groups at even distances in samples.jsonl: first those that differ, the newest first.

    beta: that of the run's settings; steps: the lines of metrics.jsonl, which have that of a step.
    """
    if not path.exists():
        return []
    betas = {line["step"]: line.get("beta") for line in steps}
    count = sum(1 for _ in find_groups(path))
    chosen = {*np.linspace(0, count - 1, min(count, GROUPS)).round().astype(int).tolist()}
    groups = []
    for number, data in enumerate(find_groups(path)):
        if number in chosen and (lines := parse_lines(data)):
            step = min(lines[0]["version"] + 1, max(betas, default=0))
            groups.append(describe_group(lines, betas.get(step) or beta))
    return sorted(groups[::-1], key=lambda group: not group["differs"])


def find_groups(path: Path) -> Iterator[bytes]:
    """Yield the lines of each group.

    The file may be far larger than what is shown of it: the lines are not parsed yet.
    """
    with open(path, "rb") as file:
        lines_with_head = filter(HEAD.match, file)
        for _, lines in groupby(lines_with_head, lambda line: HEAD.match(line)[0]):
            # A task of one query has groups of the same version and query beside each other.
            while group := b"".join(islice(lines, SAMPLES)):
                yield group


def describe_group(lines: list[dict], beta: float) -> dict:
    """Return what the page says of a group, and add to each line its tokens and its log Z.

    log_z: r/β + log π_ref − log b of a response, None without a reference policy; of the group the
    mean, an estimate of log Z as in Eq. 4 with b for π. differs: the rewards do.
    """
    for line in lines:
        behavior, reference = line["behavior_logprobs"], line["ref_logprobs"]
        line["shown"], line["log_z"] = [*read_tokens(line)], None
        if behavior is not None and reference is not None:
            line["log_z"] = line["reward"] / beta + sum(reference) - sum(behavior)
    rewards, values = ([line[name] for line in lines] for name in ("reward", "log_z"))
    log_z = None if None in values else fmean(values)
    means = {"reward": fmean(rewards), "log_z": log_z, "differs": len({*rewards}) > 1}
    return {"lines": lines, "beta": beta, **means}


def read_tokens(line: dict) -> Iterator[tuple[str, str, str]]:
    """Yield the text, the known log-probabilities and the shade of each token.

    A character that several tokens make is shown as one, with their sums. The shade is a class: u1
    to u4 where b is above π_ref, d1 to d4 below, or none; "quiet" where it was not sampled.
    """
    texts, start = line["tokens"], 0
    columns = {"log b": line["behavior_logprobs"], "log π_ref": line["ref_logprobs"]}
    known = {name: values for name, values in columns.items() if values is not None}
    for end, text in enumerate(texts, 1):
        if text or end == len(texts):
            sums = {name: sum(values[start:end]) for name, values in known.items()}
            figures = ", ".join(f"{name} {value:.2f}" for name, value in sums.items())
            shade = ""
            if line["sampled"] and not line["sampled"][start]:
                shade = "quiet"
            elif len(sums) == 2:
                difference = sums["log b"] - sums["log π_ref"]
                number = bisect_right(SHADES, abs(difference))
                shade = f"{'u' if difference > 0 else 'd'}{number}" if number else ""
            yield text or "\ufffd", figures, shade
            start = end
