"""Adam and AdamW for parameters in CPU memory, as a torch optimizer."""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.ops import AdamOptions, adam_step_
from lightning_zero.partition.handle import Sharded


class CPUAdam(Optimizer):
    """Adam (``adamw_mode=False``) or AdamW over fp32 CPU parameters, on the kernels of ``lightning_zero.ops``.

    Arguments mean what they mean in ``torch.optim.AdamW``; ``lr`` may be a tensor. Gradients may be fp32, bf16 or fp16.
    State has torch's names, and state dicts go to and from ``torch.optim.Adam`` and ``AdamW``; like theirs, they carry the
    hyper-parameters, except that the kind of decay stays the one this optimizer was made with.

    Parameters must be contiguous fp32 tensors: a 16-bit parameter would lose most small updates to rounding.
    ``ZeroStrategy`` keeps fp32 masters of 16-bit parameters and steps those.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        num_threads: int | None = None,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"a tensor lr must have one element, got shape {tuple(lr.shape)}")
        if not float(lr) >= 0:
            raise ValueError(f"lr must not be negative, got {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        if not eps >= 0:
            raise ValueError(f"eps must not be negative, got {eps}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": adamw_mode,  # torch's name, so that torch's Adam reads it from a state dict
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check_newest_group()
        except Exception:
            self.param_groups.pop()
            raise

    def _check_newest_group(self) -> None:
        *others, group = self.param_groups
        first = sum(len(other["params"]) for other in others)
        names: Iterable[str] = group.get("param_names") or ("",) * len(group["params"])
        for index, (param, name) in enumerate(zip(group["params"], names), first):
            if isinstance(param, Sharded):
                continue  # ZeroStrategy updates its shard, which is in host memory and of fp32 where it offloads
            label = f"parameter {index}" + (f" ({name})" if name else "")
            if param.layout != torch.strided or param.device.type != "cpu":
                raise ValueError(
                    f"CPUAdam needs dense CPU tensors; {label} has layout {param.layout} on device {param.device}"
                )
            if param.dtype != torch.float32:
                raise TypeError(f"CPUAdam needs torch.float32 parameters; {label} is {param.dtype}")
            if not param.is_contiguous():
                raise ValueError(
                    f"CPUAdam needs contiguous parameters; {label} has shape {tuple(param.shape)} with strides "
                    f"{param.stride()}"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "num_threads": self.num_threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Also the last act of load_state_dict, with groups that another kind of Adam may have written.
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("amsgrad", False)
            group.setdefault("maximize", False)
            group["decoupled_weight_decay"] = self.defaults["decoupled_weight_decay"]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index = 0
        for group in self.param_groups:
            options = options_of(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(param, param.grad, index, group["amsgrad"], options)
                index += 1
        return loss

    def _step_param(self, param: Tensor, grad: Tensor, index: int, amsgrad: bool, options: AdamOptions) -> None:
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"CPUAdam does not support sparse gradients; parameter {index} has one of layout {grad.layout}. "
                "torch.optim.SparseAdam does"
            )
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
            if amsgrad:
                state["max_exp_avg_sq"] = torch.zeros_like(param)
        step = int(state["step"]) + 1
        adam_step_(
            param,
            grad.contiguous(),  # only read, so a copy does no harm
            state["exp_avg"],
            state["exp_avg_sq"],
            options,
            step=step,
            max_exp_avg_sq=state["max_exp_avg_sq"] if amsgrad else None,
            num_threads=self.num_threads,
        )
        state["step"] += 1


def options_of(group: dict[str, Any]) -> AdamOptions:
    """The settings of a param group of CPUAdam or of torch's Adam and AdamW."""
    beta1, beta2 = group["betas"]
    return AdamOptions(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        maximize=group["maximize"],
    )
