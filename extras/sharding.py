"""The policy sharded over several trainer processes by FSDP2 (--trainer_processes).

Rank 0 has the Trainer. Each other rank has a learner of its own and makes the calls that rank 0
makes on its (follow). A rank holds 1 / N of each weight, its gradient and its moments; a layer's
weights are gathered while it is computed, so every forward pass is made by all ranks at once.
"""

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from types import GeneratorType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from config import LOAD_SECONDS, Config
from learner import Learner
from loss import Metrics
from models.device import device
from models.logprobs import TOKENS_PER_FORWARD, response_logprobs, split_rows
from models.policy import decoder_layers, load_policy
from rollouts import Response
from runtime.memory_trial import try_largest_batch
from runtime.transport.status import StatusTable

POLL_SECONDS = 1.0  # between two heartbeats of a rank that waits for a call


class Rank:
    """One of several trainer processes, on one machine, and its ways to the others.

    connections: of rank 0, its ends of pipes to the others; of another, its end of that pipe.
    timeout: seconds after which a rank gives up on the others.
    """

    def __init__(self, rank: int, size: int, connections: list[Connection], timeout: float):
        self.rank, self.size, self.connections = rank, size, tuple(connections)
        self.timeout = timedelta(seconds=timeout)

    def join(self) -> None:
        """Meet the other ranks, once each has loaded."""
        for interface in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(interface, "lo")
        host, loading = "127.0.0.1", timedelta(seconds=LOAD_SECONDS)
        if self.rank == 0:
            listener = socket.create_server((host, 0))  # the store itself would listen to all hosts
            port = listener.getsockname()[1]
            self.send(port)
            at = dict(is_master=True, master_listen_fd=listener.detach())
        else:  # once rank 0 has loaded: who started both watches over that
            port, at = self.connections[0].recv(), {}
        store = dist.TCPStore(host, port, self.size, timeout=loading, wait_for_workers=False, **at)
        store.set(f"loaded {self.rank}", "")
        store.wait([f"loaded {rank}" for rank in range(self.size)], loading)
        backend = "cpu:gloo,cuda:nccl" if device().type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=self.timeout
        )

    def send(self, message: Any) -> None:
        """Send something to the other ranks, on rank 0; on another do nothing."""
        for connection in self.connections if self.rank == 0 else ():
            connection.send(message)

    def gather(self, value: Any) -> list:
        """Return the value that each rank has here, on every rank."""
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def follow(self, learner: object, beat: Callable[[], None]) -> None:
        """Call what rank 0 calls, until it ends. beat: sends a heartbeat."""
        while True:
            beat()
            if not self.connections[0].poll(POLL_SECONDS):
                continue
            try:
                name, arguments = self.connections[0].recv()
            except EOFError:
                return
            result = getattr(learner, name)(*arguments)
            if isinstance(result, GeneratorType):
                deque(result, maxlen=0)  # to its end

    def share(self, rows: list, group_size: int) -> list:
        """Return the rows of this rank: whole groups of so many."""
        starts = np.array_split(range(0, len(rows), group_size), self.size)[self.rank]
        return [row for start in starts for row in rows[start : start + group_size]]


def connect(size: int, timeout: float) -> list[Rank]:
    """Make the trainer's processes, by rank. timeout: seconds that one waits for the others."""
    pipes = [torch.multiprocessing.Pipe(duplex=False) for _ in range(size - 1)]
    leader = Rank(0, size, [sender for _, sender in pipes], timeout)
    return [leader, *(Rank(i, size, [end], timeout) for i, (end, _) in enumerate(pipes, start=1))]


class PolicyLogprobs(torch.nn.Module):
    """response_logprobs as the forward pass of a module, which is what FSDP2 shards.

    All ranks must run equally many flat passes. With a gradient each runs one; without one, a rank
    with fewer appends some over one short row.
    """

    def __init__(self, policy: torch.nn.Module, rank: Rank):
        super().__init__()
        self.policy, self.rank = policy, rank

    def forward(
        self, prompts: list[np.ndarray], responses: list[np.ndarray], *arguments: Any
    ) -> Tensor:
        lacking = 0
        if not torch.is_grad_enabled():
            passes = split_rows(prompts, responses, TOKENS_PER_FORWARD[device().type])
            lacking = max(self.rank.gather(len(passes))) - len(passes)
        logprobs = response_logprobs(self.policy, prompts, responses, *arguments)
        for _ in range(lacking):
            response_logprobs(self.policy, prompts[:1], [responses[0][:2]], *arguments)
        return logprobs


class ShardedLearner(Learner):
    """The learner of one rank. Call methods on rank 0 only: it has the others call them too."""

    def __init__(self, config: Config, say: Callable[[str], None], rank: Rank):
        self.rank = rank
        super().__init__(config, say)
        self.response_logprobs = self.root

    def load_policy(self) -> torch.nn.Module:
        """Load the policy, and leave this rank its share of it on its device.

        As under autocast in one process, layers compute in dtype, and what is outside of them,
        embeddings and head, is read in the dtype of the masters.
        """
        policy = load_policy(self.config, torch.device("cpu"))
        self.rank.join()
        mesh = init_device_mesh(device().type, (self.rank.size,))
        layers = decoder_layers(policy)
        precision = MixedPrecisionPolicy(self.dtype, torch.float32, cast_forward_inputs=False)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        self.root = PolicyLogprobs(policy, self.rank)
        # Not left gathered: the weights may change before the next forward pass.
        fully_shard(self.root, mesh=mesh, reshard_after_forward=True)
        for module in (*layers, self.root):
            module.set_gradient_divide_factor(1.0)  # the sum over ranks, not the mean
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        return policy

    def call(self, name: str, *arguments: Any) -> None:
        """Have the other ranks call this method of their learners, as rank 0 does now."""
        self.rank.send((name, arguments))

    def update(self, rows: list[Response]) -> Metrics:
        self.call("update", rows)
        return super().update(rows)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self.call("weights")
        yield from super().weights()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        self.call("state")
        yield from super().state()

    def load_state(self, state: dict[str, Tensor] | None) -> None:
        """Take over what state() gave, of any number of ranks. Only rank 0 has it."""
        self.call("load_state", None)
        # The others get what is small, and of the rest the names.
        small = {
            name: value if value.ndim == 0 or name == "counters" else None
            for name, value in (state or {}).items()
        }
        of_rank_0 = self.rank.gather(small)[0]
        super().load_state(state or of_rank_0)

    @torch.no_grad()
    def logprobs_under(
        self,
        weights: dict[str, Tensor] | None,
        rows: list[Response],
        temperature: float | None = None,
    ) -> list[np.ndarray]:
        """Compute what Learner's does. Only rank 0 has the weights; the others know their names."""
        self.call("logprobs_under", None, rows, temperature)
        weights = weights or dict.fromkeys(name for name, _ in self.policy.named_parameters())
        own = self.rank.share(rows, group_size=1)
        # A rank without rows keeps step.
        found = super().logprobs_under(weights, own or rows[:1], temperature)[: len(own)]
        return [one for part in self.rank.gather(found) for one in part]

    def accumulate(self, rows: list[Response]) -> Metrics:
        """Add up the gradient of this rank's share. Returns the metrics of the whole batch."""
        own = super().accumulate(self.rank.share(rows, self.config.responses_per_query))
        log_ratios = [(log_ratio.cpu(), mask.cpu()) for log_ratio, mask in self.log_ratios]
        of_ranks = self.rank.gather((own, log_ratios))
        self.log_ratios = [part for _, parts in of_ranks for part in parts]
        return {name: sum(metrics[name] for metrics, _ in of_ranks) for name in own}

    def with_shares(self, parts: list[range]) -> list[tuple[range, float]]:
        """Pair each part with its share of all ranks' rows.

        A rank with fewer parts appends dummies with a share of 0, to keep step: each of K rows at
        most, as every pass's graph stays in memory.
        """
        counts, sizes = zip(*self.rank.gather((len(parts), sum(map(len, parts)))))
        dummies = [parts[-1][: self.config.responses_per_query]] * (max(counts) - len(parts))
        shares = [len(part) / sum(sizes) for part in parts] + [0.0] * len(dummies)
        return list(zip([*parts, *dummies], shares))

    def fits(self, rows: list[Response]) -> bool:
        """Return whether the step fits on all ranks. They make the same passes on equal devices.

        If one lacks memory, all do: one that failed alone would leave the others waiting.
        """
        it_fits = super().fits(rows)
        if not it_fits:
            # Or FSDP2 takes the next backward pass for the rest of this one. Gradients that are
            # left go into those of the next pass, which the trial drops.
            self.root.reset_iter_state()
        return all(self.rank.gather(it_fits))


def follow(config: Config, rank: Rank, status: StatusTable, row: str) -> None:
    """A trainer process other than the first. row: its row of the status table."""
    with status.note_failure(row):
        learner = ShardedLearner(config, print, rank)
        try_largest_batch(config, learner, print)
        status.mark_ready(row)
        rank.follow(learner, beat=lambda: status.beat(row))
