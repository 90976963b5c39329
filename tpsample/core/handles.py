"""Numbers that stand for objects, because an operator of torch takes tensors and numbers alone."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count(1)


def handle_of(it: object, before: int = 0) -> int:
    """Return a new number that stands for an object as long as it lives.

    Args:
        before: the number that stood for it, and from now on stands for nothing; 0 for none.
    """
    _objects.pop(before, None)
    handle = next(_numbers)
    _objects[handle] = it
    return handle


def living() -> list[Any]:
    """Return every object that has a handle and still lives."""
    # A list of references is made at once, while another thread may add an object.
    objects = [reference() for reference in _objects.valuerefs()]
    return [it for it in objects if it is not None]


def object_of(handle: int, name: str) -> Any:
    """Return the object that a number stands for.

    Raises:
        RuntimeError: it is gone, or has another number now.
    """
    registered = _objects.get(handle)
    if registered is None:
        raise RuntimeError(
            f"{name}: a graph was compiled or exported for one that is gone, or whose rows have "
            "changed since; keep it as it was, or compile or export again"
        )
    return registered
