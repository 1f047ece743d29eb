"""The metrics of a step but the learner's own: of groups and rows, rates and counts.

And the mismatch between vLLM's log-probabilities and the trainer's, which is measured now and then.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.multiprocessing

from buffer import Group, ReplayBuffer, Row, rows_of
from learner import Learner
from loss import Metrics
from models.logprobs import mismatch
from runtime.record.first_look import describe_first
from runtime.transport.status import StatusTable
from weights import SharedWeights

RATE_WINDOW = 10.0  # seconds over which rates and busy shares are taken
MISMATCH_PERIOD = 50  # steps between two measurements of the mismatch with vLLM


class StepMetrics:
    """Makes the metrics of each step.

    figures: of the latest groups that arrived. skipped_publishes: syncs at which no slot was free.
    """

    def __init__(
        self,
        learner: Learner,
        weights: SharedWeights,
        buffer: ReplayBuffer,
        rollout_queue: torch.multiprocessing.Queue,
        status: StatusTable,
    ):
        self.learner, self.weights, self.buffer = learner, weights, buffer
        self.rollout_queue, self.status = rollout_queue, status
        self.figures: dict[str, float] = {}
        self.first: list[Group] = []  # that arrive before the first step
        self.mismatch_due = 0  # step from which the mismatch is to be measured again
        self.skipped_publishes = 0
        # (time, [seconds that the trainer waited, that searchers worked, tokens]) for the rates
        self.window: deque[tuple[float, np.ndarray]] = deque()

    def state_dict(self) -> dict:
        return {
            "fresh": self.figures,
            "mismatch_due": self.mismatch_due,
            "skipped_publishes": self.skipped_publishes,
        }

    def load_state_dict(self, state: dict) -> None:
        self.figures, self.mismatch_due = state["fresh"], state["mismatch_due"]
        self.skipped_publishes = state["skipped_publishes"]

    def observe(self, groups: list[Group], later: Sequence[Group] = ()) -> None:
        """Look at groups as they were generated: the buffer drops duplicates, which would distort.

        later: groups for later steps, which may show the mismatch sooner.
        """
        if not groups:
            return
        self.figures |= describe(groups)
        if self.learner.step == 0:
            self.first += groups
        # Once for the base model and once for the first published weights, in case they never
        # arrived.
        is_due = self.learner.step >= self.mismatch_due
        if is_due or self.figures.get("mismatch_version") == 0:
            self.measure_mismatch([*groups, *later], 0 if is_due else 1)

    def measure_mismatch(self, groups: list[Group], least: int) -> None:
        """Measure the mismatch on the latest group of one version, `least` or later, in a slot."""
        held = {v: tensors for v, tensors in self.weights.held().items() if v >= least}
        for group in reversed(groups):
            if group.version == group.last_version and group.version in held:
                ours = self.learner.logprobs_under(
                    held[group.version], rows_of(group), group.temperature
                )
                self.figures["mismatch"] = mismatch(group, ours)
                self.figures["mismatch_version"] = group.version
                self.mismatch_due = self.learner.step + MISMATCH_PERIOD
                return

    def say_first_look(self, say: Callable[[str], None]) -> None:
        """Before the first step, say what a user would ask of the first responses."""
        groups, self.first = self.first, []
        if groups:
            left_out = int(self.status.total("long_prompts"))
            for line in describe_first(self.learner.config, groups, describe(groups), left_out):
                say(line)

    def of(self, rows: list[Row], waited: float) -> Metrics:
        """Return the metrics of the step that was just made, from these rows.

        waited: seconds for which the trainer has waited so far.
        """
        version = self.learner.step - 1  # of the weights that the step started from
        staleness = version - np.array([row.version for row in rows])
        in_buffer = version - np.array([row.received_step for row in rows])
        return {
            **self.figures,
            "staleness_mean": float(staleness.mean()),
            "staleness_max": int(staleness.max()),
            "staleness_in_flight": float((staleness - in_buffer).mean()),
            "staleness_in_buffer": float(in_buffer.mean()),
            **self.rates(waited),
            "queue_depth": self.rollout_queue.qsize(),
            "received": self.buffer.received,
            "buffer_responses": self.buffer.responses,
            "buffer_queries": self.buffer.queries,
            "long_prompts": int(self.status.total("long_prompts")),
            "unscored_groups": int(self.status.total("unscored_groups")),
            "bad_steps": self.learner.bad_steps,
            "searcher_restarts": int(self.status.total("restarts")),
            "skipped_publishes": self.skipped_publishes,
        }

    def rates(self, waited: float) -> Metrics:
        """Return busy shares and tokens per second, over the latest RATE_WINDOW seconds."""
        status = self.status
        counts = np.array([waited, status.total("busy"), status.total("tokens")])
        self.window.append((time.monotonic(), counts))
        waiting, working, tokens_per_second = rate_of(self.window, RATE_WINDOW)
        return {
            "trainer_busy": 1.0 - waiting,
            "searcher_busy": working / len(status.searchers),
            "searcher_tokens_per_second": tokens_per_second,
            **status.figures(self.weights.version),
        }


def describe(groups: list[Group]) -> dict[str, float]:
    """Describe groups as they were generated, in figures.

    KL (nats a response, against the reference policy, if there is one) and entropy (nats a token)
    are estimates for the policy that sampled; KL contains the mismatch with vLLM. Tokens that
    were not sampled are left out.
    """
    was_sampled = np.concatenate([group.sampled for group in groups])
    behavior = np.concatenate([group.behavior_logprobs for group in groups])[was_sampled]
    reference = np.concatenate([group.ref_logprobs for group in groups])[was_sampled]
    lengths = np.concatenate([group.lengths for group in groups])
    has_reference = not np.isnan(reference).all()
    kl = {"kl": float((behavior - reference).sum() / len(lengths))} if has_reference else {}
    return {
        "reward": float(np.concatenate([group.rewards for group in groups]).mean()),
        "equal_rewards": float(np.mean([np.ptp(group.rewards) == 0 for group in groups])),
        **kl,
        "entropy": float(-behavior.mean()),
        "response_tokens": float(was_sampled.sum() / len(lengths)),
        "finished": float(np.concatenate([group.finished for group in groups]).mean()),
    }


def rate_of(seen: deque[tuple[float, Any]], seconds: float) -> Any:
    """Per second, over the latest so many seconds of (time, count or array); 0 of a single one."""
    while len(seen) > 2 and seen[1][0] < seen[-1][0] - seconds:
        seen.popleft()
    (start, before), (end, after) = seen[0], seen[-1]
    return (after - before) / ((end - start) or 1.0)
