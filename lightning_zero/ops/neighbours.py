"""Messages between processes of one host: the receiver copies from the sender's memory, once and without a network."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.ops._native import kernels

_NONCE_BYTES = 32
_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
_CAP_SYS_PTRACE = 19
_DONE, _LATE, _PEER_GONE = 1, 2, 3


@dataclass(frozen=True)
class Address:
    """Where a process is found by its neighbours."""

    host: str
    """The same for processes of one machine, which see each other's ids and have the same network."""
    pid: int
    board: int
    """Its file of messages, as a descriptor of the process."""
    nonce_at: int
    nonce: bytes
    """To be read there, as a proof that this is the process."""


class Neighbours:
    """What this process sends to and receives from others of its host.

    Needs the compiled kernels, Linux, and the permission to read the others' memory: processes of one user have it unless
    the system says otherwise (``ptrace_scope``, a container's rules). Of ``places`` processes this is the ``place``-th.
    """

    def __init__(self, place: int, places: int) -> None:
        """Raises OSError where this cannot be had."""
        if kernels is None or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            raise OSError("this takes the compiled kernels, Linux and its pidfd")
        # A file without a name: nothing is left of it, whatever happens to the process.
        self._board = os.memfd_create("lightning_zero")
        self._nbytes = kernels.Neighbours.board_bytes(places)
        os.ftruncate(self._board, self._nbytes)
        self._nonce = torch.frombuffer(bytearray(os.urandom(_NONCE_BYTES)), dtype=torch.uint8)
        self._native = kernels.Neighbours(place, places, self._board)
        nonce = bytes(self._nonce.tolist())
        self.address = Address(_host(), os.getpid(), self._board, self._nonce.data_ptr(), nonce)

    def add(self, place: int, address: Address) -> bool:
        """Make the acquaintance of another process. Returns whether its memory can be read."""
        if address.host != self.address.host:
            return False
        nonce = torch.zeros_like(self._nonce)
        if kernels.Neighbours.read(address.pid, address.nonce_at, nonce.data_ptr(), _NONCE_BYTES):
            return False
        if bytes(nonce.tolist()) != address.nonce:
            return False
        try:
            board = os.open(f"/proc/{address.pid}/fd/{address.board}", os.O_RDWR)
        except OSError:
            return False
        try:
            process = os.pidfd_open(address.pid)
            try:
                self._native.add(place, address.pid, process, board)
            finally:
                os.close(process)
        except (OSError, RuntimeError):
            return False
        finally:
            os.close(board)
        return True

    def all_added(self) -> None:
        """Called when nobody will add this process any more."""
        os.close(self._board)

    def send(self, place: int, key: int, tensor: Tensor, seconds: float) -> "Passage":
        """Let the process at ``place`` copy a contiguous tensor, which must stay as it is until then."""
        return Passage(self._native.send(place, key, tensor.data_ptr(), tensor.nbytes, tensor), seconds)

    def receive(self, place: int, key: int, tensor: Tensor, seconds: float) -> "Passage":
        """Fill a contiguous tensor with what the process at ``place`` sends under ``key``, which comes again only after this
        is over."""
        return Passage(self._native.receive(place, key, tensor.data_ptr(), tensor.nbytes, tensor), seconds)

    def sum(self, places: Sequence[int], key: int, own: Tensor, out: Tensor, scale: float, seconds: float) -> "Passage":
        """Receive what all ``places`` but this one send, and add it to ``own`` on the way: fp32, contiguous and all of one
        size. ``out`` becomes the sum in the order of ``places``, times ``scale``."""
        ticket = self._native.sum(list(places), key, own.data_ptr(), out.data_ptr(), out.numel(), scale, (own, out))
        return Passage(ticket, seconds)


def why_no_neighbours() -> str:
    """What keeps processes of one user on this host from copying each other's memory; empty if nothing is known to."""
    try:
        one, other = Neighbours(0, 2), Neighbours(1, 2)
    except OSError as error:
        return str(error)
    known = one.add(1, other.address)
    for each in (one, other):
        each.all_added()
    if not known:
        return "process_vm_readv is not allowed here"
    with suppress(OSError), open(_SCOPE) as file, open("/proc/self/status") as status:
        capabilities = next((line.split()[1] for line in status if line.startswith("CapEff")), "0")
        if file.read().strip() != "0" and not int(capabilities, 16) >> _CAP_SYS_PTRACE & 1:
            return f"{_SCOPE} is not 0"
    return ""


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return " ".join([file.read().strip(), *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])


class Passage:
    """A message on its way. It is taken back if nobody waits for it."""

    def __init__(self, ticket: Any, seconds: float) -> None:
        self._ticket = ticket
        self._seconds = seconds

    def done(self) -> bool:
        """Whether waiting takes no time."""
        return self._ticket.over()

    def wait(self) -> None:
        """Raises RuntimeError if the other process has ended, does not come to it in time, or expects another size."""
        outcome = self._ticket.wait(self._seconds)
        if outcome == _DONE:
            return
        if outcome == _LATE:
            raise RuntimeError(f"it did not come within {self._seconds:g} s")
        if outcome == _PEER_GONE:
            raise RuntimeError("its process has ended")
        raise RuntimeError(f"copying from memory to memory: {os.strerror(self._ticket.error())}")
