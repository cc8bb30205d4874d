"""What users read outside of a step: unsharded until the next step, when their edits are kept."""

from collections.abc import Mapping, Sequence

from lightning_zero.comm import Comm, fingerprint
from lightning_zero.partition.buffer import ShardedBuffer
from lightning_zero.partition.gradients import UnitGradients
from lightning_zero.partition.unit import Unit


class OutsideReads:
    """The buffers that were unsharded outside of a step.

    Of those that are sharded they are the same on all ranks, since they agree on each. A whole buffer may be looked at by
    one rank alone, so there it is remembered whether its user has changed it, until the ranks meet.
    """

    def __init__(
        self, units: Sequence[Unit], gradients: Mapping[int, UnitGradients], comm: Comm, read_timeout: float
    ) -> None:
        self._units = units
        self._gradients = gradients
        self._comm = comm
        self._read_timeout = read_timeout
        self._buffers: dict[int, ShardedBuffer] = {}
        self._seen: dict[int, int] = {}
        """Checksums, by index, of whole units from before the user looked."""
        self._edited: dict[int, int] = {}
        """Checksums of whole units that were edited since the ranks last compared."""

    def __contains__(self, buffer: ShardedBuffer) -> bool:
        return id(buffer) in self._buffers

    def read(self, unit: Unit, is_gradient: bool, what: str) -> None:
        """Unshard what users see of a sharded unit, or its gradients, and take part in what other ranks read now.

        Raises RuntimeError on every rank that asked if another does not ask within the time limit.
        """
        wish = 2 * unit.index + is_gradient
        most, least = self._comm.exchange("reading outside of a step", [wish], what, self._read_timeout)
        wishes = [wish] if most == least else self._comm.all_gather_object(wish)
        for one in sorted(set(wishes)):  # in one order on every rank
            buffer = self._gradients[one // 2].buffer if one % 2 else self._units[one // 2].face
            if one == wish:
                buffer.unshard()
                self._buffers[id(buffer)] = buffer
            else:
                buffer.serve()

    def look(self, unit: Unit) -> None:
        """Unshard a whole unit on this rank."""
        unit.face.unshard()
        if self._comm.world_size > 1:
            self._seen[unit.index] = unit.checksum()

    def discard(self, buffer: ShardedBuffer) -> None:
        """Reshard ``buffer``, if it was read, without keeping its edits."""
        if self._buffers.pop(id(buffer), None) is not None:
            buffer.reshard()

    def settle(self) -> None:
        """Let edits take effect, and reshard what was read."""
        self._settle_whole()
        buffers, self._buffers = self._buffers, {}
        if not buffers:
            return
        self.settle_units([unit for unit in self._units if id(unit.face) in buffers])
        for one in self._gradients.values():
            if id(one.buffer) in buffers:
                one.settle()

    def settle_units(self, read: list[Unit]) -> None:
        """The same for some of the units, which were read."""
        for unit in read:
            self._buffers.pop(id(unit.face), None)
            unit.keep_outside_edits()
        if read:
            self._check_same_edits(read)
        for unit in read:
            unit.face.reshard()

    def _settle_whole(self) -> None:
        seen, self._seen = self._seen, {}
        for index, before in seen.items():
            unit = self._units[index]
            unit.keep_edits()
            now = unit.checksum()
            if now != before:
                self._edited[index] = now
            unit.face.hide()

    def _check_same_edits(self, read: list[Unit]) -> None:
        """Each rank keeps its own shard's range of an edit: that is the user's edit only if all made the same."""
        if self._comm.world_size == 1:
            return
        sums = {unit.index: unit.checksum() for unit in read}
        most, least = self._comm.exchange("starting a step after parameters were read", [fingerprint(sums)])
        if most != least:
            self._compare(sums)

    @property
    def edits(self) -> int:
        """A number that is the same on ranks that have made the same edits of whole units."""
        return fingerprint(sorted(self._edited.items())) if self._edited else 0

    def compare_edits(self) -> None:
        """Raise RuntimeError if the ranks' edits of whole units differ. All ranks call it."""
        self._compare(self._edited)

    def meet(self, place: str) -> None:
        """The same where no step follows that would find out; waits ``read_timeout`` for the other ranks."""
        most, least = self._comm.exchange(place, [self.edits], timeout=self._read_timeout)
        if most != least:
            self.compare_edits()
        self.forget_edits()

    def forget_edits(self) -> None:
        """They are the same on all ranks."""
        self._edited.clear()

    def _compare(self, sums: dict[int, int]) -> None:
        everybodys = self._comm.all_gather_object(sums)
        for unit in self._units:
            if len({sums.get(unit.index) for sums in everybodys}) > 1:
                apart = zip(unit.names, zip(*self._comm.all_gather_object(unit.checksums())))
                names = [name for name, found in apart if len(set(found)) > 1] or unit.names
                raise RuntimeError(
                    f"Parameters were edited differently on the ranks: {_listed(names)} (this is rank {self._comm.rank})."
                    " Make the same edit on all ranks, or edit on one and broadcast."
                )


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
