"""What users read outside of a step: unsharded until the next step, when their edits are kept."""

from collections.abc import Iterable

from lightning_zero.comm import Comm, fingerprint
from lightning_zero.partition.buffer import ShardedBuffer
from lightning_zero.partition.gradients import UnitGradients
from lightning_zero.partition.unit import Unit


class OutsideReads:
    """The buffers that were unsharded outside of a step.

    Of those that are sharded they are the same on all ranks, since they agree on each. A whole buffer may be looked at by
    one rank alone, so there it is remembered whether its user has changed it, until the ranks meet.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._buffers: dict[int, ShardedBuffer] = {}
        self._seen: dict[int, int] = {}
        """Checksums, by index, of whole units from before the user looked."""
        self._edited: dict[int, int] = {}
        """Checksums of whole units that were edited since the ranks last compared."""

    def __contains__(self, buffer: ShardedBuffer) -> bool:
        return id(buffer) in self._buffers

    def unshard(self, buffer: ShardedBuffer) -> None:
        buffer.unshard()
        self._buffers[id(buffer)] = buffer

    def look(self, unit: Unit) -> None:
        """Unshard a whole unit on this rank."""
        unit.face.unshard()
        if self._comm.world_size > 1:
            self._seen[unit.index] = unit.checksum()

    def discard(self, buffer: ShardedBuffer) -> None:
        """Reshard ``buffer``, if it was read, without keeping its edits."""
        if self._buffers.pop(id(buffer), None) is not None:
            buffer.reshard()

    def settle(self, units: list[Unit], gradients: Iterable[UnitGradients]) -> None:
        """Let edits take effect, and reshard what was read."""
        self._settle_whole(units)
        buffers, self._buffers = self._buffers, {}
        if not buffers:
            return
        self.settle_units(units, [unit for unit in units if id(unit.face) in buffers])
        for one in gradients:
            if id(one.buffer) in buffers:
                one.settle()

    def settle_units(self, units: list[Unit], read: list[Unit]) -> None:
        """The same for some of all ``units``, which were read."""
        for unit in read:
            self._buffers.pop(id(unit.face), None)
            unit.keep_outside_edits()
        if read:
            self._check_same_edits(units, read)
        for unit in read:
            unit.face.reshard()

    def _settle_whole(self, units: list[Unit]) -> None:
        seen, self._seen = self._seen, {}
        for index, before in seen.items():
            unit = units[index]
            unit.keep_edits()
            now = unit.checksum()
            if now != before:
                self._edited[index] = now
            unit.face.hide()

    def _check_same_edits(self, units: list[Unit], read: list[Unit]) -> None:
        """Each rank keeps its own shard's range of an edit: that is the user's edit only if all made the same."""
        if self._comm.world_size == 1:
            return
        sums = {unit.index: unit.checksum() for unit in read}
        most, least = self._comm.exchange("starting a step after parameters were read", [fingerprint(sums)])
        if most != least:
            self._compare(units, sums)

    @property
    def edits(self) -> int:
        """A number that is the same on ranks that have made the same edits of whole units."""
        return fingerprint(sorted(self._edited.items())) if self._edited else 0

    def compare_edits(self, units: list[Unit]) -> None:
        """Raise RuntimeError if the ranks' edits of whole units differ. All ranks call it."""
        self._compare(units, self._edited)

    def meet(self, units: list[Unit], place: str, timeout: float) -> None:
        """The same where no step follows that would find out; waits ``timeout`` seconds for the other ranks."""
        most, least = self._comm.exchange(place, [self.edits], timeout=timeout)
        if most != least:
            self.compare_edits(units)
        self.forget_edits()

    def forget_edits(self) -> None:
        """They are the same on all ranks."""
        self._edited.clear()

    def _compare(self, units: list[Unit], sums: dict[int, int]) -> None:
        everybodys = self._comm.all_gather_object(sums)
        for unit in units:
            if len({sums.get(unit.index) for sums in everybodys}) > 1:
                apart = zip(unit.names, zip(*self._comm.all_gather_object(unit.checksums())))
                names = [name for name, found in apart if len(set(found)) > 1] or unit.names
                raise RuntimeError(
                    f"Parameters were edited differently on the ranks: {_listed(names)} (this is rank {self._comm.rank})."
                    " Make the same edit on all ranks, or edit on one and broadcast."
                )


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
