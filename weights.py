"""SharedWeights: the policy's weights on their way from the trainer to the searchers.

They go through shared memory, in a few slots, each one whole copy. The writer fills a slot that is
neither the newest nor being read and then makes it the newest; a reader pins the newest slot while
it reads. So a reader sees one version whole, the writer never waits, and no lock exists that a
killed process could leave locked.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]  # of tensors, by name
SLOTS = 3  # the newest, one that a slow reader still pins, one to write into
SHARED_MEMORY = "/dev/shm"  # where torch puts shared tensors on Linux
_LOCAL_LOCK = threading.Lock()  # of this process alone


def full_fence() -> None:
    """Make this process's stores so far visible to others before its next loads.

    Reader and writer each store a word and then load the other's. Without a full fence between, a
    processor may load first (x86-64 too: the store waits in its store buffer), and then neither
    sees the other. To take a lock is an atomic read-modify-write, which on x86-64 is a full fence.
    On ARM it is none: that is no platform of ours until it was tested there.
    """
    with _LOCAL_LOCK:
        pass


class SharedWeights:
    """Weights in shared memory, with one writer, the trainer, and several readers, the searchers.

    Made in the parent, and passed to each child as a process argument.

    shapes: of every published tensor, in the order they are laid out. dtype: what the searchers
    compute in; published tensors are cast to it. readers: their number; reader i alone uses pin i.
    slots: where there is one, it is written in place, by a writer who knows that no reader comes
    meanwhile (extras/lockstep.py).
    """

    # The reference policy, where it is reset: extras/lockstep.py.
    reference: "SharedWeights | None" = None

    def __init__(self, shapes: Shapes, dtype: torch.dtype, readers: int, slots: int = SLOTS):
        self.shapes = shapes
        size = num_elements(shapes)
        self.slots = [torch.empty(size, dtype=dtype).share_memory_() for _ in range(slots)]
        # Words with one writer each. An aligned word is read whole or not at all.
        self.versions = torch.full((slots,), -1, dtype=torch.int64).share_memory_()
        # The slot that reader i reads, or -1.
        self.pins = torch.full((readers,), -1, dtype=torch.int64).share_memory_()
        self.newest_slot = torch.tensor([-1]).share_memory_()
        self.newest_to_evaluate = torch.tensor([-1]).share_memory_()  # a version

    @property
    def memories(self) -> list[Tensor]:
        """All shared memory of the weights."""
        return self.slots + (self.reference.memories if self.reference else [])

    @torch.no_grad()
    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], evaluate: bool = False
    ) -> bool:
        """Make `tensors` the newest version.

        Returns False, at once, when readers pin every slot that may be written. version: the
        trainer step of these weights. evaluate: a searcher is asked to evaluate them. Raises
        KeyError and ValueError for tensors that are not as announced.
        """
        newest = int(self.newest_slot)
        full_fence()  # the store of `newest_slot` before this load of the pins
        pinned = self.pins.tolist()
        spared = {newest, *pinned} if len(self.slots) > 1 else {*pinned}
        free = [slot for slot in range(len(self.slots)) if slot not in spared]
        if not free:
            return False
        self._fill(self.slots[free[0]], version, tensors)
        self.versions[free[0]] = version
        if evaluate:
            self.newest_to_evaluate[0] = version
        self.newest_slot[0] = free[0]
        return True

    @property
    def version(self) -> int:
        """The newest version, -1 before the first publish."""
        newest = int(self.newest_slot)
        return int(self.versions[newest]) if newest >= 0 else -1

    @property
    def evaluation_version(self) -> int:
        """The newest version that asks for an evaluation, -1 if none did."""
        return int(self.newest_to_evaluate)

    @contextmanager
    def read(self, reader: int, keep: bool = False) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Read the newest version: its number, and its tensors by name.

        The tensors are views of shared memory, valid and unchanged until the block ends; with
        `keep` until unpin(reader) or the next read. Raises RuntimeError before the first publish.
        """
        while True:
            slot = int(self.newest_slot)
            if slot < 0:
                raise RuntimeError("no weights have been published yet: check `version` first")
            self.pins[reader] = slot
            full_fence()  # the store of the pin before the second look at `newest_slot`
            # If it is the newest still, the writer, which never takes the newest slot, sees the pin
            # before it next looks for a free one. Otherwise the writer may be filling this slot:
            # pin again. It takes a publish in between, so nobody starves.
            if slot == int(self.newest_slot):
                break
        try:
            yield int(self.versions[slot]), self._views(self.slots[slot])
        finally:
            if not keep:
                self.unpin(reader)

    def held(self) -> dict[int, dict[str, Tensor]]:
        """Every version that is still whole in a slot; for the writer, until it publishes again."""
        slots = zip(self.versions.tolist(), self.slots)
        return {version: self._views(memory) for version, memory in slots if version >= 0}

    def unpin(self, reader: int) -> None:
        """Free what the reader was reading: at its own end of a read, or when it was found dead."""
        self.pins[reader] = -1
        if self.reference:
            self.reference.unpin(reader)

    def _fill(self, memory: Tensor, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        target, what = self._views(memory), f"publish(version={version})"
        for name, tensor in tensors:
            shape = tuple(target[name].shape)
            if tensor.shape != shape:  # copy_ would broadcast
                raise ValueError(f"{what}: {name} has shape {tuple(tensor.shape)}, not {shape}")
            # Cast first: on its way from a GPU copy_ would do it here, on a CPU.
            target.pop(name).copy_(tensor.to(memory.dtype))
        if target:
            lacking = f"{len(target)} of {len(self.shapes)} tensors, first {next(iter(target))!r}"
            raise KeyError(f"{what} lacks {lacking}")

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        parts = memory.split([torch.Size(shape).numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts)}


def num_elements(shapes: Shapes) -> int:
    """Numbers in all tensors together."""
    return sum(torch.Size(shape).numel() for shape in shapes.values())
