"""What is sent, counted where it is handed over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_zero.pairs import Pairs


@contextmanager
def handed_over(step: Callable[[], int]) -> Iterator[list[tuple[int, int]]]:
    """The bytes that this rank hands over to be sent to others, each time with the number of the ``step``."""
    handed, exchange = [], Pairs.exchange

    def counting(self: Pairs, what: str, tag: int, sends: dict[int, Tensor], *rest: Any) -> Any:
        handed.append((step(), sum(tensor.nbytes for tensor in sends.values())))
        return exchange(self, what, tag, sends, *rest)

    Pairs.exchange = counting  # type: ignore[method-assign]
    yield handed
    Pairs.exchange = exchange  # type: ignore[method-assign]
