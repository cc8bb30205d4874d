"""ZeroStrategy: Lightning's hooks, each a line or two into the engine."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero import planner
from lightning_zero.activations.checkpointing import Recomputation, checked_policy
from lightning_zero.activations.contiguous import ContiguousInputs, Region
from lightning_zero.activations.inputs import Inputs
from lightning_zero.activations.offload import ActivationStore
from lightning_zero.activations.partitioned import PartitionedInputs
from lightning_zero.alone import RunsAlone
from lightning_zero.checkpoint.parts import check_writes_parts
from lightning_zero.checkpoint.saving import FolderSaver, saves_in_background
from lightning_zero.comm import Comm, check_backend
from lightning_zero.config import EngineConfig, checked_gather_dtype, checked_reduce_dtype, checked_unit_policy
from lightning_zero.deferred import Deferred, is_on_meta, rest_to_device
from lightning_zero.estimate import optimizer_states
from lightning_zero.migration import AnswersForeignArguments
from lightning_zero.model_parallel import JoinsGroups, check_replicated, checked_model_parallel
from lightning_zero.offload.store import Store
from lightning_zero.offload.streamed import StreamedUpdate
from lightning_zero.offload.threads import agreed_threads
from lightning_zero.offload.tiers import make_tiers, uses_files
from lightning_zero.offload.update import HostUpdate
from lightning_zero.partition.engine import ZeroEngine
from lightning_zero.partition.grouping import check_module, check_synced_norm, outline
from lightning_zero.partition.memory import Ledger
from lightning_zero.partition.rest import Tiers
from lightning_zero.partition.updater import Updater
from lightning_zero.plugins import TakesPlugins, check_plugins
from lightning_zero.progress import LateBar
from lightning_zero.saving import SavesShards
from lightning_zero.settings import (
    DEFAULT_UNIT_SIZE_MB,
    OffloadConfig,
    check_tiers,
    check_timeout,
    checked_unit_bytes,
    first_delayed_step,
)
from lightning_zero.stopping import stop_together
from lightning_zero.topology import checked_shard_group_size
from lightning_zero.transfer import Link, StreamLink
from lightning_zero.uneven import MeetsUnevenRanks, UnevenBatches

_CLOSE_TIMEOUT_SECONDS = 10.0


class ZeroStrategy(AnswersForeignArguments, TakesPlugins, MeetsUnevenRanks, JoinsGroups, SavesShards, RunsAlone):
    """Data-parallel training with sharded optimizer state, gradients and parameters (ZeRO, SC 20).

    The LightningModule needs no change and is never wrapped.

    Args:
        stage: 1 shards optimizer state over the ranks, 2 gradients too, 3 parameters too; "auto" takes what ``plan``
            finds for the memory that is free when a fit begins, and says so. It may turn ``offload`` on.
        offload: keep optimizer state and run the step on the CPU.
        delayed_update: run the optimizer step one step late, beside the next forward and backward.
        unit_policy: which modules' parameters are gathered together: ``None`` chooses automatically; an iterable of
            module classes, or a callable with the signature of FSDP's policies.
        unit_size_mb: upper bound of an automatic unit in MiB of parameters.
        prefetch: how many units are gathered ahead of use (stage 3).
        reduce_dtype: dtype of gradients on the wire; ``None`` is the parameters' own dtype.
        gather_dtype: dtype of parameters on the wire at stage 3: ``torch.int8`` sends codes with one scale for each block of
            256 elements, which steps compute with; ``None`` is the dtype that they compute with.
        shard_group_size: shard inside groups of this many consecutive ranks and replicate across them; ``None`` shards
            over all ranks.
        model_parallel: ranks that work on one batch together, each with its part of tensor-parallel layers: how many
            consecutive ranks, a DeviceMesh with a dimension named ``tensor_parallel`` (or that dimension's own), or a
            process group. ZeRO shards over the data-parallel ranks, those at the same place of their groups. Parameters
            of which each rank has another part have ``tensor_model_parallel = True``.
        activation_checkpointing_policy: which modules are recomputed in backward: module classes, names or patterns of
            names (``"blocks.*"``), or a callable of the module that returns whether, or keyword arguments of
            ``torch.utils.checkpoint.checkpoint``.
        contiguous_activations: keep what ``activation_checkpointing_policy`` keeps in one region that is allocated once and
            used again by every step.
        partition_activations: keep what ``activation_checkpointing_policy`` keeps in parts on the ranks of a
            model-parallel group.
        activation_offload: keep saved activations in host memory (where there is a device).
        state_dict_type: ``"full"`` saves one ordinary Lightning checkpoint, ``"sharded"`` a folder to which all ranks
            write in parallel. Either loads, whatever this is.
        read_timeout: seconds that a rank which reads a sharded tensor outside of a step, or saves a checkpoint, waits
            for the others before it raises.
        process_group_backend: ``None`` is NCCL on GPUs and Gloo on CPUs.
        timeout: time limit of collectives.
        start_method: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``, as for DDPStrategy.
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3, "auto"] = 2,
        offload: bool | OffloadConfig = False,
        delayed_update: bool | int = False,
        unit_policy: Any = None,
        unit_size_mb: float = DEFAULT_UNIT_SIZE_MB,
        prefetch: int = 1,
        reduce_dtype: torch.dtype | str | None = None,
        gather_dtype: torch.dtype | str | None = None,
        shard_group_size: int | None = None,
        model_parallel: Any = None,
        activation_checkpointing_policy: Any = None,
        contiguous_activations: bool = False,
        partition_activations: bool = False,
        activation_offload: bool = False,
        state_dict_type: Literal["full", "sharded"] = "full",
        read_timeout: float = 30.0,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accelerator: "pl.accelerators.Accelerator | None" = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        check_plugins(
            checkpoint_io=checkpoint_io, cluster_environment=cluster_environment, parallel_devices=parallel_devices
        )
        check_timeout(timeout)
        self._precision_plugin = precision_plugin
        checked_shard_group_size(shard_group_size)
        self.shard_group_size = shard_group_size
        self.model_parallel = checked_model_parallel(model_parallel)
        if self.model_parallel is not None and stage == "auto":
            raise ValueError("stage='auto' does not count what the ranks of model_parallel groups hold: name a stage")
        if partition_activations and (model_parallel is None or activation_checkpointing_policy is None):
            raise ValueError(
                "partition_activations=True needs model_parallel, whose ranks keep the parts, and an"
                " activation_checkpointing_policy, whose modules' inputs are kept"
            )
        self.partition_activations = partition_activations
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(f"state_dict_type must be 'full' or 'sharded', got {state_dict_type!r}")
        if start_method not in ("popen", "spawn", "fork", "forkserver"):
            raise ValueError(f"start_method must be 'popen', 'spawn', 'fork' or 'forkserver', got {start_method!r}")
        self.config = EngineConfig(
            stage=1 if stage == "auto" else stage,
            unit_bytes=checked_unit_bytes(unit_size_mb),
            unit_policy=checked_unit_policy(unit_policy),
            prefetch=prefetch,
            reduce_dtype=checked_reduce_dtype(reduce_dtype),
            gather_dtype=checked_gather_dtype(gather_dtype, stage),
            read_timeout=read_timeout,
        )
        if not isinstance(offload, (bool, OffloadConfig)):
            raise TypeError(f"offload must be True, False or an OffloadConfig, got {offload!r}")
        self.state_dict_type = state_dict_type
        if process_group_backend is not None:
            check_backend(process_group_backend)
        self.offload = OffloadConfig() if offload is True else offload or None
        check_tiers(self.offload, stage)
        self._chooses = stage == "auto"
        self._given_offload = self.offload
        self.delayed_from = first_delayed_step(delayed_update, self.offload)
        self._recomputed = checked_policy(activation_checkpointing_policy)
        self._recomputation: Recomputation | None = None
        if not isinstance(activation_offload, bool):
            raise TypeError(f"activation_offload must be True or False, got {activation_offload!r}")
        if not isinstance(contiguous_activations, bool):
            raise TypeError(f"contiguous_activations must be True or False, got {contiguous_activations!r}")
        if contiguous_activations and activation_offload:
            raise ValueError(
                "contiguous_activations=True does not go with activation_offload=True: what waits in host memory leaves no"
                " holes on the device, and that memory is used again already. Leave one of them out."
            )
        if contiguous_activations and activation_checkpointing_policy is None:
            raise ValueError(
                "contiguous_activations=True needs an activation_checkpointing_policy, whose modules' inputs are kept"
            )
        self.activation_offload = activation_offload
        self.contiguous_activations = contiguous_activations
        self._region: Region | None = None
        self.engine: ZeroEngine | None = None
        self._tiers: Tiers | None = None
        self._ledger = Ledger()
        self._link: Link | None = None
        self._optimizer_engine: ZeroEngine | None = None
        self._comm: Comm | None = None
        self._comm_group: Any = None
        self._syncs_buffers = False
        self._buffers_due = False
        self._uneven = None
        self._interrupted = False
        self._folders = FolderSaver()
        self._deferred = Deferred()
        self._restores_late = False

    # -- set-up ------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        if self.accelerator is None or self.model is None:
            raise RuntimeError("ZeroStrategy.setup was called before the Trainer connected an accelerator and a model")
        if self.state_dict_type == "sharded":
            saves_in_background(self._checkpoint_io)  # or refuse it
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        if fitting and self.world_size > 1:
            check_synced_norm(self.model, self.root_device)
        if self._shards(fitting) and self.world_size > 1:
            check_module(self.model, self.config.residence.whole_parameters)
        if not (self._shards(fitting) and isinstance(self.precision_plugin, HalfPrecision)):
            self.model = self.precision_plugin.convert_module(self.model)
        self._restores_late = is_on_meta(self.model)
        self._interrupted = False
        comm = self._make_comm()
        if comm.world_size > 1:
            comm.check_same("parameters and buffers", outline(self.model))
        if comm.model is not None:
            self._compare_replicas(comm, fitting)
        self._deferred.prepare(self.model, comm)
        # What there is to choose, and whether one rank shards at all, depends on them; else they see the module as it trains.
        optimizers_first = fitting and (self._chooses or not (comm.is_shared or is_on_meta(self.model)))
        if optimizers_first:
            self.setup_optimizers(trainer)
        if fitting and self._chooses:
            self._choose(comm, str(trainer.precision))
        decides_alone = optimizers_first and not comm.is_shared
        self._setup_engine(comm, fitting, self.optimizers if decides_alone else [])
        self._deferred.finish(self.model)
        self._uneven = UnevenBatches(trainer, comm, self.engine)
        if fitting and not optimizers_first:
            self.setup_optimizers(trainer)
        if fitting and not decides_alone and self.engine is not None:
            self.engine.bind(self.optimizers)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _compare_replicas(self, comm: Comm, fitting: bool) -> None:
        """With model-parallel groups all of the module comes to the device, to be compared over them, before it is cut."""
        if self.model is None or is_on_meta(self.model):
            raise NotImplementedError(
                "A module on the meta device with model_parallel is not implemented yet: build it without the meta device."
            )
        self.model_to_device()
        comm.broadcast([t.detach() for t in (*self.model.parameters(), *self.model.buffers()) if t.numel()], counted=False)
        if fitting:
            check_replicated(self.model, comm)
            check_writes_parts(self._checkpoint_io)

    @property
    def _shows_progress(self) -> bool:
        return self.is_global_zero and self._trainer.progress_bar_callback is not None

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Around ``configure_model`` and in ``Trainer.init_module``: what is built on the meta device remembers how, and
        gets its values when it is sharded. With ``empty_init`` all is built there, else in host memory."""
        with self._deferred.recording(redirect=bool(empty_init)), self.precision_plugin.tensor_init_context():
            yield

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """There is nothing to load into before, where the module is on the meta device."""
        return self._restores_late or (self.model is not None and is_on_meta(self.model))

    def _make_comm(self) -> Comm:
        """The groups are made once per process group: making them is a collective, and there is a limit to how many."""
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._comm is None or self._comm_group is not group:
            topology = self._topology or self._make_topology()
            self._comm = Comm(self.global_rank, self.world_size, self.root_device, self._timeout, topology)
            self._comm_group = group
        return self._comm

    def _shards(self, fitting: bool) -> bool:
        """Evaluation alone shards nothing at stages 1 and 2: there is no optimizer state and there are no gradients."""
        return fitting or self.config.stage == 3

    def _choose(self, comm: Comm, precision: str) -> None:
        """For ``stage="auto"``: the same choice on every rank."""
        offload = (None, OffloadConfig()) if self._given_offload is None else (self._given_offload,)
        module = self._trainer.lightning_module
        chosen = planner.choose(
            module, comm, self.root_device, precision, optimizer_states(self.optimizers), offload, self.config
        )
        self.config = replace(self.config, stage=chosen.stage)
        self.offload = self._given_offload or chosen.tiers

    def _setup_engine(self, comm: Comm, fitting: bool, optimizers: list[Optimizer]) -> None:
        module, plugin = self.lightning_module, self.precision_plugin
        if module is None:
            raise RuntimeError("ZeroStrategy.setup was called without a LightningModule")
        self.engine = self._link = None
        self._ledger = Ledger()
        if self._shards(fitting):
            rests = self.offload is not None and self.offload.parameters is not None
            link = self._link = self._make_link() if rests or (fitting and (self.offload is not None or self.activation_offload)) else None
            plugin.convert_buffers(module)
            rest_to_device(module, comm)
            keeper = self._make_keeper(link, fitting)
            self.engine = self._make_engine(module, comm, link, keeper, fitting, optimizers)
            if not self.engine.units:
                self.model = plugin.convert_module(module)
        if self.engine is None or not self.engine.units:
            self._deferred.fill(module, comm)
            self.model_to_device()
            if comm.world_size > 1 and comm.model is None:
                _sync_module_states(module)
        if fitting:
            self._optimizer_engine = self.engine
            if self._recomputed is not None:
                self._recomputation = Recomputation(module, self._recomputed, self._make_inputs(comm, keeper))
        plugin.engine = self.engine
        if self.config.gathers_codes and comm.num_shards == 1:
            rank_zero_info("ZeroStrategy(gather_dtype=torch.int8) does nothing: a rank that shards with no other gathers nothing.")
        self._syncs_buffers = self._buffers_due = fitting and comm.world_size > 1

    def _make_engine(
        self, module: "pl.LightningModule", comm: Comm, link: Link | None, keeper: ActivationStore | None, fitting: bool,
        optimizers: list[Optimizer],
    ) -> ZeroEngine:  # fmt: skip
        uses = uses_files(self.offload, fitting)
        with comm.failing_together("make its files") if uses else nullcontext():
            self._tiers = make_tiers(self.offload, comm.rank, link, fitting, self._ledger.add)
        updater = self._make_updater(comm, link) if fitting else None
        config = self._engine_config(module, updater)
        with LateBar("sharding the module", self._shows_progress) as progress:
            return ZeroEngine(
                module, comm, config, optimizers, updater, keeper, self._deferred.source, progress, self._tiers, self._ledger
            )  # fmt: skip

    def _engine_config(self, module: "pl.LightningModule", updater: Updater | None) -> EngineConfig:
        host = torch.device("cpu")
        on_host = updater is not None and updater.link is not None
        # Updates that run beside steps need weights of their own, and so do those of weights that rest elsewhere.
        beside = self.delayed_from is not None or (updater is not None and updater.is_early)
        beside |= self._tiers is not None and self._tiers.main is None
        return replace(
            self.config,
            dtypes=replace(self.precision_plugin.parameter_dtypes(module), separate_main=on_host or beside),
            main_device=host if on_host else None,
            wide_sums=self.precision_plugin.wide_sums(self._trainer),
        )

    def _make_updater(self, comm: Comm, link: Link | None) -> Updater | None:
        if self.offload is None:
            return None
        if self.offload.parameters == "cpu" and link is None:
            rank_zero_info("OffloadConfig(parameters='cpu') does nothing on a CPU: parameters are in host memory.")
        threads = agreed_threads(comm, self.offload.num_threads, self.offload.bind_threads)
        if self._tiers is not None and isinstance(self._tiers.main, Store):
            return StreamedUpdate(self._tiers.main, threads, link)
        return HostUpdate(self._delays, threads, link, self.offload.early_update, self._ledger.add)

    def _make_link(self) -> Link | None:
        """The way to host memory; None on a CPU, where there is nowhere to go."""
        if self.root_device.type == "cpu":
            return None
        pins = self.offload is None or self.offload.pin_memory is not False
        return StreamLink(self.root_device, pins, self._ledger.add)

    def _make_keeper(self, link: Link | None, fitting: bool) -> ActivationStore | None:
        if not self.activation_offload or not fitting:
            return None
        if link is None:
            rank_zero_info("ZeroStrategy(activation_offload=True) does nothing on a CPU: activations are in host memory.")
            return None
        return ActivationStore(link, self.root_device)

    def _make_inputs(self, comm: Comm, keeper: ActivationStore | None) -> Inputs | None:
        """Who keeps the inputs of recomputed modules, if not autograd."""
        if self.contiguous_activations:
            self._region = Region(self.root_device, self._ledger.add)
        if self.partition_activations and comm.model is not None:
            return PartitionedInputs(comm.model, self._region or keeper)
        return None if self._region is None else ContiguousInputs(self._region)

    def _delays(self) -> bool:
        return self.delayed_from is not None and self._trainer.global_step >= self.delayed_from

    @override
    def configure_ddp(self) -> None:
        """Nothing to wrap: the module stays the user's own."""

    # -- steps -------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        automatic = self.lightning_module is not None and self.lightning_module.automatic_optimization
        self._sync_buffers(then=automatic and (self.engine is None or self.engine.reduces))
        with self._step("train", backward_follows=automatic):
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validate", super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test", super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict", super().predict_step, *args, **kwargs)

    def _evaluate(self, kind: str, step: Callable, *args: Any, **kwargs: Any) -> Any:
        self._sync_buffers(then=False)
        self._batches.before_step()
        with self._step(kind):
            output = step(*args, **kwargs)
        self._batches.after_step()
        return output

    @contextmanager
    def _step(self, kind: str, backward_follows: bool = False) -> Iterator[None]:
        with nullcontext() if self.engine is None else self.engine.step(kind, backward_follows):
            yield

    def _sync_buffers(self, then: bool) -> None:
        """DDP's rule: rank 0's buffers go to all ranks before a forward that follows one whose gradients were
        reduced (or the first)."""
        if self._buffers_due and self._comm is not None and self.lightning_module is not None:
            # Looked up each time: callbacks replace buffers (averaging resets batch norm).
            self._comm.broadcast([b.detach() for b in self.lightning_module.buffers() if b.numel()])
        self._buffers_due = then and self._syncs_buffers

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        with nullcontext() if self.engine is None else self.engine.no_sync():
            yield

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        # The Trainer's first one after it has registered its handlers, before anything runs.
        name = kwargs.get("name", args[0] if args else None)
        if name == "run-stage" and self.engine is not None and self.engine.units and self.world_size > 1:
            stop_together(self._trainer, self.engine)
        super().barrier(*args, **kwargs)

    # -- the user's side ---------------------------------------------------------------------------------------------

    @contextmanager
    def full_parameters(self, module: nn.Module | None = None, write_back: bool = False) -> Iterator[None]:
        """Whole plain parameters of ``module`` (default: the LightningModule) for a block of code, on all ranks.

        Edits made in the block are kept only with ``write_back=True`` (stages 1 and 2 keep whole parameters, so there
        edits are always kept). Must be entered on all ranks.
        """
        target = module if module is not None else self.lightning_module
        if self.engine is None or target is None or self.engine.closed:
            yield
            return
        with self.engine.parameters.full_parameters(target, write_back):
            yield

    @property
    def stage(self) -> int:
        """1, 2 or 3; with ``stage="auto"``, what was chosen (1 until then)."""
        return self.config.stage

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The 2-norm over all ranks of the gradients that were last clipped by norm, before that (0-dim, unscaled).

        None before the first clipping. With several optimizers, of the one clipped last. Costs nothing: log it from any
        hook after the step, such as ``on_train_batch_end``.
        """
        return self.precision_plugin.last_grad_norm

    plan = staticmethod(planner.make_plan)

    def memory_stats(self) -> dict[str, Any]:
        """Bytes that this rank holds, wherever they rest: ``{"now": {kind: bytes}, "peak": {kind: bytes}, "peak_total":
        bytes, "nvme": bytes}``, the last being those that are taken in files.

        Kinds: ``parameters``, ``gradients``, ``master``, ``optimizer``, ``buffers`` (unsharded flat buffers of units); in
        host memory beside them ``staging`` (copies on their way between device and host), ``undo`` (to take early updates
        back), ``delayed_gradients`` (whose update comes a step late) and ``file_buffers`` (what files are read into and
        written from); and ``activations`` that are kept in memory of their own. What waits for its next use counts as well.
        The kinds have their peaks at different times, ``peak_total`` is the most that all of them took at once.
        """
        engine = self.engine or self._optimizer_engine
        if engine is not None:
            files = None if self._tiers is None else self._tiers.files
            return {**engine.memory_stats(), "nvme": 0 if files is None else files.nbytes}
        parameters = list(self.lightning_module.parameters()) if self.lightning_module is not None else []
        held = {"parameters": sum(p.numel() * p.element_size() for p in parameters)}
        return {"now": held, "peak": dict(held), "peak_total": held["parameters"], "nvme": 0}

    def comm_stats(self) -> dict[str, dict[str, Any]]:
        """What this rank has sent since set-up: ``{collective: {"calls": n, "bytes": n, "seconds": s}}``.

        Seconds are those in which the program stood still for the collective; under NCCL the device's queue does the
        waiting, which is not seen here.
        """
        return {} if self._comm is None else self._comm.stats.as_dict()

    @property
    def has_pending_update(self) -> bool:
        """Whether a delayed update is under way or waits to be published."""
        return self.engine is not None and self.engine.has_pending_update

    # -- end ---------------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._interrupted = True
        self._restores_late = False
        if self.engine is not None:
            self.engine.abandon()
        super(DDPStrategy, self).on_exception(exception)  # DDP's own explains a reducer that is not there

    @override
    def teardown(self) -> None:
        self._restores_late = False
        try:
            if self.engine is not None:
                self._close_engine(self.engine)
        finally:
            if self._tiers is not None and self._tiers.files is not None:
                self._tiers.files.close()
        memory = self._link or (None if self._tiers is None else self._tiers.memory)
        if memory is not None and not self._interrupted:
            memory.clear()
        if self._recomputation is not None:
            self._recomputation.remove()
            self._recomputation = None
        if self._region is not None:
            self._region.close()
            self._region = None
        try:
            super().teardown()
        except (NotImplementedError, RuntimeError):
            # A module on the meta device, or left sharded, cannot move to the CPU. What has brought us here says it better.
            if not self._interrupted:
                raise
        try:
            self._folders.close()
        except (OSError, RuntimeError) as error:
            if not self._interrupted:
                raise
            rank_zero_warn(f"A checkpoint that was being saved when the exception came is lost: {error}")

    def _close_engine(self, engine: ZeroEngine) -> None:
        if not self._interrupted:
            engine.close()
            return
        try:
            engine.close(min(_CLOSE_TIMEOUT_SECONDS, self.config.read_timeout))
        except (RuntimeError, OSError) as error:
            rank_zero_warn(
                f"The module could not be made whole after the exception: its parameters stay sharded. {error}"
            )

    @override
    def __getstate__(self) -> dict:
        state = super().__getstate__()
        # Groups and engines belong to one process; the launcher pickles the strategy before either exists.
        left = dict.fromkeys(("engine", "_optimizer_engine", "_uneven", "_comm", "_comm_group", "_tiers", "_link", "_region"))
        return {**state, **left}

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for stage in (1, 2, 3):
            text = f"ZeRO stage {stage} for unchanged LightningModules"
            strategy_registry.register(f"zero_{stage}", cls, description=text, stage=stage)
            strategy_registry.register(
                f"zero_{stage}_offload", cls, description=f"{text}, stepping on the host", stage=stage, offload=True
            )
