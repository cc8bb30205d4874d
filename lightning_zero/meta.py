"""Modules that are built without allocating anything, to be measured."""

import importlib
import json
import os
import sys

import torch
from torch import nn


def build_on_meta(path: str, init_args: str = "{}") -> nn.Module:
    """Call what ``package.module:Class`` names, with keyword arguments given as JSON, without allocating anything."""
    module_name, _, attribute = path.partition(":")
    sys.path.insert(0, os.getcwd())  # a console script does not look there by itself
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {attribute!r} from {module_name!r}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    try:
        kwargs = json.loads(init_args)
    except json.JSONDecodeError as error:
        raise ValueError(f"--init-args must be a JSON object, got {init_args!r}: {error}") from error
    if not isinstance(kwargs, dict):
        raise ValueError(f"--init-args must be a JSON object, got {init_args!r}")
    try:
        with torch.device("meta"):
            module = factory(**kwargs)
    except Exception as error:
        raise ValueError(
            f"{path} could not be built on the meta device with the arguments {kwargs}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"{path} must give a torch.nn.Module, got {type(module).__qualname__}")
    return module


def build_from_config(path: str) -> nn.Module:
    """Build the model that a Hugging Face ``config.json`` (or the folder it is in) describes; needs `transformers`."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{path!r} is taken for a config of Hugging Face: pip install transformers") from error
    try:
        # A name that is no path would be looked for on the network.
        config = transformers.AutoConfig.from_pretrained(os.path.realpath(path, strict=True))
        name = (config.architectures or [""])[0]
        with torch.device("meta"):
            model = getattr(transformers, name)(config) if name else transformers.AutoModel.from_config(config)
    except Exception as error:
        raise ValueError(f"no model could be built from {path!r}: {type(error).__name__}: {error}") from error
    return model
