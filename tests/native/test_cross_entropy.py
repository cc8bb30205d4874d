"""The fused loss: torch's values and gradients, the same bits everywhere, and nobody's logits lost by surprise."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_zero.ops import FusedCrossEntropyLoss, available_isas, fused_cross_entropy
from tests.native.conftest import UseIsa

BACKENDS = (*available_isas(), "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Half a unit in the last place for rounding the gradient once, and as much again for scaling it in the backward.
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-12}
NEEDS_KERNELS = pytest.mark.skipif(
    not available_isas(), reason="the package was installed without its compiled kernels"
)


def make_case(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, weighted: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * 3).to(dtype)
    target = torch.randint(shape[-1], shape[:-1], generator=generator)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return logits, target, torch.rand(shape[-1], generator=generator) + 0.1 if weighted else None


def reference(logits: Tensor, target: Tensor, weight: Tensor | None, grad_output: Tensor, **options: Any) -> Any:
    """torch's own in double: the value, and the gradient with respect to the logits."""
    x = logits.detach().double().requires_grad_()
    rows = x.reshape(target.numel(), x.shape[-1])
    weight = None if weight is None else weight.double()
    loss = F.cross_entropy(rows, target.flatten(), weight, **options)
    if options.get("reduction") == "none":
        loss = loss.view(target.shape)
    return loss.detach(), torch.autograd.grad(loss, x, grad_output.double())[0]


def check(logits: Tensor, target: Tensor, weight: Tensor | None, inplace: bool, scale: float, **options: Any) -> None:
    shape = target.shape if options["reduction"] == "none" else ()
    generator = torch.Generator().manual_seed(7)
    grad_output = scale * (torch.rand(shape, generator=generator) + 0.5)
    value, gradient = reference(logits, target, weight, grad_output, **options)

    leaf = logits.clone().requires_grad_()
    seen = leaf.clone() if inplace else leaf
    loss = fused_cross_entropy(seen, target, weight, inplace=inplace, **options)
    assert loss.shape == shape
    assert loss.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.detach().double(), value, rtol=3e-6, atol=3e-6)
    loss.backward(grad_output.to(loss.dtype))
    assert leaf.grad.dtype == logits.dtype
    rtol = ROUNDING[logits.dtype]
    # What counts as zero beside the largest element, and fp16's smallest step.
    atol = 0.05 * rtol * gradient.abs().amax().item() if gradient.numel() else 0.0
    atol = max(atol, 2**-24 if logits.dtype == torch.float16 else 1e-13 * scale)
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=rtol, atol=atol)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_torchs(backend: str, dtype: torch.dtype, use_isa: UseIsa) -> None:
    use_isa(backend)
    for shape in ((5, 1), (7, 13), (4, 16), (2, 3, 33), (3, 9001)):
        for weighted in (False, True):
            logits, target, weight = make_case(shape, dtype, weighted)
            for smoothing in (0.0, 0.1, 1.0):
                for reduction in ("none", "mean", "sum"):
                    check(
                        logits, target, weight, inplace=weighted, scale=3.0,
                        label_smoothing=smoothing, reduction=reduction,
                    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    classes=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(("none", "mean", "sum")),
    smoothing=st.sampled_from((0.0, 0.3)),
    weighted=st.booleans(),
    inplace=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_is_torchs(
    shape: list[int], classes: int, dtype: torch.dtype, reduction: str, smoothing: float, weighted: bool,
    inplace: bool, seed: int,
) -> None:  # fmt: skip
    logits, target, weight = make_case((*shape, classes), dtype, weighted, seed)
    if reduction == "mean" and not (target != -100).any():
        reduction = "sum"
    check(logits, target, weight, inplace, 1.0, label_smoothing=smoothing, reduction=reduction, ignore_index=-100)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_class_can_be_ignored(backend: str, use_isa: UseIsa) -> None:
    use_isa(backend)
    logits, target, _ = make_case((40, 5))
    target[1] = 0
    check(logits, target, None, False, 1.0, reduction="mean", ignore_index=2)


@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_bits_depend_on_values_alone(dtype: torch.dtype, use_isa: UseIsa) -> None:
    for classes in (1, 15, 17, 5003):
        logits, target, weight = make_case((130, classes), dtype, weighted=True)
        first = None
        for isa in available_isas():
            use_isa(isa)
            for threads in (1, 3):
                x = logits.clone().requires_grad_()
                loss = fused_cross_entropy(x, target, weight, label_smoothing=0.1, num_threads=threads)
                grad = torch.autograd.grad(loss, x)[0]
                first = first or (loss.detach(), grad)
                assert torch.equal(loss.detach(), first[0])
                assert torch.equal(grad, first[1])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(reduction: str, weighted: bool) -> None:
    logits, target, weight = make_case((2, 3, 4), torch.float64, weighted)
    assert torch.autograd.gradcheck(
        lambda x: fused_cross_entropy(x, target, weight, reduction=reduction, label_smoothing=0.1),
        logits.requires_grad_(),
    )


# -- values at the edge ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits(backend: str, dtype: torch.dtype, use_isa: UseIsa) -> None:
    use_isa(backend)
    inf = math.inf
    rows = [
        [1e4, -1e4, 0.0, 5.0],
        [-1e4, -1e4, -1e4, -1e4],
        [1e4, 1e4, 1e4 - 16, -inf],
        [-inf, 0.0, 1.0, -inf],
        [-inf, 0.0, -inf, -inf],
        [-inf, 0.0, 1.0, 2.0],  # its target cannot be: the loss is infinite, the gradient is not
        [-inf] * 4,
        [inf, 0.0, 0.0, 0.0],
        [math.nan, 0.0, 0.0, 0.0],
    ]
    target = torch.tensor([1, 2, 0, 2, 1, 0, 0, 0, 1])
    logits = torch.tensor(rows).to(dtype).repeat(1, 6)  # 24 classes: vectors and a ragged end
    x = logits.clone().requires_grad_()
    loss = fused_cross_entropy(x, target, reduction="none")
    loss.sum().backward()
    value, gradient = reference(logits, target, None, torch.ones(9), reduction="none")
    torch.testing.assert_close(loss.detach().double(), value, rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(x.grad.double(), gradient, rtol=ROUNDING[dtype], atol=1e-7, equal_nan=True)
    assert loss[0].item() == pytest.approx(2e4 + math.log(6), rel=5e-3)
    assert loss[5].item() == inf
    assert x.grad[:6].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ignored_is_torchs_nan_without_gradient(backend: str, dtype: torch.dtype, use_isa: UseIsa) -> None:
    use_isa(backend)
    for smoothing in (0.0, 0.1):
        for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
            x = torch.randn(3, 5).to(dtype).requires_grad_()
            target = torch.full((3,), -100)
            loss = fused_cross_entropy(x, target, reduction=reduction, label_smoothing=smoothing)
            loss.backward()
            assert loss.item() == pytest.approx(expected, nan_ok=True)
            assert x.grad.tolist() == torch.zeros(3, 5).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend: str, use_isa: UseIsa) -> None:
    use_isa(backend)
    x = torch.empty(0, 5, requires_grad=True)
    target = torch.empty(0, dtype=torch.int64)
    assert fused_cross_entropy(x, target, reduction="none").shape == (0,)
    assert fused_cross_entropy(x, target).isnan()
    loss = fused_cross_entropy(x, target, reduction="sum")
    loss.backward()
    assert loss.item() == 0
    assert x.grad.shape == (0, 5)


def test_small_gradients_of_fp16_survive() -> None:
    """Divided by the rows in the forward they would all be zero; a loss scale in the backward brings them back."""
    logits, target, _ = make_case((64, 5000), torch.float16)
    leaf = logits.requires_grad_()
    (fused_cross_entropy(leaf, target) * 2.0**16).backward()
    _, gradient = reference(logits, target, None, torch.tensor(2.0**16))
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=2e-3, atol=2**-24)


# -- memory and the logits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_kept_unless_given(backend: str, dtype: torch.dtype, use_isa: UseIsa) -> None:
    use_isa(backend)
    logits, target, _ = make_case((6, 40), dtype)
    leaf = logits.clone().requires_grad_()
    loss = fused_cross_entropy(leaf, target)
    loss.backward()
    assert torch.equal(leaf, logits)

    computed = leaf * 1
    loss = fused_cross_entropy(computed, target, inplace=True)
    assert not torch.equal(computed, logits)
    kept = loss.grad_fn.saved_tensors[0]
    assert kept.data_ptr() == computed.data_ptr()
    grad = torch.autograd.grad(loss, computed)[0]
    assert grad.data_ptr() == computed.data_ptr()


def test_one_buffer_waits_for_the_backward() -> None:
    saved: list[Tensor] = []
    logits, target, _ = make_case((6, 40), torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fused_cross_entropy(logits.requires_grad_(), target)
    assert [(x.shape, x.dtype) for x in saved] == [((6, 40), torch.bfloat16)]


def test_logits_that_autograd_needs_cannot_be_overwritten_unnoticed() -> None:
    logits, target, _ = make_case((6, 40))
    computed = logits.requires_grad_().exp()  # saves its result
    loss = fused_cross_entropy(computed, target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_gradient_in_the_logits_cannot_be_overwritten_unnoticed() -> None:
    logits, target, _ = make_case((6, 40))
    computed = logits.requires_grad_() * 1
    loss = fused_cross_entropy(computed, target, inplace=True)
    with torch.no_grad():
        computed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_is_for_computed_contiguous_logits() -> None:
    logits, target, _ = make_case((6, 40))
    leaf = logits.requires_grad_()
    with pytest.raises(RuntimeError, match="over a leaf that requires a gradient"):
        fused_cross_entropy(leaf, target, inplace=True)
    sliced = (leaf * 1)[:, :39]
    with pytest.raises(ValueError, match=r"needs contiguous logits, got shape \(6, 39\)"):
        fused_cross_entropy(sliced, target.clamp(max=38), inplace=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_logits(backend: str, use_isa: UseIsa) -> None:
    use_isa(backend)
    for cut in (
        lambda x: x[:, :-1],
        lambda x: x.transpose(0, 1),
        lambda x: x[..., ::2],
        lambda x: x[:1].expand(3, 4, 20),
    ):
        logits, _, _ = make_case((3, 4, 20))
        part = cut(logits)
        target = make_case(tuple(part.shape))[1]
        leaf = logits.clone().requires_grad_()
        fused_cross_entropy(cut(leaf), target).backward()
        other = logits.clone().requires_grad_()
        F.cross_entropy(cut(other).flatten(0, 1), target.flatten()).backward()
        torch.testing.assert_close(leaf.grad, other.grad)
        assert torch.equal(leaf.detach(), logits)


@pytest.mark.parametrize("inplace", [False, True])
def test_backward_twice(inplace: bool) -> None:
    logits, target, _ = make_case((6, 40))
    leaf = logits.requires_grad_()
    computed = leaf * 1
    loss = fused_cross_entropy(computed, target, inplace=inplace)
    first = torch.autograd.grad(loss, leaf, torch.tensor(2.0), retain_graph=True)[0]
    before = first.clone()
    second = torch.autograd.grad(loss, leaf, torch.tensor(3.0))[0]
    assert torch.equal(first, before)
    torch.testing.assert_close(second, first * 1.5)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_other_uses_of_the_logits() -> None:
    logits, target, _ = make_case((6, 40))
    leaf = logits.requires_grad_()
    loss = fused_cross_entropy(leaf, target) + 0.1 * leaf.logsumexp(1).square().mean()
    other = F.cross_entropy(leaf, target) + 0.1 * leaf.logsumexp(1).square().mean()
    torch.testing.assert_close(torch.autograd.grad(loss, leaf), torch.autograd.grad(other, leaf))


def test_there_is_no_second_derivative() -> None:
    logits, target, _ = make_case((6, 40))
    leaf = logits.requires_grad_()
    loss = fused_cross_entropy(leaf, target)
    with pytest.raises(RuntimeError, match="fused_cross_entropy has no second derivative"):
        torch.autograd.grad(loss, leaf, create_graph=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_forms_no_gradient(mode: Any) -> None:
    logits, target, _ = make_case((6, 40))
    leaf = logits.clone().requires_grad_()
    with mode():
        computed = leaf * 1
        loss = fused_cross_entropy(computed, target, inplace=True)
    assert torch.equal(computed, logits)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))
    assert fused_cross_entropy(logits, target).grad_fn is None


# -- what is refused ---------------------------------------------------------------------------------------------------

LOGITS, TARGET = torch.zeros(3, 5), torch.tensor([0, 4, 2])
REFUSED = [
    ({"target": torch.tensor([0, 5, 2])}, IndexError, "target 5 is out of bounds: there are 5 classes"),
    ({"target": torch.tensor([0, -1, 2])}, IndexError, "target -1 is out of bounds"),
    ({"target": torch.tensor([-100, 1, 2]), "ignore_index": 0}, IndexError, "target -100 is out of bounds"),
    ({"target": TARGET.int()}, TypeError, r"class indices in torch\.int64, got torch\.int32"),
    ({"target": torch.rand(3, 5)}, TypeError, "for class probabilities use"),
    ({"target": TARGET[:2]}, ValueError, r"got logits \(3, 5\) and target \(2,\)"),
    ({"logits": torch.zeros(3, 5, 2), "target": torch.zeros(3, 2).long()}, ValueError, r"need logits.movedim\(1, -1\)"),
    ({"logits": torch.tensor(1.0), "target": torch.tensor(0)}, ValueError, "the shape of the logits without"),
    ({"logits": LOGITS.long()}, TypeError, "logits must be floating-point"),
    ({"target": TARGET.to("meta")}, ValueError, "target is on meta, the logits are on cpu"),
    ({"weight": torch.ones(4)}, ValueError, r"must have shape \(5,\).*got \(4,\)"),
    ({"weight": torch.ones(5).long()}, TypeError, "class weights must be floating-point"),
    ({"weight": torch.ones(5, device="meta")}, ValueError, "class weights are on meta"),
    ({"weight": torch.ones(5, requires_grad=True)}, ValueError, r"weight.detach\(\)"),
    ({"reduction": "avg"}, ValueError, "reduction must be one of none, mean, sum, got 'avg'"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be between 0 and 1, got 1.5"),
    ({"num_threads": 0}, ValueError, "num_threads must be at least 1"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), REFUSED)
def test_refuses(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fused_cross_entropy(**{"logits": LOGITS, "target": TARGET, **arguments})


# -- the module, compile -----------------------------------------------------------------------------------------------


def test_module() -> None:
    weight = torch.rand(5)
    options = {"ignore_index": 2, "reduction": "sum", "label_smoothing": 0.1}
    ours, theirs = FusedCrossEntropyLoss(weight, **options), nn.CrossEntropyLoss(weight, **options)
    theirs.load_state_dict(ours.state_dict())
    logits = torch.randn(3, 5)
    torch.testing.assert_close(ours(logits, TARGET), theirs(logits, TARGET))
    assert repr(ours) == "FusedCrossEntropyLoss(ignore_index=2, reduction='sum', label_smoothing=0.1, inplace=False)"
    with pytest.raises(ValueError, match="reduction must be one of"):
        FusedCrossEntropyLoss(reduction="avg")


def test_compiled_code_steps_outside() -> None:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        return fused_cross_entropy(x * 2, target, inplace=True) * 3

    logits, target, _ = make_case((6, 40))
    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        leaf = logits.clone().requires_grad_()
        value = function(leaf, target)
        value.backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1])
