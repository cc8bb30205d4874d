"""Ranges with names of units in the traces of torch's profiler."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

PREFIX = "ZeRO::"
GATHER, REDUCE, PUBLISH, WAIT = "gather", "reduce", "publish", "wait"
_NOTHING = nullcontext()


def span(what: str, name: str, of: str = "") -> AbstractContextManager:
    """A range named ``ZeRO::WHAT (NAME)``, or ``ZeRO::WHAT for OF (NAME)``, around what is done inside; nothing, and no name
    is made, while no profiler is active."""
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(f"{PREFIX}{what} for {of} ({name})" if of else f"{PREFIX}{what} ({name})")
