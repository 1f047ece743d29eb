"""SharedWeights: the policy's weights on their way from the trainer to the searchers, through shared memory.

A few slots, each one whole copy. The writer fills a slot that is neither the newest nor being read and then makes it the newest; a
reader pins the newest slot while it reads. So a reader sees one version whole, the writer never waits, and no lock exists
that a killed process could leave locked. The reference policy, where it changes, has a slot of its own, which later versions never overwrite.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SLOTS = 3  # the newest, one that a slow reader still pins, one to write into
SHARED_MEMORY = "/dev/shm"  # where torch puts shared tensors on Linux
WRITING = -1  # in the place of a version


class SharedWeights:
    """Create it in the parent; children get it as a process argument.

    shapes: of every published tensor, by name, in the order they are laid out.
    dtype: what the searchers compute in; published tensors are cast to it.
    readers: number of readers; reader i uses pin i and nobody else does.
    reference: also make the slot of the reference policy, in fp32: it is a policy of the trainer's, not rounded to what searchers compute in.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        readers: int,
        reference: bool = False,
    ):
        self.shapes = shapes
        self.slots = [
            torch.empty(elements(shapes), dtype=dtype).share_memory_() for _ in range(SLOTS)
        ]
        # Plain int64 words, each with one writer. On one machine an aligned word is read whole or not at all, so none needs a lock.
        self.versions = torch.full((SLOTS,), -1, dtype=torch.int64).share_memory_()
        self.pins = torch.full(
            (readers,), -1, dtype=torch.int64
        ).share_memory_()  # the slot that reader i reads, or -1
        self.newest = torch.tensor(
            [-1, -1]
        ).share_memory_()  # the newest slot; the newest version that asks for an evaluation
        self.reference = torch.empty(elements(shapes) if reference else 0).share_memory_()
        self.reference_pins = torch.zeros(
            readers, dtype=torch.int64
        ).share_memory_()  # 1 while reader i reads the reference
        self.reference_words = torch.zeros(
            1, dtype=torch.int64
        ).share_memory_()  # its version; WRITING while it is being written

    @staticmethod
    def required_bytes(
        shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, reference: bool = False
    ) -> int:
        return (SLOTS * dtype.itemsize + reference * torch.float32.itemsize) * elements(shapes)

    @torch.no_grad()
    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], evaluate: bool = False
    ) -> bool:
        """Makes `tensors` the newest version, or returns False, at once, when readers pin every slot that is not the newest.

        version: the trainer step of these weights. evaluate: the searcher that serves evaluations should evaluate them.
        """
        newest = int(self.newest[0])
        pinned = self.pins.tolist()
        free = [slot for slot in range(SLOTS) if slot != newest and slot not in pinned]
        if not free:
            return False
        self._fill(self.slots[free[0]], version, tensors)
        self.versions[free[0]] = version
        if evaluate:
            self.newest[1] = version
        self.newest[0] = free[0]
        return True

    @property
    def version(self) -> int:
        """The newest version, -1 before the first publish."""
        newest = int(self.newest[0])
        return int(self.versions[newest]) if newest >= 0 else -1

    @property
    def evaluation_version(self) -> int:
        """The newest version that asks for an evaluation, -1 if none did."""
        return int(self.newest[1])

    @contextmanager
    def read(self, reader: int, keep: bool = False) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The newest version and its tensors by name: views of shared memory, valid and unchanged until the block ends, or, to keep them, until
        unpin(reader) or the next read."""
        while True:
            slot = int(self.newest[0])
            if slot < 0:
                raise RuntimeError(
                    "no weights have been published yet: check `version` before reading"
                )
            self.pins[reader] = slot
            # Still the newest after the pin was set: the writer, which never takes the newest slot, sees the pin before it next looks
            # for a free one. Otherwise it may already be writing here: pin again. It takes a publish in between, so nobody starves.
            if slot == int(self.newest[0]):
                break
        try:
            yield int(self.versions[slot]), self._views(self.slots[slot])
        finally:
            if not keep:
                self.unpin(reader)

    @torch.no_grad()
    def publish_reference(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> bool:
        """Makes `tensors`, the weights of that version, the reference policy, or returns False, at once, while a reader reads the old one."""
        previous = self.reference_version
        # First the sign, then the look at the pins; a reader does it the other way round. So one of the two sees the other.
        self.reference_words[0] = WRITING
        if self.reference_pins.any():
            self.reference_words[0] = previous
            return False
        self._fill(self.reference, version, tensors)
        self.reference_words[0] = version
        return True

    @property
    def reference_version(self) -> int:
        """The version that is the reference policy: 0, the policy that the run began with, until publish_reference; WRITING in the midst of it."""
        return int(self.reference_words[0])

    @contextmanager
    def read_reference(self, reader: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """As read(), for a published reference policy; but while it is being written (version WRITING) its tensors are of no use."""
        self.reference_pins[reader] = 1
        try:
            yield self.reference_version, self.reference_tensors()
        finally:
            self.unpin(reader)

    def reference_tensors(self) -> dict[str, Tensor]:
        """For the writer, who needs no pin."""
        return self._views(self.reference)

    def held(self) -> dict[int, dict[str, Tensor]]:
        """For the writer alone: every version that is still whole in a slot, until it publishes again."""
        return {
            version: self._views(self.slots[slot])
            for slot, version in enumerate(self.versions.tolist())
            if version >= 0
        }

    def unpin(self, reader: int) -> None:
        """Also for whoever finds that reader dead: what it was reading is free again."""
        self.pins[reader] = -1
        self.reference_pins[reader] = 0

    def _fill(self, memory: Tensor, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        target = self._views(memory)
        for name, tensor in tensors:
            if tensor.shape != target[name].shape:  # copy_ would broadcast
                raise ValueError(
                    f"publish(version={version}): {name} has shape {tuple(tensor.shape)}, not {tuple(target[name].shape)}"
                )
            target.pop(name).copy_(tensor)
        if target:
            raise KeyError(
                f"publish(version={version}) lacks {len(target)} of {len(self.shapes)} tensors, first {next(iter(target))!r}"
            )

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for name, shape in self.shapes.items():
            size = torch.Size(shape).numel()
            views[name] = memory[start : start + size].view(shape)
            start += size
        return views


def elements(shapes: dict[str, tuple[int, ...]]) -> int:
    """Numbers in all tensors together."""
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def check_shared_memory(needed: int) -> None:
    """Raises MemoryError with what to do: without this check a process dies of SIGBUS at its first touch of the missing page."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        raise MemoryError(
            f"shared memory is too small: the copies of the weights need {needed / 2**20:.0f} MiB, {SHARED_MEMORY} has"
            f" {free / 2**20:.0f} MiB free; enlarge it (mount -o remount,size=… {SHARED_MEMORY}, docker run --shm-size=…)"
        )
