"""report.html: a run in one file that opens without a network: results, curves, responses.

What models wrote is not trusted: jinja2 escapes it, control characters and those that turn the text
around get a sign, and the page has no script and forbids any.
"""

import base64
import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from config import UserError
from launch.display import pictures
from launch.display.shown_samples import SHADES, cut_middle, read_groups
from launch.files import find_evaluations, read_lines, read_metrics

TOKENS = 32_000  # of all responses that are shown; one with its log-probabilities takes 100 bytes
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
    evaluations = list(find_evaluations(metrics))
    names = [name.removeprefix("final_") for _, name, *_ in evaluations]
    rows = [row for row, name in zip(evaluations, names) if name == names[0]]
    groups = read_groups(run / "samples.jsonl", config["beta"], steps)
    facts = {
        "name": run.resolve().name,
        "config": config,
        "starts": read_lines(run / "starts.jsonl"),
        "alarms": read_lines(run / "alarms.jsonl"),
        "last": steps[-1] if steps else {"step": 0},
        "is_whole": any(name.startswith("final_") for _, name, *_ in evaluations),
        "evaluations": evaluations,
        "metric": names[0] if names else "",
        "lead": rows[:1] + rows[1:][-1:],
        "pictures": {
            title: base64.b64encode(picture).decode()
            for title, picture in pictures.draw(run_dir).items()
        },
        "groups": groups,
        "most_tokens": TOKENS // max(1, sum(len(group.lines) for group in groups)),
        "shades": SHADES,
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=make_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shorten": shorten, "cut_middle": cut_middle}
    page = environment.get_template("report.html.j2").render(facts)
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
