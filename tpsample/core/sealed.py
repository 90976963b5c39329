"""Names that nothing would read are refused: attributes of objects, and fields of a request."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import Any, ClassVar, NoReturn, TypeVar

from tpsample.core.checks import describe


class Sealed:
    """Base of classes whose objects take no new attribute once their `__init__` has ended.

    Attributes:
        _FIXED: attributes that cannot be set then either, with the way out.
    """

    _FIXED: ClassVar[Mapping[str, str]] = {}

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
        if "_sealed" in own and name in kind._FIXED:
            raise AttributeError(
                f"{name}: is fixed once {kind.__name__} is built; {kind._FIXED[name]}"
            )
        if "_sealed" in own and name not in own and not hasattr(kind, name):
            near = difflib.get_close_matches(
                name, [attribute for attribute in dir(self) if attribute[0] != "_"], 1
            )
            way_out = f"; did you mean {near[0]}?" if near else ", and nothing would read it"
            raise AttributeError(f"{name}: not an attribute of {kind.__name__}{way_out}")
        super().__setattr__(name, value)


class ReadOnlyDict(dict[Any, Any]):
    """A dictionary that stays as it was made, so that a frozen value may hold it.

    Unlike `types.MappingProxyType` it can be copied and pickled.
    """

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a request is frozen; make another by dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[Any, Any]]]:
        return type(self), (dict(self),)


T = TypeVar("T")

_ENGINES = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "ignore_eos"),
        "when an answer ends is the engine's to decide, between two steps",
    ),
    **dict.fromkeys(
        ("stop", "include_stop_str_in_output"),
        "texts that end an answer are the engine's to look for; for ids see stop_token_ids",
    ),
    "n": "give each answer a request with a seed of its own, or call the sampler with num_samples=",
    **dict.fromkeys(("generator", "manual_seed"), "give each request seed=, an int of 64 bits"),
    **dict.fromkeys(
        ("softcap", "logit_softcap", "logit_scale"),
        "it belongs to the head: give it to LMHeadSampler",
    ),
    **dict.fromkeys(
        ("draft", "draft_probs"),
        "pass draft_logits=, the drafter's logits before temperature",
    ),
    "best_of": "answers are not ranked; give each a request with a seed of its own",
    **dict.fromkeys(
        ("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"),
        "making text of tokens is the engine's",
    ),
    "prompt_logprobs": "see LMHeadSampler.prompt_logprobs",
    **dict.fromkeys(
        ("structured_outputs", "guided_decoding"),
        "set SamplingBatch.grammar_bitmask before each step",
    ),
    "logits_processors": "functions of the logits are not supported; see logit_bias",
    **dict.fromkeys(
        ("max_new_tokens", "do_sample"),
        "it is an argument of transformers' generate; see tpsample.integrations.transformers",
    ),
    "top_logprobs": "give logprobs= the number of tokens to report",
}
"""Fields that users of engines know, and where they went."""


def way_out(name: str, fields: Iterable[str]) -> str:
    """Return what to do about a name that is none of `fields`."""
    if name in _ENGINES and not any(field.endswith(f"_{name}") for field in fields):
        return _ENGINES[name]
    near = difflib.get_close_matches(name, fields, n=1)
    near = near or [field for field in fields if name.endswith(f"_{field}")]
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(fields) or 'none'}"


def refuses_unknown_fields(of: type[T]) -> type[T]:
    """Let a dataclass refuse unknown names with a way out, which Python does not offer."""
    known, init = of.__dict__["__dataclass_fields__"], of.__init__

    @functools.wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        if args:
            raise TypeError(
                f"{of.__name__}: expected every field by its name, such as temperature=0.7, got "
                f"{describe(args[0])} without a name; give it one"
            )
        for name in given:
            if name not in known:
                raise TypeError(f"{name}: not a field of {of.__name__}; {way_out(name, known)}")
        init(self, **given)

    of.__init__ = checked  # type: ignore[assignment, method-assign]
    return of
