"""Calls that every rank makes, whose arguments may have no place in them on one rank.

Python refuses such arguments before any line of the call runs: an unknown name, one that is
missing, one too many. The other ranks would wait for this one, so they are told first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from tpsample.core.sealed import way_out
from tpsample.request.as_json import FIELDS
from tpsample.settings import require_sampler

_Call = TypeVar("_Call", bound=Callable[..., Any])


def collective(refuse: Callable[[dict[str, Any], TypeError], object]) -> Callable[[_Call], _Call]:
    """Let a call be refused on every rank, as for a wrong argument, where Python refuses it on one.

    Args:
        refuse: raises the error on every rank. It is given the arguments by name, those of unknown
            names too, and without those that are too many.
    """

    def decorated(call: _Call) -> _Call:
        parameters = inspect.signature(call).parameters.values()
        names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

        @wraps(call)
        def placed(*given: Any, **named: Any) -> Any:
            try:
                return call(*given, **named)
            except TypeError as error:
                here = error.__traceback__
                if here is None or here.tb_next is not None:  # a line of the call has raised it
                    raise
                wrong = misplaced(call, named, str(error))
                wrong.__suppress_context__ = True  # it says the same; a lost rank's error does not
                refuse(dict(zip(names, given, strict=False)) | named, wrong)
                raise wrong from None

        return cast(_Call, placed)

    return decorated


def refuse_on_sampler(given: Mapping[str, Any], error: TypeError) -> None:
    """Raise an error on every rank of the sampler whose method or function is called.

    Raises:
        TypeError: there is no sampler, which would say who the other ranks are.
    """
    sampler = given.get("self", given.get("sampler"))
    require_sampler(sampler)
    sampler.agreement.refuse(error)


def tells_itself(call: _Call) -> _Call:
    """Hide from `inspect.signature` that a step takes misplaced arguments.

    A step takes any argument, so that it can tell its peers of a misplaced one. The wrapper of
    `collective` would do so, too, but costs every step a call.
    """
    signature = inspect.signature(call)
    shown = [
        each.replace(default=each.empty) if each.kind is each.POSITIONAL_OR_KEYWORD else each
        for each in signature.parameters.values()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    call.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return call


def misplaced(call: Callable[..., object], named: Mapping[str, object], said: str) -> TypeError:
    """Return the error for arguments that have no place in a call, with the way out.

    Args:
        named: those that were given by name.
        said: what is wrong, if no name is.
    """
    shown, takes = call.__qualname__.removesuffix(".__init__"), inspect.signature(call).parameters
    for name in named:
        if name not in takes:
            advice = f"give it to each request, SamplingParams({name}=…)"
            if name not in FIELDS:
                advice = way_out(name, [other for other in takes if other != "self"])
            return TypeError(f"{name}: not an argument of {shown}; {advice}")
    listed: list[str] = []
    for each in takes.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in listed:
            listed.append("*")
        if each.name != "self":
            listed.append(each.name if each.default is each.empty else f"{each.name}=…")
    return TypeError(f"{said}; call it as {shown}({', '.join(listed)})")
