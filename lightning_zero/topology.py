"""Which ranks share what: integers only, the same on every rank.

Four data-parallel ranks with ``shard_group_size=2`` (hybrid sharding): each row is a shard group, whose ranks own
different shards; each column is a group of replicas, whose ranks own the same one::

              shard 0   shard 1
    group 0   rank 0    rank 1
    group 1   rank 2    rank 3

With model-parallel groups (``model_parallel``) ranks of one group work on the same batch, and the data-parallel ranks are
those that stand at the same place of their groups. Four ranks in model-parallel groups of 2: each row is a group, each
column has data-parallel ranks 0 and 1, which share shards as above::

    rank 0    rank 1
    rank 2    rank 3
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class Topology:
    """The data-parallel ranks of a run and how they share the shards."""

    rank: int
    """This rank, among the data-parallel ones."""
    world_size: int
    """Data-parallel ranks."""
    num_shards: int
    """Ranks of a shard group."""
    columns: tuple[tuple[int, ...], ...]
    """The data-parallel ranks, as global ones, of every place in a model-parallel group."""
    column: int
    """The place of this rank."""

    @property
    def members(self) -> tuple[int, ...]:
        """This rank's data-parallel ranks, as global ones."""
        return self.columns[self.column]

    @property
    def model_parallel_size(self) -> int:
        return len(self.columns)

    @property
    def model_group(self) -> list[int]:
        """This rank's model-parallel group, of global ranks."""
        return [column[self.rank] for column in self.columns]

    def as_global(self, ranks: Sequence[int]) -> list[int]:
        """Data-parallel ranks as global ones."""
        return [self.members[rank] for rank in ranks]

    @property
    def replicas(self) -> int:
        """How many ranks own the same shard."""
        return self.world_size // self.num_shards

    @property
    def received_share(self) -> float:
        """What the others send, for each byte of a flat buffer that is reduced by sends and receives."""
        return (self.num_shards - 1) / self.num_shards + (self.replicas - 1) / self.replicas / self.num_shards

    @property
    def shard_rank(self) -> int:
        """Which shard this rank owns."""
        return self.rank % self.num_shards

    @property
    def shard_group(self) -> list[int]:
        """The data-parallel ranks that together with this one own everything."""
        first = self.rank - self.shard_rank
        return list(range(first, first + self.num_shards))

    @property
    def replica_group(self) -> list[int]:
        """The data-parallel ranks that own the same shard as this one."""
        return list(range(self.shard_rank, self.world_size, self.num_shards))


def make_topology(
    rank: int,
    world_size: int,
    shard_group_size: int | None = None,
    model_groups: Sequence[Sequence[int]] | None = None,
) -> Topology:
    """The topology of ``world_size`` ranks as global rank ``rank`` sees it; ``model_groups`` are all model-parallel ones.

    Raises ValueError unless groups of ``shard_group_size`` (None: of all) divide the data-parallel ranks evenly, and the
    model-parallel groups are of one size, hold each rank once and run through the ranks alike.
    """
    if model_groups is None:
        model_groups = [[each] for each in range(world_size)]
    columns = _columns(model_groups, world_size)
    column = next(i for i, members in enumerate(columns) if rank in members)
    size = len(columns[0])
    num_shards = checked_shard_group_size(shard_group_size, size)
    return Topology(columns[column].index(rank), size, num_shards, columns, column)


def _columns(model_groups: Sequence[Sequence[int]], world_size: int) -> tuple[tuple[int, ...], ...]:
    groups = sorted(sorted(group) for group in model_groups)
    alike = len({len(group) for group in groups}) == 1 and sorted(chain(*groups)) == list(range(world_size))
    columns = tuple(zip(*groups, strict=True)) if alike else ()
    if not alike or any(list(column) != sorted(column) for column in columns):
        raise ValueError(
            f"model_parallel: the groups {groups} do not cover {world_size} ranks in groups of one size that run through"
            " them alike, as the rows of a DeviceMesh do"
        )
    return columns


def checked_shard_group_size(shard_group_size: int | None, world_size: int | None = None) -> int:
    """The size of shard groups among ``world_size`` ranks, all of them for None; raises ValueError if there is none."""
    if shard_group_size is None:
        return world_size or 1
    if isinstance(shard_group_size, bool) or not isinstance(shard_group_size, int) or shard_group_size < 1:
        raise ValueError(
            f"shard_group_size must be the number of ranks of a group (at least 1) or None for all ranks, got"
            f" {shard_group_size!r}"
        )
    if world_size is not None and world_size % shard_group_size:
        sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"shard_group_size={shard_group_size} does not divide the {world_size} ranks into equal groups: use one of"
            f" {', '.join(map(str, sizes))}, or None to shard over all ranks"
        )
    return shard_group_size
