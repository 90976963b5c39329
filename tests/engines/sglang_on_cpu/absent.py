"""Modules that are not there, for imports of names that nobody calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar


class Absent(types.ModuleType):
    """A module in which every name is another, and which cannot be called."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        if self.__name__.startswith("torchvision."):  # classes and decorators, at import
            return None
        raise RuntimeError(f"{self.__name__}: not on a CPU")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds whatever is below one package."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return a spec for a module of the package."""
        if name.startswith(f"{self._package}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Absent:
        """Return the module."""
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing, as there is nothing."""


def stand_in(package: str) -> Any:
    """Let imports below a package succeed, and return the `__getattr__` of the package."""
    sys.meta_path.insert(0, Finder(package))

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{package}.{name}")

    return get
