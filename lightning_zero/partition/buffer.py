"""ShardedBuffer: a flat buffer that is gathered and given up, and the tensors that view it."""

from collections.abc import Callable
from enum import Enum, auto

import torch
from torch import Tensor

from lightning_zero import profiling
from lightning_zero.comm import Comm
from lightning_zero.ops import is_rounded_copy
from lightning_zero.partition import handle
from lightning_zero.partition.coded import CodedGather, CodesUnderWay
from lightning_zero.partition.layout import FlatLayout
from lightning_zero.partition.memory import BufferPool, FlatViews, allocate
from lightning_zero.partition.rest import Rested, WholePlaces, bytes_of
from lightning_zero.transfer import Transfer
from lightning_zero.work import Work


class State(Enum):
    """Life cycle of a sharded buffer."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class ShardedBuffer:
    """One flat buffer, the shard this rank owns, and the tensors that view it while it is unsharded.

    ``unshard_async`` -> ``unshard`` -> ``reshard`` go round through the three states; tensors are handles
    (partition/handle.py) unless UNSHARDED. A ``whole`` buffer keeps its bytes while resharded (stages 1 and 2 between a
    step and the arrival of the other ranks' updates), a sharded one takes a buffer from the pool and gives it back.
    """

    def __init__(
        self,
        name: str,
        layout: FlatLayout,
        tensors: list[Tensor],
        shard: Tensor,
        comm: Comm,
        pool: BufferPool,
        channel: int,
        on_access: Callable[["ShardedBuffer", Tensor], None],
        dtype: torch.dtype,
        device: torch.device,
        whole: FlatViews | None = None,
        rest: Rested | None = None,
        coded: CodedGather | None = None,
    ) -> None:
        self.name = name
        self.layout = layout
        self.tensors = tensors
        self.shard = shard
        self.rest = rest
        """Where the shard is while the tensors are sharded, if that is not here."""
        self.state = State.SHARDED
        self.buffer = whole
        self._comm = comm
        self._pool = pool
        self._channel = channel
        self._on_access = on_access
        self._whole = whole is not None
        self._coded = coded
        self.is_coded = coded is not None
        """Whether the tensors are not what the shards have, but what their codes stand for."""
        self.dtype = dtype
        self._device = device
        self._classes = [type(t) for t in tensors]
        value = handle.placeholder(tensors[0].dtype, device)
        self._resting = [value.expand(t.shape) for t in tensors]
        self._work: Work | None = None
        self.arriving: Transfer | None = None
        """The own shard's new values on their way from the host."""
        for tensor in tensors:
            handle.adopt(tensor, self)

    def __repr__(self) -> str:
        return f"ShardedBuffer({self.name}, {self.state.name})"

    @property
    def is_whole(self) -> bool:
        return self._whole

    @property
    def is_moving(self) -> bool:
        """Whether shards of other ranks are on their way."""
        return self._work is not None and not isinstance(self._work, _Here)

    def access(self, tensor: Tensor) -> None:
        """Called by a handle whose bytes are wanted."""
        self._on_access(self, tensor)

    def stride(self, tensor: Tensor) -> tuple[int, ...]:
        """The strides of one of the tensors when it is unsharded."""
        return next(slot.stride for slot, own in zip(self.layout.slots, self.tensors, strict=True) if own is tensor)

    def stage(self) -> None:
        """The tensors are wanted soon: start fetching the own shard from where it rests."""
        if self.rest is not None and self.state is State.SHARDED:
            self.rest.stage()

    def unshard_async(self) -> None:
        """Start gathering the other ranks' shards."""
        if self.state is not State.SHARDED:
            raise AssertionError(f"{self} is already unsharded or on its way")
        self._launch()
        self.state = State.GATHERING
        self._pool.ledger.changed()

    def unshard(self) -> None:
        """Make the tensors plain; waits for a gather under way, starts one if there is none."""
        if self.state is State.UNSHARDED:
            return
        if self.state is State.SHARDED:
            self.unshard_async()
        self._wait()
        self.attach()

    def attach(self) -> None:
        """Give the tensors their bytes and their class back."""
        if self.buffer is None:
            raise AssertionError(f"{self} has no bytes")
        for tensor, cls, view in zip(self.tensors, self._classes, self.buffer.views, strict=True):
            tensor.__class__ = cls
            if not self._whole or tensor.data_ptr() != view.data_ptr():
                tensor.data = view
        self.state = State.UNSHARDED
        self._pool.ledger.changed()

    def reshard(self) -> None:
        """Make the tensors handles; the bytes outside the own shard are given up (or, if whole, are out of date)."""
        if self.state is State.SHARDED:
            return
        if self.state is State.GATHERING:
            self._wait()
            self.state = State.SHARDED  # the tensors are handles, or view another buffer
            self._pool.ledger.changed()
        else:
            self.detach()
        if not self._whole and self.buffer is not None:
            self._pool.give(self.layout, self.buffer)
            self.buffer = None
        if self.rest is not None:
            self.rest.put_away()

    def detach(self) -> None:
        """Turn the tensors into handles, leaving the bytes alone."""
        for tensor, cls, resting in zip(self.tensors, self._classes, self._resting, strict=True):
            if tensor.__class__ is cls:
                if not self._whole:
                    tensor.data = resting
                tensor.__class__ = handle.sharded_class(cls)
        self.state = State.SHARDED
        self._pool.ledger.changed()

    def hide(self) -> None:
        """Make the tensors of a whole buffer handles although their bytes are here and up to date: that they are read
        between steps is then noticed."""
        self.detach()
        self._work = _Here()
        self.state = State.GATHERING

    def arrive(self) -> None:
        """Wait for a gather under way, and leave it at that."""
        if self.state is State.GATHERING:
            self._wait()
            self._work = _Here()

    def serve(self) -> None:
        """Take part in a gather that only other ranks need."""
        if self.state is State.SHARDED:
            self.unshard_async()
            self.reshard()
            return
        # Unsharded here: the other ranks still want the own shard, what they send is known already.
        if self._coded is not None:
            codes = self._coded.start(self._shard_to_send(), self._channel)
            codes.wait()
            codes.finish(None)
            return
        scratch = self._pool.take(self.layout, self.dtype)
        self._comm.all_gather(scratch.flat, self._shard_to_send(), self._channel).wait()
        self._pool.give(self.layout, scratch)

    def keep_edits(self) -> bool:
        """Write what the user changed in the unsharded tensors back to the own shard; whether anything had changed.

        Covers in-place edits, edits through views and ``.data`` (which leave no version trace), and rebound ``.data``.
        """
        if self.state is not State.UNSHARDED or self.buffer is None:
            return False
        changed = self._relink(self.buffer)
        if self._whole:
            return changed
        own = self.own_slice(self.buffer.flat)
        return write_changes(own, self.shard) or changed

    def edited(self) -> list[int]:
        """Of a coded buffer: which tensors have been changed since they were gathered, as far as the own shard shows."""
        if self.state is not State.UNSHARDED or self.buffer is None or self._coded is None:
            return []
        pairs = enumerate(zip(self.tensors, self.buffer.views, strict=True))
        found = {i for i, (tensor, view) in pairs if not tensor.is_set_to(view)}
        own, gathered = self.own_slice(self.buffer.flat), self._coded.rounded(self._shard_to_send())
        if not _same_bits(own, gathered):
            changed = (own != gathered) & ~(own.isnan() & gathered.isnan())
            local = (self.layout.local_range(i, self._comm.shard_rank).slice() for i in range(len(self.tensors)))
            found.update(i for i, part in enumerate(local) if bool(changed[part].any()))
        return sorted(found)

    def own_slice(self, flat: Tensor) -> Tensor:
        """The own shard's range of an unsharded flat buffer."""
        return flat.narrow(0, self._comm.shard_rank * self.layout.shard_numel, self.layout.shard_numel)

    def release(self, whole: WholePlaces) -> None:
        """Hand the tensors to the user for good, each with host memory of its own: on the device there may not be room for
        all of them. They must be unsharded."""
        if self.state is not State.UNSHARDED:
            raise AssertionError(f"{self} cannot be released")
        for tensor in self.tensors:
            tensor.data = whole.copy(tensor)
            handle.disown(tensor)
        if not self._whole and self.buffer is not None:
            self._pool.give(self.layout, self.buffer)
        self.buffer = None
        if self.rest is not None:
            self.rest.put_away()

    def _relink(self, buffer: FlatViews) -> bool:
        """Copy in what the user has bound to ``.data``; whether there was any."""
        rebound = {
            i: tensor.data
            for i, (tensor, view) in enumerate(zip(self.tensors, buffer.views, strict=True))
            if not tensor.is_set_to(view)
        }
        for i, value in rebound.items():
            view = buffer.views[i]
            if value.shape != view.shape or value.dtype != view.dtype:
                raise ValueError(
                    f"A tensor of {self.name} was rebound from {view.dtype} of shape {tuple(view.shape)} to {value.dtype} of"
                    f" shape {tuple(value.shape)}. A sharded tensor keeps its shape and dtype until the Trainer is done."
                )
        if rebound:
            # The user may have kept the old bytes to put them back later: they stay as they are, we move.
            self.buffer = moved = self._take()
            moved.flat.copy_(buffer.flat)
            for i, value in rebound.items():
                moved.views[i].copy_(value)
            for tensor, view in zip(self.tensors, moved.views, strict=True):
                tensor.data = view
            if self._whole:
                self.shard = self.own_slice(moved.flat)
            else:
                self._pool.give(self.layout, buffer)
        return bool(rebound)

    def _take(self) -> FlatViews:
        if self._whole:
            return allocate(self.layout, self.dtype, self._device)
        return self._pool.take(self.layout, self.dtype)

    def _launch(self) -> None:
        if self.buffer is None and self._coded is None:
            self.buffer = self._take()
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None
        if self.rest is not None:
            self.rest.bring()  # to stay while the tensors are unsharded, for edits to be compared with
        with profiling.span(profiling.GATHER, self.name):
            if self._coded is not None:
                self._work = self._coded.start(self._shard_to_send(), self._channel)
            elif self.buffer is not None:
                self._work = self._comm.all_gather(self.buffer.flat, self._shard_to_send(), self._channel)

    def _shard_to_send(self) -> Tensor:
        shard = bytes_of(self.shard)
        here = shard.dtype == self.dtype and shard.device == self._device
        return shard if here else shard.to(self.dtype).to(self._device)

    def _wait(self) -> None:
        if self._work is None:
            raise AssertionError(f"{self} has no gather under way")
        with self._comm.stats.waiting("all_gather", self.name):
            self._work.wait()
        work, self._work = self._work, None
        if isinstance(work, CodesUnderWay):
            self.buffer = self._take()  # not before: nobody needs its memory while codes are under way
            work.finish(self.buffer.flat)


class _Here:
    def wait(self) -> None:
        return None


def write_changes(values: Tensor, shard: Tensor) -> bool:
    """Copy those ``values`` into ``shard`` that differ from it (rounded to their dtype); whether there were any.

    An element of a wider shard keeps its extra bits unless its rounded value changed.
    """
    if _is_rounded(values, shard):
        return False
    rounded = shard.to(values.dtype).to(values.device)  # in this order: 16 bits travel
    if _same_bits(values, rounded):
        return False
    if shard.dtype == values.dtype:
        shard.copy_(values)
    else:
        changed = (values != rounded).to(shard.device)
        shard.copy_(torch.where(changed, values.to(shard), shard))
    return True


def _is_rounded(values: Tensor, shard: Tensor) -> bool:
    """Whether one pass over 16-bit weights and their master, without room for what it rounds to, finds them in step."""
    return (
        values.dtype in (torch.bfloat16, torch.float16) and shard.dtype == torch.float32
        and values.device.type == shard.device.type == "cpu"
        and values.is_contiguous() and shard.is_contiguous()
        and is_rounded_copy(values.view(-1), shard.view(-1))
    )  # fmt: skip


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits."""
    if a.dim() == 1 and a.is_contiguous() and b.is_contiguous() and a.nbytes % 8 == 0:
        # Eight bytes at a time, as shards allow: a third of the time of comparing floats.
        a, b = a.view(torch.int64), b.view(torch.int64)
    return torch.equal(a, b)


def in_memory_order(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The elements of ``tensor`` as a 1-D tensor in the order of the dense ``stride``; a view where it can be one."""
    if tuple(tensor.stride()) != stride:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
