"""Calls that every rank makes, whose arguments may have no place in them on one rank.

Python refuses such arguments before any line of the call runs: an unknown name, one that is
missing, one too many. The other ranks would wait for this one, so they are told first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from tpsample.core.handles import living
from tpsample.core.sealed import way_out
from tpsample.request.as_json import FIELDS
from tpsample.settings import Settings, require_sampler

_Call = TypeVar("_Call", bound=Callable[..., Any])


def collective(refuse: Callable[[dict[str, Any], TypeError], object]) -> Callable[[_Call], _Call]:
    """Refuse a call on every rank if Python refuses its arguments on one.

    Args:
        refuse: raises the error on every rank. It gets the arguments by name and by position, also
            those of unknown names, and the error.
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
                by_place = {str(place): value for place, value in enumerate(given)}
                refuse(by_place | dict(zip(names, given, strict=False)) | named, wrong)
                raise wrong from None

        return cast(_Call, placed)

    return decorated


def refuse_on_sampler(given: Mapping[str, Any], error: TypeError) -> None:
    """Raise an error on every rank of the sampler whose method or function is called.

    Raises:
        TypeError: there is no sampler, which would say who the other ranks are.
    """
    sampler = given.get("self", given.get("sampler"))
    require_sampler_on_all_ranks(sampler)
    sampler.agreement.refuse(error)


def require_sampler_on_all_ranks(sampler: Any) -> None:
    """Raise a TypeError for anything but a sampler, on every rank of this process's samplers.

    The peers make the call with a sampler, and wait for this rank there. On CPUs they hear of the
    error in any sampler of their group. Among samplers of several groups it is not known in which
    group they wait, so this rank raises alone.
    """
    try:
        require_sampler(sampler)
    except TypeError as error:
        with_peers = [
            it
            for it in living()
            if isinstance(getattr(it, "settings", None), Settings)
            and not it.checks.closed
            and it.ranks.world_size > 1
        ]
        if len({id(it.ranks.shared) for it in with_peers}) == 1:
            with_peers[0].agreement.refuse(error)
        raise


def misplaced(call: Callable[..., object], named: Mapping[str, object], message: str) -> TypeError:
    """Return the error for arguments that a call does not take, with the way out.

    Args:
        named: the arguments that were given by name.
        message: Python's message, which is used if every name is right.
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
    return TypeError(f"{message}; call it as {shown}({', '.join(listed)})")
