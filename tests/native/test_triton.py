"""The GPU's kernel of the fused loss, without a GPU: in Triton's interpreter against torch's operations, and compiled."""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.ops import _fallback
from tests.harness import run
from tests.native.test_cross_entropy import ROUNDING, make_case

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def both(logits: Tensor, target: Tensor, weight: Tensor | None, inplace: bool, **options: Any) -> None:
    """Losses and gradients by Triton are those of torch's operations, to rounding."""
    from lightning_zero.ops import _triton

    expected = torch.empty_like(logits)
    found = logits.clone() if inplace else torch.empty_like(logits)
    source = found if inplace else logits
    losses = _fallback.cross_entropy_rows(logits, target, weight, expected, **options)
    # First without a gradient: that leaves the logits alone.
    kept = source.clone()
    without = _triton.cross_entropy_rows(source, target, weight, None, **options)
    assert torch.equal(source.view(torch.uint8), kept.view(torch.uint8))
    with_gradient = _triton.cross_entropy_rows(source, target, weight, found, **options)
    torch.testing.assert_close(with_gradient, losses, rtol=2e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(with_gradient, without, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found, expected, rtol=ROUNDING[logits.dtype], atol=1e-6, equal_nan=True)


def in_the_interpreter() -> None:
    # 5001 classes are more than a block.
    for shape in ((1, 1), (2, 13), (1, 5001)):
        for dtype in DTYPES:
            for weighted in (False, True):
                logits, target, weight = make_case(shape, dtype, weighted)
                for smoothing in (0.0, 0.1):
                    both(
                        logits, target, weight, inplace=weighted, ignore_index=-100, label_smoothing=smoothing,
                        grad_scale=torch.tensor(3.0) if weighted else None,
                    )  # fmt: skip
    inf, nan = float("inf"), float("nan")
    rows = [
        [1e4, -1e4, 0.0, 5.0],
        [-1e4] * 4,
        [-inf, 0.0, -inf, 1.0],
        [0.0, nan, 0.0, 0.0],
        [inf, 0.0, 0.0, 0.0],
        [-inf] * 4,
    ]
    extreme, target = torch.tensor(rows), torch.tensor([0, 3, 1, 0, 1, 2])
    both(extreme, target, None, False, ignore_index=-100, label_smoothing=0.0, grad_scale=None)
    # A whole block of -inf before the first number.
    late = torch.cat([torch.full((1, 4096), -inf), torch.arange(10.0).view(1, 10)], dim=1)
    both(late, torch.tensor([4100]), None, False, ignore_index=-100, label_smoothing=0.0, grad_scale=None)
    both(extreme, torch.full((6,), 2), None, True, ignore_index=2, label_smoothing=0.1, grad_scale=None)


def scaled() -> None:
    from lightning_zero.ops import _triton

    for dtype in DTYPES:
        rows = torch.randn(6, 4100).to(dtype)
        for factor in (torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([1.0, 0.0, 2.0, -3.0, 1.0, 0.3])):
            expected, found = rows.clone(), rows.clone()
            _fallback.scale_rows_(expected, factor)
            version = found._version
            _triton.scale_rows_(found, factor)
            assert found._version > version
            torch.testing.assert_close(found, expected, rtol=ROUNDING[dtype], atol=0)


def compiled() -> list[int]:
    """The sizes of both kernels for a GPU of compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_zero.ops import _triton

    pointers = {name: "*bf16" for name in ("logits", "grad")} | {
        name: "*fp32" for name in ("weight", "weight_sum", "scale")
    }
    numbers = {
        "losses": "*fp32",
        "target": "*i64",
        "ignore_index": "i32",
        "on_target": "fp32",
        "on_each": "fp32",
    }
    switches = {
        "CLASSES": 50_257,
        "BLOCK": 4096,
        "WEIGHTED": True,
        "SMOOTHED": True,
        "SCALED": True,
        "WITH_GRADIENT": True,
    }
    loss = (_triton._cross_entropy, pointers | numbers, switches)
    scale = (_triton._scale, {"rows": "*bf16", "factor": "*fp32", "stride": "i32"}, {"CLASSES": 50_257, "BLOCK": 4096})
    sizes = []
    for kernel, types, constants in (loss, scale):
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constexprs=constants)
        sizes.append(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
    return sizes


def test_interpreted() -> None:
    # A process of its own: Triton asks the variable when it is imported, and torch may have done that here.
    run_python = [sys.executable, "-c", "from tests.native import test_triton as t; t.in_the_interpreter(); t.scaled()"]
    ended = subprocess.run(run_python, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_compiles_for_a_gpu_that_is_not_here() -> None:
    [sizes] = run(1, compiled)
    assert min(sizes) > 1000
