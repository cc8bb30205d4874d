"""A device to test with: this host, at the other end of a slow link.

Copies run one after the other on a thread of their own, each after a delay, and read their source only then. Until a
copy is done its target holds NaN, and so does host memory that was given back: whoever reads too early, or writes to
memory that a copy still needs, gets wrong numbers.
"""

import time

import torch
from torch import Tensor

from lightning_zero import ZeroStrategy
from lightning_zero.comm import Comm
from lightning_zero.offload.trial import Trial
from lightning_zero.offload.update import HostUpdate
from lightning_zero.transfer import STAGING, Account, HostPool, Link, Transfer, count_nowhere
from lightning_zero.worker import Worker


class SlowLink(HostPool):
    def __init__(self, delay: float = 0.002, account: Account = count_nowhere) -> None:
        super().__init__(pin_memory=False, account=account)
        self.down = self.up = 0
        """Bytes."""
        self.pooled: set[int] = set()
        """Addresses of all host memory that was ever handed out."""
        self._delay = delay
        self._worker = Worker("slow-link")

    def take(self, numel: int, dtype: torch.dtype, kind: str | None = STAGING) -> Tensor:
        tensor = super().take(numel, dtype, kind)
        self.pooled.add(tensor.data_ptr())
        return tensor

    def give(self, tensor: Tensor, after: Transfer | None = None) -> None:
        if after is None:
            _poison(tensor)
        super().give(tensor, after)

    def download(self, source: Tensor, target: Tensor) -> Transfer:
        self.down += source.nbytes
        return self._copy(source, target)

    def upload(self, source: Tensor, target: Tensor) -> Transfer:
        self.up += source.nbytes
        return self._copy(source, target)

    def _copy(self, source: Tensor, target: Tensor) -> Transfer:
        _poison(target)

        def late() -> None:
            time.sleep(self._delay)
            target.copy_(source)

        return _Late(self._worker.submit(late))


class _Late:
    def __init__(self, future: object) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()  # type: ignore[attr-defined]

    synchronize = wait


def _poison(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


class EarlyStrategy(ZeroStrategy):
    """Updates early whether it pays or not, from the third step on: here all steps take no time."""

    updater: HostUpdate | None = None

    def _make_updater(self, comm: Comm, link: Link | None) -> HostUpdate | None:
        self.updater = super()._make_updater(comm, link)
        if isinstance(self.updater, HostUpdate):
            self.updater.early.trial = Trial(spell=1, clock=lambda: 0.0)
        return self.updater


class FarStrategy(EarlyStrategy):
    """Offloads over a slow link, on a CPU."""

    link: SlowLink | None = None

    def _make_link(self) -> Link:
        self.link = SlowLink(account=self._ledger.add)
        return self.link
