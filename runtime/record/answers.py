"""What a person asks of a model's responses before anything else: how do they look?"""

from collections.abc import Sequence
from contextlib import suppress

from runtime.transport.messages import Answers
from tasks import Task

SHOWN_CHARACTERS = 200


def look_at(
    task: Task, texts: Sequence[str], rewards: Sequence[float], finished: Sequence[bool]
) -> Answers:
    """Look at N responses, N at least 1. With episodes a text is the list of the model's turns."""
    has_answers, answers = type(task).extract is not Task.extract, extract_all(task, texts)
    whole = [i for i in range(len(texts)) if finished[i]]
    best = max(whole, key=lambda i: rewards[i], default=None)
    worst = min(whole, key=lambda i: rewards[i], default=None)
    examples = {}
    if best is not None:
        examples["best"] = best
        if rewards[worst] < rewards[best]:
            examples["wrong"] = worst
    if len(whole) < len(texts):
        examples["cut off"] = next(i for i in range(len(texts)) if not finished[i])
    lines = []
    for kind, i in examples.items():
        answer = f", answer {answers[i]!r}" if has_answers else ""
        lines.append(f"  {kind}: reward {rewards[i]:g}{answer}: {shortened(texts[i])!r}")
    unanswered = answers.count(None) / len(texts) if has_answers else None
    return Answers(1 - len(whole) / len(texts), unanswered, lines)


def extract_all(task: Task, texts: Sequence[str]) -> list[str | None]:
    """Extract the answer of each response; None where there is none, or extract() fails."""
    answers = [None] * len(texts)
    for i, text in enumerate(texts):
        with suppress(Exception):
            answers[i] = task.extract(text)
    return answers


def shortened(text: str | list[str]) -> str | list[str]:
    """Leave out the middle of a long text: an answer stands at the end."""
    if not isinstance(text, str) or len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"
