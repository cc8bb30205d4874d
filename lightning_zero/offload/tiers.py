"""From an OffloadConfig to where shards rest."""

from lightning_zero.offload.mapped import MappedTensors
from lightning_zero.offload.store import DeviceFiles, HostStore, Store
from lightning_zero.partition.rest import Places, PlainMemory, Tiers
from lightning_zero.settings import OffloadConfig
from lightning_zero.transfer import Account, HostPool, Link, count_nowhere


def uses_files(offload: OffloadConfig | None, fitting: bool) -> bool:
    """Whether something rests in files; evaluation has parameters only."""
    return offload is not None and (offload.parameters == "nvme" or (fitting and offload.optimizer == "nvme"))


def make_tiers(
    offload: OffloadConfig | None, rank: int, link: Link | None, fitting: bool, account: Account = count_nowhere
) -> Tiers | None:
    """None where all shards rest where they are used. Raises OSError if files cannot be made."""
    if offload is None:
        return None
    store = Store(offload.nvme_path or "", rank, account, offload.checksums) if uses_files(offload, fitting) else None
    parameters: Places | None = None
    if offload.parameters == "nvme" and store is not None:
        parameters = store if link is None else DeviceFiles(store, link)
    elif offload.parameters == "cpu" and link is not None:
        parameters = HostStore(link)
    main = store if offload.optimizer == "nvme" and fitting else None
    if main is None and parameters is None:
        return None
    # Where parameters are in files they may be more than memory holds, and then so are their gradients.
    gradients = main if offload.parameters == "nvme" else None
    whole = PlainMemory() if store is None or offload.parameters != "nvme" else MappedTensors(store)
    return Tiers(main, parameters, gradients, link or HostPool(pin_memory=False, account=account), store, whole)
