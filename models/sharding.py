"""The policy on one trainer process, or sharded over several by FSDP2 (--trainer_processes).

Rank 0 is the Trainer. Each other rank has a learner of its own and makes the calls that rank 0
makes on its (follow). A rank holds 1 / N of each weight, its gradient and its moments; a layer's
weights are gathered while it is computed, so every forward pass is made by all ranks at once.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from types import GeneratorType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from config import LOAD_SECONDS
from models.device import device
from models.logprobs import PolicyLogprobs, all_counted
from models.lora import BASE, OF_ADAPTER
from models.policy import decoder_layers

POLL_SECONDS = 1.0  # between two signs of life of a rank that waits for a call


class OneProcess:
    """The trainer as one process: the policy is whole, and there is nobody to agree with."""

    rank, size = 0, 1
    connections: tuple[Connection, ...] = ()

    def shard(self, policy: torch.nn.Module, dtype: torch.dtype) -> PolicyLogprobs:
        """Bring the policy to this process's device. dtype: what is computed in."""
        return PolicyLogprobs(policy.to(device()), self.keep_step)

    def call(self, name: str, *arguments: Any) -> None:
        """Have the other ranks call this method of their learners, as rank 0 does now.

        On another rank it does nothing.
        """
        self.send((name, arguments))

    def send(self, message: Any) -> None:
        """Send something to the other ranks, on rank 0; on another do nothing."""
        for connection in self.connections if self.rank == 0 else ():
            connection.send(message)

    def gather(self, value: Any) -> list:
        """Return the value that each rank has here, on every rank."""
        return [value]

    def share(self, rows: list, group_size: int) -> list:
        """Return the rows of this rank: whole groups of so many."""
        queries, rest = divmod(len(rows) // group_size, self.size)
        first = self.rank * queries + min(self.rank, rest)
        last = first + queries + (self.rank < rest)
        return rows[first * group_size : last * group_size]

    def keep_step(self, parts: list, least: int = 1) -> list[tuple[Any, int]]:
        """Pair each part with a 1, and others with a 0 until every rank has equally many.

        A part is the rows of a pass. One with a 0 counts nothing: it answers the other ranks'
        gathering, and has the fewest rows that a pass may have: every pass's graph stays in memory.
        """
        lacking = max(self.gather(len(parts))) - len(parts)
        return all_counted(parts) + [(parts[-1][:least], 0)] * lacking

    @contextmanager
    def under(self, policy: torch.nn.Module, weights: dict[str, Tensor] | None) -> Iterator[None]:
        """Give the policy other weights until the block ends.

        weights: by name, whole, of any dtype and device, of a model without adapters; on rank 0.
        A copy of what this rank holds is kept meanwhile: then there are no gradients.
        """
        own = {name: parameter.clone() for name, parameter in policy.named_parameters()}
        try:
            for name, parameter in policy.named_parameters():
                if OF_ADAPTER in name:
                    parameter.zero_()  # it adds nothing
                else:
                    fill(parameter, weights[name.replace(BASE, "")] if self.rank == 0 else None)
            yield
        finally:
            for name, parameter in policy.named_parameters():
                parameter.copy_(own[name])

    def recover(self, policy_logprobs: PolicyLogprobs) -> None:
        """Bring the policy back to where no pass is under way, after one ran out of memory."""


def connect(size: int, timeout: float) -> list[OneProcess]:
    """Make the trainer's processes, by rank. timeout: seconds that one waits for the others."""
    if size == 1:
        return [OneProcess()]
    pipes = [torch.multiprocessing.Pipe(duplex=False) for _ in range(size - 1)]
    leader = Rank(0, size, [sender for _, sender in pipes], timeout)
    return [leader, *(Rank(i, size, [end], timeout) for i, (end, _) in enumerate(pipes, start=1))]


class Rank(OneProcess):
    """One of several trainer processes, on one machine.

    connections: of rank 0, its ends of pipes to the others; of another, its end of that pipe.
    timeout: seconds after which a rank gives up on the others.
    """

    def __init__(self, rank: int, size: int, connections: list[Connection], timeout: float):
        self.rank, self.size, self.connections = rank, size, tuple(connections)
        self.timeout = timedelta(seconds=timeout)

    def shard(self, policy: torch.nn.Module, dtype: torch.dtype) -> PolicyLogprobs:
        """Leave this rank its share of the policy, on its device.

        As under autocast in one process, layers compute in dtype, and what is outside of them,
        embeddings and head, is read in the dtype of the masters.
        """
        self.join()
        mesh = init_device_mesh(device().type, (self.size,))
        layers = decoder_layers(policy)
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        policy_logprobs = PolicyLogprobs(policy, self.keep_step)
        # Not left gathered: the weights may change before the next forward pass.
        fully_shard(policy_logprobs, mesh=mesh, reshard_after_forward=True)
        for module in (*layers, policy_logprobs):
            module.set_gradient_divide_factor(1.0)  # the sum over ranks, not the mean
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        return policy_logprobs

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

    def follow(self, learner: object, beat: Callable[[], None]) -> None:
        """Call what rank 0 calls, until it ends. beat: gives a sign of life."""
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
                for _ in result:
                    pass

    def gather(self, value: Any) -> list:
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def recover(self, policy_logprobs: PolicyLogprobs) -> None:
        # Or the next backward pass would be taken for the rest of this one. What that pass has left
        # of gradients goes into those of the next, which the trial drops.
        policy_logprobs.reset_iter_state()


def full(tensor: Tensor) -> Tensor:
    """Return a parameter, its gradient or moment whole, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fill(parameter: Tensor, value: Tensor | None) -> None:
    """Copy a whole tensor, which only rank 0 needs to have, into a parameter or moment."""
    if isinstance(parameter, DTensor):
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if value is not None:
            whole.copy_(value)
        value = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def state_of(
    trained: dict[str, torch.nn.Parameter], optimizer: torch.optim.AdamW
) -> Iterator[tuple[str, Tensor]]:
    """Yield what is trained and its moments, whole, by name, one at a time."""
    for name, parameter in trained.items():
        yield f"policy.{name}", full(parameter.detach())
        for key, value in optimizer.state[parameter].items():
            yield f"optimizer.{name}.{key}", full(value)


@torch.no_grad()
def load_state_of(
    trained: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.AdamW,
    ranks: OneProcess,
    state: dict[str, Tensor],
) -> None:
    """Take over what state_of() gave, of any number of ranks. Only rank 0 needs it."""
    numbers = ranks.gather({name: value for name, value in state.items() if value.ndim == 0})[0]
    for name, parameter in trained.items():
        fill(parameter, state[f"policy.{name}"] if ranks.rank == 0 else None)
        prefix = f"optimizer.{name}"
        if f"{prefix}.step" not in numbers:  # there are no moments before the first step
            continue
        moments = {"step": numbers[f"{prefix}.step"].to(parameter.device)}
        for key in ("exp_avg", "exp_avg_sq"):
            moments[key] = torch.empty_like(parameter)
            fill(moments[key], state[f"{prefix}.{key}"] if ranks.rank == 0 else None)
        optimizer.state[parameter] = moments
