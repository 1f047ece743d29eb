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
class Token:
    """A token as it is shown; a character that several tokens make is one, with their sums."""

    text: str
    behavior: float | None  # log b
    reference: float | None  # log pi_ref
    is_sampled: bool  # False: appended, or an environment's

    @property
    def shade(self) -> str:
        """The class of its colour: u1 to u4 where b is above pi_ref, d1 to d4 below; or none.

        "quiet" where it was not sampled.
        """
        if not self.is_sampled:
            return "quiet"
        if self.behavior is None or self.reference is None:
            return ""
        difference = self.behavior - self.reference
        shade = bisect_right(SHADES, abs(difference))
        return f"{'u' if difference > 0 else 'd'}{shade}" if shade else ""


@dataclass
class Response:
    """A line of samples.jsonl. log_z: r/β + log π_ref − log b; None without a reference policy."""

    line: dict
    tokens: list[Token]
    log_z: float | None


@dataclass
class SampledGroup:
    """What samples.jsonl has of the responses to a query. beta: that of its version."""

    version: int
    query_id: int
    beta: float
    responses: list[Response]

    @property
    def log_z(self) -> float | None:
        """The mean over its responses: an estimate of log Z, as in Eq. 4 with b for pi."""
        values = [response.log_z for response in self.responses]
        return None if None in values else sum(values) / len(values)

    @property
    def differs(self) -> bool:
        """Whether its rewards differ, and so say which response is better."""
        return len({response.line["reward"] for response in self.responses}) > 1


def read_groups(path: Path, beta: float, steps: list[dict]) -> list[SampledGroup]:
    """Read groups at even distances in samples.jsonl, the newest first.

    beta: that of the run's settings; steps: the lines of metrics.jsonl, which have that of a step.
    """
    if not path.exists():
        return []
    numbers = [line["step"] for line in steps]
    count = sum(1 for _ in find_groups(path))
    chosen = set(spread(range(count), GROUPS))
    groups = []
    for number, data in enumerate(find_groups(path)):
        if number in chosen and (lines := parse_lines(data)):
            version = lines[0]["version"]
            # Of the first step after that version of which there is a line, or of the last one.
            after = steps[bisect_right(numbers, version) :][:1] or steps[-1:]
            own_beta = next((line.get("beta") for line in after), None) or beta
            responses = [read_response(line, own_beta) for line in lines]
            groups.append(SampledGroup(version, lines[0]["query_id"], own_beta, responses))
    return groups[::-1]


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


def spread(values: Sequence, most: int) -> Sequence:
    """Take so many values at even distances, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]


def cut_middle(whole: Sequence, most: int) -> tuple[Sequence, int, Sequence]:
    """Return the beginning of a text or a list, how much is left out, and the end."""
    left_out = max(0, len(whole) - most)
    half = most // 2 if left_out else len(whole)
    return whole[:half], left_out, whole[half + left_out :]


def read_response(line: dict, beta: float) -> Response:
    """Make a Response of a line. One without log-probabilities is shown as its characters are."""
    behavior, reference = line.get("behavior_logprobs"), line.get("ref_logprobs")
    texts = line.get("tokens") or list(line["response"])
    log_z = None
    if behavior is not None and reference is not None:
        log_z = line["reward"] / beta + sum(reference) - sum(behavior)
    sampled = line.get("sampled") or [True] * len(texts)
    return Response(line, list(merge_parts(texts, behavior, reference, sampled)), log_z)


def merge_parts(
    texts: list[str],
    behavior: list[float] | None,
    reference: list[float] | None,
    sampled: list[bool],
) -> Iterator[Token]:
    """Yield the tokens, those that have no text of their own together with the one that has it."""
    start = 0
    for end, text in enumerate(texts, 1):
        if text or end == len(texts):
            sums = (
                None if values is None else sum(values[start:end])
                for values in (behavior, reference)
            )
            yield Token(text or NO_TEXT, *sums, sampled[start])
            start = end
