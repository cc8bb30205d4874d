"""Arguments of the strategies people come from: which argument here does the same, or why there is none."""

import inspect
from typing import Any

from typing_extensions import Self

_DDP = {
    "find_unused_parameters": "Not needed: unused parameters, also on some ranks only, work at every stage. Remove it.",
    "static_graph": "Not needed: graphs may change from step to step. Remove it.",
    "gradient_as_bucket_view": "Not needed: gradients lie in flat buffers already. Remove it.",
    "bucket_cap_mb": "Use unit_size_mb: gradients are reduced unit by unit.",
    "bucket_cap_mb_list": "Use unit_size_mb: gradients are reduced unit by unit.",
    "broadcast_buffers": "Not needed: buffers follow rank 0's before every synchronised forward, as under DDP's default."
    " Remove it.",
    "forward_sync_buffers": "Not needed: buffers follow rank 0's before every synchronised forward. Remove it.",
    "init_sync": "Not needed: all ranks start from rank 0's weights. Remove it.",
    "check_reduction": "Not needed. Remove it.",
    "batched_grad_copy": "Not needed. Remove it.",
    "skip_all_reduce_unused_params": "Not needed: what no rank has used is not sent. Remove it.",
    "ddp_comm_hook": "Use reduce_dtype for a compressing hook (reduce_dtype='bfloat16' for bf16_compress_hook); other"
    " communication hooks are not supported.",
    "ddp_comm_state": "Use reduce_dtype for a compressing hook; other communication hooks are not supported.",
    "ddp_comm_wrapper": "Use reduce_dtype for a compressing hook; other communication hooks are not supported.",
    "model_averaging_period": "Not supported: gradients are reduced in every step, there is nothing to average later.",
    "delay_all_reduce_named_params": "Not supported: each gradient is reduced as soon as its unit is complete.",
    "param_to_hook_all_reduce": "Not supported: each gradient is reduced as soon as its unit is complete.",
    "device_ids": "Use devices of the Trainer.",
    "output_device": "Use devices of the Trainer.",
    "dim": "Not needed: each rank has its own batch. Remove it.",
    "process_group": "Use process_group_backend; shard_group_size and model_parallel form groups of ranks.",
    "module": "Use the module given to trainer.fit: it is never wrapped.",
}
_FSDP = {
    "cpu_offload": "Use offload: master weights, optimizer state and the step on the host.",
    "mixed_precision": "Use Trainer(precision='bf16-mixed') or 'bf16-true', and reduce_dtype.",
    "auto_wrap_policy": "Use unit_policy, which takes the same classes and callables; by default units are chosen automatically.",
    "activation_checkpointing": "Use activation_checkpointing_policy.",
    "sharding_strategy": "Use stage: 'SHARD_GRAD_OP' is stage=2, 'FULL_SHARD' is stage=3, 'HYBRID_SHARD' is shard_group_size,"
    " 'NO_SHARD' is plain DDP.",
    "device_mesh": "Use shard_group_size for a mesh of replicas and shards, model_parallel for one with a tensor-parallel dimension.",
    "backward_prefetch": "Use prefetch: units gathered ahead, in forward and backward.",
    "forward_prefetch": "Use prefetch: units gathered ahead, in forward and backward.",
    "limit_all_gathers": "Use prefetch: units gathered ahead bound the memory.",
    "use_orig_params": "Not needed: the module always keeps its own parameters. Remove it.",
    "ignored_modules": "Not supported: every parameter is sharded. Freeze what is not to be trained.",
    "ignored_states": "Not supported: every parameter is sharded. Freeze what is not to be trained.",
    "param_init_fn": "Not needed: a module on the meta device is initialised by its own code (docs/large-models.md). Remove it.",
    "sync_module_states": "Not needed: all ranks start from rank 0's weights. Remove it.",
    "device_id": "Use devices of the Trainer.",
    "data_parallel_size": "Use model_parallel: the data-parallel size is devices times num_nodes of the Trainer, divided by it.",
    "tensor_parallel_size": "Use model_parallel; the module brings its own tensor-parallel layers (docs/model-parallel.md).",
    "save_distributed_checkpoint": "Use state_dict_type.",
}
_DEEPSPEED = {
    "zero_optimization": "Use stage. Without sharding use Trainer(strategy='ddp').",
    "offload_optimizer": "Use offload=True.",
    "offload_optimizer_device": "Use offload: True for the host, or an OffloadConfig.",
    "offload_parameters": "Use offload: OffloadConfig(parameters=...).",
    "offload_params_device": "Use offload: OffloadConfig(parameters=...).",
    "remote_device": "Use offload: OffloadConfig(parameters=...).",
    "nvme_path": "Use offload: OffloadConfig(nvme_path=...).",
    "pin_memory": "Not needed: host memory is pinned where that helps.",
    "thread_count": "Use offload: OffloadConfig(num_threads=...).",
    "sub_group_size": "Not needed: the host's step runs unit by unit. Remove it.",
    "overlap_comm": "Not needed: reduction always runs beside backward. Remove it.",
    "contiguous_gradients": "Not needed: gradients lie in flat buffers already. Remove it.",
    "reduce_scatter": "Not needed: gradients are always reduce-scattered. Remove it.",
    "allgather_partitions": "Not needed: parameters are always all-gathered. Remove it.",
    "allgather_bucket_size": "Use unit_size_mb, in MiB.",
    "reduce_bucket_size": "Use unit_size_mb, in MiB.",
    "zero_allow_untested_optimizer": "Not needed: every element-wise optimizer works, others are refused by name. Remove it.",
    "logging_batch_size_per_gpu": "Not needed: the batch size is never asked for. Remove it.",
    "logging_level": "Not needed: what there is to say comes through Python's warnings. Remove it.",
    "config": "Use this strategy's arguments and the Trainer's: there is no engine configuration.",
    "load_full_weights": "Not needed: a checkpoint always loads at any stage and number of ranks. Remove it.",
    "exclude_frozen_parameters": "Not supported: a checkpoint holds the whole model.",
    "partition_activations": "The same, beside model_parallel.",
    "cpu_checkpointing": "Use activation_offload.",
    "contiguous_memory_optimization": "Use contiguous_activations.",
    "synchronize_checkpoint_boundary": "Not needed. Remove it.",
}
_NVME = "params_buffer_count params_buffer_size max_in_cpu optimizer_buffer_count block_size queue_depth single_submit overlap_events"
_LOSS_SCALE = "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"

ADVICE = {
    **_DDP,
    **_FSDP,
    **_DEEPSPEED,
    **dict.fromkeys(_NVME.split(), "Use offload: an OffloadConfig sets up the NVMe tier."),
    **dict.fromkeys(
        _LOSS_SCALE.split(), "Use Trainer(plugins=[ZeroPrecision('16-mixed', scaler=torch.amp.GradScaler(...))])."
    ),
}


class AnswersForeignArguments:
    """Raises TypeError with advice for other strategies' arguments that the class does not take.

    A base class of its own, because the command line shows what ``__init__`` takes, unless the class itself has a
    ``__new__``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        taken = inspect.signature(cls.__init__).parameters
        foreign = [name for name in kwargs if name in ADVICE and name not in taken]
        if foreign:
            advice = " ".join(f"{name}: {ADVICE[name]}" for name in foreign)
            raise TypeError(f"{cls.__name__} does not take {', '.join(foreign)}, as other strategies do. {advice}")
        return super().__new__(cls)
