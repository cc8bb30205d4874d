"""Squared norms and the search for infinities and NaNs."""

import math

import pytest
import torch

from lightning_zero.ops import available_isas, has_nonfinite, sum_of_squares
from tests.native.conftest import UseIsa
from tests.native.state import GRAD_DTYPES

BACKENDS = (*available_isas(), "torch")
SIZES = (0, 1, 7, 8, 15, 16, 17, 33, 1001, 40_000)


def gradient(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_sum_of_squares_is_that(backend: str, dtype: torch.dtype, use_isa: UseIsa) -> None:
    use_isa(backend)
    for numel in SIZES:
        grad = gradient(numel, dtype)
        exact = math.fsum(x * x for x in grad.tolist())
        assert sum_of_squares(grad) == pytest.approx(exact, rel=1e-14)


@pytest.mark.skipif(not available_isas(), reason="the package was installed without its compiled kernels")
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_sum_of_squares_has_the_same_bits_everywhere(dtype: torch.dtype, use_isa: UseIsa) -> None:
    for numel in (*SIZES, 1_000_003):
        grad = gradient(numel, dtype)
        shifted = torch.cat([grad.new_zeros(3), grad])[3:]
        sums = set()
        for isa in available_isas():
            use_isa(isa)
            sums |= {sum_of_squares(x, num_threads=threads) for threads in (1, 2, 3) for x in (grad, shifted)}
        assert len(sums) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_is_found_anywhere(backend: str, dtype: torch.dtype, bad: float, use_isa: UseIsa) -> None:
    use_isa(backend)
    for numel in (1, 7, 17, 33, 9000):
        for position in {0, 1, numel // 2, numel - 2, numel - 1} & set(range(numel)):
            grad = torch.full((numel,), torch.finfo(dtype).max, dtype=dtype)
            assert not has_nonfinite(grad)
            assert math.isfinite(sum_of_squares(grad))
            grad[position] = bad
            assert has_nonfinite(grad)
            assert not math.isfinite(sum_of_squares(grad))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nonfinite_is_found_by_every_thread(backend: str, use_isa: UseIsa) -> None:
    use_isa(backend)
    grad = torch.zeros(1_000_003, dtype=torch.bfloat16)
    assert not has_nonfinite(grad, num_threads=3)
    for position in (0, 499_999, 1_000_002):
        grad[position] = math.nan
        assert has_nonfinite(grad, num_threads=3)
        grad[position] = 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_finite_and_zero(backend: str, use_isa: UseIsa) -> None:
    use_isa(backend)
    assert sum_of_squares(torch.empty(0)) == 0.0
    assert not has_nonfinite(torch.empty(0))
