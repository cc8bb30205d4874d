"""The console script ``lightning-zero``: what a model will need, whether this machine is ready, and one file from many."""

# What imports torch, which takes seconds, is imported by the commands that need it.
import argparse
import importlib.metadata
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from lightning_zero.formulas import (
    HOST_KINDS,
    KINDS,
    SIZES,
    MemoryEstimate,
    Setting,
    parse_count,
    ranks_text,
    short_count,
)
from lightning_zero.settings import OffloadConfig
from lightning_zero.tables import ByteUnit, new_table, render

if TYPE_CHECKING:
    from torch import nn


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    parser = _make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        from lightning_zero import doctor

        if arguments.ranks < 1:
            parser.error(f"--ranks must be at least 1, got {arguments.ranks}")
        return doctor.run(arguments.path, arguments.ranks)
    try:
        if arguments.command == "consolidate":
            _consolidate(arguments.folder, arguments.file)
            return 0
        with Console(stderr=True).status("Laying out the module ..."):  # on a terminal only
            text, code = _plan(arguments) if arguments.command == "plan" else (_estimate(arguments), 0)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(text)
    return code


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-zero", allow_abbrev=False, description="ZeRO for unchanged LightningModules.")
    parser.add_argument("--version", action="version", version=f"lightning_zero {importlib.metadata.version('lightning_zero')}")
    commands = parser.add_subparsers(dest="command", required=True)
    estimate = commands.add_parser(
        "estimate", allow_abbrev=False,
        help="bytes of model states on each rank, by stage",
        description="Bytes of model states on each rank, by stage; 0 is plain data parallelism.",
    )
    _add_model(estimate)
    estimate.add_argument("--ranks", type=int, nargs="+", default=[8], help="numbers of ranks (default: 8)")
    estimate.add_argument(
        "--stage", type=int, nargs="+", default=[0, 1, 2, 3], choices=(0, 1, 2, 3), help="(default: all)"
    )
    estimate.add_argument(
        "--backend", default="nccl", choices=("nccl", "gloo"), help="what carries gradients (default: nccl)"
    )
    estimate.add_argument("--offload", action="store_true", help="masters and optimizer state in host memory")
    estimate.add_argument("--early-update", action="store_true", help="with what takes early updates back (OffloadConfig)")
    estimate.add_argument("--delayed-update", action="store_true", help="with gradients whose update comes a step late")
    _add_shard_group_size(estimate)
    estimate.add_argument("--largest-unit", type=parse_count, metavar="N", help="parameters in the largest unit")
    plan = commands.add_parser(
        "plan", allow_abbrev=False,
        help="the cheapest configuration that fits",
        description="The cheapest configuration that fits: first by the bytes that ranks send to each other, then by those"
        " between device and host. Says why cheaper ones do not fit and prints the YAML to paste. The exit code is 1 if"
        " nothing fits.",
    )
    _add_model(plan)
    plan.add_argument("--ranks", type=int, default=8, help="number of ranks, over all nodes (default: 8)")
    plan.add_argument("--nodes", type=int, default=1, help="number of machines (default: 1)")
    _add_shard_group_size(plan)
    plan.add_argument("--device-memory", metavar="SIZE", help="of one device, as 80GB (default: this machine's)")
    plan.add_argument("--host-memory", metavar="SIZE", help="of one node, as 512GB (default: this machine's)")
    plan.add_argument("--nvme", default="0", metavar="SIZE", help="space on one node's NVMe for files (default: 0, none)")
    plan.add_argument(
        "--activations", metavar="SIZE",
        help="on each device for all but model states and buffers (default: a fifth of the device is kept free)",
    )  # fmt: skip
    plan.add_argument(
        "--accelerator", default="auto", choices=("auto", "cpu", "gpu"),
        help="cpu: ranks share their node's memory (default: what this machine has, or gpu with --device-memory)",
    )  # fmt: skip
    examine = commands.add_parser(
        "doctor", allow_abbrev=False,
        help="whether this machine is ready",
        description="Versions, backends, kernels, threads, memory, and what is known to go wrong together. The exit code is"
        " 1 if anything keeps training from working.",
    )
    examine.add_argument("--ranks", type=int, default=1, help="how many are to run on this machine (default: 1)")
    examine.add_argument("--path", metavar="FOLDER", help="measure how fast this folder's disk writes and reads")
    merge = commands.add_parser(
        "consolidate", allow_abbrev=False,
        help="make one file of a folder of shards",
        description="Make one Lightning checkpoint of the folder that state_dict_type='sharded' (or Lightning's FSDP) has"
        " written, in one process and little memory. A .safetensors file gets the weights only.",
    )
    merge.add_argument("folder", help="the checkpoint folder")
    merge.add_argument("file", help="the new file, ending in .ckpt, .pt, .pth or .safetensors")
    return parser


def _consolidate(folder: str, file: str) -> None:
    from lightning_zero.checkpoint.consolidate import consolidate
    from lightning_zero.progress import LateBar

    # Its name alone: a long path would leave no room for the bar.
    with LateBar(os.path.basename(file), after=0) as bar:
        consolidate(folder, file, bar)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a number of parameters (7.5B); package.module:Class, built on the meta device; or a config.json of Hugging"
        " Face, or the folder it is in",
    )
    parser.add_argument("--init-args", default="{}", metavar="JSON", help="keyword arguments for the class")
    parser.add_argument(
        "--precision", default="bf16-mixed", help=f"as for the Trainer: {', '.join(SIZES)}, ... (default: bf16-mixed)"
    )
    parser.add_argument(
        "--optimizer-states", type=float, default=2, metavar="K",
        help="numbers of state per parameter: 2 for Adam (default), 1 for SGD with momentum, 0 for SGD",
    )  # fmt: skip


def _add_shard_group_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shard-group-size", type=int, metavar="K", help="shard inside groups of K ranks (default: over all ranks)"
    )


def _model(arguments: argparse.Namespace) -> "nn.Module | int":
    if not arguments.model.endswith(".json") and ":" not in arguments.model and not os.path.isdir(arguments.model):
        return parse_count(arguments.model)
    if arguments.model.endswith(".json") and not os.path.exists(arguments.model):
        raise FileNotFoundError(f"there is no file {arguments.model!r}")
    import lightning_zero.names  # noqa: F401 (for modules that name the strategy by a string)
    from lightning_zero.meta import build_from_config, build_on_meta

    if arguments.model.endswith(".json") or os.path.isdir(arguments.model):
        return build_from_config(arguments.model)
    return build_on_meta(arguments.model, arguments.init_args)


def _plan(arguments: argparse.Namespace) -> tuple[str, int]:
    from lightning_zero.planner import make_plan

    plan = make_plan(
        _model(arguments),
        arguments.ranks,
        arguments.nodes,
        arguments.device_memory,
        arguments.host_memory,
        arguments.nvme,
        arguments.precision,
        arguments.optimizer_states,
        arguments.activations,
        arguments.accelerator,
        shard_group_size=arguments.shard_group_size,
    )
    return str(plan), int(plan.chosen is None)


def _estimate(arguments: argparse.Namespace) -> str:
    if arguments.early_update and not arguments.offload:
        raise ValueError("--early-update needs --offload: it is the step on the host that begins early")
    model = _model(arguments)
    tables = []
    for ranks in arguments.ranks:
        estimates = [_estimate_stage(model, ranks, stage, arguments) for stage in arguments.stage]
        tables.append(_table(estimates, arguments.offload))
    return "\n\n".join(tables)


def _estimate_stage(
    model: "nn.Module | int", ranks: int, stage: int, arguments: argparse.Namespace
) -> MemoryEstimate:
    setting = Setting(
        ranks,
        stage,
        OffloadConfig(early_update=arguments.early_update) if arguments.offload and stage else None,
        arguments.precision,
        arguments.optimizer_states,
        arguments.largest_unit,
        backend=arguments.backend,
        shard_group_size=arguments.shard_group_size,
        delayed_update=arguments.delayed_update and stage > 0,
    )
    if isinstance(model, int):
        return setting.of_count(model)
    from lightning_zero.estimate import estimate_module

    return estimate_module(model, setting)


def _table(estimates: list[MemoryEstimate], offload: bool) -> str:
    """One column per stage."""
    first = estimates[0]
    unit = ByteUnit.for_bytes(max(estimate.total for estimate in estimates))
    table = new_table(*(f"stage {estimate.stage}" if estimate.stage else "plain DP" for estimate in estimates))
    table.add_row("bytes", *(estimate.formula for estimate in estimates))

    def add(label: str, attribute: str) -> None:
        values = [getattr(estimate, attribute) for estimate in estimates]
        if any(values):
            table.add_row(label, *map(unit.show, values))

    table.add_section()
    for kind in KINDS:
        add(kind, kind)
    table.add_section()
    add("model states", "total")
    if offload:
        add("on the host", "host")
        add("on the device", "device")
    add("buffers", "buffers")
    for kind in HOST_KINDS:
        add(f"{kind.replace('_', ' ')} (host)", kind)
    ranks = ranks_text(first.world_size, estimates[-1].num_shards)
    count = short_count(first.num_parameters)
    return render(table, [f"Memory per rank in {unit.name}: {count} parameters, {ranks}, {first.precision}"])
