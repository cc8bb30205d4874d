"""The fused Adam step: against its twin, against torch, and against itself cut, shifted and threaded."""

import itertools
import math

import pytest
import torch

from lightning_zero.ops import AdamOptions, adam_step_, available_isas
from tests.native.conftest import UseIsa
from tests.native.state import COPY_DTYPES, GRAD_DTYPES, State, bits, differing, make_state
from tests.native.twin import adam_step_twin_

ISAS = available_isas()
pytestmark = pytest.mark.skipif(not ISAS, reason="the package was installed without its compiled kernels")

DECAY = AdamOptions(lr=1e-2, weight_decay=0.1)
OPTIONS = [
    DECAY,
    AdamOptions(lr=1e-2, weight_decay=0.1, decoupled_weight_decay=False),
    AdamOptions(lr=1e-2, maximize=True),
    AdamOptions(lr=1e-2, weight_decay=0.1, decoupled_weight_decay=False, maximize=True),
    AdamOptions(beta1=0.0, beta2=0.0),
    AdamOptions(beta1=0.4, beta2=0.5, eps=1e-3),
]
KINDS = list(itertools.product(GRAD_DTYPES, COPY_DTYPES, (False, True)))
SIZES = (0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 1001)


@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_twin(options: AdamOptions, use_isa: UseIsa) -> None:
    for (grad_dtype, copy_dtype, amsgrad), numel in itertools.product(KINDS, SIZES):
        start = make_state(numel, grad_dtype, copy_dtype, amsgrad, seed=numel)
        expected = start.clone()
        adam_step_twin_(**expected.tensors(), options=options, step=5, grad_scale=0.7)
        for isa in ISAS:
            use_isa(isa)
            got = start.clone().step(options, step=5, grad_scale=0.7)
            assert differing(got, expected) == {}, (isa, numel, grad_dtype, copy_dtype, amsgrad)


@pytest.mark.parametrize("isa", ISAS)
def test_does_not_depend_on_cutting_or_alignment(isa: str, use_isa: UseIsa) -> None:
    use_isa(isa)
    for grad_dtype, copy_dtype, amsgrad in KINDS:
        start = make_state(1001, grad_dtype, copy_dtype, amsgrad)
        whole = start.clone().step(DECAY)
        for cuts in ((0, 1, 17, 500, 999, 1001), (0, 333, 334, 1001)):
            sliced = start.clone()
            for begin, end in itertools.pairwise(cuts):
                sliced.range(begin, end).step(DECAY)
            assert differing(sliced, whole) == {}
        for offset in (1, 3, 13):
            assert differing(start.misaligned(offset).step(DECAY), whole) == {}


@pytest.mark.parametrize("isa", ISAS)
def test_does_not_depend_on_threads(isa: str, use_isa: UseIsa) -> None:
    use_isa(isa)
    start = make_state(500_003, torch.bfloat16, torch.bfloat16, amsgrad=True)
    whole = start.clone().step(DECAY, num_threads=1)
    for threads in (2, 3, 100):
        assert differing(start.clone().step(DECAY, num_threads=threads), whole) == {}


@pytest.mark.parametrize("isa", ISAS)
def test_streamed_copies_are_complete(isa: str, use_isa: UseIsa) -> None:
    # Long enough for stores that go around the cache, at an address that they cannot start from.
    use_isa(isa)
    numel = (1 << 22) + 77
    state = State(
        param=torch.arange(numel, dtype=torch.float32) / 7,
        grad=torch.zeros(numel, dtype=torch.bfloat16),
        exp_avg=torch.zeros(numel),
        exp_avg_sq=torch.zeros(numel),
        param_copy=torch.zeros(numel + 3, dtype=torch.bfloat16)[3:],
    )
    state.step(AdamOptions(), num_threads=2)
    assert torch.equal(state.param_copy, state.param.bfloat16())


@pytest.mark.parametrize("isa", [*ISAS, "torch"])
def test_undo_data_are_the_old_values(isa: str, use_isa: UseIsa) -> None:
    """Also where they begin at an odd address, end within a vector, or are written by several threads."""
    use_isa(isa)
    for numel, amsgrad, offset in itertools.product((0, 1, 17, 4096 + 33, (1 << 18) + 5), (False, True), (0, 3)):
        start = make_state(numel, torch.bfloat16, torch.bfloat16, amsgrad).misaligned(offset)
        plain = start.clone().misaligned(offset).step(DECAY)
        old = [start.param, start.exp_avg, start.exp_avg_sq, *([start.max_exp_avg_sq] if amsgrad else [])]
        undo = torch.full((offset + len(old) * numel,), math.nan)[offset:].view(len(old), numel)
        got = start.clone().step(DECAY, undo=undo, num_threads=2)
        assert differing(got, plain) == {}
        for kept, tensor in zip(undo, old, strict=True):
            assert torch.equal(bits(kept), bits(tensor))


def test_undo_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="undo must have 24 elements"):
        make_state(8).step(DECAY, undo=torch.zeros(4, 8))


@pytest.mark.parametrize("isa", ISAS)
def test_special_values(isa: str, use_isa: UseIsa) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 1e-45, -1e-40, 1e-38, 3e38, -3e38, math.inf, -math.inf, math.nan])
    param, grad, exp_avg, exp_avg_sq = (x.flatten().clone() for x in torch.meshgrid([values] * 4, indexing="ij"))
    start = State(param, grad, exp_avg, exp_avg_sq.abs(), torch.ones_like(param), torch.zeros_like(param).half())
    for options in OPTIONS:
        use_isa("portable")
        expected = start.clone().step(options)
        use_isa(isa)
        assert differing(start.clone().step(options), expected) == {}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient(isa: str, dtype: torch.dtype, use_isa: UseIsa) -> None:
    use_isa(isa)
    grad = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    start = make_state(1 << 16)
    narrow, wide = (
        State(start.param.clone(), g, start.exp_avg.clone(), start.exp_avg_sq.clone()) for g in (grad, grad.float())
    )
    narrow.step(DECAY)
    wide.step(DECAY)
    narrow.grad = wide.grad
    assert differing(narrow, wide) == {}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_round_as_torch_does(isa: str, dtype: torch.dtype, use_isa: UseIsa) -> None:
    # Each 16-bit value, the middle to the next one, and a hair to each side of the middle; then arbitrary bits.
    use_isa(isa)
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    middle = every.view(torch.int32) + (1 << 15 if dtype == torch.bfloat16 else 1 << 12)
    noise = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    param = torch.cat([every, *(x.view(torch.float32) for x in (middle, middle - 1, middle + 1, noise))])
    zeros = torch.zeros_like(param)
    copy = torch.zeros_like(param, dtype=dtype)
    adam_step_(param, zeros, zeros.clone(), zeros.clone(), AdamOptions(lr=0.0), step=1, param_copy=copy)
    assert torch.equal(bits(copy), bits(param.to(dtype)))


def just_above_a_tie() -> list[tuple[float, float, float]]:
    """Return cases (1 - beta2, gradient, exp_avg_sq) whose sum is above 1 + 2**-24, but by less than a double can tell.

    With integers of 24 bits, h * g = 2**47 + excess; scaled, (1 - beta2) * gradient * gradient = 2**-24 + excess * 2**-71.
    """
    g = torch.arange(1 << 23, (1 << 23) + 20_000)
    h = (1 << 47) // g + 1
    excess = h * g - (1 << 47)
    grad, product = (g.double() * 2.0**-35).float(), (h.double() * 2.0**-36).float()
    weight = (product.double() / grad).float()
    beta2 = (1 - weight.double()).float()
    exp_avg_sq = (1 / beta2.double()).float()
    usable = (excess > 0) & (excess < 1 << 17) & (weight * grad == product) & (exp_avg_sq * beta2 == 1)
    return [tuple(x[usable][i].item() for x in (weight, grad, exp_avg_sq)) for i in range(4)]


@pytest.mark.parametrize("isa", ISAS)
def test_multiply_add_rounds_once(isa: str, use_isa: UseIsa) -> None:
    # Rounded to double first, the sum would be the tie itself, and then go to 1.
    use_isa(isa)
    for weight, grad, exp_avg_sq in just_above_a_tie():
        state = State(*(torch.full((17,), x) for x in (0.0, grad, 0.0, exp_avg_sq)))
        state.step(AdamOptions(beta2=1 - weight))
        assert state.exp_avg_sq.tolist() == [1 + 2.0**-23] * 17


@pytest.mark.parametrize("isa", ISAS)
def test_gradient_scale_is_one_float_multiplication(isa: str, use_isa: UseIsa) -> None:
    use_isa(isa)
    scaled, multiplied = make_state(1001), make_state(1001)
    multiplied.grad *= 1 / 3
    multiplied.step(DECAY)
    scaled.step(DECAY, grad_scale=1 / 3)
    assert torch.equal(scaled.grad, make_state(1001).grad)
    scaled.grad = multiplied.grad
    assert differing(scaled, multiplied) == {}


@pytest.mark.parametrize("isa", ISAS)
def test_threads_take_the_callers_subnormal_mode(isa: str, use_isa: UseIsa) -> None:
    use_isa(isa)
    start = make_state(1 << 18)
    start.exp_avg_sq.fill_(1e-40)
    start.grad.mul_(1e-22)
    kept = start.clone().step(DECAY, num_threads=2)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed = [start.clone().step(DECAY, num_threads=threads) for threads in (1, 2)]
    finally:
        torch.set_flush_denormal(False)
    assert differing(*flushed) == {}
    assert differing(flushed[0], kept)


def test_written_tensors_change_version() -> None:
    state = make_state(8, torch.bfloat16, torch.float16, amsgrad=True)
    before = {name: tensor._version for name, tensor in state.tensors().items()}
    state.step(DECAY)
    after = {name: tensor._version for name, tensor in state.tensors().items()}
    assert [name for name in after if after[name] == before[name]] == ["grad"]
    with torch.inference_mode():
        make_state(8).step(DECAY)  # tensors without a version counter


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch itself does not fuse multiply-adds here"
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_100_steps_of_torch_fused(options: AdamOptions, amsgrad: bool) -> None:
    numel, body = 1003, 992  # torch takes the last few elements one by one, by other roundings
    ours, theirs = make_state(numel, amsgrad=amsgrad), make_state(numel, amsgrad=amsgrad)
    function = torch._fused_adamw_ if options.decoupled_weight_decay else torch._fused_adam_
    largest = [theirs.max_exp_avg_sq] if amsgrad else []
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 101):
        grad = torch.randn(numel, generator=generator) * 0.1
        ours.grad = theirs.grad = grad
        ours.step(options, step=step)
        function(
            [theirs.param], [grad], [theirs.exp_avg], [theirs.exp_avg_sq], largest, [torch.tensor(float(step))],
            lr=options.lr, beta1=options.beta1, beta2=options.beta2, weight_decay=options.weight_decay,
            eps=options.eps, amsgrad=amsgrad, maximize=options.maximize,
        )  # fmt: skip
    assert differing(ours.range(0, body), theirs.range(0, body)) == {}
    for name, tensor in ours.range(body, numel).tensors().items():
        torch.testing.assert_close(tensor, theirs.range(body, numel).tensors()[name], rtol=1e-5, atol=1e-6)
