"""Test data for the step, and comparison by bits."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lightning_zero.ops import AdamOptions, adam_step_

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COPY_DTYPES = (None, torch.bfloat16, torch.float16)


@dataclass
class State:
    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    param_copy: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def clone(self) -> "State":
        return State(**{name: tensor.clone() for name, tensor in self.tensors().items()})

    def range(self, start: int, stop: int) -> "State":
        return State(**{name: tensor[start:stop] for name, tensor in self.tensors().items()})

    def misaligned(self, offset: int) -> "State":
        """The same values, `offset` elements past an aligned address."""

        def moved(tensor: Tensor) -> Tensor:
            return torch.cat([tensor.new_zeros(offset), tensor])[offset:]

        return State(**{name: moved(tensor) for name, tensor in self.tensors().items()})

    def step(self, options: AdamOptions, **keywords: object) -> "State":
        named = self.tensors()
        args = [named.pop(name) for name in ("param", "grad", "exp_avg", "exp_avg_sq")]
        adam_step_(*args, options, **{"step": 3, **named, **keywords})
        return self


def make_state(
    numel: int,
    grad_dtype: torch.dtype = torch.float32,
    copy_dtype: torch.dtype | None = None,
    amsgrad: bool = False,
    seed: int = 0,
) -> State:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(numel, generator=generator) * scale

    magnitudes = torch.exp2(torch.randint(-8, 1, (numel,), generator=generator).float())
    return State(
        param=normal(1.0),
        grad=(normal(0.1) * magnitudes).to(grad_dtype),
        exp_avg=normal(0.01),
        exp_avg_sq=normal(0.03).square(),
        max_exp_avg_sq=normal(0.03).square() if amsgrad else None,
        param_copy=None if copy_dtype is None else torch.full((numel,), 7.0, dtype=copy_dtype),
    )


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, with all NaNs made one: which NaN an operation gives is the processor's choice."""
    integers = tensor.detach().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    return integers.masked_fill(tensor.isnan(), -1)


def differing(a: State, b: State) -> dict[str, int]:
    """How many elements differ in bits, for each tensor with any."""
    counts = {name: int((bits(x) != bits(b.tensors()[name])).sum()) for name, x in a.tensors().items()}
    return {name: count for name, count in counts.items() if count}
