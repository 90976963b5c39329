"""Objects that refuse attributes which they do not have, because nothing would read them."""

from __future__ import annotations

import difflib
from functools import wraps
from typing import Any


class Sealed:
    """Base of classes whose objects take no new attribute once their `__init__` has ended."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        init = cls.__dict__.get("__init__")
        if init is None:
            return

        @wraps(init)
        def sealing(self: Any, *args: Any, **named: Any) -> None:
            init(self, *args, **named)
            if type(self).__init__ is sealing:  # no constructor of a subclass goes on
                vars(self)["_sealed"] = True

        cls.__init__ = sealing  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: object) -> None:
        own, kind = vars(self), type(self)
        if "_sealed" in own and name not in own and not hasattr(kind, name):
            near = difflib.get_close_matches(
                name, [each for each in dir(self) if each[0] != "_"], 1
            )
            way_out = f"; did you mean {near[0]}?" if near else ", and nothing would read it"
            raise AttributeError(f"{name}: not an attribute of {kind.__name__}{way_out}")
        super().__setattr__(name, value)
