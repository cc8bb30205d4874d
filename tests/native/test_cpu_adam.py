"""CPUAdam as an optimizer: torch's results, torch's state dicts, and clear refusals."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from lightning_zero.offload import CPUAdam

SHAPES = ((16, 16), (32,), (3, 5, 7), (1,), (0, 4), ())
KINDS = list(itertools.product((False, True), (False, True), (False, True), (0.0, 0.1)))


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def torch_twin(params: list[nn.Parameter], adamw_mode: bool, **options: Any) -> torch.optim.Optimizer:
    return (AdamW if adamw_mode else Adam)(params, **options)


def assert_close(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("adamw_mode", "amsgrad", "maximize", "weight_decay"), KINDS)
def test_100_steps_of_torch(adamw_mode: bool, amsgrad: bool, maximize: bool, weight_decay: float) -> None:
    options = {"lr": 1e-2, "amsgrad": amsgrad, "maximize": maximize, "weight_decay": weight_decay}
    ours, theirs = make_params(), make_params()
    train(CPUAdam(ours, adamw_mode=adamw_mode, **options), ours, 100)
    train(torch_twin(theirs, adamw_mode, fused=True, **options), theirs, 100)
    assert_close(ours, theirs)
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        # These two have no ragged end, which torch computes by other roundings.
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize(("adamw_mode", "amsgrad", "maximize", "weight_decay"), KINDS)
def test_state_goes_to_torch_and_back(adamw_mode: bool, amsgrad: bool, maximize: bool, weight_decay: float) -> None:
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "amsgrad": amsgrad, "maximize": maximize, "weight_decay": weight_decay}
    params, unbroken = make_params(), make_params()
    first = CPUAdam(params, adamw_mode=adamw_mode, **options)
    train(first, params, 3, seed=1)
    second = torch_twin(params, adamw_mode)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, params, 3, seed=2)
    third = CPUAdam(params, adamw_mode=adamw_mode)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    train(third, params, 3, seed=3)

    reference = torch_twin(unbroken, adamw_mode, **options)
    for seed in (1, 2, 3):
        train(reference, unbroken, 3, seed=seed)
    assert_close(params, unbroken)
    for mine, its in zip(third.state.values(), reference.state.values()):
        assert mine.keys() == its.keys()
        for key in its:
            torch.testing.assert_close(mine[key], its[key], rtol=1e-5, atol=1e-6)
            assert mine[key].dtype == its[key].dtype


def test_the_kind_of_decay_is_the_optimizers_own() -> None:
    params = make_params()
    adamw = AdamW(params, weight_decay=0.1)
    train(adamw, params, 1)
    adam = CPUAdam(params, adamw_mode=False)
    adam.load_state_dict(adamw.state_dict())
    assert adam.param_groups[0]["decoupled_weight_decay"] is False
    assert adam.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_alike(duplicate: Any) -> None:
    params = make_params()
    optimizer = CPUAdam(params, lr=1e-2, weight_decay=0.1, adamw_mode=False, num_threads=1)
    train(optimizer, params, 2)
    twin = duplicate(optimizer)
    twin_params = twin.param_groups[0]["params"]
    train(optimizer, params, 2)
    train(twin, twin_params, 2)
    assert twin.num_threads == 1
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params))


def test_groups_tensor_lr_and_scheduler() -> None:
    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:2], "lr": torch.tensor(0.02)}, {"params": params[2:], "betas": (0.5, 0.9)}]

    ours, theirs = make_params(), make_params()
    for params, kind in ((ours, CPUAdam), (theirs, AdamW)):
        optimizer = kind(groups(params), lr=1e-2, weight_decay=0.1)
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        for seed in range(4):
            train(optimizer, params, 1, seed=seed)
            scheduler.step()
    assert_close(ours, theirs)


def test_unused_parameters_16_bit_and_strided_gradients() -> None:
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(4)]
    optimizer = CPUAdam(params)
    params[1].grad = torch.arange(16.0).view(4, 4)
    params[2].grad = params[1].grad.T.contiguous().T
    optimizer.step()
    assert torch.equal(params[0], torch.ones(4, 4))
    assert params[0] not in optimizer.state
    assert torch.equal(params[1], params[2])


def test_a_refused_gradient_is_not_counted() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = CPUAdam([param])
    param.grad = torch.ones(4).to_sparse()
    with pytest.raises(RuntimeError, match=r"parameter 0 has one of layout torch\.sparse_coo"):
        optimizer.step()
    assert not optimizer.state[param]


def test_closure() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([param], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert (param < 1).all()


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (
            torch.zeros(2, dtype=torch.bfloat16),
            TypeError,
            "needs torch.float32 parameters; parameter 2 is torch.bfloat16",
        ),
        (torch.zeros(2, dtype=torch.complex64), TypeError, "parameter 2 is torch.complex64"),
        (torch.zeros(2, device="meta"), ValueError, "parameter 2 has layout torch.strided on device meta"),
        (torch.zeros(2, 2).to_sparse(), ValueError, "parameter 2 has layout torch.sparse_coo"),
        (torch.zeros(4, 2).T, ValueError, r"parameter 2 has shape \(2, 4\) with strides \(1, 2\)"),
    ],
)
def test_refuses_by_index(bad: torch.Tensor, error: type[Exception], text: str) -> None:
    good = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = CPUAdam(good[:1])
    with pytest.raises(error, match=text):
        optimizer.add_param_group({"params": [good[1], nn.Parameter(bad)]})
    assert len(optimizer.param_groups) == 1


def test_names_are_told() -> None:
    with pytest.raises(TypeError, match=r"parameter 1 \(head\.weight\)"):
        CPUAdam([("body.weight", nn.Parameter(torch.zeros(2))), ("head.weight", nn.Parameter(torch.zeros(2).half()))])


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"lr": -1.0}, "lr must not be negative"),
        ({"lr": torch.zeros(2)}, "one element"),
        ({"betas": (0.9, 1.0)}, "betas must be in"),
        ({"eps": -1e-8}, "eps must not be negative"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"num_threads": 0}, "num_threads must be at least 1"),
    ],
)
def test_refuses_options(option: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CPUAdam([nn.Parameter(torch.zeros(2))], **option)
