"""The searcher's side of lockstep: each version makes the batches that it owes, and no others."""

from collections import deque
from typing import Any

import torch

from extras.lockstep import batches_of_version
from rollouts import Group
from searcher import Searcher


class LockstepSearcher(Searcher):
    """Draws the queries that the version in the engine still owes to the batches that it makes."""

    seeds_requests = True  # so that the run is repeatable

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        # For each query that is to start, the trainer step that its group is for.
        self.owed: deque[int] = deque()
        self.reference_version = 0  # config.model is version 0

    def begin(self) -> None:
        super().begin()
        if not self.config.resume or self.weights.version == 0:
            self.owe()

    def owe(self) -> None:
        """Queue this searcher's share of each batch that the version in the engine must make."""
        config = self.config
        own_queries = len(range(self.rank, config.queries_per_batch, config.searchers))
        for batch in batches_of_version(self.engine.version, config):
            self.owed.extend([batch] * own_queries)

    def may_load(self) -> bool:
        """Return whether all groups are complete: every response is of one version."""
        return super().may_load() and not self.owed and not self.share.in_flight

    def load(self) -> None:
        self.take_reset()
        super().load()
        self.owe()

    @torch.no_grad()
    def take_reset(self) -> None:
        """Load the newest reference policy, if there was a reset: it is published first."""
        shared = self.weights.reference
        if shared and self.reference and shared.version > self.reference_version:
            with shared.read(self.rank) as (version, tensors):
                for name, parameter in self.reference.named_parameters():
                    parameter.copy_(tensors[name])
            self.reference_version = version

    def has_room(self) -> bool:
        return bool(self.owed) and super().has_room()

    def draw(self) -> Group:
        group = super().draw()
        group.batch = self.owed.popleft()
        return group

    def drop(self, group: Group) -> None:
        super().drop(group)
        self.owed.appendleft(group.batch)  # the batch needs another query in its place

    def is_over(self) -> bool:
        """Return whether nobody needs more: at a shutdown the trainer still waits for its batch."""
        return self.status.last_step_done and not self.evaluation.run

    def add_reference_logprobs(self, scored: list[Group]) -> None:
        super().add_reference_logprobs(scored)
        for group in scored:
            group.reference_version = self.reference_version
