"""Tensors on the meta device have, when they are asked for, the values that the same code gives without it."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from lightning_zero.comm import Comm
from lightning_zero.deferred import Deferred
from lightning_zero.pretrained import load_pretrained

COMM = Comm(0, 1, torch.device("cpu"))


@contextmanager
def on_meta(deferred: Deferred) -> Iterator[None]:
    with deferred.recording(), torch.device("meta"):
        yield


@contextmanager
def redirected(deferred: Deferred) -> Iterator[None]:
    with deferred.recording(redirect=True):
        yield


def lazy() -> nn.Module:
    layer = nn.LazyLinear(5)
    layer(torch.randn(2, 7))
    return layer


def edited() -> Tensor:
    first = torch.randn(4, 5)
    second = first.t().contiguous() * 2
    first[1:3] = 7.0  # after it was read
    second.view(-1)[::3].add_(first.sum())
    second.data.mul_(3)
    return torch.stack([second, first.t()])


def filled_again() -> Tensor:
    first = torch.rand(6)
    kept = first.clone()
    first.normal_()
    return kept + first


def chosen_by_value() -> Tensor:
    table = torch.randn(5)
    rates = [rate.item() for rate in torch.linspace(0, 1, 3)] + torch.arange(2.0).tolist()
    return table * rates[1] if table.max() > 0 and bool((table < 9).all()) else torch.zeros(5)


def own_generator() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.empty(20).normal_(generator=generator) + torch.empty(20).uniform_(generator=generator)


def default_dtype() -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return torch.randn(30)
    finally:
        torch.set_default_dtype(before)


def loaded() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.load_state_dict({"weight": torch.arange(9.0, device="cpu").view(3, 3).clone(), "bias": layer.bias})
    return layer


MADE: dict[str, Callable[[], Any]] = {
    "numbers": lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * torch.as_tensor([2.0, 3.0]),
    "edited": edited,
    "filled again": filled_again,
    "chosen by value": chosen_by_value,
    "own generator": own_generator,
    "default dtype": default_dtype,
    "loaded": loaded,
    "permutation": lambda: torch.randperm(9),
    "dropout": lambda: F.dropout(torch.ones(40)),
    "multinomial": lambda: torch.multinomial(torch.rand(8), 5),
    "decomposition": lambda: torch.linalg.qr(torch.randn(4, 4))[0] + torch.geqrf(torch.randn(4, 4))[0],
    "truncated": lambda: nn.init.trunc_normal_(torch.empty(50, 3)),
    "narrowly truncated": lambda: nn.init.trunc_normal_(torch.empty(50, 3), a=-0.1, b=0.1),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(6, 4)),
    "sparse": lambda: nn.init.sparse_(torch.empty(5, 6), 0.5),
    "dirac": lambda: nn.init.dirac_(torch.empty(3, 4, 3)),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "halved": lambda: nn.Linear(3, 4).half(),
    "embedding": lambda: nn.Embedding(5, 4, padding_idx=1),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "recurrent": lambda: nn.GRU(4, 5, 2, bidirectional=True),
    "copies": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False),
    "copied": lambda: copy.deepcopy(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
    "lazy": lazy,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "orthogonal parametrization": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
}


def tensors(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [*made.parameters(), *made.buffers()]


@pytest.mark.parametrize("context", [on_meta, redirected])
@pytest.mark.parametrize("case", MADE)
def test_values_are_those_without_the_meta_device(case: str, context: Callable[[Deferred], Any]) -> None:
    def make() -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(4)
        torch.rand(3)
        made = tensors(MADE[case]())
        return made, torch.rand(3, device="cpu")

    expected, drawn_after = make()
    deferred = Deferred()
    with context(deferred):
        torch.manual_seed(4)
        torch.rand(3)
        made = tensors(MADE[case]())
    assert torch.equal(torch.rand(3), drawn_after)
    assert case == "numbers" or any(tensor.is_meta for tensor in made)
    state = torch.get_rng_state()
    # In another order than they were made in.
    for tensor, right in reversed(list(zip(made, expected, strict=True))):
        value = deferred.value(tensor) if tensor.is_meta else tensor
        torch.testing.assert_close(value, right.detach(), rtol=0, atol=0, equal_nan=True)
        assert value.stride() == right.stride()
    assert torch.equal(state, torch.get_rng_state())


class Plain(nn.Module):
    """Without an initialiser."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.attention = nn.MultiheadAttention(4, 2)


def test_what_nobody_followed_is_initialised_by_its_own_methods_inner_modules_first() -> None:
    torch.manual_seed(1)
    eager = Plain()
    torch.manual_seed(1)
    with torch.device("meta"):
        module = Plain()
    torch.manual_seed(1)
    deferred, ids = Deferred(), list(map(id, module.parameters()))
    deferred.prepare(module, COMM)
    deferred.fill(module, COMM)
    deferred.finish(module)
    assert ids == list(map(id, module.parameters()))
    assert module.state_dict().keys() == eager.state_dict().keys()
    for name, value in eager.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("kind", "message"), [("p", "Parameter 'odd.p'"), ("b", "Buffer 'odd.b'"), ("never", "Parameter 'odd.p'")]
)
def test_what_has_no_initialiser_is_named(kind: str, message: str) -> None:
    module, deferred = Plain(), Deferred()
    module.odd = nn.Module()
    if kind == "never":
        with deferred.recording(redirect=True):
            module.odd.p = nn.Parameter(torch.empty(3))
    elif kind == "p":
        module.odd.p = nn.Parameter(torch.empty(3, device="meta"))
    else:
        module.odd.register_buffer("b", torch.zeros(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=f"{message} is on the meta device and nothing gives it values: Module has no"):
        deferred.prepare(module, COMM)


def test_a_source_that_changes_is_noticed() -> None:
    deferred, source = Deferred(), torch.ones(3)
    with deferred.recording(), torch.device("meta"):
        layer = nn.Linear(3, 1)
        with torch.no_grad():
            layer.weight.copy_(source)
    source.zero_()
    with pytest.raises(RuntimeError, match=r"A tensor of shape \(3,\), from which .* has been changed since"):
        deferred.value(layer.weight)


def test_attributes_of_the_object_stay() -> None:
    deferred = Deferred()
    with deferred.recording(redirect=True):
        module = nn.Linear(2, 2)
        module.weight.no_decay = True
        module.mask, module.tables = torch.ones(2).bool(), {"a": [torch.arange(3)]}
    module.bias.requires_grad_(False)
    deferred.prepare(module, COMM)
    deferred.fill(module, COMM)
    assert module.weight.no_decay
    assert not module.bias.requires_grad
    assert module.mask.tolist() == [True, True]
    assert module.tables["a"][0].tolist() == [0, 1, 2]


def test_what_is_lost_on_the_way_to_another_process_is_not_made_up() -> None:
    deferred = Deferred()
    with deferred.recording(redirect=True):
        module = nn.Linear(2, 2)
    for there in (
        pickle.loads(pickle.dumps(deferred)),
        pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(deferred)))),
    ):
        there.prepare(nn.Linear(2, 2), COMM)
        with pytest.raises(ValueError, match="built on the meta device before its processes were spawned"):
            there.prepare(module, COMM)
    pickle.loads(pickle.dumps(Deferred())).prepare(module, COMM)


def test_something_that_holds_a_parameter_is_named() -> None:
    import weakref

    deferred = Deferred()
    with deferred.recording(redirect=True):
        module = nn.Linear(2, 2)
    reference = weakref.ref(module.weight)
    deferred.prepare(module, COMM)
    with pytest.raises(RuntimeError, match="'weight' is on the meta device and cannot be given values: something else"):
        deferred.fill(module, COMM)
    assert reference() is module.weight


def test_transformers_is_not_left_without_its_initialisation(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    deferred = Deferred()
    with deferred.recording(), torch.device("meta"):
        model = nn.Sequential(transformers.BertModel(config))
    with pytest.raises(ValueError, match=r"transformers does not initialise '0\.embeddings.* under torch.device"):
        deferred.prepare(model, COMM)
    transformers.BertModel(config).save_pretrained(tmp_path)
    with deferred.recording(), torch.device("meta"):
        model = nn.Sequential(transformers.BertModel(config))
        load_pretrained(model[0], tmp_path)
    deferred.prepare(model, COMM)
    with deferred.recording(redirect=True):
        model = transformers.BertModel(config)
    deferred.prepare(model, COMM)


# -- files -------------------------------------------------------------------------------------------------------------


def test_loading_needs_a_followed_module_and_a_file_it_knows(tmp_path: Any) -> None:
    with torch.device("meta"):
        outside = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="Linear is on the meta device: call load_pretrained where it is built"):
        load_pretrained(outside, tmp_path)
    inside = nn.Linear(2, 2)
    with pytest.raises(FileNotFoundError, match=r"holds none of model\.safetensors\.index"):
        load_pretrained(inside, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"'.*missing\.bin' does not exist"):
        load_pretrained(inside, tmp_path / "missing.bin")
    (tmp_path / "weights.h5").touch()
    with pytest.raises(ValueError, match=r"'.*weights.h5' must end in .safetensors"):
        load_pretrained(inside, tmp_path / "weights.h5")


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".ckpt"])
def test_names_and_shapes_are_checked_as_torch_does(tmp_path: Any, suffix: str) -> None:
    state = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(state, path)
    else:
        torch.save({"state_dict": state} if suffix == ".ckpt" else state, path)
    deferred = Deferred()
    with deferred.recording(), torch.device("meta"):
        fits, wide, deep = nn.Linear(3, 2), nn.Linear(4, 2), nn.Sequential(nn.Linear(3, 2))
        assert not any(load_pretrained(fits, path))
        with pytest.raises(RuntimeError, match=r"size mismatch for weight: .*\[2, 3\].*\[2, 4\]"):
            load_pretrained(wide, path)
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.weight", "0.bias"'):
            load_pretrained(deep, path)
        assert sorted(load_pretrained(deep, path, strict=False).unexpected_keys) == ["bias", "weight"]
    assert torch.equal(deferred.value(fits.weight), state["weight"])
