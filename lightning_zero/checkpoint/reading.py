"""Files that come from elsewhere: what is wrong with one is said with its name, and what it names is inside its folder."""

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

_KEPT = (pickle.UnpicklingError, ValueError, RuntimeError)
_OUTLINE = {
    "pytorch-lightning_version": str, "state_dict": Mapping, "loops": Mapping, "callbacks": Mapping,
    "optimizer_states": list, "lr_schedulers": list,
}  # fmt: skip
"""What Lightning's own entries are."""


@contextmanager
def reading(path: str | os.PathLike, what: str = "checkpoint", failed: str = "could not be read") -> Iterator[None]:
    """Errors of the libraries that read ``path`` carry its name; what is not of a usual kind becomes RuntimeError."""
    try:
        yield
    except Exception as error:
        if os.fspath(path) in str(error):
            raise
        kind = type(error) if type(error) in _KEPT else RuntimeError
        name = "" if kind is type(error) else f"{type(error).__name__}: "
        raise kind(f"The {what} {os.fspath(path)!r} {failed}: {name}{error}") from error


def is_inside(name: object) -> bool:
    """Whether ``name`` is that of a file in the folder that names it, or below: neither absolute nor with ``..``."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return not any(path.is_absolute() or path.drive or ".." in path.parts for path in paths)


def check_outline(checkpoint: Any) -> None:
    """Raise ValueError for what is no checkpoint of a Trainer."""
    if not isinstance(checkpoint, dict):
        raise ValueError(f"it holds {type(checkpoint).__name__} instead of Lightning's dict")
    if "pytorch-lightning_version" not in checkpoint:
        raise ValueError("it has no 'pytorch-lightning_version', so it is not a checkpoint of a Trainer")
    for key, kind in _OUTLINE.items():
        if checkpoint.get(key) and not isinstance(checkpoint[key], kind):  # an empty one of another kind does no harm
            raise ValueError(f"its {key!r} is {type(checkpoint[key]).__name__} instead of {kind.__name__}")
