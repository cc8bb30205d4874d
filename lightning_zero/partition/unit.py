"""Unit: parameters that are unsharded and resharded together, and their master shard."""

from collections.abc import Callable
from functools import cache

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_zero.comm import Comm
from lightning_zero.partition import handle
from lightning_zero.partition.buffer import ShardedBuffer, State, write_changes
from lightning_zero.partition.coded import CodedGather
from lightning_zero.partition.layout import FlatLayout, Range
from lightning_zero.partition.memory import BufferPool, FlatViews, Ledger, allocate
from lightning_zero.partition.rest import Place, Rested, Tiers, bytes_of
from lightning_zero.transfer import HostPool, Link


class Unit:
    """Parameters of one dtype that share a flat buffer, with their fp32 master shard if they have one.

    ``modules`` bracket the use of the parameters; ``names`` are FQNs in slot order. ``buffer`` holds what steps compute
    with. With ``shows_main`` users who look at a parameter outside of a step see its master weights, through a second
    buffer over the same tensors, and with ``is_coded`` they see what steps compute with in full precision; of the two
    buffers at most one is unsharded. ``values`` are the whole parameters, on the device, in
    the dtype of the master weights if there are any: the parameters let go of their own memory.
    """

    def __init__(
        self,
        index: int,
        name: str,
        modules: list[nn.Module],
        named_parameters: list[tuple[str, nn.Parameter]],
        layout: FlatLayout,
        values: FlatViews,
        comm: Comm,
        pool: BufferPool,
        ledger: Ledger,
        on_access: Callable[[ShardedBuffer, Tensor], None],
        whole: bool,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype | None,
        shows_main: bool,
        main_device: torch.device | None,
        link: Link | None = None,
        tiers: Tiers | None = None,
        is_coded: bool = False,
    ) -> None:
        self.index = index
        self.name = name
        self.modules = modules
        self.finished_modules: set[nn.Module] = set()
        """Those whose forward has ended since the unit was unsharded."""
        self.pending_backward = 0
        """Forwards of a frozen unit whose backward is still to come."""
        self.unsharded_in_backward = False
        self.published = False
        """The update has written the model weights' shard as well."""
        self.updating = False
        """An update of the main shard is under way or has not been published: it is ahead of the buffer."""
        self.edited_meanwhile = False
        """The user has edited parameters inside a step during that update."""
        self.gradient_place: Place | None = None
        """Where the reduced gradients of its shard rest, if that is not in memory."""
        self._versions = 0
        self.names = [n for n, _ in named_parameters]
        self.tensors: list[nn.Parameter] = [p for _, p in named_parameters]
        self.dtype = compute_dtype
        self.layout = layout
        self._rank, self._shard_rank = comm.rank, comm.shard_rank
        self._in_shard = [layout.local_range(i, comm.shard_rank) for i in range(len(self.tensors))]
        device = values.flat.device
        with torch.inference_mode(False), torch.no_grad():
            own = values.flat.narrow(0, comm.shard_rank * layout.shard_numel, layout.shard_numel)
            self.master = None if master_dtype is None else own.to(main_device, master_dtype, copy=True)
            if whole:
                flat = values if values.flat.dtype == compute_dtype else allocate(layout, compute_dtype, device)
                if flat is not values:
                    flat.flat.copy_(values.flat)
                shard = flat.flat.narrow(0, comm.shard_rank * layout.shard_numel, layout.shard_numel)
            else:
                shard = own.to(compute_dtype, copy=True)
        tensors: list[Tensor] = list(self.tensors)
        tiers = tiers or Tiers()
        rest = self._master_rest = None
        if tiers.main is not None and self.master is not None:
            place = tiers.main.place("master", self.layout.shard_numel, self.master.dtype)
            self._master_rest = Rested(place, self.master.device, self.master)
            self.master = self._master_rest.tensor
        if tiers.parameters is not None and not whole:
            place = tiers.parameters.place("parameters", self.layout.shard_numel, self.dtype)
            rest = Rested(place, device, shard)
            shard = rest.tensor
            tiers.whole.reserve(sum(p.numel() for p in self.tensors) * values.flat.dtype.itemsize)
        with torch.inference_mode(False), torch.no_grad():  # now that nothing can fail
            resting = handle.placeholder(compute_dtype, device)
            for i, parameter in enumerate(self.tensors):
                handle.rebase(self.names[i], parameter, flat.views[i] if whole else resting.expand(parameter.shape))
        self.buffer = ShardedBuffer(
            name, self.layout, tensors, shard, comm, pool, 2 * index, on_access, self.dtype, device,
            flat if whole else None, rest, CodedGather(layout, comm, pool) if is_coded else None,
        )
        self.face = self.buffer
        self._shows_main = self.master is not None and shows_main
        if self.master is not None and shows_main:
            self.face = ShardedBuffer(
                name, self.layout, tensors, self.master, comm, pool, 2 * index, on_access, self.master.dtype,
                device,
            )
        elif is_coded:
            self.face = ShardedBuffer(
                name, self.layout, tensors, shard, comm, pool, 2 * index, on_access, self.dtype, device, rest=rest
            )
        ledger.add("parameters", flat.nbytes if whole else shard.nbytes)
        if self.master is not None:
            ledger.add("master", self.master.numel() * self.master.element_size())
        self.buffer.state = State.UNSHARDED
        if whole:
            self.buffer.hide()
        else:
            self.buffer.detach()
        self._link = link
        self._outgoing: Tensor | None = None
        self._staging = link if rest is None else tiers.memory
        self._published = self._sum_of_weights()
        """Of the model weights, as the master that is elsewhere has them: it need not be brought to find no edits."""
        self.shards = [self._shard_of(i) for i in range(len(self.tensors))]

    def __repr__(self) -> str:
        return f"Unit({self.index}: {self.name}, {self.buffer.state.name})"

    @property
    def main(self) -> Tensor:
        """The shard that the optimizer updates: the master weights, or the parameter shard where it is its own."""
        return self.buffer.shard if self.master is None else self.master

    @property
    def main_rest(self) -> Rested | None:
        """Where the main shard is, if that is not here."""
        return self.buffer.rest if self.master is None else self._master_rest

    def in_shard(self, index: int) -> Range:
        """This rank's part of a parameter, counted from the start of its shard."""
        return self._in_shard[index]

    def in_tensor(self, index: int) -> Range:
        """The same elements, counted from the start of the parameter in memory order."""
        return self.layout.tensor_range(index, self._shard_rank)

    def _shard_of(self, index: int) -> nn.Parameter | None:
        """The optimizer's view of a parameter: a 1-D slice of the main shard, or None where this rank owns nothing. Of
        a main shard that rests elsewhere it has no bytes, but while :meth:`hold_main` has brought them."""
        local = self.in_shard(index)
        if not local.numel:
            return None
        with torch.inference_mode(False):
            if self.main_rest is None:
                return nn.Parameter(self.main[local.slice()], requires_grad=self.main.is_floating_point())
            nowhere = handle.placeholder(self.main.dtype, self.main.device).expand(local.numel)
            return nn.Parameter(nowhere, requires_grad=self.main.is_floating_point())

    def hold_main(self) -> None:
        """Bring the main shard, if it rests elsewhere, for the optimizer to work on until :meth:`put_away`."""
        if self.main_rest is not None:
            self._point_shards(self.main_rest.bring_to_write())

    def put_away(self) -> None:
        """Let what was brought rest again, with the changes."""
        if self.main_rest is not None and self.main_rest.is_here:
            for shard in self.shards:
                if shard is not None:
                    shard.data = handle.placeholder(shard.dtype, shard.device).expand(shard.shape)
        if self._master_rest is not None:
            self._master_rest.put_away()
        if self.buffer.rest is not None and self.buffer.state is State.SHARDED:
            self.buffer.rest.put_away()

    def _point_shards(self, main: Tensor) -> None:
        for index, shard in enumerate(self.shards):
            if shard is not None:
                shard.data = main[self.in_shard(index).slice()]

    @property
    def hides_master(self) -> bool:
        """Whether there are master weights with more bits than users see."""
        return self.master is not None and self.master.dtype != self.face.dtype

    @property
    def owned(self) -> list[slice]:
        """Where this rank's parts of the parameters lie in a shard; between and behind them is padding."""
        ranges = (self.in_shard(index) for index in range(len(self.tensors)))
        return [local.slice() for local in ranges if local.numel]

    def copy_target(self, in_use: bool) -> Tensor | None:
        """Where an update of all that this rank owns may write the model weights, rounded to 16 bits, of shape
        ``(shard_numel,)``; None where :meth:`publish` rounds. ``in_use``: steps compute with the weights meanwhile."""
        if self.master is None or self.dtype.itemsize != 2:
            return None
        if self._staging is not None:
            return self._stage(self._staging)
        return None if in_use else self.buffer.shard

    @property
    def copies_all(self) -> bool:
        """Whether new model weights leave as a whole shard, also where some of them are as before."""
        return self.master is not None and self._staging is not None

    @property
    def crosses(self) -> bool:
        """Whether the main shard is updated on the other side of a link."""
        return self._link is not None

    def weights_target(self) -> Tensor:
        """Where an update that nobody computes beside is to write the new model weights, of shape ``(shard_numel,)``."""
        return self.buffer.shard if self._staging is None else self._stage(self._staging)

    def publish(self) -> None:
        """After an update: the model weights' shard takes the master's new values."""
        if self.master is not None:
            target = self.weights_target()
            if not self.published:
                target.copy_(bytes_of(self.master))
            self._published = self._sum_of_weights(target)
            if self._staging is not None:
                self._send(target, self._staging)
        self.put_away()
        self.published = False

    def published_to_rest(self) -> None:
        """Wait until what was published is where it rests. Raises OSError if it could not be written."""
        if self.buffer.rest is not None:
            self.buffer.rest.arrive()

    def _send(self, target: Tensor, staging: Link | HostPool) -> None:
        arriving = None
        if self.buffer.rest is not None:
            arriving = self.buffer.rest.replace(target)
        elif self._link is not None:
            arriving = self.buffer.arriving = self._link.upload(target, self.buffer.shard)
            if self.face.shard is self.buffer.shard:
                self.face.arriving = arriving
        staging.give(target, after=arriving)
        self._outgoing = None

    def _stage(self, link: Link | HostPool) -> Tensor:
        """Host memory for the model weights' shard on its way to the device, or to where it rests."""
        if self._outgoing is None:
            self._outgoing = self.without_padding(link.take(self.layout.shard_numel, self.dtype))
        return self._outgoing

    def without_padding(self, shard: Tensor) -> Tensor:
        """``shard``, of shape ``(shard_numel,)``, with zeros where no parameter is."""
        start = 0
        for owned in [*self.owned, slice(self.layout.shard_numel, 0)]:
            shard[start : owned.start].zero_()
            start = owned.stop
        return shard

    def checksum(self) -> int:
        """A number that is the same on ranks that see the same bits in the unsharded parameters."""
        return _checksum(self._unsharded_views().flat)

    def checksums(self) -> list[int]:
        """The same for each parameter."""
        views = self._unsharded_views()
        flats = [views.flat[slot.range.slice()] for slot in self.layout.slots]
        return [_weighted(flat.view(torch.uint8).long()) for flat in flats]

    def _unsharded_views(self) -> FlatViews:
        if self.face.buffer is None:
            raise AssertionError(f"{self} has no bytes")
        return self.face.buffer

    def begin_update(self) -> None:
        """An update of the main shard begins beside a step: until it is over, shard and main shard may differ."""
        self.updating, self.edited_meanwhile = True, False
        self._versions = self._version()

    def end_update(self) -> None:
        self.updating = False

    def _version(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return sum(tensor._version for tensor in self.tensors)

    def keep_edits(self, buffer: ShardedBuffer | None = None) -> None:
        """Let edits made inside a step, or of ``buffer``, reach the shard and, where they changed it, the master."""
        buffer = buffer or self.buffer
        if buffer.is_coded:
            self._refuse_edits(buffer)
            return
        changed = buffer.keep_edits()
        if changed:
            self._follow_shard()
        if self.updating:
            known = self._published is None or self._is_as_published()
            self.edited_meanwhile |= changed or not known or self._versions != self._version()
        elif changed or self.buffer.is_whole:
            self.keep_in_master()

    def _refuse_edits(self, buffer: ShardedBuffer) -> None:
        edited = buffer.edited()
        if edited:
            names = ", ".join(repr(self.names[i]) for i in edited)
            raise RuntimeError(
                f"{names} of {self.name!r} was edited inside a step (rank {self._rank}). There gather_dtype=torch.int8 shows"
                " parameters rounded to 8 bits, and what is edited of them cannot be kept exactly. Edit parameters outside of"
                " steps, in a hook such as `on_train_batch_end`, where they are exact, or leave gather_dtype out."
            )

    def keep_edits_so_far(self) -> None:
        """The same before an update that begins inside a step, but for what a comparison of whole weights with their master
        finds: where they are on one device, :meth:`keep_in_master` does that; elsewhere :meth:`keep_edits` does, later."""
        if self.buffer.is_coded:
            self._refuse_edits(self.buffer)
        elif self.buffer.keep_edits():
            self._follow_shard()
            self.keep_in_master()

    @property
    def compares_with_master(self) -> bool:
        """Whether edits of its weights show only beside the master, which is at hand."""
        return self.master is not None and self.buffer.is_whole and self._published is None

    def keep_in_master(self) -> None:
        """Let the master take what the shard's weights differ in from it."""
        if self.master is not None and not self._is_as_published():
            if write_changes(self.buffer.shard, self.master) and self._shows_main:
                _warn_of_rounding(self.name, str(self.dtype).removeprefix("torch."))
            self._published = self._sum_of_weights()
            self.put_away()

    def _follow_shard(self) -> None:
        if self.master is None and self.main_rest is None:
            self._point_shards(self.main)  # it may have moved

    def keep_exact_edits(self) -> None:
        """Let edits of the face, made inside a step, reach what the step computes with, which may be on its way already."""
        changed = self.face.keep_edits()
        if self.buffer.buffer is not None and self.face.buffer is not None:
            self.buffer.arrive()
            self.buffer.buffer.flat.copy_(self.face.buffer.flat)
        if self.buffer.is_whole:
            self._published = self._sum_of_weights()
        elif changed:
            self.publish()
        self.put_away()

    def keep_outside_edits(self) -> None:
        """Let edits made outside of a step, on all ranks, reach what steps compute with."""
        if not self._shows_main:
            self.keep_edits(self.face)
        elif self.face.keep_edits() or self.buffer.is_whole:
            if self.buffer.buffer is not None and self.face.buffer is not None:
                self.buffer.buffer.flat.copy_(self.face.buffer.flat)
            else:
                self.publish()
        self.put_away()

    def _sum_of_weights(self, weights: Tensor | None = None) -> int | None:
        """A checksum of the model weights' shard; None where the master is at hand, and comparing with it is as cheap."""
        at_hand = self._master_rest is None and (self.master is None or self.master.device == self.buffer.shard.device)
        if at_hand or not self.buffer.is_whole:
            return None
        return _checksum(self.buffer.shard if weights is None else weights)

    def _is_as_published(self) -> bool:
        return self._published is not None and self._published == self._sum_of_weights()


@cache
def _warn_of_rounding(name: str, dtype: str) -> None:
    rank_zero_warn(
        f"Parameters of {name!r} were edited inside a step, through the {dtype} weights that it computes with: what is smaller"
        " than those can express is lost. Edit them under torch.no_grad() before the forward, or in a hook such as"
        " `on_train_batch_end`: there they show their fp32 master weights."
    )


def _checksum(flat: Tensor) -> int:
    """The same for equal bits in a flat buffer or shard, which is whole words."""
    words = flat.view(torch.int64).view(8, -1)
    # Weighted by position, so that values that have changed places show as well.
    return _weighted(words.sum(0)) + _weighted(words.sum(1)) >> 2


def _weighted(numbers: Tensor) -> int:
    """Their sum weighted by position, which wraps around."""
    return int((numbers * torch.arange(1, numbers.numel() + 1, device=numbers.device)).sum())
