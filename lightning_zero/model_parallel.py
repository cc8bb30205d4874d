"""Model-parallel groups beside ZeRO: which ranks they are, what they need of a module, what they cannot do yet.

ZeRO then shards over the data-parallel ranks only, those at the same place of their groups. The module brings its own
tensor-parallel layers; a parameter of which each rank of a group has another part says so, as Megatron's do::

    self.weight.tensor_model_parallel = True

All others must be the same on the ranks of a group.
"""

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from lightning_zero.comm import Comm, all_model_groups
from lightning_zero.partition.clipping import is_tensor_parallel
from lightning_zero.topology import Topology, make_topology

DIMENSIONS = ("tensor_parallel", "model_parallel", "tp", "mp")
"""Names of a mesh's dimension that is taken for the model-parallel one."""


def checked_model_parallel(value: Any) -> Any:
    """``value`` if it can tell the model-parallel groups; raises ValueError or TypeError otherwise."""
    if value is None or isinstance(value, torch.distributed.ProcessGroup):
        return value
    if isinstance(value, DeviceMesh):
        _dimension(value)
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"model_parallel must be a number of ranks, a DeviceMesh or a process group, got {value!r}"
        )
    if value < 1:
        raise ValueError(f"model_parallel must be at least 1 rank, got {value}")
    return value


def make_mesh(size: int, world_size: int, device: torch.device) -> DeviceMesh:
    """Groups of ``size`` consecutive ranks, under the names that Lightning's ModelParallelStrategy gives."""
    if world_size % size:
        raise ValueError(f"model_parallel={size} does not divide the {world_size} ranks into groups of one size")
    names = ("data_parallel", "tensor_parallel")
    return init_device_mesh(device.type, (world_size // size, size), mesh_dim_names=names)


def model_groups(value: DeviceMesh | Any) -> list[list[int]]:
    """All model-parallel groups, of global ranks. A collective of all ranks."""
    if isinstance(value, DeviceMesh):
        value = value.get_group(_dimension(value)) if value.ndim > 1 else value.get_group()
    return all_model_groups(value)


def _dimension(mesh: DeviceMesh) -> str:
    found = [name for name in mesh.mesh_dim_names or () if name in DIMENSIONS]
    if mesh.ndim > 1 and len(found) != 1:
        raise ValueError(
            f"model_parallel: the DeviceMesh has the dimensions {mesh.mesh_dim_names}; exactly one of them must be named"
            f" {', '.join(DIMENSIONS)}, or give the one-dimensional mesh of that dimension"
        )
    return found[0] if found else ""


class JoinsGroups(DDPStrategy):
    """The hooks of the strategy that know which ranks share a batch and which share shards."""

    shard_group_size: int | None
    model_parallel: Any
    _comm: Comm | None
    _topology: Topology | None = None
    _topology_of: Any = None
    _mesh: DeviceMesh | None = None

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._topology is None or self._topology_of is not group:
            self._topology, self._topology_of = self._make_topology(), group
        if self._mesh is not None and self.lightning_module is not None:
            self.lightning_module._device_mesh = self._mesh  # for configure_model, as with ModelParallelStrategy

    def _make_topology(self) -> Topology:
        groups, given = None, self.model_parallel
        if isinstance(given, int):
            given = make_mesh(given, self.world_size, self.root_device)
        if given is not None:
            groups, self._mesh = model_groups(given), given if isinstance(given, DeviceMesh) else None
        return make_topology(self.global_rank, self.world_size, self.shard_group_size, groups)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._topology is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": self._topology.world_size, "rank": self._topology.rank}

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different batches: all of them, divided by the ranks of a model-parallel group."""
        return self.world_size if self._topology is None else self._topology.world_size

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(tensor, self._data_group(group), reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, self._data_group(group), sync_grads)

    def _data_group(self, group: Any) -> Any:
        return self._comm.data_group if group is None and self._comm is not None else group

    @override
    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_topology": None, "_topology_of": None, "_mesh": None}


def check_replicated(module: nn.Module, comm: Comm) -> None:
    """Raise RuntimeError on all ranks unless the parameters that are not marked are the same over each group. All ranks
    call it."""
    if comm.model is None:
        return
    named = list(module.named_parameters())
    whole = [(name, parameter.detach()) for name, parameter in named if not is_tensor_parallel(parameter)]
    if len(whole) == len(named):
        raise RuntimeError(
            "No parameter is marked as a part of a tensor-parallel layer, so each would count once in the norm of the"
            " gradients. Set `parameter.tensor_model_parallel = True` where the ranks of a model-parallel group have"
            " different parts."
        )
    sizes = comm.model.all_gather_object([(name, tuple(p.shape), p.dtype) for name, p in whole])
    if any(theirs != sizes[0] for theirs in sizes):
        apart = sorted({each[0] for theirs in sizes for each in theirs if any(each not in other for other in sizes)})
    else:
        apart = [name for name, p in whole if not torch.equal(p, comm.model.from_first(p))]
    apart = sorted(set(chain(*comm.model.all_gather_object(apart))))
    if apart:
        raise RuntimeError(
            f"Parameters differ over a model-parallel group and are not marked as parts: {', '.join(map(repr, apart[:3]))}"
            f"{', ...' if len(apart) > 3 else ''} (this is rank {comm.rank}). Set `parameter.tensor_model_parallel = True`"
            " if each rank has its own part, or initialise them alike."
        )
