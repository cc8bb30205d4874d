"""The last layer and its loss in chunks: what the two give one after the other, without their logits."""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.ops import available_isas, fused_linear_cross_entropy
from tests.native.conftest import UseIsa

BACKENDS = (*available_isas()[:1], "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-12}
Case = tuple[Tensor, Tensor, Tensor, Tensor]


def make_case(dtype: torch.dtype, rows: tuple[int, ...] = (2, 9), features: int = 8, classes: int = 37) -> Case:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*rows, features, generator=generator).to(dtype)
    weight = (torch.randn(classes, features, generator=generator) / 2).to(dtype)
    bias = torch.randn(classes, generator=generator).to(dtype)
    target = torch.randint(classes, rows, generator=generator)
    target.view(-1)[1:3] = -100
    return hidden, weight, bias, target


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_rows", [1, 4, None])
def test_is_the_layer_and_the_loss(backend: str, dtype: torch.dtype, chunk_rows: int | None, use_isa: UseIsa) -> None:
    use_isa(backend)
    hidden, weight, bias, target = make_case(dtype)
    class_weight = torch.rand(37) + 0.1
    for reduction in ("mean", "sum", "none"):
        for options in ({}, {"label_smoothing": 0.1, "weight": class_weight}):
            shape = (2, 9) if reduction == "none" else ()
            grad_output = torch.rand(shape) + 0.5
            wide = [x.double().requires_grad_() for x in (hidden, weight, bias)]
            torch_options = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
            logits = F.linear(*wide).flatten(0, 1)
            expected = F.cross_entropy(logits, target.flatten(), reduction=reduction, **torch_options).view(shape)
            gradients = torch.autograd.grad(expected, wide, grad_output.double())

            leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
            loss = fused_linear_cross_entropy(
                leaves[0], leaves[1], target, leaves[2], class_weight=options.get("weight"), reduction=reduction,
                label_smoothing=options.get("label_smoothing", 0.0), chunk_rows=chunk_rows,
            )  # fmt: skip
            assert loss.shape == shape
            got = torch.autograd.grad(loss, leaves, grad_output.to(loss.dtype))
            assert relative(loss.detach(), expected.detach()) < TOLERANCE[dtype]
            for ours, theirs in zip(got, gradients):
                assert ours.dtype == dtype
                assert relative(ours, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction: str) -> None:
    hidden, weight, bias, target = make_case(torch.float64, rows=(5,), features=3, classes=4)
    assert torch.autograd.gradcheck(
        lambda h, w, b: fused_linear_cross_entropy(h, w, target, b, reduction=reduction, chunk_rows=2),
        [x.requires_grad_() for x in (hidden, weight, bias)],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_frozen_parts_get_no_gradient(dtype: torch.dtype, wanted: tuple[bool, bool]) -> None:
    hidden, weight, _, target = make_case(dtype)
    hidden.requires_grad_(wanted[0])
    weight.requires_grad_(wanted[1])
    loss = fused_linear_cross_entropy(hidden, weight, target)
    assert loss.requires_grad == any(wanted)
    if any(wanted):
        loss.backward()
    assert (hidden.grad is not None, weight.grad is not None) == wanted


def test_backward_twice() -> None:
    hidden, weight, _, target = make_case(torch.float32)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = fused_linear_cross_entropy(*leaves, target)
    first = torch.autograd.grad(loss, leaves, torch.tensor(2.0), retain_graph=True)
    before = [x.clone() for x in first]
    second = torch.autograd.grad(loss, leaves, torch.tensor(4.0))
    for a, b, c in zip(first, before, second):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, 2 * a)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_autocast_is_linears() -> None:
    hidden, weight, bias, target = make_case(torch.float32)
    results = []
    for fused in (False, True):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        with torch.autocast("cpu", torch.bfloat16):
            if fused:
                loss = fused_linear_cross_entropy(leaves[0], leaves[1], target, leaves[2])
            else:
                loss = F.cross_entropy(F.linear(*leaves).flatten(0, 1), target.flatten())
        assert loss.dtype == torch.float32
        loss.backward()
        results.append((loss.item(), *(x.grad for x in leaves)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    for ours, theirs in zip(results[1][1:], results[0][1:]):
        assert ours.dtype == torch.float32
        assert relative(ours, theirs.double()) < 1e-2


class Peak(TorchDispatchMode):
    """The most results of at least ``numel`` elements that were alive at one time, and the most elements of one."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.live = weakref.WeakSet[Any]()
        self.most = 0
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
            if result.numel() >= self.numel:
                self.live.add(result.untyped_storage())
        self.most = max(self.most, len(self.live))
        return result


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_of_one_chunk_at_a_time(reduction: str) -> None:
    hidden, weight, _, target = make_case(torch.float32, rows=(600,), classes=100)
    with Peak(50 * 100) as peak:
        loss = fused_linear_cross_entropy(
            hidden.requires_grad_(), weight.requires_grad_(), target, reduction=reduction, chunk_rows=60
        )
        loss.sum().backward()
    assert peak.largest == 60 * 100
    assert peak.most == 1


def test_empty_and_all_ignored() -> None:
    weight = torch.randn(5, 3, requires_grad=True)
    hidden = torch.empty(0, 3, requires_grad=True)
    target = torch.empty(0, dtype=torch.int64)
    assert fused_linear_cross_entropy(hidden, weight, target).isnan()
    assert fused_linear_cross_entropy(hidden, weight, target, reduction="none").shape == (0,)
    fused_linear_cross_entropy(hidden, weight, target, reduction="sum").backward()
    assert hidden.grad.shape == (0, 3)
    assert weight.grad.tolist() == torch.zeros(5, 3).tolist()
    hidden = torch.randn(2, 3, requires_grad=True)
    loss = fused_linear_cross_entropy(hidden, weight, torch.tensor([-100, -100]))
    loss.backward()
    assert loss.isnan()
    assert hidden.grad.tolist() == torch.zeros(2, 3).tolist()


HIDDEN, WEIGHT, TARGET = torch.zeros(3, 4), torch.zeros(5, 4), torch.tensor([0, 4, 2])
REFUSED = [
    ({"weight": torch.zeros(4, 5)}, ValueError, r"weight must have shape \(classes, 4\) for hidden of shape \(3, 4\)"),
    ({"bias": torch.zeros(4)}, ValueError, r"bias must have shape \(5,\)"),
    ({"weight": WEIGHT.double()}, TypeError, r"weight must be torch\.float32 on cpu as hidden is, got torch\.float64"),
    ({"bias": torch.zeros(5, device="meta")}, TypeError, "bias must be .* got torch.float32 on meta"),
    ({"chunk_rows": 0}, ValueError, "chunk_rows must be at least 1, got 0"),
    ({"target": torch.tensor([0, 5, 2])}, IndexError, "target 5 is out of bounds: there are 5 classes"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), REFUSED)
def test_refuses(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fused_linear_cross_entropy(**{"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET, **arguments})
