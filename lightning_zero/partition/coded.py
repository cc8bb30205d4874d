"""CodedGather: shards sent in eight bits (ZeRO++, arXiv 2306.10209, section 3.1).

[Note: coded parameters]
Shards, masters and what users see outside of steps stay exact. For a step ranks send int8 codes of their shards with one
scale for each block of 256 elements, and all ranks compute with what the codes stand for, the owner of a shard too, so that
replicas never differ. Tensors begin with a block of their own (FlatLayout), so what a weight is rounded to depends on its
tensor alone, not on units or the number of ranks. What is edited inside a step is the rounded weight; nobody could tell
which exact value was meant, so that is refused.
"""

import torch
from torch import Tensor

from lightning_zero.comm import Comm
from lightning_zero.ops import BLOCK_NUMEL, CODED_DTYPES, decode_blocks_, encode_blocks_
from lightning_zero.partition.layout import FlatLayout, build_layout
from lightning_zero.partition.memory import BufferPool, FlatViews
from lightning_zero.work import Work

_SCALE_BYTES = 4


def can_be_coded(dtype: torch.dtype) -> bool:
    """Whether parameters that steps compute with in ``dtype`` are sent as codes; others go as they are."""
    return dtype in CODED_DTYPES


def message_layout(layout: FlatLayout) -> FlatLayout:
    """The ranks' messages, in bytes, one after the other: the codes of a shard, its scales, and up to 64 bytes in all."""
    nbytes = layout.shard_numel + layout.shard_numel // BLOCK_NUMEL * _SCALE_BYTES
    return build_layout(((nbytes,),) * layout.num_shards, ((1,),) * layout.num_shards, layout.num_shards, itemsize=1)


class CodedGather:
    """Gathers the shards of one unit as codes. See [Note: coded parameters]."""

    def __init__(self, layout: FlatLayout, comm: Comm, pool: BufferPool) -> None:
        self._numel = layout.shard_numel
        self._messages = message_layout(layout)
        self._comm = comm
        self._pool = pool

    def start(self, shard: Tensor, channel: int) -> "CodesUnderWay":
        """Send the codes of ``shard``, of shape ``(shard_numel,)``, and receive the other ranks'."""
        messages = self._pool.take(self._messages, torch.uint8)
        own = self._of_rank(messages.flat, self._comm.shard_rank)
        self._encode(shard, own)
        return CodesUnderWay(self, messages, self._comm.all_gather(messages.flat, own, channel))

    def finish(self, messages: FlatViews, full: Tensor | None) -> None:
        if full is not None:
            for rank, part in enumerate(full.split(self._numel)):
                self._decode(self._of_rank(messages.flat, rank), part)
        self._pool.give(self._messages, messages)

    def rounded(self, shard: Tensor) -> Tensor:
        """What the other ranks make of ``shard``."""
        message = torch.empty(self._messages.shard_numel, dtype=torch.uint8, device=shard.device)
        self._encode(shard, message)
        values = torch.empty_like(shard)
        self._decode(message, values)
        return values

    def _of_rank(self, messages: Tensor, rank: int) -> Tensor:
        return messages.narrow(0, rank * self._messages.shard_numel, self._messages.shard_numel)

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        codes = message[: self._numel].view(torch.int8)
        scales = message[self._numel :][: self._numel // BLOCK_NUMEL * _SCALE_BYTES].view(torch.float32)
        return codes, scales

    def _encode(self, shard: Tensor, message: Tensor) -> None:
        codes, scales = self._parts(message)
        encode_blocks_(codes, scales, shard)

    def _decode(self, message: Tensor, values: Tensor) -> None:
        decode_blocks_(values, *self._parts(message))


class CodesUnderWay:
    """A gather that has begun. After ``wait`` all codes are here, and ``finish`` is called once."""

    def __init__(self, gather: CodedGather, messages: FlatViews, work: Work) -> None:
        self._gather = gather
        self._messages = messages
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def finish(self, full: Tensor | None) -> None:
        """Write what the codes stand for to ``full``, of shape ``(padded_numel,)``, if anybody wants it."""
        self._gather.finish(self._messages, full)
