"""Replay: the trainer's batches are drawn from the buffer (section 4.2)."""

import numpy as np

from buffer import Group, ReplayBuffer, Row
from config import Config


class ReplayBatches:
    """Draws B queries x K responses from the buffer, once the initial responses have arrived."""

    is_exact = False  # a run that was killed and resumed goes on, but otherwise than it would have

    def __init__(self, config: Config):
        self.config = config
        self.buffer = ReplayBuffer(
            config.capacity_per_query,
            config.reward_inverse_temperature,
            config.seed,
            config.buffer_growth_steps,
        )
        self.received = 0  # responses, duplicates included
        self.wanted = max(1, config.initial_responses)  # before the first batch
        self.unobserved: list[Group] = []  # groups whose figures are not in the metrics yet

    def add(self, groups: list[Group], step: int) -> None:
        """Put what arrived at this step into the buffer."""
        if groups:
            self.buffer.add(groups, step)
            self.received += sum(len(group.lengths) for group in groups)
            self.unobserved = groups

    def next(self, step: int) -> list[Row]:
        """Return the batch of this step, or [] if the buffer holds too little that is young."""
        config = self.config
        if self.received < self.wanted:
            return []
        oldest = 0 if config.max_staleness is None else max(0, step - config.max_staleness)
        return self.buffer.sample(
            config.queries_per_batch,
            config.responses_per_query,
            config.most_on_policy_prob,
            oldest,
        )

    def awaited(self, step: int) -> str:
        """Say what next() lacks."""
        if self.received < self.wanted:
            return f"the first {self.wanted} responses, {self.received} are here"
        return f"responses at most {self.config.max_staleness} steps old (--max_staleness)"

    def waiting(self) -> list[Group]:
        """Return the groups for later steps: none, all are in the buffer."""
        return []

    def is_taken(self, newest_version: int) -> bool:
        """Return whether the searchers have taken this version: nobody waits for that."""
        return True

    def is_settled(self, step: int, is_evaluation_pending: bool) -> bool:
        """Return whether a checkpoint is exact now: it need not be."""
        return True

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
