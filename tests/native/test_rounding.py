"""Whether weights are what their master weights round to, found without making them anew."""

import math

import pytest
import torch

from lightning_zero.ops import available_isas, is_rounded_copy
from tests.native.conftest import UseIsa

BACKENDS = (*available_isas(), "torch")
SIZES = (0, 1, 7, 17, 511, 512, 1001, 70_000)


def exact(numel: int) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    # Ties, subnormals of both types, what overflows fp16. No NaN, of which torch makes one of several.
    special = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 2**-24, 1.5 * 2**-25, 1e-40, -0.0, 65519.9, 7e4, math.inf, -1e38])
    values[: len(special)] = special[:numel]
    return values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_changed_bit_is_found_anywhere(backend: str, dtype: torch.dtype, use_isa: UseIsa) -> None:
    use_isa(backend)
    for numel in SIZES:
        master = exact(numel)
        weights = master.to(dtype)
        for threads in (1, 3):
            assert is_rounded_copy(weights, master, num_threads=threads)
        for position in {0, 1, numel // 2, numel - 2, numel - 1} & set(range(numel)):
            bits = weights.view(torch.int16)
            bits[position] ^= 1
            assert not is_rounded_copy(weights, master)
            bits[position] ^= 1
        assert is_rounded_copy(weights, master)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_master_that_rounds_to_the_same_weight_is_no_change(backend: str, use_isa: UseIsa) -> None:
    use_isa(backend)
    master, weights = torch.full((100,), 1.0), torch.ones(100, dtype=torch.bfloat16)
    master[50] = 1.0 + 2**-9
    assert is_rounded_copy(weights, master)
    master[50] = 1.0 + 2**-7
    assert not is_rounded_copy(weights, master)


def test_what_it_cannot_compare_is_named() -> None:
    master, weights = torch.ones(8), torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"copy must be torch\.bfloat16 or torch\.float16, got torch\.float32"):
        is_rounded_copy(master, master)
    with pytest.raises(TypeError, match=r"exact must be torch\.float32, got torch\.bfloat16"):
        is_rounded_copy(weights, weights)
    with pytest.raises(ValueError, match="copy must have 8 elements"):
        is_rounded_copy(weights[:4], master)
