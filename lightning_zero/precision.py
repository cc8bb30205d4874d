"""ZeroPrecision: compute dtypes, loss scaling and clipping where gradients are sharded."""

import copy
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.config import ParameterDtypes
from lightning_zero.partition.engine import ZeroEngine

_REFUSED = {
    "TransformerEnginePrecision": "it replaces linear layers by its own and keeps fp8 state in them",
    "BitsandbytesPrecision": "its quantised weights are tensor subclasses whose bytes cannot be sharded",
    "DeepSpeedPrecision": "it belongs to DeepSpeedStrategy",
    "FSDPPrecision": "it belongs to FSDPStrategy",
    "XLAPrecision": "it belongs to XLAStrategy",
}

# How torch says that an operation has got both, which autocast would have prevented.
_NARROW_AND_WIDE = re.compile("type.*(BFloat16|Half)")

_DENSE = ("weight", "bias")
AUTOCAST_MODULES: Mapping[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: _DENSE,
    nn.Conv1d: _DENSE,
    nn.Conv2d: _DENSE,
    nn.Conv3d: _DENSE,
    nn.ConvTranspose1d: _DENSE,
    nn.ConvTranspose2d: _DENSE,
    nn.ConvTranspose3d: _DENSE,
    nn.MultiheadAttention: ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}
"""Parameters that autocast would cast to 16 bit at every use, by module type.

Casting them beforehand gives the same numbers, forward and backward, in 16 bit of memory and traffic. Recurrent layers
are not among them: they add the gradients of all time steps in the weights' dtype.
"""


class ZeroPrecision(Precision):
    """A Lightning precision plugin for sharded gradients.

    ``ZeroPrecision("bf16-mixed")`` builds one; :func:`translate` makes one of any other plugin, by mixing this class
    with the plugin's own. Takes ``"32-true"``, ``"64-true"``, ``"bf16-true"``, ``"16-true"``, ``"bf16-mixed"`` and
    ``"16-mixed"``; ``scaler`` replaces the default ``torch.amp.GradScaler`` of the fp16 ones, and ``autocast_modules``
    extends :data:`AUTOCAST_MODULES`.
    """

    engine: ZeroEngine | None = None
    scaler: "torch.amp.GradScaler | None" = None
    autocast_modules: Mapping[type[nn.Module], tuple[str, ...]] = AUTOCAST_MODULES
    last_grad_norm: Tensor | None = None
    """What the last clipping by norm found, before it clipped."""

    def __new__(
        cls,
        precision: Any = None,
        scaler: "torch.amp.GradScaler | None" = None,
        device: str = "cpu",
        autocast_modules: Mapping[type[nn.Module], tuple[str, ...]] | None = None,
    ) -> "ZeroPrecision":
        plugin = translate(_stock_plugin(precision, device, scaler))
        if autocast_modules is not None:
            plugin.autocast_modules = {**AUTOCAST_MODULES, **autocast_modules}
        return plugin

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is done in ``__new__``, which returns an object of a derived class."""

    def __reduce__(self) -> Any:
        # The class is made on the fly; make it again from the plugin's own.
        state = {k: v for k, v in vars(self).items() if k not in ("engine", "last_grad_norm")}
        return _mix, (type(self).__mro__[2], state)

    # -- dtypes ------------------------------------------------------------------------------------------------------

    def parameter_dtypes(self, module: nn.Module) -> ParameterDtypes:
        """Which parameters of ``module`` steps compute with in 16 bit."""
        if isinstance(self, HalfPrecision):
            half = self._desired_input_dtype
            return ParameterDtypes({id(p): half for p in module.parameters() if p.is_floating_point()})
        if isinstance(self, MixedPrecision):
            half = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
            return ParameterDtypes(dict.fromkeys(self._autocast_parameters(module), half), shows_main=True)
        return ParameterDtypes()

    def _autocast_parameters(self, module: nn.Module) -> set[int]:
        chosen: set[int] = set()
        others: set[int] = set()
        for submodule in module.modules():
            names = self._names_in(submodule)
            for name, parameter in submodule._parameters.items():
                if parameter is not None:
                    (chosen if name in names and parameter.dtype == torch.float32 else others).add(id(parameter))
        # A weight that some other module shares (an embedding, say) is not cast at every use.
        return chosen - others

    def _names_in(self, module: nn.Module) -> tuple[str, ...]:
        for cls, names in self.autocast_modules.items():
            # A subclass with a forward of its own may use the parameter before autocast sees it.
            if isinstance(module, cls) and type(module).forward is cls.forward:
                return names
        return ()

    def wide_sums(self, trainer: Trainer) -> bool:
        """Whether reduced 16-bit gradients are added to or scaled before the optimizer sees them."""
        return (
            not trainer.lightning_module.automatic_optimization
            or trainer.accumulate_grad_batches > 1
            or any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)  # type: ignore[attr-defined]
            or bool(trainer.gradient_clip_val)
            or self.scaler is not None
        )

    def convert_buffers(self, module: nn.Module) -> None:
        """What ``convert_module`` does to buffers; parameters are converted as they are sharded."""
        if isinstance(self, HalfPrecision):
            for submodule in module.modules():
                for name, buffer in submodule._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        submodule._buffers[name] = buffer.to(self._desired_input_dtype)

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        with super().forward_context():
            try:
                yield
            except RuntimeError as error:
                if not isinstance(self, MixedPrecision) or not _NARROW_AND_WIDE.search(str(error)):
                    raise
                raise RuntimeError(
                    f"{error}. In {self.precision} weights of linear, convolution and attention layers have 16 bit inside a"
                    " step, also where autocast is switched off. Leave it on there, or keep the weights of such layers in"
                    f" fp32: `Trainer(plugins=[ZeroPrecision({self.precision!r}, autocast_modules={{nn.Linear: ()}})])`."
                ) from error

    # -- loss scaling ------------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self.scaler is not None and not isinstance(self, MixedPrecision):
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    @override
    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        with nullcontext() if self.engine is None else self.engine.backward():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if self.scaler is None or self.engine is None or not self.engine.units:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        skipped = result is None and model.automatic_optimization
        if not skipped:
            self._unscale(optimizer, self.scaler)
        self._after_closure(model, optimizer)
        if skipped:
            return result
        state = self.scaler._per_optimizer_states[id(optimizer)]
        # Not GradScaler.step: it leaves it to a fused optimizer to look for the overflow.
        output = self.scaler._maybe_opt_step(optimizer, state, **kwargs)
        state["stage"] = OptState.STEPPED
        self.scaler.update()
        return output

    def _unscale(self, optimizer: Optimizer, scaler: "torch.amp.GradScaler") -> None:
        """``GradScaler.unscale_`` over shards: all ranks see an overflow that one of them has."""
        if self.engine is None:
            raise RuntimeError("gradients cannot be unscaled before the strategy is set up")
        found = self.engine.gradient_shards(self.main_params(optimizer)).unscale(1.0 / scaler.get_scale())
        state = scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {found.device: found}
        state["stage"] = OptState.UNSCALED

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.scaler is None else self.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)

    # -- clipping ----------------------------------------------------------------------------------------------------

    @override
    def clip_gradients(self, optimizer: Optimizer, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        # Not MixedPrecision's, which refuses fused optimizers: here they never unscale by themselves.
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = list(self.main_params(optimizer))
        if self.engine is None or not self.engine.units:
            self.last_grad_norm = nn.utils.clip_grad_norm_(parameters, clip_val)
        else:
            self.last_grad_norm = self.engine.gradient_shards(parameters).clip_by_norm(float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.engine is None or not self.engine.units:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            self.engine.gradient_shards(self.main_params(optimizer)).clip_by_value(float(clip_val))


def translate(plugin: Precision) -> ZeroPrecision:
    """The same plugin for sharded gradients: of a subclass of its own class, so that user overrides stay in force."""
    if isinstance(plugin, ZeroPrecision):
        return plugin
    if not isinstance(plugin, Precision):
        raise TypeError(
            f"precision_plugin must be a Precision plugin of `lightning.pytorch`, got {plugin!r} of"
            f" {type(plugin).__module__}. (The packages `lightning` and `pytorch_lightning` cannot be mixed.)"
        )
    for cls in type(plugin).__mro__:
        if cls.__name__ in _REFUSED:
            raise ValueError(
                f"ZeroStrategy does not work with the precision plugin {type(plugin).__name__}: {_REFUSED[cls.__name__]}."
                " Use precision='32-true', 'bf16-mixed', '16-mixed', 'bf16-true' or '16-true'."
            )
    state = dict(vars(copy.copy(plugin)))
    if isinstance(plugin, HalfPrecision) and plugin.precision == "16-true":
        state.setdefault("scaler", torch.amp.GradScaler(device="cuda" if torch.cuda.is_available() else "cpu"))
    return _mix(type(plugin), state)


def _stock_plugin(precision: Any, device: str, scaler: "torch.amp.GradScaler | None") -> Precision:
    if precision in ("16-mixed", "bf16-mixed"):
        return MixedPrecision(precision, device, scaler)
    if precision in ("16-true", "bf16-true"):
        plugin = HalfPrecision(precision)
        if scaler is not None:
            plugin.scaler = scaler  # type: ignore[attr-defined]
        return plugin
    if precision == "64-true":
        from lightning.pytorch.plugins.precision import DoublePrecision

        return DoublePrecision()
    if precision in (None, "32-true"):
        return Precision()
    raise ValueError(
        f"precision must be '32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed', got {precision!r}"
    )


def _mix(cls: type[Precision], state: dict[str, Any]) -> ZeroPrecision:
    # Checkpoints name the plugin's state by its class: keep the name that plain Lightning gives it.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    mixed: Any = type(cls.__name__, (ZeroPrecision, cls) if cls is not Precision else (ZeroPrecision,), names)
    plugin = object.__new__(mixed)
    plugin.__dict__.update(state)
    return plugin
