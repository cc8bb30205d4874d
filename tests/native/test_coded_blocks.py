"""Numbers as int8 codes with a scale for each block, and back."""

import math

import pytest
import torch

from lightning_zero.ops import BLOCK_NUMEL, available_isas, decode_blocks_, encode_blocks_
from tests.native.conftest import UseIsa
from tests.native.state import GRAD_DTYPES

BACKENDS = (*available_isas(), "torch")
TINY = torch.finfo(torch.float32).tiny


def coded(values: torch.Tensor, threads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = values.numel() // BLOCK_NUMEL
    codes, scales = torch.full((values.numel(),), 99, dtype=torch.int8), torch.full((blocks,), 99.0)
    encode_blocks_(codes, scales, values, num_threads=threads)
    return codes, scales


def decoded(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, threads: int = 1) -> torch.Tensor:
    values = torch.full((codes.numel(),), 99, dtype=dtype)
    decode_blocks_(values, codes, scales, num_threads=threads)
    return values


def special(dtype: torch.dtype) -> torch.Tensor:
    """Blocks of noise of many sizes, and of what is at the ends of a dtype's range."""
    noise = torch.randn(300, BLOCK_NUMEL, generator=torch.Generator().manual_seed(0))
    noise *= torch.logspace(-36, 3, 300)[:, None]
    least, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max * (1 - 1e-6)  # not all codes fit at the very end
    ends = torch.zeros(10, BLOCK_NUMEL)
    ends[1, 7], ends[2, 255], ends[3, 0] = most, -most, least
    ends[4, :2], ends[5, :2] = torch.tensor([127 * TINY, TINY]), torch.tensor([126.9 * TINY, TINY])
    ends[6, 100], ends[7, 200], ends[8, 0] = math.inf, -math.inf, math.nan
    ends[6:9, 50] = 1.0
    ends[9, :8] = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])  # between two codes
    return torch.cat([noise, ends]).to(dtype).flatten()


def test_by_hand() -> None:
    values = torch.zeros(3 * BLOCK_NUMEL)
    values[:5] = torch.tensor([254.0, 1.0, 3.0, -5.0, -254.0])  # the scale is 2
    values[BLOCK_NUMEL + 9] = -1e-30
    codes, scales = coded(values)
    assert codes[:5].tolist() == [127, 0, 2, -2, -127]  # 0.5, 1.5 and -2.5 go to even
    assert not codes[5:BLOCK_NUMEL].any()
    assert codes[BLOCK_NUMEL + 9] == -127
    assert scales.tolist() == [2.0, pytest.approx(1e-30 / 127), 0.0]
    back = decoded(codes, scales, torch.float32)
    assert back[:5].tolist() == [254.0, 0.0, 4.0, -4.0, -254.0]
    assert torch.equal(back[2 * BLOCK_NUMEL :], values[2 * BLOCK_NUMEL :])


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_all_instruction_sets_and_torch_have_the_same_bits(dtype: torch.dtype, use_isa: UseIsa) -> None:
    values = special(dtype)
    values = torch.cat([values] * 17) if dtype is torch.float32 else values  # enough for several threads
    use_isa("torch")
    codes, scales = coded(values)
    wanted = decoded(codes, scales, dtype)
    for isa in available_isas():
        use_isa(isa)
        for threads in (1, 3):
            found, found_scales = coded(values, threads)
            assert torch.equal(found, codes), isa
            assert torch.equal(found_scales.view(torch.int32), scales.view(torch.int32)), isa
            back = decoded(codes, scales, dtype, threads)
            torch.testing.assert_close(back, wanted, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(back.signbit() & ~back.isnan(), wanted.signbit() & ~wanted.isnan()), isa


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_what_comes_back(backend: str, dtype: torch.dtype, use_isa: UseIsa) -> None:
    use_isa(backend)
    values = special(dtype)
    back = decoded(*coded(values), dtype)
    blocks, back_blocks = values.view(-1, BLOCK_NUMEL).double(), back.view(-1, BLOCK_NUMEL).double()
    finite = blocks.isfinite().all(1)
    assert not finite.all()
    # Nothing that is not a number becomes one, and no other block is touched.
    assert back_blocks[~finite].isnan().all()
    assert back_blocks[finite].isfinite().all()
    assert torch.equal(back[values == 0].isnan() | (back[values == 0] == 0), torch.ones_like(back[values == 0], dtype=torch.bool))
    # Half a step off at most, and rounding to the dtype; the largest of a block stays what it is but for that.
    step = blocks[finite].abs().amax(1, keepdim=True) / 127
    rounding = torch.finfo(dtype).eps
    bound = step * (0.5 + 127 * rounding) + (127 * TINY if dtype is not torch.float16 else 2**-24)
    assert ((back_blocks[finite] - blocks[finite]).abs() <= bound).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_and_what_it_cannot_code(backend: str, use_isa: UseIsa) -> None:
    use_isa(backend)
    codes, scales = coded(torch.empty(0))
    assert decoded(codes, scales, torch.bfloat16).numel() == 0
    with pytest.raises(TypeError, match=r"values must be torch\.float32 or .*, got torch\.float64"):
        coded(torch.zeros(256, dtype=torch.float64))
    with pytest.raises(ValueError, match="codes must have 256 elements"):
        encode_blocks_(torch.zeros(255, dtype=torch.int8), torch.zeros(1), torch.zeros(256))
    with pytest.raises(ValueError, match="values must have 256 elements"):
        decode_blocks_(torch.zeros(300), torch.zeros(256, dtype=torch.int8), torch.zeros(1))
    with pytest.raises(ValueError, match="values must be contiguous"):
        encode_blocks_(torch.zeros(256, dtype=torch.int8), torch.zeros(1), torch.zeros(512)[::2])
