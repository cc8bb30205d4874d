"""Where shards rest while nobody uses them: in memory, or in a place from which their bytes are fetched.

[Note: resting shards]
A 1-D tensor that rests in a place is a handle (partition/handle.py): it has its shape and dtype, and an operation on it
fetches its bytes, after which it is plain until it is put away. What the engine itself does every step does not rely on
that: it stages bytes ahead of their use, brings and puts them away at named points, and reads the rest with
:func:`bytes_of`, which leaves a handle what it is. So the accesses by handle are those of users.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.partition import handle
from lightning_zero.transfer import HostPool, Link, Transfer


class Place(Protocol):
    """Room for a 1-D tensor."""

    numel: int
    dtype: torch.dtype

    def part(self, start: int, stop: int) -> "Place":
        """The elements ``[start, stop)``."""

    def take(self, device: torch.device) -> Tensor:
        """Memory to read the bytes to, on the ``device`` that uses them."""

    def give(self, memory: Tensor) -> None:
        """Take it back from somebody who has no use for it any more; others may still look into it."""

    def read(self, into: Tensor) -> Transfer:
        """Start copying the bytes to ``into``, where they are used."""

    def write(self, values: Tensor) -> Transfer:
        """Start copying the bytes of ``values`` in host memory, which must not change before that is done."""


class Places(Protocol):
    """Who has room."""

    def place(self, name: str, numel: int, dtype: torch.dtype) -> Place:
        """Room that is called ``name``, as other room may be. Raises OSError if there is none."""


class WholePlaces(Protocol):
    """Who has host memory for whole tensors: a module's when a run is over, those of a checkpoint."""

    def reserve(self, nbytes: int) -> None:
        """Make sure of room for the module's. Raises OSError if there is none."""

    def release(self) -> None:
        """The module's come now: what was reserved is for them."""

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a dense tensor, with its strides and memory of its own. Raises OSError if there is no room."""


class PlainMemory:
    """Host memory as everybody takes it."""

    def reserve(self, nbytes: int) -> None:
        """Nobody can be sure of it."""

    def release(self) -> None:
        """Nothing is reserved."""

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True, memory_format=torch.preserve_format)


@dataclass(frozen=True)
class Tiers:
    """Where shards rest; None is the memory that computes with them."""

    main: Places | None = None
    """Master weights, and the optimizer's state."""
    parameters: Places | None = None
    """The shards of sharded parameters."""
    gradients: Places | None = None
    """Reduced gradients."""
    memory: Link | HostPool | None = None
    """Host memory for what is on its way to where parameters rest."""
    files: "Files | None" = None
    """Those that there are."""
    whole: WholePlaces = field(default_factory=PlainMemory)
    """Where tensors are that are whole on the host."""


class Files(Protocol):
    """The files in which something rests."""

    nbytes: int
    """Taken on the disk."""

    def close(self) -> None:
        """Leave nothing behind. Bytes stay readable as long as somebody has a place for them."""


class RestingTensor(handle.Sharded, Tensor):  # type: ignore[misc]
    """The class of a tensor whose bytes rest elsewhere."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.to and isinstance(args[0], RestingTensor) and _is_as_asked(args, kwargs or {}):
            return args[0]  # as torch does; loading and moving optimizers comes here with every state
        return handle.Sharded.__torch_function__.__func__(cls, func, types, args, kwargs)


def _is_as_asked(args: tuple, kwargs: dict) -> bool:
    tensor, *rest = args
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return like.to(*rest, **kwargs) is like


class Rested:
    """A 1-D tensor that rests in ``place``, on ``device`` when it is here. See [Note: resting shards]."""

    def __init__(self, place: Place, device: torch.device, values: Tensor | None = None, compares: bool = False) -> None:
        """With ``values`` these are written to the place. ``compares``: users may edit the tensor through ``.data``,
        which leaves no version trace, so putting it away compares it with what the place has."""
        self.place = place
        self._device = device
        self._staged: tuple[Tensor, Transfer] | None = None
        self._leaving: Transfer | None = None
        """New bytes on their way to the place."""
        self._lost: OSError | None = None
        """Why these did not come there: what it has is out of date."""
        self._last: Transfer | None = None
        """What reads the place, perhaps still."""
        self._version: int | None = None
        """While the tensor is here: the version it came with, or one that it never has."""
        self._compares = compares
        self._nowhere = handle.placeholder(place.dtype, device).expand(place.numel)
        if values is not None:
            place.write(values.to("cpu")).synchronize()
        # Not made of the placeholder, with which it would share its version.
        self.tensor = Tensor._make_subclass(Tensor, torch.empty(0, dtype=place.dtype, device=device))
        handle.adopt(self.tensor, self)
        self._leave()

    def __del__(self) -> None:
        if hasattr(self, "tensor"):
            handle.disown(self.tensor)

    @property
    def dtype(self) -> torch.dtype:
        return self.place.dtype

    @property
    def is_here(self) -> bool:
        return self._version is not None

    def stride(self, tensor: Tensor) -> tuple[int, ...]:
        return (1,)

    def access(self, tensor: Tensor) -> None:
        self.bring()

    def stage(self) -> None:
        """Start fetching the bytes: they are wanted soon."""
        if not self.is_here and self._staged is None:
            self.arrive()
            with torch.inference_mode(False):
                into = self.place.take(self._device)
            self._staged = into, self.place.read(into)

    def bring(self) -> Tensor:
        """The tensor, plain until it is put away. Raises OSError if its bytes cannot be read."""
        if not self.is_here:
            bytes_here = self._fetch()
            self.tensor.__class__ = Tensor
            self.tensor.data = bytes_here
            self._version = self.tensor._version
        return self.tensor

    def bring_to_write(self) -> Tensor:
        """The same for somebody who writes through tensors with versions of their own."""
        tensor = self.bring()
        self._version = -1
        return tensor

    def read(self) -> Tensor:
        """The bytes, to look at: those of the tensor if it is here, else a copy of what the place has."""
        return self.tensor if self.is_here else self._fetch()

    def put_away(self) -> None:
        """The tensor is a handle again; what was changed goes to the place. Raises OSError if that cannot be written."""
        if self.is_here:
            if self.tensor._version != self._version or (self._compares and not self._same_as_place()):
                self.arrive()
                self.place.write(self.tensor.detach().to("cpu")).synchronize()
            memory = self.tensor.detach()
            self._leave()
            self.place.give(memory)
        self.forget()

    def forget(self) -> None:
        """What was fetched is not wanted, or out of date."""
        if self._staged is not None:
            (memory, transfer), self._staged = self._staged, None
            transfer.synchronize()
            self.place.give(memory)

    def replace(self, values: Tensor) -> Transfer:
        """Start giving the place new bytes: ``values`` must not change before that is done. The tensor is a handle."""
        self.forget()
        self._leave()
        self.arrive()
        self._leaving = self.place.write(values)
        return self._leaving

    def arrive(self) -> None:
        """Wait until nothing is on its way any more. Raises OSError if new bytes have not come to the place, again and
        again: it has old ones."""
        last, self._last = self._last, None
        leaving, self._leaving = self._leaving, None
        if last is not None:
            last.synchronize()
        if leaving is not None:
            try:
                leaving.synchronize()
            except OSError as error:
                self._lost = error
        if self._lost is not None:
            raise self._lost

    def _fetch(self) -> Tensor:
        self.stage()
        (into, transfer), self._staged = self._staged, None  # type: ignore[misc]
        transfer.wait()
        self._last = transfer
        return into

    def _leave(self) -> None:
        self.tensor.__class__ = Tensor
        self.tensor.data = self._nowhere
        self.tensor.__class__ = RestingTensor
        self._version = None

    def _same_as_place(self) -> bool:
        with torch.inference_mode(False):
            there = torch.empty_like(self.tensor)
        self.place.read(there).synchronize()
        return torch.equal(there.view(torch.uint8), self.tensor.view(torch.uint8))


def resting(tensor: Any) -> Rested | None:
    """Who keeps the bytes of ``tensor``, if they are not here."""
    owner = handle.owner_of(tensor) if isinstance(tensor, RestingTensor) else None
    return owner if isinstance(owner, Rested) else None


def bytes_of(value: Tensor | Rested) -> Tensor:
    """The bytes of a tensor, to look at; one that rests goes on doing so."""
    owner = value if isinstance(value, Rested) else resting(value)
    return value if owner is None else owner.read()  # type: ignore[return-value]


def part_of(tensor: Tensor, part: slice) -> Tensor | Rested:
    """Elements of a 1-D tensor: a view, or what rests where they do."""
    owner = resting(tensor)
    return tensor[part] if owner is None else Rested(owner.place.part(part.start, part.stop), tensor.device)
