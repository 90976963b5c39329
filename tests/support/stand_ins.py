"""Stand-ins for modules of an engine that is not installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest


def stand_in(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Let modules with these attributes be imported, and the packages that they are in."""
    names = {name for path in modules for name in accumulate(path.split("."), "{}.{}".format)}
    for name in names:
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
