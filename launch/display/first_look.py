"""The first look: what a user would ask of the first responses, said when training begins."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from config import Config
from launch.files import read_lines
from models.tokens import load_tokenizer, tokens_left_out
from rollouts import Group
from runtime.record.answers import extract_all, extracts, shortened
from runtime.record.metrics import describe
from runtime.transport.messages import Answers
from runtime.transport.status import StatusTable
from tasks import Task, load_task

LOOK_SECONDS = 5.0


class FirstLook:
    """Collects the first groups on their way to the trainer, and says what a user would ask.

    say: shows the user a line, from any thread. is_wanted: not where a run is resumed.
    """

    def __init__(
        self, config: Config, status: StatusTable, say: Callable[[str], None], is_wanted: bool
    ):
        self.config, self.status, self.say, self.is_wanted = config, status, say, is_wanted
        self.groups: list[Group] = []

    def take(self, group: Group) -> None:
        """Take note of a group that goes to the trainer. From any thread."""
        if self.is_wanted:
            self.groups.append(group)

    def say_if_due(self) -> None:
        """Describe the groups once those of the first step are there. Call it often.

        In a thread that is waited for at most LOOK_SECONDS: the task's extract() may hang, and this
        process watches over the others.
        """
        groups, config = [*self.groups], self.config
        size = config.queries_per_batch * config.samples_per_query
        wanted = size if config.lockstep else config.initial_responses
        if self.is_wanted and sum(len(group.lengths) for group in groups) >= max(1, wanted):
            self.is_wanted, self.groups = False, []
            thread = threading.Thread(target=self.describe, args=(groups,), daemon=True)
            thread.start()
            thread.join(LOOK_SECONDS)

    def describe(self, groups: list[Group]) -> None:
        """Describe these groups to the user."""
        left_out = int(self.status.total("long_prompts"))
        try:
            for line in describe_first(self.config, groups, describe(groups), left_out):
                self.say(line)
        except Exception as error:  # such as of a task's own code: the run goes on
            self.say(f"warning: no look at the first responses: {error!a:.200}")


def describe_first(
    config: Config, groups: list[Group], figures: dict[str, float], left_out: int
) -> Iterator[str]:
    """Say what a user would ask of the first groups, a line each.

    figures: of them, as in metrics.py. left_out: queries whose prompts are empty or too long.
    """
    tokenizer, task = load_tokenizer(config), load_task(config.task, **config.options)
    hidden = tokens_left_out(tokenizer, task.keep_special_tokens)
    equal, cut_off, reward = figures["equal_rewards"], 1 - figures["finished"], figures["reward"]
    rewards = f"reward {reward:.3g}; all rewards equal in {equal:.0%} of them"
    if equal == 1.0 and reward == 0:
        rewards = "no response was right"
    yield f"first {len(groups)} groups: {rewards}"
    yield from describe_example(config, task)
    if equal == 1.0:
        yield (
            "equal rewards do not say which response is better: see whether score() finds the "
            "answer; else try easier queries, a larger --samples_per_query or --temperature"
        )
    if config.max_episode_tokens is None:  # else a response is more than one text
        unanswered = find_unanswered(tokenizer, hidden, task, groups)
        yield str(Answers(cut_off, unanswered, examples=[]))
        if unanswered == 1:
            yield f"the task finds an answer in no response: {task.if_unanswered}"
    elif cut_off:
        what = "--max_turns or --max_episode_tokens, or a turn by --max_response_tokens"
        yield f"{cut_off:.0%} of the first responses were cut off by {what}"
    if left_out:
        why = f"over --max_prompt_tokens {config.max_prompt_tokens}, empty or not Unicode"
        yield f"prompts left out, {why}: {left_out}"
    if unseen := find_unseen(tokenizer, hidden, groups):
        what = f"special tokens in the responses, {', '.join(unseen)}"
        yield f"score() does not see {what}: keep_special_tokens of the task would show them"


def describe_example(config: Config, task: Task) -> Iterator[str]:
    """Show the best response of samples.jsonl with its prompt and answers, if there is one."""
    samples = read_lines(Path(config.output_dir, "samples.jsonl"))
    if not samples:
        return
    best = max(samples, key=lambda sample: sample["reward"])
    extracted = f", extracted {best['extracted']!r:.200}" if extracts(task) else ""
    wanted = "" if best["answer"] is None else f", wanted {best['answer']!r:.200}"
    yield f"  prompt: {shortened(str(best['prompt']))!r}"
    yield f"  response: {shortened(best['response'])!r}"
    yield f"  reward {best['reward']:g}{extracted}{wanted}"


def find_unanswered(
    tokenizer: PreTrainedTokenizerBase, hidden: dict[int, str], task: Task, groups: list[Group]
) -> float | None:
    """Find the share of responses in which the task finds no answer; None if it extracts none.

    hidden: the special tokens that score() does not see, by id.
    """
    if not extracts(task):
        return None
    rows = [row for group in groups for row in group.responses()]
    ids = [[i for i in row.tokens["token"].tolist() if i not in hidden] for row in rows]
    answers = extract_all(task, tokenizer.batch_decode(ids))
    return answers.count(None) / len(answers)


def find_unseen(
    tokenizer: PreTrainedTokenizerBase, hidden: dict[int, str], groups: list[Group]
) -> list[str]:
    """Name the special tokens within the sampled responses that are hidden from score()."""
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    # The last token of a turn may be another end, of several that a model has.
    responses = [row.tokens for group in groups for row in group.responses()]
    within = [own["token"][:-1][own["sampled"][:-1] & own["sampled"][1:]] for own in responses]
    found = {*np.concatenate(within).tolist()} - ends
    return sorted(hidden[token] for token in found & hidden.keys())
