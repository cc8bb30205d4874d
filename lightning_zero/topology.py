"""Which ranks share what: integers only, the same on every rank.

Four data-parallel ranks with ``shard_group_size=2`` (hybrid sharding): each row is a shard group, whose ranks own
different shards; each column is a group of replicas, whose ranks own the same one::

              shard 0   shard 1
    group 0   rank 0    rank 1
    group 1   rank 2    rank 3
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The data-parallel ranks of a run and how they share the shards."""

    rank: int
    """This rank, among the data-parallel ones."""
    world_size: int
    """Data-parallel ranks."""
    num_shards: int
    """Ranks of a shard group."""

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
    def shard_groups(self) -> list[list[int]]:
        """The ranks that together own everything."""
        return [list(range(i, i + self.num_shards)) for i in range(0, self.world_size, self.num_shards)]

    @property
    def replica_groups(self) -> list[list[int]]:
        """The ranks that own the same shard, by shard."""
        return [list(range(i, self.world_size, self.num_shards)) for i in range(self.num_shards)]

    @property
    def shard_group(self) -> list[int]:
        """This rank's."""
        return self.shard_groups[self.rank // self.num_shards]

    @property
    def replica_group(self) -> list[int]:
        """This rank's."""
        return self.replica_groups[self.shard_rank]


def make_topology(rank: int, world_size: int, shard_group_size: int | None = None) -> Topology:
    """Raises ValueError unless groups of ``shard_group_size`` (None: of all ranks) divide the ranks evenly."""
    return Topology(rank, world_size, checked_shard_group_size(shard_group_size, world_size))


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
