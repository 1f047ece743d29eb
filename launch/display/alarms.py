"""Alarms: one line where a figure of the run says that something is wrong, and what to do about it.

Each is raised once a run: shown, and kept in alarms.jsonl.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from config import Config
from launch.files import read_lines
from models.device import compute_dtype
from runtime.record.lines import Lines
from tasks import load_task

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
