"""What the processes of a run send each other besides groups."""

from collections.abc import Iterator
from dataclasses import dataclass

FEW_QUERIES = 30  # of which fewer tell little


@dataclass
class Answers:
    """A look at some responses.

    cut_off: the share that a limit cut off. unanswered: the share in which the task finds no
    answer; None for a task that extracts none. examples: lines, of the best response, a wrong one
    and one that was cut off, as far as there are such.
    """

    cut_off: float
    unanswered: float | None
    examples: list[str]

    def __str__(self) -> str:
        found = "" if self.unanswered is None else f", {self.unanswered:.0%} have no answer"
        limit = " (--max_response_tokens)" if self.cut_off else ""
        shares = f"{self.cut_off:.0%} of the responses were cut off{limit}{found}"
        return "\n".join([shares, *self.examples])


@dataclass
class Evaluation:
    """What the responses of one version to the test queries got.

    metrics: by name the mean, and the ends of its 95 % interval. NaN if no response got a score.
    """

    version: int
    metrics: dict[str, tuple[float, float, float]]
    queries: int
    samples: int = 1  # responses to each
    long_prompts: int = 0  # queries left out, their prompt is too long or has no tokens
    unscored: int = 0  # responses left out, they got no score
    answers: Answers | None = None

    def line(self, base_model: str, prefix: str = "") -> dict:
        """Make its line of metrics.jsonl. prefix: of the names of the metrics."""
        line = {"step": self.version, "base_model": base_model}
        for name, (mean, *interval) in self.metrics.items():
            line |= {f"{prefix}{name}": mean, f"{prefix}{name}_interval": interval}
        return line

    def describe(self) -> Iterator[str]:
        """Yield a line for each metric."""
        few = " (few: the interval is wide)" if self.queries < FEW_QUERIES else ""
        counted = f"on {self.queries} test queries{few}"
        if self.samples > 1:
            counted += f", {self.samples} samples each"
        prompts = "prompt over --max_prompt_tokens, empty or not Unicode"
        for count, reason in (self.long_prompts, prompts), (self.unscored, "they got no score"):
            counted += f"; {count} left out, {reason}" if count else ""
        for name, (mean, low, high) in self.metrics.items():
            interval = f"95 % interval {low:.4f} to {high:.4f}"
            yield f"{name}: {mean:.2f} ({mean:.4f}, {interval}, {counted})"


@dataclass
class Notice:
    """A line for the user, from a searcher: the supervisor shows it."""

    text: str
