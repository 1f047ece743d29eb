"""The first look: what a user would ask of the first responses, said when training begins."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from config import Config
from launch.display.alarms import BEST_REWARDS
from launch.files import read_lines
from models.tokens import load_tokenizer, tokens_left_out
from rollouts import Group
from runtime.record.metrics import describe
from runtime.responses.samples import shortened
from runtime.transport.status import StatusTable
from tasks import Task, load_task


class FirstLook:
    """Collects the first groups on their way to the trainer, and says what a user would ask.

    say: shows the user a line. is_wanted: not where a run is resumed.
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
        """Describe the groups once those of the first step are there. Call it often."""
        groups, config = [*self.groups], self.config
        size = config.queries_per_batch * config.samples_per_query
        wanted = size if config.lockstep else config.initial_responses
        if self.is_wanted and sum(len(group.lengths) for group in groups) >= max(1, wanted):
            self.is_wanted, self.groups = False, []
            for line in self.describe_first(groups):
                self.say(line)

    def describe_first(self, groups: list[Group]) -> Iterator[str]:
        """Say what a user would ask of the first groups, a line each."""
        config, figures = self.config, describe(groups)
        task = load_task(config.task, **config.options)
        equal, cut_off = figures["equal_rewards"], 1 - figures["finished"]
        rewards = f"reward {figures['reward']:.3g}; all rewards equal in {equal:.0%} of them"
        if equal == 1.0 and figures["reward"] == 0:
            rewards = "no response was right"
        yield f"first {len(groups)} groups: {rewards}"
        # Searchers have written some of them down, with what extract() finds: it may hang.
        if samples := read_lines(Path(config.output_dir, "samples.jsonl")):
            best = max(samples, key=lambda sample: sample["reward"])
            extracts = type(task).extract is not Task.extract
            extracted = f", extracted {best['extracted']!r:.200}" if extracts else ""
            wanted = "" if best["answer"] is None else f", wanted {best['answer']!r:.200}"
            yield f"  prompt: {shortened(str(best['prompt']))!r}"
            yield f"  response: {shortened(best['response'])!r}"
            yield f"  reward {best['reward']:g}{extracted}{wanted}"
            if extracts and all(sample["extracted"] is None for sample in samples):
                what = f"the task finds an answer in none of {len(samples)} responses"
                yield f"{what}: {task.if_unanswered}"
        if equal == 1.0 and not BEST_REWARDS[0] <= figures["reward"] <= BEST_REWARDS[1]:
            yield (
                "equal rewards do not say which response is better: see whether score() finds the "
                "answer; else try easier queries, a larger --samples_per_query or --temperature"
            )
        if cut_off:
            limit = "--max_response_tokens"
            if config.max_episode_tokens is not None:
                limit = f"--max_turns or --max_episode_tokens, or a turn by {limit}"
            yield f"{cut_off:.0%} of the first responses were cut off by {limit}"
        if left_out := int(self.status.total("long_prompts")):
            why = f"over --max_prompt_tokens {config.max_prompt_tokens}, empty or not Unicode"
            yield f"prompts left out, {why}: {left_out}"
        if unseen := find_unseen(config, task, groups):
            what = f"special tokens in the responses, {', '.join(unseen)}"
            yield f"score() does not see {what}: keep_special_tokens of the task would show them"


def find_unseen(config: Config, task: Task, groups: list[Group]) -> list[str]:
    """Name the special tokens within the sampled responses that are hidden from score()."""
    tokenizer = load_tokenizer(config)
    hidden = tokens_left_out(tokenizer, task.keep_special_tokens)
    # The last token of a turn may be another end, of several that a model has.
    responses = [row.tokens for group in groups for row in group.responses()]
    within = [own["token"][:-1][own["sampled"][:-1] & own["sampled"][1:]] for own in responses]
    found = {*np.concatenate(within).tolist()} - {tokenizer.eos_token_id, tokenizer.pad_token_id}
    return sorted(hidden[token] for token in found & hidden.keys())
