"""The Adam step written for reading, one float operation a line: what the kernels have to equal bit for bit."""

import math

import torch
from torch import Tensor

from lightning_zero.ops import AdamOptions


def rounded(x: Tensor) -> Tensor:
    """Round a double result to float. For +, *, / and sqrt of floats that is the float operation itself; for a*b+c it is
    the fused one, save for a double rounding of odds 2**-29, which has a test of its own."""
    return x.float().double()


def adam_step_twin_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    options: AdamOptions,
    *,
    step: int,
    max_exp_avg_sq: Tensor | None = None,
    param_copy: Tensor | None = None,
    grad_scale: float = 1.0,
) -> None:
    def const(x: float) -> float:
        return torch.tensor(x, dtype=torch.float64).float().item()

    o = options
    one_minus_beta1 = const(1 - o.beta1)
    step_size = const(o.lr / (1 - o.beta1**step))
    bias_correction2_sqrt = const(math.sqrt(1 - o.beta2**step))

    p, m, v, g = param.double(), exp_avg.double(), exp_avg_sq.double(), grad.double()
    g = rounded(g * const(grad_scale))
    if o.maximize:
        g = -g
    if o.weight_decay != 0:
        if o.decoupled_weight_decay:
            p = rounded(p * const(1 - o.lr * o.weight_decay))
        else:
            g = rounded(p * const(o.weight_decay) + g)
    if one_minus_beta1 < 0.5:
        m = rounded(one_minus_beta1 * rounded(g - m) + m)
    else:
        m = rounded(const(one_minus_beta1 - 1) * rounded(g - m) + g)
    v = rounded(rounded(const(1 - o.beta2) * g) * g + rounded(v * const(o.beta2)))
    largest = v
    if max_exp_avg_sq is not None:
        largest = torch.maximum(max_exp_avg_sq.double(), v)
        max_exp_avg_sq.copy_(largest)
    denominator = rounded(rounded(rounded(largest.sqrt()) / bias_correction2_sqrt) + const(o.eps))
    p = rounded(p + rounded(rounded(-step_size * m) / denominator))
    param.copy_(p)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if param_copy is not None:
        param_copy.copy_(param)
