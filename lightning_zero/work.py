"""Collectives under way."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A collective under way. ``wait`` returns when its result may be used (on a GPU: in the current stream)."""

    def wait(self) -> Any: ...


class Done:
    """Nothing was to be sent."""

    def wait(self) -> None:
        return None


def is_over(work: Any) -> bool:
    """Whether it is known, without waiting, that waiting takes no time."""
    if isinstance(work, Result):
        return work.is_local
    done = getattr(work, "done", None)
    return done is not None and done()


class Result:
    """A collective whose result is a tensor made after its bytes have arrived."""

    def __init__(self, works: list[Work], finish: Callable[[], Tensor]) -> None:
        self.is_local = not works
        """Nothing is sent, so there is nothing to wait for."""
        self._works = works
        self._finish = finish

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._finish()


class Exchange:
    """Point-to-point sends and receives that together form one collective."""

    def __init__(self, what: str, rank: int, works: list[tuple[int | str, Any]], keep: list[Tensor]) -> None:
        self._what, self._rank, self._works = what, rank, works
        self._keep = keep  # only keeps the memory alive until the transfers are done

    def done(self) -> bool:
        """Of messages that can tell: whether waiting takes no time."""
        return all(work.done() for _, work in self._works)

    def add(self, peer: int | str, work: Any) -> None:
        self._works.append((peer, work))

    def wait(self) -> None:
        for peer, work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {self._rank}: {self._what} with rank {peer} failed. That rank has ended, or is somewhere"
                    f" else in the program and did not answer in time. ({error})"
                ) from error
        self._works, self._keep = [], []


class Arriving:
    """A tensor that messages from memory to memory fill."""

    def __init__(self, exchange: Exchange, tensor: Tensor, dtype: torch.dtype) -> None:
        self._exchange = exchange
        self._tensor = tensor
        self._dtype = dtype

    def done(self) -> bool:
        return self._exchange.done()

    def wait(self) -> Tensor:
        self._exchange.wait()
        return self._tensor.to(self._dtype)


class FutureWork:
    """A collective that a thread of this process brings to its end."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Tensor:
        return self._future.result()
