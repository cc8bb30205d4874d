"""A run of one rank is what it is without a strategy: nobody to start, nobody to meet, nothing to divide."""

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override


class RunsAlone(DDPStrategy):
    """With one rank there is no launcher, no process group and no distributed sampler."""

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank."""
        return self.num_processes * self.num_nodes == 1

    @override
    def _configure_launcher(self) -> None:
        # Lightning's would watch over no processes, in a thread that outlives the run, and refuses notebooks.
        if not self.is_alone or self._start_method != "popen":
            super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None and self.is_alone:
            # A sampler for one of one replicas would shuffle training data that the user wants in order.
            trainer._accelerator_connector.use_distributed_sampler = False

    @override
    def setup_distributed(self) -> None:
        if not self.is_alone or self._process_group_backend is not None:
            super().setup_distributed()
        elif self.cluster_environment is not None:
            self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
            rank_zero_only.rank = 0  # type: ignore[attr-defined]

    # A scheduler's environment variables may be those of a job that has more to do than this run.

    @property
    @override
    def global_rank(self) -> int:
        return 0 if self.is_alone else super().global_rank

    @property
    @override
    def local_rank(self) -> int:
        return 0 if self.is_alone else super().local_rank

    @property
    @override
    def node_rank(self) -> int:
        return 0 if self.is_alone else super().node_rank

    @property
    @override
    def world_size(self) -> int:
        return 1 if self.is_alone else super().world_size
