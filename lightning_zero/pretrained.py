"""Weights from files into a module that may be on the meta device: read when, and where, they are wanted."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.reading import is_inside, reading
from lightning_zero.deferred import is_followed_now, is_on_meta, outside_modes

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FILES = ("model.safetensors", "pytorch_model.bin")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def load_pretrained(module: nn.Module, path: str | os.PathLike, strict: bool = True) -> Any:
    """``module.load_state_dict`` of the weights in ``path``, without holding them in memory.

    In ``configure_model``, for a module that was built there on the meta device, nothing is read: when the module is
    sharded, rank 0 reads one unit after another and sends it. Modules with memory are filled at once.

    Args:
        module: Any module; its names are those in the files.
        path: A ``.safetensors`` file, a file of ``torch.save`` (``.bin``, ``.pt``, ``.pth``, or a Lightning ``.ckpt``), or
            a folder of Hugging Face with such files and, if there are several, their ``index.json``.
        strict: Whether missing and unexpected names are errors. A name that stands for the same parameter as a name that is
            there (tied weights) is not missing.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict`` does.

    Raises:
        RuntimeError: names or shapes do not fit, as ``load_state_dict`` says; or the module is on the meta device and this
            is not ``configure_model``.
        FileNotFoundError: there are no weights in ``path``.
        ValueError: the file's name does not tell what it is.
    """
    if is_on_meta(module) and not is_followed_now():
        raise RuntimeError(
            f"{type(module).__qualname__} is on the meta device: call load_pretrained where it is built, in `configure_model`"
            " or under `trainer.init_module(empty_init=True)`, so that its weights are read when it is sharded."
        )
    with outside_modes():  # readers shall not make meta tensors
        state = _open_all(Path(path))
    return module.load_state_dict(_with_tied(module, state), strict=strict)


def _open_all(path: Path) -> dict[str, Tensor]:
    """Tensors by name, in memory that is mapped to their files."""
    if not path.is_dir():
        return _open(path)
    for index in (path / name for name in _INDICES):
        if index.exists():
            files = _named_in(index)
            return dict(itertools.chain.from_iterable(_open(path / file).items() for file in files))
    for file in (path / name for name in _FILES):
        if file.exists():
            return _open(file)
    raise FileNotFoundError(f"{str(path)!r} holds none of {', '.join((*_INDICES, *_FILES))}")


def _named_in(index: Path) -> list[str]:
    with reading(index, "index"):
        files = json.loads(index.read_text())["weight_map"].values()
        outside = [name for name in files if not is_inside(name)]
        if outside:
            raise ValueError(f"it names {outside[0]!r}, which is not a file inside its folder")
        return sorted(set(files))


def _open(file: Path) -> dict[str, Tensor]:
    if not file.exists():
        raise FileNotFoundError(f"{str(file)!r} does not exist")
    with reading(file, "file of weights"):
        state = _tensors_of(file)
        strangers = [name for name, value in state.items() if not isinstance(name, str) or not isinstance(value, Tensor)]
        if strangers:
            raise ValueError(f"{strangers[0]!r} is {type(state[strangers[0]]).__name__} instead of a tensor")
        return state


def _tensors_of(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(f"reading {file.name} needs safetensors: pip install safetensors") from error
        with safe_open(file, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}
    if file.suffix not in _PICKLED:
        raise ValueError(
            f"{str(file)!r} must end in .safetensors, {', '.join(_PICKLED)}, or be a folder with such files"
        )
    state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"it holds {type(state).__name__} instead of tensors by name")
    inner = state.get("state_dict")  # of Lightning
    return inner if isinstance(inner, dict) else state


def _with_tied(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Files hold one name of tied weights, modules know all."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    state = dict(state)
    for tied in names.values():
        found = next((state[name] for name in tied if name in state), None)
        if found is not None:
            for name in tied:
                state.setdefault(name, found)
    return state
