"""Replay: the trainer's batches from the buffer (section 4.2), as old as the buffer gives them."""

import numpy as np

from buffer import Group, ReplayBuffer, Row
from config import Config


class ReplayBatches:
    """Samples B queries x K responses of the buffer, once that holds the initial responses."""

    is_exact = False

    def __init__(self, config: Config):
        self.config = config
        self.buffer = ReplayBuffer(
            config.capacity_per_query, config.reward_inverse_temperature, config.seed
        )
        self.received = 0  # responses, as generated: the buffer drops duplicates
        self.wanted = max(1, config.initial_responses)
        self.fresh: list[Group] = []  # groups whose figures nobody has looked at

    def add(self, groups: list[Group], step: int) -> None:
        """Put what one sync brought into the buffer."""
        if groups:
            self.buffer.add(groups, step)
            self.received += sum(len(group.lengths) for group in groups)
            self.fresh = groups

    @property
    def is_filled(self) -> bool:
        """Whether the initial responses are here."""
        return self.received >= self.wanted

    def next(self, step: int) -> list[Row]:
        """The batch of this step; [] if the buffer holds nothing young enough."""
        config = self.config
        oldest = 0 if config.max_staleness is None else max(0, step - config.max_staleness)
        return self.buffer.sample(
            config.queries_per_batch,
            config.responses_per_query,
            config.most_on_policy_prob,
            oldest,
        )

    def awaited(self, step: int) -> str:
        """What next() lacks, in words."""
        if not self.is_filled:
            return f"the first {self.wanted} responses, {self.received} are here"
        return f"responses at most {self.config.max_staleness} steps old (--max_staleness)"

    def waiting(self) -> list[Group]:
        """Groups for later steps: none, all are in the buffer."""
        return []

    def figures(self) -> dict[str, int]:
        return {
            "received": self.received,
            "buffer_responses": self.buffer.responses,
            "buffer_queries": len(self.buffer.all),
        }

    def state_dict(self) -> dict[str, np.ndarray]:
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.buffer.load_state_dict(state)
