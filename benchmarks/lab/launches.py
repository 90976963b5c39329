"""The arguments of a kernel's launch, as far as its compiler sees it: enough to compile it anew.

    with listed() as launches:      # nothing runs: a launch is put on the list and no more
        sampler(hidden_states, batch, positions)
    for launch in launches:
        launch.compile()            # in any process, into Triton's cache

Of a tensor the compiler sees the dtype and whether its address is a multiple of 16. Of an integer
that is not a constant it sees whether that is 1, a multiple of 16, or 64 bits wide. Everything else
that two launches differ in makes the same binary, so the list has it once.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tpsample.backends.over_zeros import list_over_zeros
from tpsample.backends.torch_.passes import Verdict
from tpsample.backends.triton_.cuts import TritonCuts
from tpsample.backends.triton_.passes import TritonShardLogits
from tpsample.core.order import ABOVE_ALL
from tpsample.core.vocab_shard import VocabShard

_INT32 = range(-(2**31), 2**31)


@dataclass(frozen=True)
class Pointer:
    """A tensor argument. It passes for a tensor where a kernel is compiled and not run."""

    dtype: torch.dtype
    aligned: bool = True

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1


@dataclass(frozen=True)
class Launch:
    """One specialisation of one kernel.

    Attributes:
        kernel: "module:name".
        arguments: names and values, as the compiler sees them; options such as num_warps too.
    """

    kernel: str
    arguments: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(function: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Launch:
        given = dict(zip(function.arg_names, positional, strict=False)) | named
        constants, unspecialised = _marks(function)
        seen = {
            name: value if name in constants else _seen(value, name in unspecialised)
            for name, value in given.items()
            if name in function.arg_names
        }
        options = {name: value for name, value in given.items() if name not in seen}
        found = f"{function.fn.__module__}:{function.fn.__name__}"
        return Launch(found, tuple(sorted({**seen, **options}.items())))

    @property
    def function(self) -> Any:
        """The jitted function."""
        module, name = self.kernel.split(":")
        found = getattr(import_module(module), name)
        while isinstance(found, (Autotuner, Heuristics)):  # which choose its blocks
            found = found.fn
        return found

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(self.arguments)

    def compile(self, load: bool = False) -> Any:
        """Compile it, or take it from Triton's cache; nothing is launched.

        Args:
            load: whether it is loaded into the GPU as well, as its first launch would do. Triton
                3.6 then has a C compiler build what launches it, which it keeps in its cache too.

        Raises:
            Exception: it does not compile, or the GPU has too little shared memory for it.
        """
        kernel = self.function.warmup(grid=(1,), **self.named)
        if load:
            kernel._init_handles()
        return kernel


@contextlib.contextmanager
def listed(run_them: bool = False) -> Iterator[dict[Launch, int]]:
    """Collect the launches of the block, and how often each was made.

    Args:
        run_them: whether they are made as well.
    """
    launches: dict[Launch, int] = {}

    def listing(run: Callable[..., Any]) -> Callable[..., Any]:
        def note(self: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
            launch = Launch.of(self, args, named)
            launches[launch] = launches.get(launch, 0) + 1
            return run(self, *args, grid=grid, warmup=warmup, **named) if run_them else None

        return note

    before = [(kind, kind.run) for kind in (JITFunction, InterpretedFunction)]
    for kind, run in before:
        kind.run = listing(run)
    try:
        yield launches
    finally:
        for kind, run in before:
            kind.run = run


@contextlib.contextmanager
def filled() -> Iterator[None]:
    """Memory that no kernel has written is filled, so that loops over it go the same way each time.

    Not around baselines: what `torch.compile` keeps is kept for this mode alone.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports a compiler
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextlib.contextmanager
def searched() -> Iterator[None]:
    """Every row with filters is searched, because a step that did not run decides none.

    Steps that run search the rows that their best scores leave undecided, which nothing foretells.
    Nor does anything say how many tokens a row keeps, so what follows of few is launched, too.
    """
    first_kept, list_end = TritonShardLogits.first_kept, TritonCuts.list_end
    few: set[torch.device] = set()

    def undecided(*arguments: Any) -> Verdict:
        verdict = first_kept(*arguments)
        return verdict._replace(decided=torch.zeros_like(verdict.decided))

    def too_many(cuts: TritonCuts, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = cuts.rows
        if rows.logits.device not in few:
            few.add(rows.logits.device)
            shard = VocabShard(rows.first_id, rows.first_id + rows.logits.shape[1])
            list_over_zeros(shard, rows.vocab_size, 1, rows.logits.device)
        cut, room = list_end(cuts, *arguments)
        return cut, torch.full_like(room, ABOVE_ALL)

    of_rows = patch.object(TritonShardLogits, "first_kept", undecided)
    with of_rows, patch.object(TritonCuts, "list_end", too_many):
        yield


@cache
def _marks(function: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the arguments that are compile-time constants, and those never specialised."""
    named = inspect.signature(function.fn).parameters.values()
    constants = frozenset(p.name for p in named if "constexpr" in str(p.annotation))
    kinds = ("do_not_specialize", "do_not_specialize_on_alignment")
    marks = vars(function) | vars(function).get("kwargs", {})  # the interpreter keeps them there
    return constants, frozenset(name for kind in kinds for name in marks[kind] or ())


def _seen(value: Any, unspecialised: bool) -> Any:
    """Return what stands for a run-time value."""
    if isinstance(value, torch.Tensor):
        return Pointer(value.dtype, unspecialised or value.data_ptr() % 16 == 0)
    if isinstance(value, float):
        return 0.5
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    wide = 0 if value in _INT32 else 2**40
    if unspecialised:
        return wide + 17
    return 1 if value == 1 else wide + (16 if value % 16 == 0 else 17)
