"""What the door to the kernels refuses, how it chooses, and what runs where they are missing."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_zero.offload import CPUAdam
from lightning_zero.ops import AdamOptions, adam_step_, available_isas, has_nonfinite, native_isa, sum_of_squares
from tests.fresh import environment
from tests.native.conftest import UseIsa
from tests.native.state import COPY_DTYPES, GRAD_DTYPES, make_state

BACKENDS = (*available_isas(), "torch")

strided = torch.zeros(16)[::2]
# The argument, what is passed for it, and what the message says.
REFUSED = [
    ("param", strided, ValueError, "param must be contiguous"),
    ("grad", strided, ValueError, "grad must be contiguous"),
    ("exp_avg", strided, ValueError, "exp_avg must be contiguous"),
    ("exp_avg_sq", torch.zeros(2, 4).T, ValueError, "exp_avg_sq must be contiguous"),
    ("max_exp_avg_sq", strided, ValueError, "max_exp_avg_sq must be contiguous"),
    ("param_copy", torch.zeros(16, dtype=torch.bfloat16)[::2], ValueError, "param_copy must be contiguous"),
    ("param", torch.zeros(8, dtype=torch.bfloat16), TypeError, "param must be torch.float32, got torch.bfloat16"),
    (
        "grad",
        torch.zeros(8, dtype=torch.float64),
        TypeError,
        "grad must be torch.float32 or torch.bfloat16 or torch.float16",
    ),
    ("exp_avg", torch.zeros(8, dtype=torch.float16), TypeError, "exp_avg must be torch.float32"),
    ("param_copy", torch.zeros(8), TypeError, "param_copy must be torch.bfloat16 or torch.float16, got torch.float32"),
    ("grad", torch.zeros(7), ValueError, "grad must have 8 elements as param has, got 7"),
    ("exp_avg_sq", torch.zeros(9), ValueError, "exp_avg_sq must have 8 elements"),
    ("grad", torch.zeros(8).to_sparse(), ValueError, "grad must be a dense CPU tensor, got layout torch.sparse_coo"),
    ("exp_avg", torch.zeros(8, device="meta"), ValueError, "on device meta"),
    ("step", 0, ValueError, "step counts from 1, got 0"),
    ("num_threads", 0, ValueError, "num_threads must be at least 1, got 0"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "value", "error", "text"), REFUSED)
def test_refuses(backend: str, name: str, value: object, error: type[Exception], text: str, use_isa: UseIsa) -> None:
    use_isa(backend)
    state = make_state(8)
    before = state.clone()
    with pytest.raises(error, match=text):
        adam_step_(**{**state.tensors(), "options": AdamOptions(), "step": 1, name: value})
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before.tensors()[name])


@pytest.mark.parametrize("function", [sum_of_squares, has_nonfinite])
def test_gradient_functions_refuse(function: object) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        function(strided)
    with pytest.raises(TypeError, match=r"got torch\.int32"):
        function(torch.zeros(3, dtype=torch.int32))


def test_any_shape_will_do() -> None:
    state = make_state(24)
    flat = state.clone().step(AdamOptions())
    adam_step_(
        **{name: tensor.view(2, 3, 4) for name, tensor in state.tensors().items()}, options=AdamOptions(), step=3
    )
    assert torch.equal(state.param, flat.param)


def test_the_variable_chooses(use_isa: UseIsa) -> None:
    for name in BACKENDS:
        use_isa(name)
        assert native_isa() == name
    use_isa("")
    assert native_isa() == BACKENDS[0]
    use_isa("avx1024")
    with pytest.raises(ValueError, match=r"LIGHTNING_ZERO_ISA='avx1024' is not available here.*torch"):
        native_isa()


def test_the_fallback_agrees(use_isa: UseIsa) -> None:
    for grad_dtype, copy_dtype, amsgrad, decoupled, maximize in itertools.product(
        GRAD_DTYPES, COPY_DTYPES, (False, True), (False, True), (False, True)
    ):
        options = AdamOptions(lr=1e-2, weight_decay=0.1, decoupled_weight_decay=decoupled, maximize=maximize)
        start = make_state(1003, grad_dtype, copy_dtype, amsgrad)
        use_isa(BACKENDS[0])
        expected = start.clone().step(options, grad_scale=0.7)
        use_isa("torch")
        got = start.clone().step(options, grad_scale=0.7)
        for name, tensor in got.tensors().items():
            rtol = 1e-2 if name == "param_copy" else 1e-5
            torch.testing.assert_close(tensor, expected.tensors()[name], rtol=rtol, atol=1e-6)


HIDDEN = """
import sys, warnings
sys.modules["lightning_zero.ops._kernels"] = None  # what an import finds where the extension was not built
import torch
from lightning_zero.offload import CPUAdam
from lightning_zero.ops import available_isas, has_nonfinite, native_isa, sum_of_squares

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (5, 64)]
    optimizer = CPUAdam(params, lr=1e-2, weight_decay=0.1)
    for step in range(3):
        for p in params:
            p.grad = p.detach() * (step + 1)
        optimizer.step()
    assert sum_of_squares(torch.full((4,), 2.0)) == 16 and not has_nonfinite(params[0])
messages = [str(w.message) for w in caught if "lightning_zero" in str(w.message)]
assert len(messages) == 1, messages
assert "torch's fused CPU operations" in messages[0] and "_kernels" in messages[0], messages
assert available_isas() == () and native_isa() == "torch"
torch.save([p.detach() for p in params], sys.argv[1])
"""


def test_without_the_extension_torch_steps_in_and_says_so_once(tmp_path: Path) -> None:
    file = tmp_path / "params.pt"
    variables = {name: value for name, value in environment().items() if name != "LIGHTNING_ZERO_ISA"}
    subprocess.run([sys.executable, "-c", HIDDEN, str(file)], check=True, cwd=tmp_path, env=variables, timeout=60)
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (5, 64)]
    optimizer = CPUAdam(params, lr=1e-2, weight_decay=0.1)
    for step in range(3):
        for p in params:
            p.grad = p.detach() * (step + 1)
        optimizer.step()
    for ours, theirs in zip(params, torch.load(file)):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-5, atol=1e-6)
