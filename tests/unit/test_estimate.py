"""Predicted bytes: the paper's table, the formulas, modules, offload and what is refused."""

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import OffloadConfig, estimate, estimate_memory
from lightning_zero.estimate import optimizer_states, short_bytes, short_count

P, N = 2**20, 16


def test_docstrings_say_what_happens() -> None:
    failed, attempted = doctest.testmod(estimate)
    assert failed == 0
    assert attempted >= 2


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "16-true", "bf16-true"])
def test_the_table_of_the_paper(stage: int, gigabytes: float, precision: str) -> None:
    if stage == 0 and precision.endswith("true"):
        gigabytes = 60  # the paper has masters there, Lightning has none
    total = estimate_memory(7.5e9, world_size=64, stage=stage, precision=precision).total
    assert round(total / 1e9, 1) == gigabytes


@pytest.mark.parametrize(
    ("precision", "parameters", "gradients", "optimizer"),
    [("bf16-mixed", 4, 4, 8), ("16-true", 2, 2, 4), ("32-true", 4, 4, 8), ("64-true", 8, 8, 16)],
)
def test_plain_data_parallelism_is_lightnings_own(
    precision: str, parameters: int, gradients: int, optimizer: int
) -> None:
    plain = estimate_memory(P, N, 0, precision=precision)
    assert (plain.parameters, plain.gradients, plain.optimizer) == (parameters * P, gradients * P, optimizer * P)
    assert plain.master == 0


@pytest.mark.parametrize(
    ("given", "name"), [("bf16", "bf16-mixed"), (16, "16-mixed"), ("32", "32-true"), (64, "64-true"), ("BF16", "bf16-mixed")]
)
def test_precisions_are_spelt_as_the_trainer_takes_them(given: Any, name: str) -> None:
    assert estimate_memory(P, N, 2, precision=given) == estimate_memory(P, N, 2, precision=name)


@pytest.mark.parametrize(
    ("precision", "stage", "formula", "expected"),
    [
        ("32-true", 0, "16P", 16 * P),
        ("32-true", 1, "8P + 8P/N", 8 * P + 8 * P // N),
        ("32-true", 2, "4P + 12P/N", 4 * P + 12 * P // N),
        ("32-true", 3, "16P/N", 16 * P // N),
        ("bf16-true", 1, "4P + 12P/N", 4 * P + 12 * P // N),
        ("bf16-true", 2, "2P + 14P/N", 2 * P + 14 * P // N),
        ("bf16-true", 3, "16P/N", 16 * P // N),
        ("64-true", 2, "8P + 24P/N", 8 * P + 24 * P // N),
    ],
)
def test_formulas(precision: str, stage: int, formula: str, expected: int) -> None:
    it = estimate_memory(P, N, stage, precision=precision)
    assert (it.formula, it.total) == (formula, expected)


def test_the_formula_of_a_module_is_the_average_over_its_parameters() -> None:
    """Autocast computes with linear layers in 16 bits (2 + 2 + 12 bytes a parameter) and with embeddings in 32 (4 + 4 + 8)."""
    module = nn.Sequential(nn.Embedding(10, 10), nn.Linear(10, 30, bias=False))
    assert estimate_memory(module, 2, 1, precision="bf16-mixed").formula == "5P + 11P/N"
    module[1].weight.requires_grad_(False)
    assert estimate_memory(module, 2, 1, precision="bf16-mixed").formula == "8P + 8P/N"



def test_the_optimizer_multiplier_counts_states_of_the_masters_size() -> None:
    assert estimate_memory(P, N, 1, optimizer_multiplier=1).optimizer == 4 * P // N
    assert estimate_memory(P, N, 1, optimizer_multiplier=0).formula == "8P"
    assert estimate_memory(P, N, 3, optimizer_multiplier=0.5, precision="16-true").formula == "10P/N"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_leaves_what_the_device_computes_with(stage: int) -> None:
    it = estimate_memory(P, N, stage, offload=True, precision="bf16-mixed")
    assert it.device == {1: 4 * P, 2: 2 * P, 3: 2 * P // N}[stage]
    # The whole gradients of stage 1 stay on the device.
    assert it.host == (12 if stage == 1 else 14) * P // N
    # An offloaded fp32 parameter has a master of its own, because the parameter itself stays on the device.
    assert estimate_memory(P, N, stage, offload=True).host == (12 if stage == 1 else 16) * P // N
    assert estimate_memory(P, N, stage, offload=True).total == estimate_memory(P, N, stage).total + 4 * P // N
    assert "(host)" in str(it)


def test_buffers_are_units_under_way() -> None:
    unit = 1000
    stage_2, stage_3 = (estimate_memory(P, N, stage, largest_unit=unit, prefetch=2).buffers for stage in (2, 3))
    assert stage_2 == 4 * unit * 3  # one being filled, two being reduced
    assert stage_3 == 4 * unit * 3 + 4 * unit * 3  # and one in use with two prefetched
    assert estimate_memory(P, N, 1, largest_unit=unit).buffers == 0
    assert estimate_memory(P, 1, 3, largest_unit=unit).buffers == 0
    # On Gloo the other 15 ranks' shards of two reductions come beside them.
    received = 2 * 4 * unit * 15 // 16
    assert estimate_memory(P, N, 1, largest_unit=unit, backend="gloo").buffers == received
    assert estimate_memory(P, N, 2, largest_unit=unit, backend="gloo").buffers == stage_2 + received
    assert estimate_memory(P, 1, 2, largest_unit=unit, backend="gloo").buffers == 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.body = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_is_counted_as_it_is(device: str) -> None:
    with torch.device(device):
        module = Tied()
    trained, frozen = 64 * 16 + 16 * 16 + 16, 16 * 16
    plain = estimate_memory(module, 4, 0)
    assert plain.num_parameters == trained + frozen
    assert (plain.parameters, plain.gradients, plain.optimizer) == (4 * (trained + frozen), 4 * trained, 8 * trained)
    # On four ranks the 1296 trained elements are padded to 4 * 336, so that each shard is a multiple of 64 bytes; the
    # 256 frozen ones fit.
    sharded = estimate_memory(module, 4, 3)
    assert (sharded.parameters, sharded.gradients, sharded.optimizer) == (4 * (336 + 64), 4 * 336, 8 * 336)


def test_small_parameters_are_padded_on_many_ranks() -> None:
    # Every rank has at least 64 bytes of every flat buffer.
    assert estimate_memory(nn.Linear(3, 1), 1024, 3).parameters == 64


OPTIMIZERS: list[tuple[Callable, float]] = [
    (torch.optim.Adam, 2),
    (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
    (lambda p: torch.optim.AdamW(p, fused=True), 2),
    (torch.optim.SGD, 0),
    (lambda p: torch.optim.SGD(p, momentum=0.9), 1),
    (torch.optim.RMSprop, 1),
    (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3),
    (torch.optim.Adagrad, 1),
    (torch.optim.Adadelta, 2),
]


@pytest.mark.parametrize(("make", "states"), OPTIMIZERS)
def test_a_trial_step_tells_how_much_state_an_optimizer_keeps(make: Callable, states: float) -> None:
    module = nn.Linear(4, 4)
    before = module.weight.detach().clone()
    optimizer = make(module.parameters())
    kept = {key: dict(value) for key, value in optimizer.state.items()}
    assert optimizer_states([optimizer]) == states
    assert torch.equal(module.weight, before)
    assert module.weight.grad is None
    assert {key: dict(value) for key, value in optimizer.state.items()} == kept


def test_optimizers_are_weighted_by_what_they_train() -> None:
    small, large = nn.Linear(10, 1, bias=False), nn.Linear(10, 3, bias=False)
    assert optimizer_states([torch.optim.SGD(small.parameters()), torch.optim.Adam(large.parameters())]) == 1.5
    assert optimizer_states([]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size must be an integer of at least 1, got 0"),
        ({"world_size": 2.5}, "world_size must be an integer"),
        ({"stage": 4}, "stage must be 0 .*, 1, 2 or 3, got 4"),
        ({"precision": "bf8"}, "precision must be one of 32-true, .*, bf16, got 'bf8'"),
        ({"backend": "mpi"}, "backend must be 'nccl' or 'gloo', got 'mpi'"),
        ({"optimizer_multiplier": -1}, "optimizer_multiplier must not be negative"),
        ({"largest_unit": 0}, "largest_unit must be at least 1 parameter"),
        ({"model_or_num_parameters": 0}, "number of parameters must be at least 1"),
        ({"model_or_num_parameters": nn.ReLU()}, "ReLU has no parameters"),
        ({"offload": True, "stage": 0}, "offload=True needs stage 1, 2 or 3"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_memory(**{"model_or_num_parameters": P, "world_size": N, "stage": 2, **arguments})


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.00 B"), (999, "999.00 B"), (1000, "1.00 kB"), (31.4e9, "31.40 GB"), (2e15, "2000.00 TB")]
)
def test_sizes_are_decimal(size: float, text: str) -> None:
    assert short_bytes(size) == text


@pytest.mark.parametrize(("count", "text"), [(10, "10"), (834_304, "834.3K"), (7.5e9, "7.5B"), (2e12, "2T")])
def test_counts_are_short(count: float, text: str) -> None:
    assert short_count(count) == text


@pytest.mark.parametrize(
    ("offload", "device", "host", "nvme"),
    [
        (OffloadConfig(optimizer="nvme", nvme_path="x"), 2, 2, 12),
        (OffloadConfig(optimizer="nvme", parameters="nvme", nvme_path="x"), 0, 0, 16),
        (OffloadConfig(optimizer="nvme", parameters="cpu", nvme_path="x"), 0, 4, 12),
        (OffloadConfig(parameters="nvme", nvme_path="x"), 0, 14, 2),
    ],
)
def test_tiers(offload: OffloadConfig, device: int, host: int, nvme: int) -> None:
    it = estimate_memory(P, N, 3, offload, precision="bf16-mixed")
    assert (it.device, it.host, it.nvme) == (device * P // N, host * P // N, nvme * P // N)
    assert it.total == 16 * P // N
    assert "optimizer" in it.on_nvme or offload.optimizer == "cpu"
    assert "(files)" in str(it)


def test_on_cpus_the_parameter_shard_is_its_own_master_in_files_too() -> None:
    tiers = OffloadConfig(optimizer="nvme", nvme_path="x")
    assert estimate_memory(P, N, 3, tiers, backend="gloo").nvme == 8 * P // N
    assert estimate_memory(P, N, 3, tiers, backend="nccl").nvme == 12 * P // N
