"""What a user is told to look at: the first responses, and figures that say what is wrong.

An alarm is a line with what to do about it. Each is raised once a run: shown, and kept in
alarms.jsonl.
"""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from config import Config
from launch.files import read_lines
from models.device import compute_dtype
from models.tokens import load_tokenizer, tokens_left_out
from rollouts import Group
from runtime.record.lines import Lines
from runtime.record.metrics import describe
from runtime.responses.samples import shortened
from runtime.transport.status import StatusTable
from tasks import Task, load_task

WINDOW = 20  # steps that a figure is averaged over: that of one batch jumps
# Of a token's log-probability, in nats, between vLLM and the trainer under the same weights.
NORMAL_MISMATCH = {torch.float32: 1e-4, torch.bfloat16: 0.1}
EQUAL_REWARDS = 0.95  # share of the groups
BEST_REWARDS = 0.95, 1.0  # their mean where nearly all responses are right: no alarm
SMALLEST_ESS = 0.01
NOTHING_NEW_SECONDS = 120.0


class Alarms:
    """Looks at the metrics of each step."""

    def __init__(self, run_dir: str, config: Config):
        self.config = config
        self.normal_mismatch = NORMAL_MISMATCH[compute_dtype(config)]
        sampling = load_task(config.task, **config.options).sampling(np.random.default_rng(0))
        if "min_tokens" in sampling:  # vLLM masks an early end, the trainer does not
            self.normal_mismatch = max(NORMAL_MISMATCH.values())
        path = Path(run_dir) / "alarms.jsonl"
        self.raised = {line["name"] for line in read_lines(path)}  # before the run was resumed
        self.lines = Lines(path)
        self.window: deque[dict] = deque(maxlen=WINDOW)
        self.received, self.received_at = -1, 0.0  # responses, and when the latest came

    def observe(self, metrics: dict) -> list[str]:
        """Take in the metrics of a step. Returns what is wrong and was not said before."""
        self.window.append(metrics)
        if metrics["received"] != self.received:
            self.received, self.received_at = metrics["received"], metrics["seconds"]
        new = {name: text for name, text in self.causes() if name not in self.raised}
        for name, text in new.items():
            self.lines.write({"step": metrics["step"], "name": name, "text": text})
        self.raised |= new.keys()
        return [*new.values()]

    def causes(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each alarm whose condition holds, and what to say."""
        latest, config = self.window[-1], self.config
        mismatch, silence = latest.get("mismatch", 0.0), latest["seconds"] - self.received_at
        if mismatch > self.normal_mismatch:
            yield (
                "mismatch",
                f"vLLM and the trainer differ by {mismatch:.2g} nats a token under the same "
                f"weights, where {self.normal_mismatch:g} at most is normal: vLLM and "
                "transformers compute this model differently. See what --dtype changes "
                f"(now {config.dtype})",
            )
        if self.received > 0 and silence > NOTHING_NEW_SECONDS:
            yield (
                "nothing new",
                f"the buffer got nothing new for {silence:.0f} s: the trainer repeats old "
                "responses. See logs/searcher-0.log, and searcher_tokens_per_second in "
                "metrics.jsonl; --max_staleness makes the trainer wait instead",
            )
        if len(self.window) < WINDOW:
            return
        equal, reward, ess, finished = (
            float(np.mean([metrics.get(name, np.nan) for metrics in self.window]))
            for name in ("equal_rewards", "reward", "ess_responses", "finished")
        )
        lowest, highest = BEST_REWARDS
        if equal >= EQUAL_REWARDS and not lowest <= reward <= highest:
            yield (
                "equal rewards",
                f"in {equal:.0%} of the groups all rewards are equal (their mean is "
                f"{reward:.3g}): they do not say which response is better. If that is not the best "
                "reward there is, try easier queries, a larger --samples_per_query (now "
                f"{config.samples_per_query}) or --temperature",
            )
        if ess < SMALLEST_ESS:
            yield (
                "effective sample size",
                f"the effective sample size of the batches is {ess:.2%}: the policy has moved far "
                "from the one that sampled, a few responses outweigh the rest. Lower "
                f"--learning_rate (now {config.learning_rate:g}) or --sync_period (now "
                f"{config.sync_period}), or raise --most_on_policy_prob (now "
                f"{config.most_on_policy_prob:g})",
            )
        if finished == 0.0:
            yield (
                "unfinished",
                f"no response ends before --max_response_tokens (now {config.max_response_tokens}; "
                "or an episode's --max_turns, --max_episode_tokens): raise it, or see in "
                "samples.jsonl whether the policy has learned not to end",
            )


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
        if equal == 1.0:
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
