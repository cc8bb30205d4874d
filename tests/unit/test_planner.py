"""The planner: what is cheap, what fits, why the rest does not, and what can be pasted."""

import doctest
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from lightning_zero import OffloadConfig, ZeroStrategy, planner
from lightning_zero.estimate import estimate_memory
from lightning_zero.planner import Plan, make_plan, parse_bytes

GB = 1e9
P, N = 10**9, 8
CHEAPEST_FIRST = ["stage 1", "stage 2", "stage 1 + offload", "stage 2 + offload", "stage 3", "stage 3 + offload", "stage 3 + all offload"]


def plan(device: float, host: float = 1e15, **kwargs: object) -> Plan:
    settings = {"activations": 0, "precision": "bf16-mixed", **kwargs}
    return make_plan(P, N, device_memory=device, host_memory=host, **settings)  # type: ignore[arg-type]


def test_docstrings_say_what_happens() -> None:
    assert doctest.testmod(planner) == (0, 4)


def test_communication_comes_first_then_the_bus_then_the_stage() -> None:
    options = plan(1e15).options
    assert [option.name for option in options] == CHEAPEST_FIRST
    by_name = {option.name: option for option in options}
    # Of 2-byte parameters and gradients a rank sends 7 of 8 shards twice, at stage 3 three times.
    assert by_name["stage 1"].sent == by_name["stage 2 + offload"].sent == 2 * 2 * P * 7 / 8
    assert by_name["stage 3"].sent == 3 * 2 * P * 7 / 8
    # Its own gradients go down and its own parameters come up.
    assert by_name["stage 2"].moved == 0
    assert {by_name[f"stage {stage} + offload"].moved for stage in (1, 2, 3)} == {2 * 2 * P / 8}


def test_shard_groups_send_less_across_and_hold_more() -> None:
    options = {option.name: option for option in plan(1e15, shard_group_size=2, num_nodes=4).options}
    # Inside a group of 2 a rank sends half of the gradients and half of the parameters; across the four groups of their
    # half, there and back, 3 of 4 pieces.
    across = 2 * 3 / 4 / 2
    assert options["stage 2"].sent == (2 * 1 / 2 + across) * 2 * P
    assert options["stage 3"].sent == (3 * 1 / 2 + across) * 2 * P
    assert options["stage 3 + offload"].moved == 2 * 2 * P / 2
    assert options["stage 3"].estimate.total == 16 * P / 2
    assert options["stage 3"].estimate.formula == "16P/k"
    chosen = plan(6.5 * GB, shard_group_size=4)
    # 4P + 12P/k = 7, 2P + 14P/k = 5.5, of 8 ranks in groups of 4.
    assert chosen.init_args == {"stage": 2, "shard_group_size": 4}
    assert "8 ranks in groups of k = 4" in str(chosen)
    assert "      shard_group_size: 4" in chosen.yaml
    with pytest.raises(ValueError, match="shard_group_size=3 does not divide the 8 ranks"):
        plan(1e15, shard_group_size=3)


@pytest.mark.parametrize("name", CHEAPEST_FIRST)
def test_the_cheapest_that_fits_is_taken(name: str) -> None:
    # Each is the first that fits some device, unless one before it is both cheaper and smaller.
    wanted = next(option for option in plan(1e15).options if option.name == name)
    device = wanted.device
    found = plan(device).chosen
    assert found is not None
    assert found.cost <= wanted.cost
    assert found.device <= device
    smaller = [option for option in plan(1e15).options if option.cost < found.cost]
    assert all(option.device > device for option in smaller)


def test_devices_of_all_sizes() -> None:
    # 4P + 12P/N = 5.5, 2P + 14P/N = 3.75, 2P + buffers = 2.1, 2P/N = 0.25, each with buffers of 0.1 to 0.17.
    assert plan(6 * GB).init_args == {"stage": 1}
    assert plan(5 * GB).init_args == {"stage": 2}
    assert plan(4 * GB).init_args == {"stage": 2}
    assert plan(3 * GB).init_args == {"stage": 2, "offload": True}
    # Less than the 4 of the whole module in 32 bit: it is brought there unit by unit.
    assert plan(0.5 * GB).init_args == {"stage": 3, "offload": True}
    # And the 0.25 GB of parameters rest on the host.
    assert plan(0.4 * GB).init_args == {"stage": 3, "offload": OffloadConfig(parameters="cpu")}
    refused = plan(0.1 * GB)
    assert refused.chosen is None
    with pytest.raises(RuntimeError, match="No configuration fits"):
        refused.yaml  # noqa: B018


def test_a_fifth_is_kept_free_unless_told() -> None:
    assert plan(6 * GB, activations=None).init_args == {"stage": 2}
    assert plan(7 * GB, activations=None).init_args == {"stage": 1}
    assert plan(7 * GB, activations="2GB").init_args == {"stage": 2}


def test_a_small_host_keeps_offload_out() -> None:
    # Stages 1 and 2 need activations that only offload leaves room for; a node would hold 14 GB of them, and for copies on
    # their way five shards of a unit of 32 MiB and one of what is left over for each rank, 0.19 GB in all.
    kwargs = {"activations": 2.2 * GB}
    assert plan(5 * GB, host=100 * GB, **kwargs).init_args == {"stage": 2, "offload": True}
    small = plan(5 * GB, host=17 * GB, **kwargs)
    assert small.init_args == {"stage": 3}
    why = "stage 2 + offload does not fit: 14.19 GB, and 3.40 GB for everything else, are more than the 17.00 GB of a node."
    assert why in small.reasons


def test_what_would_help_is_named() -> None:
    text = " ".join(str(plan(0.1 * GB)).split())
    assert "Nothing fits." in text
    assert "files (OffloadConfig(optimizer='nvme')) would take 12.00 GB off each node and need as much space there" in text
    assert "trainer:" not in text


def test_files_come_last() -> None:
    """One rank's 12 GB of masters and state fit neither its device nor its host."""
    kwargs: dict[str, Any] = {"activations": 0, "nvme_space": "13GB"}
    assert plan(5 * GB, host=100 * GB, **kwargs).init_args == {"stage": 2}
    alone = make_plan(P, 1, device_memory="7GB", host_memory="10GB", precision="bf16-mixed", **kwargs)
    assert alone.init_args == {"stage": 1, "offload": OffloadConfig("nvme", None, "FOLDER")}
    assert "optimizer: nvme\n        nvme_path: FOLDER" in alone.yaml
    kwargs["nvme_space"] = "11GB"
    assert "its files take 12.00 GB of the 11.00 GB of a node's NVMe" in " ".join(
        str(make_plan(P, 1, device_memory="7GB", host_memory="10GB", precision="bf16-mixed", **kwargs)).split()
    )


def test_a_single_rank_has_offload_only() -> None:
    one = make_plan(P, 1, device_memory="12GB", host_memory="64GB", precision="bf16-mixed")
    assert [option.name for option in one.options] == ["stage 1", "stage 1 + offload", "stage 3 + all offload"]
    assert one.init_args == {"stage": 1, "offload": True}


def test_on_cpus_ranks_share_their_node() -> None:
    shared = make_plan(P, 4, host_memory="32GB", accelerator="cpu", activations=0)
    assert [option.name for option in shared.options] == ["stage 1", "stage 2", "stage 3"]
    # 4P + 3P for each of four ranks, with buffers; gloo's received shards among them.
    expected = estimate_memory(P, 4, 2, backend="gloo")
    assert shared.options[1].host == 4 * (expected.total + expected.buffers)
    assert shared.init_args == {"stage": 2}
    assert "host <->" not in str(shared)


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_the_yaml_builds_the_strategy(accelerator: str) -> None:
    memory = {"host_memory": "1TB"} if accelerator == "cpu" else {"device_memory": "5GB", "host_memory": "1TB"}
    made = make_plan(P, N, num_nodes=2, precision="bf16", accelerator=accelerator, activations="2.2GB", **memory)  # type: ignore[arg-type]
    trainer = yaml.safe_load(made.yaml)["trainer"]
    strategy = trainer.pop("strategy")
    assert trainer == {"accelerator": accelerator, "devices": 4, "num_nodes": 2, "precision": "bf16-mixed"}
    assert strategy["class_path"] == "lightning_zero.ZeroStrategy"
    assert strategy["init_args"] == made.init_args
    assert ("offload" in made.init_args) == (accelerator == "gpu")
    assert ZeroStrategy(**strategy["init_args"]).config.stage == made.init_args["stage"]


def test_modules_are_planned_as_they_are() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(10)]).requires_grad_(False)
    frozen = ZeroStrategy.plan(module, 4, device_memory="100MB", host_memory="1GB")
    # Nothing to train: the 40 MB of parameters are all there is.
    assert frozen.init_args == {"stage": 1}
    module.requires_grad_(True)
    assert ZeroStrategy.plan(module, 4, device_memory="120MB", host_memory="1GB").init_args == {"stage": 2}


@pytest.mark.parametrize("arguments", [(7.5e9, 64, 8), (P, N, 1), (P, 1, 1)])
@pytest.mark.parametrize("device", ["1GB", "24GB", "500GB"])
def test_plans_are_80_columns_wide(arguments: tuple, device: str) -> None:
    text = str(make_plan(*arguments, device_memory=device, host_memory="512GB", nvme_space="1TB"))
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80e9), ("80 gb", 80e9), ("512GiB", 512 * 2**30), ("1.5T", 1.5e12), ("1,000", 1000), (5, 5), ("7B", 7), ("8e10", 8e10)],
)
def test_sizes_are_read(text: str | int, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_memory": "lots"}, "'lots' is not a size such as 80GB, 512 GiB or 8e10"),
        ({"device_memory": "-1GB"}, "a size must be finite and not negative, got '-1GB'"),
        ({"device_memory": "5XB"}, "'5XB' is not a size"),
        ({"num_nodes": 3}, "num_nodes must divide the 8 ranks evenly, got 3"),
        ({"num_nodes": 0}, "num_nodes must divide"),
        ({"accelerator": "tpu"}, "accelerator must be 'auto', 'cpu' or 'gpu', got 'tpu'"),
        ({"accelerator": "cpu"}, "device_memory='1GB' has no meaning with accelerator='cpu': give host_memory"),
        ({"precision": "8"}, "precision must be one of"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(**{"model_or_num_parameters": P, "world_size": N, "device_memory": "1GB", **arguments})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator")
def test_a_device_that_is_not_there_has_no_size() -> None:
    with pytest.raises(ValueError, match="this machine has no accelerator that tells its memory: give device_memory"):
        make_plan(P, N, accelerator="gpu")
