"""The metrics of a step but the learner's own: of groups and rows, rates, counts, the mismatch."""

import time
from collections import deque
from typing import Any

import numpy as np
import torch.multiprocessing

from buffer import ReplayBuffer
from loss import Metrics
from rollouts import Group, Response, join_tokens
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
        weights: SharedWeights,
        buffer: ReplayBuffer,
        rollout_queue: torch.multiprocessing.Queue,
        status: StatusTable,
    ):
        self.weights, self.buffer = weights, buffer
        self.rollout_queue, self.status = rollout_queue, status
        self.figures: dict[str, float] = {}
        self.mismatch_due = 0  # step from which the mismatch is to be measured again
        self.skipped_publishes = 0
        # (time, [seconds that the trainer waited; tokens, working and waiting of the searchers])
        self.window: deque[tuple[float, np.ndarray]] = deque()

    def state_dict(self) -> dict:
        names = "figures", "mismatch_due", "skipped_publishes"
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict) -> None:
        for name in self.state_dict():
            setattr(self, name, state[name])

    def find_to_compare(self, groups: list[Group], step: int) -> Group | None:
        """Find a group to measure the mismatch on, if it is due: of a version still in a slot.

        It is due once for the base model, once for newer weights, which shows whether they arrive,
        and every MISMATCH_PERIOD steps.
        """
        is_due = step >= self.mismatch_due
        if not is_due and self.figures.get("mismatch_version") != 0:
            return None
        held = [version for version in self.weights.held() if version >= (0 if is_due else 1)]
        whole = (group for group in reversed(groups) if group.version == group.last_version)
        return next((group for group in whole if group.version in held), None)

    def compare(self, group: Group, logprobs: list[np.ndarray], step: int) -> None:
        """Measure the mismatch, mean |difference| to vLLM of a token's log-probability, in nats.

        logprobs: of each response under the weights that sampled it, (T,), by transformers. Near 0
        the mismatch shows that what was published is what samples.
        """
        differences = np.abs(np.concatenate(logprobs) - group.tokens["behavior_logprob"])
        self.figures["mismatch"] = float(differences[group.tokens["sampled"]].mean())
        self.figures["mismatch_version"] = group.version
        self.mismatch_due = step + MISMATCH_PERIOD

    def of(self, rows: list[Response], step: int, waited: float) -> Metrics:
        """Return the metrics of the step that was just made, from these rows.

        waited: seconds for which the trainer has waited so far.
        """
        version = step - 1  # of the weights that the step started from
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
            "searcher_restarts": int(self.status.total("restarts")),
            "skipped_publishes": self.skipped_publishes,
        }

    def rates(self, waited: float) -> Metrics:
        """Return busy shares and tokens per second, over the latest RATE_WINDOW seconds."""
        status = self.status
        totals = [status.total(column) for column in ("tokens", "busy", "waited")]
        self.window.append((time.monotonic(), np.array([waited, *totals])))
        waiting, tokens_per_second, working, idle = rate_of(self.window, RATE_WINDOW)
        return {
            "trainer_busy": 1.0 - waiting,
            # A span counts once it has ended, so working seconds may exceed those of the window.
            "searcher_busy": working / ((working + idle) or 1.0),
            "searcher_tokens_per_second": tokens_per_second,
            **status.figures(self.weights.version),
        }


def describe(groups: list[Group]) -> dict[str, float]:
    """Describe groups as they were generated, in figures of the tokens that were sampled.

    KL (nats a response, against the reference policy, if there is one) and entropy (nats a token)
    are estimates for the policy that sampled; KL contains the mismatch with vLLM.
    """
    tokens = join_tokens([group.tokens for group in groups])
    was_sampled = tokens["sampled"]
    behavior = tokens["behavior_logprob"][was_sampled]
    reference = tokens["ref_logprob"][was_sampled]
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
