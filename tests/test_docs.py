"""The pages: every link leads somewhere, and every flag exists."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from conftest import ROOT

from config import Config
from tasks import find_task, task_names

PAGES = [page for room in ("", "docs/", "benchmarks/results/") for page in ROOT.glob(f"{room}*.md")]
SETTINGS = [kind for kind in (Config, *map(find_task, task_names())) if is_dataclass(kind)]
FLAGS = {field.name for kind in SETTINGS for field in fields(kind)}
FLAGS |= set("help config resume report plan plan_gpus eval_only".split())
OF_OTHERS = set("quick objectives shm-size head port address generate loss".split())


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub writes them in a link."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_somewhere_and_every_flag_exists(page):
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", text := page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists() and (not anchor or anchor in anchors(target)), link
    if page.parent != ROOT / "benchmarks" / "results":  # of earlier commits, some of them
        assert set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)) <= FLAGS | OF_OTHERS
