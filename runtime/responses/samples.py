"""What the policy answers: samples.jsonl, token by token, and a look at some responses in lines."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from config import UserError, users_code
from models.tokens import token_texts
from rollouts import Group
from runtime.record.lines import SAMPLES, Lines
from runtime.transport.messages import Answers, Notice
from tasks import Query, Task

PERIOD = 1.0  # seconds between two groups of one searcher
TOKENS_PER_SECOND = 200  # of one searcher at most, at about 20 bytes a token
SHOWN_CHARACTERS = 200  # of a response in a line
Say = Callable[[Notice], None]  # shows the user a line


class SampleLog:
    """Writes some responses of about a group a second, fewer where responses are long.

    The first error, such as of the task's extract(), goes to the user by `say`, and ends no run.
    """

    def __init__(self, run_dir: str, task: Task, tokenizer: PreTrainedTokenizerBase, say: Say):
        self.lines, self.task = Lines(Path(run_dir) / "samples.jsonl"), task
        self.tokenizer, self.say, self.has_failed = tokenizer, say, False
        self.is_due_at = 0.0  # time.monotonic()

    def write(self, group: Group) -> None:
        """Write a few responses of this group, unless one was written just before."""
        now = time.monotonic()
        if now < self.is_due_at:
            return
        rows = group.responses()[:SAMPLES]
        num_tokens = sum(len(row.tokens) for row in rows)
        self.is_due_at = now + max(PERIOD, num_tokens / TOKENS_PER_SECOND)
        try:
            with users_code("extract()"):
                answers = [self.task.extract(text) for text in group.texts[:SAMPLES]]
                answers = [None if answer is None else str(answer) for answer in answers]
            lines = [
                {
                    # These two come first: report.html finds the groups by them.
                    "version": row.version,
                    "query_id": row.query_id,
                    "prompt": group.query.prompt,
                    "answer": None if (want := group.query.answer) is None else str(want),
                    "response": text,
                    "extracted": answer,
                    "reward": row.reward,
                    "finished": is_finished,
                    "tokens": token_texts(self.tokenizer, row.tokens["token"].tolist()),
                    "behavior_logprobs": rounded(row.tokens["behavior_logprob"]),
                    "ref_logprobs": rounded(row.tokens["ref_logprob"]),
                    "sampled": None if (was := row.tokens["sampled"]).all() else was.tolist(),
                }
                for text, answer, is_finished, row in zip(
                    group.texts, answers, group.finished.tolist(), rows
                )
            ]
            self.lines.write(*lines)
        except Exception as error:
            if not self.has_failed:
                what = f"responses are left out of samples.jsonl, see logs/: {error!a:.200}"
                logging.warning(what, exc_info=True)
                self.say(Notice(f"warning: {what}"))
            self.has_failed = True


def rounded(logprobs: np.ndarray) -> list[float] | None:
    """Round to three digits; None for NaN, without a reference policy: JSON has none."""
    if not np.isfinite(logprobs).all():
        return None
    return [round(value, 3) for value in logprobs.tolist()]


def look_at(
    task: Task,
    queries: Sequence[Query],
    texts: Sequence[str],
    rewards: Sequence[float],
    finished: Sequence[bool],
) -> Answers:
    """Look at N responses, N at least 1. With episodes a text is the list of the model's turns."""
    has_answers, answers = type(task).extract is not Task.extract, extract_all(task, texts)
    whole = [i for i in range(len(texts)) if finished[i]]
    best, worst = (pick(whole, key=rewards.__getitem__, default=None) for pick in (max, min))
    examples = {"best": best} if whole else {}
    if whole and rewards[worst] < rewards[best]:
        examples["wrong"] = worst
    if len(whole) < len(texts):
        examples["cut off"] = next(i for i in range(len(texts)) if not finished[i])
    lines = []
    for kind, i in examples.items():
        found = f", extracted {answers[i]!r:.200}" if has_answers else ""
        wanted = "" if (answer := queries[i].answer) is None else f", wanted {str(answer)!r:.200}"
        prompt, response = shortened(str(queries[i].prompt)), shortened(texts[i])
        lines.append(f"  {kind}: reward {rewards[i]:g}{found}{wanted}: {prompt!r} → {response!r}")
    unanswered = sum(answer is None for answer in answers) / len(texts) if has_answers else None
    return Answers(1 - len(whole) / len(texts), unanswered, lines)


def extract_all(task: Task, texts: Sequence[str]) -> list[str | None]:
    """Extract the answer of each response; None where there is none, or extract() fails."""
    answers = [None] * len(texts)
    for i, text in enumerate(texts):
        with suppress(UserError), users_code("extract()"):
            answers[i] = task.extract(text)
    return answers


def shortened(text: str | list[str]) -> str | list[str]:
    """Leave out the middle of a long text: an answer stands at the end."""
    if not isinstance(text, str) or len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"
