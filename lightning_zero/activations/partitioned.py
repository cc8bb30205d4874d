"""The inputs of recomputed modules, kept in parts by the ranks of a model-parallel group (ZeRO-R, SC 20, P_a).

[Note: what is replicated]
Ranks of a model-parallel group work on the same batch, so most inputs of their blocks are the same on all of them, and each
rank needs to keep only one part. Whether an input is the same is asked when a module first sees it (one small message for
each), and believed from then on. That is checked where it matters: the gathered input must have the checksum of the one
that was given away.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.activations.inputs import Hooks, Keeper, flat_view, is_parameter
from lightning_zero.comm import ModelComm, fingerprint
from lightning_zero.partition.layout import dense_stride


class PartitionedInputs:
    """Packs the inputs of modules as this rank's parts, and gathers them for the recompute. ``keeper`` then keeps the
    parts, and what is not parted."""

    def __init__(self, model: ModelComm, keeper: Keeper | None = None) -> None:
        self._model = model
        self._keeper = keeper
        self._replicated: dict[tuple[str, int], bool] = {}
        """By module and position among its inputs."""

    def hooks(self, name: str) -> Hooks:
        position = 0

        def pack(tensor: Tensor) -> Any:
            nonlocal position
            position += 1
            return self._pack(name, position, tensor)

        return pack, self._unpack

    def _pack(self, name: str, position: int, tensor: Tensor) -> Any:
        if is_parameter(tensor):
            return tensor
        dense = tensor.layout is torch.strided and tuple(tensor.stride()) == dense_stride(tensor)
        own = checksum(tensor) if dense else torch.full((1,), -1 - self._model.rank, device=tensor.device)
        if not self._is_replicated((name, position), own) or not dense:
            return self._keep(tensor)
        flat = flat_view(tensor)
        numel = -(-flat.numel() // self._model.size)
        part = flat.new_zeros(numel)
        own_part = flat[self._model.rank * numel :][:numel]
        part[: own_part.numel()].copy_(own_part)
        return _Part(name, self._keep(part), tensor.size(), tensor.stride(), own)

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Part):
            return self._bring(saved)
        part = self._bring(saved.kept)
        flat = self._model.all_gather(part.view(torch.uint8)).view(part.dtype)
        tensor = flat.as_strided(saved.size, saved.stride, 0)
        same = (checksum(tensor) == saved.checksum).all()
        torch._assert_async(
            same,
            f"An input of {saved.name!r} is not the same on all ranks of its model-parallel group, though it was when the"
            " module first saw it: leave partition_activations out, or this module out of the policy.",
        )
        return tensor

    def _is_replicated(self, key: tuple[str, int], own: Tensor) -> bool:
        if key not in self._replicated:
            sums = self._model.all_gather(own)
            self._replicated[key] = bool((sums == sums[0]).all())
        return self._replicated[key]

    def _keep(self, tensor: Tensor) -> Any:
        return tensor if self._keeper is None else self._keeper.pack(tensor)

    def _bring(self, saved: Any) -> Tensor:
        return saved if self._keeper is None else self._keeper.unpack(saved)


@dataclass
class _Part:
    name: str
    kept: Any
    size: torch.Size
    stride: tuple[int, ...]
    checksum: Tensor


def checksum(tensor: Tensor) -> Tensor:
    """Of shape (1,), int64: equal for tensors of one shape with the same bits in the same dense memory order."""
    words = flat_view(tensor).view(_WORDS.get(tensor.element_size(), torch.uint8))
    # The second sum tells tensors whose elements have changed places apart; no copy is made for either.
    total = words.sum(dtype=torch.int64) + 31 * words[: words.numel() // 2].sum(dtype=torch.int64)
    return (total + fingerprint(tuple(tensor.shape)) % 2**31).reshape(1)


_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
