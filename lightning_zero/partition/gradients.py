"""The gradients of one unit: collected while backward runs, reduced to their owners, shown to the user as handles."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_zero import profiling
from lightning_zero.comm import Comm
from lightning_zero.config import EngineConfig
from lightning_zero.partition import handle
from lightning_zero.partition.buffer import ShardedBuffer, State, in_memory_order, write_changes
from lightning_zero.partition.memory import BufferPool, FlatViews, Ledger, allocate
from lightning_zero.partition.rest import Places, Rested, bytes_of
from lightning_zero.partition.unit import Unit
from lightning_zero.transfer import STAGING, Link, Transfer
from lightning_zero.work import Work


@dataclass(frozen=True)
class GradientDtypes:
    """dtypes of one unit's gradients on their way."""

    local: torch.dtype
    """Of the local sum over the micro-batches that are not reduced one by one."""
    wire: torch.dtype
    """Of what is sent."""
    arrived: torch.dtype
    """Of the reduced sum as it comes out of the reduction."""
    reduced: torch.dtype
    """Of the reduced sum that this rank keeps."""


def gradient_dtypes(unit: Unit, config: EngineConfig, world_size: int, crosses: bool) -> GradientDtypes:
    """The contract for one unit; ``crosses``: its gradients are kept on the host."""
    wire = config.reduce_dtype or unit.dtype
    wide = unit.main.dtype if config.wide_sums or unit.dtype.itemsize >= 4 else wire
    # What comes to the host has crossed to it as it was sent, so that 16 bits travel.
    arrived = wire if crosses and unit.dtype.itemsize < 4 else wide
    if world_size == 1:
        wire = arrived  # nothing is sent
    # Whole gradients also hold the sum over micro-batches that are not reduced one by one.
    local = wide if config.residence.whole_gradients else unit.dtype
    return GradientDtypes(local, wire, arrived, reduced=wide)


class UnitGradients:
    """The gradients of one unit.

    ``flat`` holds local, unreduced gradients; ``shard`` the reduced sum that this rank owns, of shape
    ``(shard_numel,)``. With ``places`` it rests there from its reduction on: the sum with that of the next micro-batch, an
    edit, a factor to clip by read and write it again. Sets of parameters are bit masks over the unit's slots.
    """

    def __init__(
        self, unit: Unit, comm: Comm, pool: BufferPool, ledger: Ledger, whole: bool,
        on_access: Callable[[ShardedBuffer, Tensor], None], link: Link | None, places: Places | None,
        dtypes: GradientDtypes,
    ) -> None:  # fmt: skip
        self.unit = unit
        self.layout = unit.layout
        self.hooked = 0
        """Parameters that have been trainable: the arrival of their gradient is noticed."""
        self.expected = 0
        """Parameters whose gradient is to come in this backward."""
        self.arrived = 0
        """Parameters whose gradient has come; it may come again (a parameter inside and outside a reentrant recompute)."""
        self.filled = 0
        """Parameters with something in ``flat``."""
        self.accumulated = self.before = 0
        """Parameters with a reduced sum, now and when this backward began: what is reduced while it runs counts as a sum of
        all of the unit's."""
        self.used = 0
        """Parameters that this rank has had a gradient for since the last reduction."""
        self.launched = False
        self.work: Work | None = None
        self.dtypes = dtypes
        self._comm, self._pool, self._ledger = comm, pool, ledger
        self._whole = whole
        self._flat: FlatViews | None = None
        self._home: FlatViews | None = None
        self._sent: FlatViews | None = None
        self._received = 0
        """Bytes that the reduction under way receives into."""
        self._previous: Tensor | None = None
        self._shown: dict[int, Tensor] = {}
        """Local gradients in the parameters' dtype, where the local sum is wider."""
        self._link = link
        self._landing_kind = STAGING if whole or places is not None else "gradients"
        """Where gradients rest whole on the device, or in files, what has come to the host is on its way."""
        self._landing: tuple[Tensor, Transfer] | None = None
        """Host memory that the reduced sum is on its way to."""
        device = unit.buffer.shard.device
        value = handle.placeholder(unit.dtype, device)
        self.handles = [torch.Tensor._make_subclass(torch.Tensor, value.expand(p.shape)) for p in unit.tensors]
        home = device if link is None else unit.main.device
        self.shard = torch.empty(0, dtype=self.dtypes.reduced, device=home)
        self._rest: Rested | None = None
        self._parts: dict[int, Rested] = {}
        """By parameter, what rests of it."""
        self._leaving: Tensor | None = None
        """Memory whose bytes are on their way to the place."""
        if places is not None:
            unit.gradient_place = places.place("gradients", self.layout.shard_numel, self.dtypes.reduced)
            self._rest = Rested(unit.gradient_place, home)
        if whole:
            self._flat = self._home = allocate(self.layout, dtypes.local, device)
            ledger.add("gradients", self._home.nbytes)
        # A channel of its own: a gradient may be read while the unit's parameters are under way.
        self.buffer = ShardedBuffer(
            f"the gradients of {unit.name}", self.layout, list(self.handles), self.shard, comm, pool,
            2 * unit.index + 1, on_access, unit.face.dtype, device,
        )  # fmt: skip
        self.buffer.state = State.UNSHARDED
        self.buffer.detach()

    @property
    def itemsize(self) -> int:
        """Bytes per element of the resident gradients."""
        return (self.dtypes.local if self._whole else self.dtypes.reduced).itemsize

    @property
    def is_moving(self) -> bool:
        """Whether the gradients are being reduced."""
        return self.work is not None

    @property
    def is_complete(self) -> bool:
        return self.expected != 0 and not self.expected & ~self.arrived

    def begin_backward(self) -> None:
        """Look at what the user left in ``p.grad``: a cleared gradient is what clears the accumulated sum."""
        self.arrived = self.expected = 0
        self.launched = False
        if self._home is not None:
            self._flat = self._home  # not before: late gradients must not overwrite what has been reduced into it
        kept = 0
        for i, parameter in enumerate(self.unit.tensors):
            bit = 1 << i
            with torch._C.DisableTorchFunctionSubclass():
                if parameter.requires_grad:
                    self.expected |= bit
                grad = parameter.grad
                if grad is self.handles[i]:
                    kept |= bit
                    parameter.grad = None
                elif grad is not None and grad is self._shown.get(i):
                    write_changes(grad, self._flat.views[i])  # type: ignore[union-attr]
                    parameter.grad = None
                elif self._flat is None or grad is not self._flat.views[i]:
                    self.filled &= ~bit
        self._forget_shown()
        self.settle()
        self.used = self.filled
        self.accumulated &= kept
        self.before = self.accumulated
        if not self.accumulated:
            self._set_shard(None)
        elif self._whole and self._link is None:
            # The own range of the flat buffer is about to be overwritten with local gradients.
            self._keep_previous(self.shard.clone())

    def add(self, index: int, parameter: nn.Parameter) -> None:
        """A gradient has arrived in ``parameter.grad``: move it to its place in the flat buffer."""
        bit = 1 << index
        if self._flat is None:
            self._flat = self._pool.take(self.layout, self.dtypes.local)
        with torch._C.DisableTorchFunctionSubclass():
            grad, view = parameter.grad, self._flat.views[index]
            if grad is not None and grad is not view:
                if grad.layout is not torch.strided:
                    grad = grad.to_dense()
                if self.filled & bit:
                    view.add_(grad)
                else:
                    view.copy_(grad)
                parameter.grad = None
        self.filled |= bit
        self.used |= bit
        self.arrived |= bit

    def show_local(self) -> None:
        """After a backward without reduction: ``p.grad`` is the local sum, as it is under DDP's ``no_sync``."""
        for i, parameter in enumerate(self.unit.tensors):
            if self.filled >> i & 1 and self._flat is not None:
                view = self._flat.views[i]
                if view.dtype != self.unit.dtype:
                    # Autograd insists on gradients of the parameter's own dtype.
                    view = self._shown[i] = view.to(self.unit.dtype)
                    self._ledger.add("gradients", view.nbytes)
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = view

    def launch(self, scale: float) -> None:
        """Start reducing the flat buffer; parameters without a gradient here contribute zeros."""
        flat = self._flat if self._flat is not None else self._pool.take(self.layout, self.dtypes.local)
        for i, (view, parameter) in enumerate(zip(flat.views, self.unit.tensors, strict=True)):
            if not self.filled >> i & 1:
                view.zero_()
            with torch._C.DisableTorchFunctionSubclass():
                if parameter.grad is view:
                    parameter.grad = None  # what comes late must not be added to what is being sent
        self._flat = None
        if self.dtypes.wire != self.dtypes.local:
            narrow = self._pool.take(self.layout, self.dtypes.wire)
            narrow.flat.copy_(flat.flat)
            self._give_back(flat)
            flat = narrow
        self._received = self._comm.received_bytes(flat.flat)
        self._ledger.add("buffers", self._received)
        with profiling.span(profiling.REDUCE, self.unit.name):
            self.work = self._comm.reduce_scatter(flat.flat, scale, self.dtypes.arrived, self.unit.index)
        self._sent = flat
        self.filled = 0
        self.launched = True

    def finish(self) -> None:
        """Wait for the reduction; its result is merged at once, or starts on its way to the host."""
        if self.work is None or self._sent is None:
            return
        with self._comm.stats.waiting("reduce_scatter", self.unit.name):
            reduced = self.work.wait()
        self._end_reduction()
        self._give_back(self._sent)
        self._sent = None
        if self._link is None:
            self._merge(reduced)
        else:
            kind = self._landing_kind if reduced.dtype == self.dtypes.reduced else STAGING
            target = self._link.take(reduced.numel(), reduced.dtype, kind)
            self._landing = (target, self._link.download(reduced, target))

    def land(self) -> None:
        """Wait for the reduced sum to have come to the host."""
        if self._landing is None or self._link is None:
            return
        (reduced, transfer), self._landing = self._landing, None
        transfer.synchronize()
        if reduced.dtype == self.dtypes.reduced:
            self._merge(reduced)
        else:
            wide = self._link.take(reduced.numel(), self.dtypes.reduced, self._landing_kind).copy_(reduced)
            self._link.give(reduced)
            self._merge(wide)

    def _merge(self, reduced: Tensor) -> None:
        """Add the reduced sum to that of earlier micro-batches."""
        if self.accumulated:
            previous = bytes_of(self.shard) if self._previous is None else self._previous
            for i in range(len(self.unit.tensors)):
                if not self.accumulated >> i & 1:
                    previous[self.unit.in_shard(i).slice()].zero_()
            fresh, reduced = reduced, previous.add_(reduced)
            if self._link is not None:
                self._link.give(fresh)
        if self._home is not None and self._link is None and reduced.dtype == self._home.flat.dtype:
            reduced = self.buffer.own_slice(self._home.flat).copy_(reduced)
        self._set_shard(reduced)
        self._keep_previous(None)
        # Late gradients of the same backward are added to what has just come.
        self.accumulated = (1 << len(self.unit.tensors)) - 1

    def show(self, used: int) -> None:
        """Give the parameters in ``used`` (a gradient on some rank) or with an earlier sum their gradient handle."""
        self.accumulated = used
        for i, parameter in enumerate(self.unit.tensors):
            if used >> i & 1:
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = self.handles[i]

    def settle(self) -> None:
        """Keep the user's edits of unsharded gradients and turn them back into handles."""
        if self.buffer.state is not State.SHARDED:
            self.buffer.keep_edits()
            self.buffer.reshard()

    def local(self, index: int) -> Tensor | None:
        """The owned part, 1-D, of the gradient that the user left in ``p.grad``, or None if there is none."""
        with torch._C.DisableTorchFunctionSubclass():
            grad = self.unit.tensors[index].grad
        if grad is None:
            return None
        if grad is self.handles[index]:
            return self._local_shard(index)
        # The user's own tensor: take the owned elements in memory order.
        flat = in_memory_order(grad.to(self.dtypes.reduced), self.layout.slots[index].stride)
        return flat[self.unit.in_tensor(index).slice()]

    def _local_shard(self, index: int) -> Tensor:
        local = self.unit.in_shard(index)
        if self._rest is None:
            return self.shard[local.slice()]
        if index not in self._parts:
            self._parts[index] = Rested(self._rest.place.part(local.start, local.stop), self.shard.device)
        return self._parts[index].tensor

    def arrive(self) -> None:
        """Wait until the reduced sum is where it rests. Raises OSError if it could not be written."""
        if self._rest is not None:
            self._rest.arrive()
        leaving, self._leaving = self._leaving, None
        if leaving is not None and self._link is not None:
            self._link.give(leaving)

    def close(self) -> None:
        """Forget the gradients and let go of the handles."""
        for i, parameter in enumerate(self.unit.tensors):
            with torch._C.DisableTorchFunctionSubclass():
                grad = parameter.grad
                if grad is self.handles[i] or (self._flat is not None and grad is self._flat.views[i]):
                    parameter.grad = None
        for tensor in self.handles:
            handle.disown(tensor)
        self._set_shard(None)
        self._keep_previous(None)
        self._forget_shown()
        if self._home is not None:
            self._ledger.add("gradients", -self._home.nbytes)
        self._end_reduction()
        self._flat = self._home = self._sent = self._landing = None

    def _end_reduction(self) -> None:
        self._ledger.add("buffers", -self._received)
        self._received, self.work = 0, None

    def _give_back(self, flat: FlatViews) -> None:
        if flat is not self._home:
            self._pool.give(self.layout, flat)

    def _keep_previous(self, previous: Tensor | None) -> None:
        kept = [0 if tensor is None else tensor.nbytes for tensor in (previous, self._previous)]
        self._previous = previous
        self._ledger.add("gradients", kept[0] - kept[1])

    def _forget_shown(self) -> None:
        self._ledger.add("gradients", -sum(tensor.nbytes for tensor in self._shown.values()))
        self._shown.clear()

    def _set_shard(self, shard: Tensor | None) -> None:
        if shard is None:
            shard = torch.empty(0, dtype=self.dtypes.reduced, device=self.shard.device)
        elif self._rest is not None:
            self.arrive()
            self._rest.replace(shard)
            shard, self._leaving = self._rest.tensor, shard
        if not self._whole and (self._link is None or self._rest is not None):
            self._ledger.add("gradients", (shard.numel() - self.shard.numel()) * shard.element_size())
        if self._link is not None and self._rest is None and self.shard is not shard and self.shard.numel():
            self._link.give(self.shard)
        self.shard = self.buffer.shard = shard
        self.buffer.rest = self._rest if shard.numel() else None


def is_unfrozen(unit: Unit, gradients: UnitGradients | None) -> bool:
    """Whether parameters are trained whose gradients nobody waits for yet."""
    hooked = 0 if gradients is None else gradients.hooked
    return any(p.requires_grad and not hooked >> i & 1 for i, p in enumerate(unit.tensors))
