"""What users read outside of a step: unsharded until the next step, when their edits are kept."""

from collections.abc import Iterable

import torch

from lightning_zero.comm import Comm, fingerprint
from lightning_zero.partition.gradients import UnitGradients
from lightning_zero.partition.unit import ShardedBuffer, Unit


class OutsideReads:
    """The buffers that were unsharded outside of a step; the same on all ranks, since they agree on each."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._buffers: dict[int, ShardedBuffer] = {}

    def __contains__(self, buffer: ShardedBuffer) -> bool:
        return id(buffer) in self._buffers

    def unshard(self, buffer: ShardedBuffer) -> None:
        buffer.unshard()
        self._buffers[id(buffer)] = buffer

    def discard(self, buffer: ShardedBuffer) -> None:
        """Reshard ``buffer``, if it was read, without keeping its edits."""
        if self._buffers.pop(id(buffer), None) is not None:
            buffer.reshard()

    def settle(self, units: list[Unit], gradients: Iterable[UnitGradients]) -> None:
        """Let edits take effect, and reshard what was read."""
        buffers, self._buffers = self._buffers, {}
        if not buffers:
            return
        read = [unit for unit in units if id(unit.face) in buffers]
        for unit in read:
            unit.keep_outside_edits()
        self._check_same_edits(units, read)
        for unit in read:
            unit.face.reshard()
        for one in gradients:
            if id(one.buffer) in buffers:
                one.settle()

    def _check_same_edits(self, units: list[Unit], read: list[Unit]) -> None:
        """Each rank keeps its own shard's range of an edit: that is the user's edit only if all made the same."""
        if self._comm.world_size == 1:
            return
        sums = {unit.index: unit.checksum() for unit in read}
        most, least = self._comm.exchange("starting a step after parameters were read", [fingerprint(sums)])
        if most == least:
            return
        nothing = torch.iinfo(torch.int64).min
        high = [sums.get(unit.index, nothing) for unit in units]
        low = [-sums[unit.index] if unit.index in sums else nothing for unit in units]
        header = self._comm.all_reduce(torch.tensor([high, low], dtype=torch.int64), "max")
        for unit, largest, smallest in zip(units, *header.tolist(), strict=True):
            if largest not in (nothing, -smallest):
                raise RuntimeError(
                    f"The parameters of {unit.name!r} ({', '.join(unit.names[:3])}, ...) were edited differently on the"
                    f" ranks (this is rank {self._comm.rank}). Make the same edit on all ranks, or edit on one and"
                    " broadcast."
                )
