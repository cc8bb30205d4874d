"""Python imports this first where the folder is on its path: see the package it lies in."""

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from typing import Any

HIDDEN = {"transformers", "scipy"}


class LeanFinder(PathFinder):
    """Finds what is installed, less what is hidden: the modules, and the package's name and version."""

    @classmethod
    def find_spec(cls, fullname: str, *args: Any) -> ModuleSpec | None:
        return None if fullname in HIDDEN else super().find_spec(fullname, *args)

    @classmethod
    def find_distributions(cls, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        context = context or DistributionFinder.Context()
        return () if context.name in HIDDEN else super().find_distributions(context)


sys.meta_path[sys.meta_path.index(PathFinder)] = LeanFinder
