"""Choosing the instruction set inside one process, and keeping torch's threads out of the way."""

from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_zero.ops import native_isa

UseIsa = Callable[[str], None]


@pytest.fixture(autouse=True)
def choose_isa_anew() -> Iterator[None]:
    native_isa.cache_clear()
    yield
    native_isa.cache_clear()


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """On busy cores the references would spend the time waiting for each other's threads, at every tiny tensor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def use_isa(monkeypatch: pytest.MonkeyPatch) -> UseIsa:
    """Return a function that makes the kernels of one instruction set run from now on."""

    def use(name: str) -> None:
        monkeypatch.setenv("LIGHTNING_ZERO_ISA", name)
        native_isa.cache_clear()

    return use
