"""What works and what is refused, each with the test that shows it: the table of the README is written from this.

    python -m tests.promises        # writes the table into README.md

A test is named by file in tests/strategy and by what the file calls it: a test function, the module that a parametrised
test trains, or a key of a dictionary of cases.
"""

from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
HEAD = "| | works | refused, by name |\n|---|---|---|\n"

Promises = dict[str, str]

TABLE: dict[str, tuple[Promises, Promises]] = {
    "optimizers": (
        {
            "any element-wise one": "test_checkpoint.py::test_other_optimizers_resume",
            "several": "test_modules.py::Gan",
            "param groups": "test_lightning_features.py::DecayGroups",
            "schedulers": "test_modules.py::LayerwiseRates",
            "subclasses with a step of their own": "test_lightning_features.py::OwnStep",
        },
        {
            "LBFGS": "test_bad_input.py::lbfgs",
            "Adafactor": "test_bad_input.py::adafactor",
            "SparseAdam": "test_bad_input.py::sparse adam",
            "optimizers around optimizers": "test_bad_input.py::wrapper",
            "anything else that needs whole matrices (Muon, Shampoo)": "test_bad_input.py::row norm",
        },
    ),
    "optimization": (
        {
            "automatic": "test_gradients.py::AccumulatedAdam",
            "manual": "test_gradients.py::ManualBackward",
            "several backwards": "test_gradients.py::SeveralBackwards",
            "accumulation": "test_gradients.py::OwnAccumulation",
            "toggling": "test_gradients.py::Adversaries",
            "clipping by norm and value": "test_gradients.py::ClippedTwice",
            "gradients of gradients": "test_gradients.py::GradientPenalty",
            "editing, masking, replacing `p.grad`": "test_gradients.py::Rewritten",
            "sparse gradients (reduced as dense ones)": "test_gradients.py::Words",
        },
        {"`torch.func` in reverse mode inside a step at stage 3": "test_bad_input.py::test_reverse_mode_transforms_at_stage_3"},
    ),
    "modules": (
        {
            "tied weights": "test_modules.py::Tied",
            "a sibling's weights": "test_modules.py::SiblingWeight",
            "methods other than `forward`": "test_modules.py::OtherMethods",
            "bare parameters": "test_modules.py::BareParameters",
            "recurrent": "test_modules.py::Recurrent",
            "attention": "test_modules.py::Transformer",
            "batch norm": "test_modules.py::ResidualNet",
            "parametrizations": "test_modules.py::Normalised",
            "frozen parts and adapters": "test_modules.py::Adapters",
            "recompute of both kinds": "test_modules.py::FrozenReentrant",
            "mixtures of experts": "test_modules.py::RoutedExperts",
            "Hugging Face models and `peft`": "test_real_models.py::test_pretrained_encoder",
            "`torch.compile`": "test_lightning_features.py::test_compiled_lightning_module",
            "built on the meta device": "test_large_models.py::Built",
            "weights read from files as the module is sharded": "test_large_models.py::test_pretrained_weights",
        },
        {
            "lazy parameters": "test_bad_input.py::lazy",
            "meta parameters without an initialiser": "test_bad_input.py::meta",
            "tensor subclasses": "test_bad_input.py::subclass",
            "two tensors over one memory": "test_bad_input.py::shared memory",
            "TorchScript": "test_bad_input.py::scripted",
            "SyncBatchNorm on CPUs": "test_lightning_features.py::test_synced_batch_norm_on_cpu_is_refused_by_name",
        },
    ),
    "during a run": (
        {
            "reading in every hook": "test_edits.py::Reading",
            "editing weights in steps and hooks": "test_edits.py::Constrained",
            "`deepcopy` and pickle": "test_edits.py::Copying",
            "`load_state_dict` in a hook": "test_edits.py::FollowingTeacher",
            "unfreezing": "test_edits.py::GradualUnfreezing",
            "pruning": "test_edits.py::Pruned",
        },
        {
            "edits that differ between ranks": "test_bad_input.py::test_edits_that_cannot_be_kept",
            "new parameters": "test_bad_input.py::test_parameters_that_come_later_are_refused_at_the_next_step",
            "reads by one rank of what is sharded": "test_hangs.py::test_what_only_one_rank_does_is_an_error",
        },
    ),
    "ranks that differ": (
        {
            "branches": "test_hangs.py::Branches",
            "unused parameters": "test_hangs.py::DeadLayer",
            "numbers of training batches (the fewest count)": "test_hangs.py::test_training_ends_with_the_rank_that_has_the_fewest_batches",
            "a stop signal to one": "../launch/test_failures.py::test_a_stop_signal_ends_all_ranks_after_the_same_batch",
            "numbers of evaluation batches": "test_hangs.py::test_evaluation_with_different_numbers_of_batches",
        },
        {
            "other parameters": "test_bad_input.py::test_ranks_with_different_modules",
        },
    ),
    "Lightning": (
        {
            "averaging (EMA, SWA)": "test_lightning_features.py::stochastic_weight_averaging",
            "finetuning callbacks": "test_lightning_features.py::test_backbone_finetuning",
            "learning rate finder": "test_lightning_features.py::learning_rate_finder",
            "profilers": "test_lightning_features.py::pytorch_profiler",
            "`barebones`": "test_lightning_features.py::test_barebones",
            "LightningCLI": "test_lightning_features.py::test_command_line_builds_the_strategy",
        },
        {
            "batch size finder (by Lightning)": "test_lightning_features.py::test_batch_size_finder_is_refused_by_lightning",
            "arguments of other strategies": "test_bad_input.py::test_arguments_of_other_strategies_are_answered",
        },
    ),
    "precision": (
        {
            "32, bf16 and fp16, mixed and true": "test_precision.py::test_contract",
            "stage 3's parameters sent in 8 bits (`gather_dtype`)": (
                "test_coded_gathers.py::test_training_is_that_of_a_module_that_rounds_its_weights"
            ),
        },
        {
            "Transformer Engine, bitsandbytes": "test_bad_input.py::test_foreign_plugins",
            "edits in steps of what is sent in 8 bits": "test_coded_gathers.py::test_edits_inside_steps_are_refused_by_name",
        },
    ),
    "checkpoints": (
        {
            "one file": "test_checkpoint.py::test_files_equal_those_of_ddp",
            "a folder of shards": "test_sharded_checkpoint.py::*",
        },
        {},
    ),
    "groups of ranks": (
        {
            "hybrid sharding (`shard_group_size`)": "test_hybrid.py::test_four_ranks",
            "a module's own tensor parallelism (`model_parallel`)": "test_model_parallel.py::test_two_by_two_ranks_are_one_process",
            "its checkpoints": "test_parts.py::test_resuming_is_going_on",
        },
        {"checkpoints of another `model_parallel` size": "test_parts.py::test_what_does_not_fit_is_refused_on_all_ranks"},
    ),
    "offload": (
        {
            "optimizer state in host memory": "test_offload.py::test_offload_equals_ddp",
            "or in files": "test_nvme.py::test_optimizer_in_files",
            "stage 3's parameters in either": "test_nvme.py::test_parameters_in_files",
            "every pair of them": "test_nvme.py::test_every_pair_of_tiers",
        },
        {
            "parameters away from the device at stages 1 and 2": "test_nvme.py::parameters at stage 2",
            "delayed and early updates of files": "test_nvme.py::delayed",
        },
    ),
}


def tests() -> dict[str, str]:
    """By promise: the test that shows it."""
    return {promise: test for pair in TABLE.values() for promises in pair for promise, test in promises.items()}


def table() -> str:
    rows = [f"| {area} | {', '.join(works)} | {', '.join(refused)} |" for area, (works, refused) in TABLE.items()]
    return HEAD + "\n".join(rows).replace("|  |", "| |") + "\n"


def written(text: str) -> str:
    """The README with the table of today."""
    start = text.index(HEAD)
    return text[:start] + table() + text[text.index("\n\n", start) + 1 :]


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
