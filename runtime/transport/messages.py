"""What the processes of a run send each other besides groups."""

from dataclasses import dataclass


@dataclass
class Evaluation:
    """The mean score of responses to test queries, of one version; from a searcher."""

    version: int
    score: float
    queries: int
    long_prompts: int  # test queries left out, their prompt is too long or has no tokens
    unscored: int  # test queries left out, the response got no score
    interval: tuple[float, float] | None = None  # of 95 %

    def line(self, metric: str, base_model: str) -> dict:
        """Make its line of metrics.jsonl. metric: what the score is called."""
        interval = {f"{metric}_interval": self.interval} if self.interval else {}
        return {"step": self.version, metric: self.score, **interval, "base_model": base_model}

    def __str__(self) -> str:
        left_out = describe_left_out(self.long_prompts, self.unscored)
        return f"{self.score:.2f} ({self.score:.4f} on {self.queries} test queries{left_out})"


@dataclass
class FinalEvaluation:
    """All metrics of the task; from the process of the final evaluation."""

    metrics: dict[str, tuple[float, float, float]]  # name -> value, ends of its 95 % interval
    queries: int
    samples: int  # responses to each
    long_prompts: int
    unscored: int

    def __str__(self) -> str:
        """A table."""
        width = max(map(len, self.metrics))
        lines = [f"{'metric':{width}}     value   95 % interval"]
        for name, (value, low, high) in self.metrics.items():
            lines.append(f"{name:{width}}  {value:8.4f}   {low:.4f} to {high:.4f}")
        left_out = describe_left_out(self.long_prompts, self.unscored)
        return "\n".join([*lines, f"on {self.counted}{left_out}"])

    @property
    def counted(self) -> str:
        """Say what the metrics are means over."""
        samples = f", {self.samples} samples each" if self.samples > 1 else ""
        return f"{self.queries} test queries{samples}"


@dataclass
class Notice:
    """A line for the user; from the supervisor, as the trainer has the terminal."""

    text: str


def describe_left_out(long_prompts: int, unscored: int) -> str:
    """Say how many test queries were left out, and why; "" for none."""
    prompts = "prompt over --max_prompt_tokens, empty or not Unicode"
    reasons = (long_prompts, prompts), (unscored, "they got no score")
    return "".join(f"; {count} left out, {reason}" for count, reason in reasons if count)
