"""Where ranks are that did not meet: the error that says so."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

ENDING = "ending after an exception"
"""The place of ranks that have no code left to move."""
_WAY_OUT = (
    " Sharded tensors are gathered from all ranks, so all ranks must read them, save and step together: move the call out"
    " of code that only some ranks run (such as `if trainer.is_global_zero`)."
)
_ASK_SECONDS = 1.0  # for ranks that did not meet to say where they are
_ANSWER_SECONDS = 5.0  # for the store to pass it on


class Whereabouts:
    """Finds out over a store where the ``members`` are. That needs no partner: some may have given up already, others may
    never come."""

    def __init__(self, rank: int, members: Sequence[int], store: Any) -> None:
        self._rank, self._members = rank, members
        self._store = store

    def apart(self, place: str, exchange: int, timeout: float | None) -> RuntimeError:
        """The error of ranks that did not meet in their ``exchange``-th comparison, at ``place``, within ``timeout``."""
        here: dict[int, str] = {}
        place, limit = place.strip(), min(_ASK_SECONDS, timeout or _ASK_SECONDS)
        # Beside the program: the store has no time limit of its own where the host that keeps it is cut off.
        asking = threading.Thread(
            target=self._ask, args=(place, exchange, limit, here), name="lightning_zero-ask", daemon=True
        )
        asking.start()
        asking.join(limit + _ANSWER_SECONDS)
        waited = timeout or _ASK_SECONDS
        if not here:
            return RuntimeError(
                f"Rank {self._rank} is {place}, and the other ranks did not come within {waited:g} s. Where they are is"
                " not known: the store of the process group, on the host of rank 0, does not answer. That host is down, or"
                " the network to it is."
            )
        where = "; ".join(f"rank {r} is {at}" for r, at in sorted(here.items()))
        away = [r for r in self._members if r not in here]
        missing = f"; rank(s) {away} did not come within {waited:g} s" if away else ""
        return RuntimeError(
            f"The ranks have gone different ways: {where}{missing}. This is rank {self._rank}."
            + ("" if place.startswith(ENDING) else _WAY_OUT)
        )

    def _ask(self, place: str, exchange: int, seconds: float, here: dict[int, str]) -> None:
        """Say where this rank is, and fill ``here`` with the others' places as they do. Their time limits end a little
        earlier or later."""
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):  # the store is gone
            self._store.set(f"{exchange}/{self._rank}", place)
            while True:
                found = [r for r in self._members if self._store.check([f"{exchange}/{r}"])]
                if len(found) == len(self._members) or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            here.update({r: self._store.get(f"{exchange}/{r}").decode() for r in found})
