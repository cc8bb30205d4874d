"""Choosing the instruction set inside one process."""

from collections.abc import Callable, Iterator

import pytest

from lightning_zero.ops import native_isa

UseIsa = Callable[[str], None]


@pytest.fixture(autouse=True)
def choose_isa_anew() -> Iterator[None]:
    native_isa.cache_clear()
    yield
    native_isa.cache_clear()


@pytest.fixture
def use_isa(monkeypatch: pytest.MonkeyPatch) -> UseIsa:
    """Return a function that makes the kernels of one instruction set run from now on."""

    def use(name: str) -> None:
        monkeypatch.setenv("LIGHTNING_ZERO_ISA", name)
        native_isa.cache_clear()

    return use
