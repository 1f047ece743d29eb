"""What report.html shows of samples.jsonl: groups from the whole run, token by token."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from launch.files import parse_lines
from runtime.record.lines import SAMPLES

GROUPS = 24  # that are shown
SHADES = (0.05, 0.25, 1.0, 2.5)  # |log b - log pi_ref| of a token, in nats, from which it is darker
HEAD = re.compile(rb'\{"version": \d+, "query_id": -?\d+, ')  # which tells a group's lines
NO_TEXT = "\ufffd"


@dataclass
class SampledGroup:
    """What samples.jsonl has of the responses to a query.

    lines: each with its tokens as "shown" and r/β + log π_ref − log b as "log_z", None without a
    reference policy. beta: that of its version. reward, log_z: means over the responses; the latter
    is an estimate of log Z, as in Eq. 4 with b for π. differs: whether the rewards say which
    response is better.
    """

    version: int
    beta: float
    lines: list[dict]

    def __post_init__(self):
        for line in self.lines:
            behavior, reference = line["behavior_logprobs"], line["ref_logprobs"]
            line["log_z"] = None
            if behavior is not None and reference is not None:
                line["log_z"] = line["reward"] / self.beta + sum(reference) - sum(behavior)
            line["shown"] = [*read_tokens(line)]
        rewards = [line["reward"] for line in self.lines]
        values = [line["log_z"] for line in self.lines]
        self.reward, self.differs = sum(rewards) / len(rewards), len({*rewards}) > 1
        self.log_z = None if None in values else sum(values) / len(values)


def read_groups(path: Path, beta: float, steps: list[dict]) -> list[SampledGroup]:
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
            version = lines[0]["version"]
            own_beta = betas.get(min(version + 1, max(betas, default=0))) or beta
            groups.append(SampledGroup(version, own_beta, lines))
    return sorted(groups[::-1], key=lambda group: not group.differs)


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


def cut_middle(whole: Sequence, most: int) -> tuple[Sequence, int, Sequence]:
    """Return the beginning of a text or a list, how much is left out, and the end."""
    left_out = max(0, len(whole) - most)
    half = most // 2 if left_out else len(whole)
    return whole[:half], left_out, whole[half + left_out :]


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
            yield text or NO_TEXT, figures, shade
            start = end
