"""What the processes of a run send each other besides groups."""

from dataclasses import dataclass


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
    """The mean score of responses to test queries, of one version; from a searcher."""

    version: int
    score: float
    queries: int
    long_prompts: int  # test queries left out, their prompt is too long or has no tokens
    unscored: int  # test queries left out, the response got no score
    interval: tuple[float, float] | None = None  # of 95 %
    answers: Answers | None = None

    def line(self, metric: str, base_model: str) -> dict:
        """Make its line of metrics.jsonl. metric: what the score is called."""
        interval = {f"{metric}_interval": self.interval} if self.interval else {}
        return {"step": self.version, metric: self.score, **interval, "base_model": base_model}

    def __str__(self) -> str:
        left_out = describe_left_out(self.long_prompts, self.unscored)
        return f"{self.score:.2f} ({self.score:.4f} on {self.queries} test queries{left_out})"


@dataclass
class Notice:
    """A line for the user, from a searcher: the supervisor shows it."""

    text: str


def describe_left_out(long_prompts: int, unscored: int) -> str:
    """Say how many test queries were left out, and why; "" for none."""
    prompts = "prompt over --max_prompt_tokens, empty or not Unicode"
    reasons = (long_prompts, prompts), (unscored, "they got no score")
    return "".join(f"; {count} left out, {reason}" for count, reason in reasons if count)
