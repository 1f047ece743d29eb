"""report.html: a run in one file that opens without a network: settings, curves, waits, responses.

What models wrote is not trusted: jinja2 escapes it, control characters and those that turn the text
around get a sign, and the page has no script and forbids any.
"""

import base64
import json
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, Template

from config import UserError
from launch.display import pictures
from launch.display.shown_samples import SHADES, cut_middle, read_groups, spread
from launch.files import find_evaluations, read_lines, read_metrics, read_spans

TOKENS = 32_000  # of all responses that are shown; one with its log-probabilities takes 50 bytes
EVALUATIONS = 60  # that are shown, and the final ones
PICTURES = ("curves.png", "timeline.png")
# Control characters but tab and newline, and what changes the direction of the text behind it.
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


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
        pictures.draw(run_dir)
        write(run_dir)
    except OSError as error:
        raise UserError(f"--report {run_dir!r} could not be written: {error}") from None
    print(f"report: {Path(run_dir, 'report.html')}")
    return 0


def write(run_dir: str) -> None:
    """Write report.html from what the run has left so far, pictures included."""
    run = Path(run_dir)
    config = json.loads((run / "config.json").read_text())
    metrics = read_metrics(run_dir)
    steps = [line for line in metrics if "loss" in line]
    evaluations = list(find_evaluations(metrics))
    final = [row for row in evaluations if row[1].startswith("final_")]  # pass@k among them
    during = [row for row in evaluations if row not in final]
    shares = shares_of_time(run_dir)
    groups = read_groups(run / "samples.jsonl", config["beta"], steps)
    num_responses = sum(len(group.responses) for group in groups)
    facts = {
        "name": run.resolve().name,
        "config": config,
        "starts": read_lines(run / "starts.jsonl"),
        "alarms": read_lines(run / "alarms.jsonl"),
        "last": steps[-1] if steps else {"step": 0},
        "is_whole": bool(final),
        "evaluations": spread(during, EVALUATIONS) + final,
        "pictures": {name: read_picture(run / name) for name in PICTURES},
        "shares": shares,
        "activities": list(dict.fromkeys(name for own in shares.values() for name in own)),
        "groups": groups,
        "open_version": next((group.version for group in groups if group.differs), None),
        "most_tokens": TOKENS // max(1, num_responses),
        "shades": SHADES,
    }
    unfinished = run / "report.html.unfinished"
    unfinished.write_text(load_template().render(facts), encoding="utf-8")
    unfinished.rename(run / "report.html")


def load_template() -> Template:
    """Load the page's template, which escapes all that is put in."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=make_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shorten": shorten, "cut_middle": cut_middle}
    return environment.get_template("report.html.j2")


def make_visible(value: object) -> object:
    """Replace what a page would hide or obey by a sign for it: 0x00 is shown as ␀.

    Called for all that the template puts in.
    """
    is_text = type(value) is str  # and no Markup, which the template has made
    return INVISIBLE.sub(sign_of, value) if is_text else value


def sign_of(match: re.Match) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def shorten(value: object, most_characters: int) -> str:
    """Cut the middle out of a long text; what is no text is shown as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    beginning, left_out, end = cut_middle(text, most_characters)
    return f"{beginning} … {left_out} characters left out … {end}" if left_out else text


def read_picture(path: Path) -> str | None:
    """Return a picture in base64; None if there is none."""
    return base64.b64encode(path.read_bytes()).decode() if path.exists() else None


def shares_of_time(run_dir: str) -> dict[str, dict[str, float]]:
    """Process -> activity -> its share of the time from the process's first span to its last."""
    shares = {}
    for process, spans in read_spans(run_dir).items():
        if not spans:
            continue
        total = max(end for *_, end in spans) - min(start for _, start, _ in spans)
        seconds: dict[str, float] = {}
        for name, start, end in spans:
            seconds[name] = seconds.get(name, 0.0) + end - start
        shares[process] = {name: spent / total for name, spent in seconds.items() if total}
    return shares
