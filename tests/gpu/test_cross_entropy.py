"""On a real device: the fused loss by Triton is torch's loss, and needs less memory."""

import pytest
import torch
import torch.nn.functional as F

from lightning_zero.ops import fused_cross_entropy
from tests.native.test_cross_entropy import DTYPES, ROUNDING, make_case


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_torchs(dtype: torch.dtype, inplace: bool) -> None:
    device = torch.accelerator.current_accelerator()
    for shape in ((7, 13), (33, 32_000), (3, 50_257)):
        for weighted in (False, True):
            logits, target, weight = make_case(shape, dtype, weighted)
            logits, target = logits.to(device), target.to(device)
            weight = None if weight is None else weight.to(device)
            for smoothing in (0.0, 0.1):
                x = logits.double().requires_grad_()
                expected = F.cross_entropy(
                    x, target, None if weight is None else weight.double(), label_smoothing=smoothing
                )
                (3 * expected).backward()
                leaf = logits.clone().requires_grad_()
                seen = leaf.clone() if inplace else leaf
                loss = fused_cross_entropy(seen, target, weight, label_smoothing=smoothing, inplace=inplace)
                (3 * loss).backward()
                torch.testing.assert_close(loss.double(), expected, rtol=3e-6, atol=3e-6)
                atol = 0.05 * ROUNDING[dtype] * x.grad.abs().amax().item()
                torch.testing.assert_close(leaf.grad.double(), x.grad, rtol=ROUNDING[dtype], atol=max(atol, 2**-24))


def test_in_place_it_needs_no_more_than_the_logits() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    logits = (torch.randn(2048, 32_000, device=device, dtype=torch.bfloat16, requires_grad=True)).clone()
    target = torch.randint(32_000, (2048,), device=device)
    accelerator = torch.get_device_module(device)
    accelerator.synchronize()
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    fused_cross_entropy(logits, target, inplace=True)
    assert accelerator.max_memory_allocated() - before < logits.nbytes // 20
