"""Every kernel that a step may call, and the types of its arguments.

Ranks wait for one another in a step, and compiling takes longer than they may wait. So each rank
compiles what later steps can need before the ranks first meet. The types follow from the dtype of
the weight; logits that a caller computed may have any dtype.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import spawn
from typing import Any

import numpy as np
import torch
from numba import float32, float64, int32, int64, typeof, types
from torch import Tensor

from tpsample.backends.numba_.kernels import cuts, ends, laws, passes
from tpsample.backends.numba_.kernels.arrays import array_of
from tpsample.backends.numba_.kernels.best_scores import first_kept, known_best
from tpsample.backends.numba_.kernels.compiling import announced, is_ready
from tpsample.backends.numba_.kernels.decode import decode
from tpsample.backends.numba_.kernels.draw import draw, draw_given
from tpsample.backends.numba_.kernels.first_logits import store_first
from tpsample.backends.numba_.kernels.head import NativeHead
from tpsample.backends.numba_.kernels.inputs import Memory, weight_of
from tpsample.backends.numba_.kernels.int8 import Copy
from tpsample.backends.numba_.kernels.logprobs import list_words, told_logprobs
from tpsample.backends.numba_.kernels.noise import Draws, safe_temperatures
from tpsample.backends.numba_.kernels.store import list_kept, store, store_given
from tpsample.core.score import LOGIT_DTYPES

log = logging.getLogger(__name__)

SECONDS_EACH = 2
"""Seconds in which a quiet core compiles a kernel, in the mean."""
FEW = 4
"""Kernels that are compiled before another process has begun."""
LONG_S = 10
"""Seconds of silence that make a person wonder."""

INTS, INTS_2, INTS_3, INTS_4 = (types.Array(int64, axes, "C") for axes in range(1, 5))
FLOATS, FLOATS_2 = float32[::1], float32[:, ::1]
DOUBLES, DOUBLES_2 = float64[::1], float64[:, ::1]
BOOLS = types.bool_[::1]
SIZED = INTS_3, INTS, FLOATS, BOOLS, int64, int64
SIZES = INTS, BOOLS, BOOLS, INTS, INTS, INTS, INTS
HEAD = typeof(NativeHead())
MEMORY = typeof(Memory(np.empty(0, np.int64)))
_FLOATS, _INTS = np.empty(0, np.float32), np.empty(0, np.int64)
COPY = typeof(Copy(np.empty(0, np.uint8), *[_FLOATS] * 3, 0, 0))
DRAWS = typeof(Draws(_FLOATS, _INTS, _INTS, 1))
LIMITS = typeof((_INTS, np.empty(0), _INTS, _INTS, _INTS))
ENDS = typeof((_INTS, np.empty(0), _INTS))
PAIR, TRIPLE = typeof((_INTS, _INTS)), typeof((_FLOATS, _FLOATS, _FLOATS))
_INTS_2, _BOOLS = np.empty((0, 0), np.int64), np.empty(0, np.bool_)
WORDS = typeof((_INTS_2, _INTS_2, _FLOATS, _FLOATS))
ASKED = typeof((_INTS_2, _INTS_2, _INTS, _BOOLS))
STATUS = int32[:, ::1]
OF_LAWS, OF_PLACES = types.Tuple((INTS_2, STATUS)), types.Tuple((INTS_2, DOUBLES_2))
LAWS = typeof(
    laws.NativeLaws(*[np.empty((0, 0), np.float32)] * 2, True, 0, 1, *[_FLOATS] * 3, *[_INTS] * 2)
)
STORED = typeof(passes.Stored(np.empty((0, 0), np.float32), 0, _FLOATS, _INTS))


def entries(weight: Tensor, *, screened: bool = False) -> list[tuple[Any, tuple]]:
    """Return each kernel that steps of a head may call, with the types of its arguments.

    Args:
        screened: whether steps of few rows read an 8-bit copy of the weight first.
    """
    kernels: list[tuple[Any, tuple]] = []
    if weight.shape[1]:  # else there is no weight, and all logits are given
        rows = torch.empty(1, 1, dtype=weight.dtype, device="cpu")
        own = typeof(weight_of(rows, 0, 0, 1)), typeof(array_of(rows)), INTS
        drawn = DRAWS, HEAD, MEMORY, INTS, INTS, DOUBLES, INTS_4, INTS_3, FLOATS_2, INTS_3
        kernels += [(draw, (*own, copy, *drawn)) for copy in (types.none, COPY)[: 1 + screened]]
        kernels += [
            (list_kept, (*own, HEAD, MEMORY, INTS, FLOATS, DOUBLES, INTS_3, INTS_3)),
            (store_first, (*own, HEAD, MEMORY, INTS, FLOATS, DOUBLES, INTS_3)),
            (store, (*own, HEAD, MEMORY)),
        ]
    for dtype in LOGIT_DTYPES:
        logits = torch.empty(1, 1, dtype=dtype, device="cpu")
        given = typeof(weight_of(logits, 0, 0, 1))
        kernels += [
            (draw_given, (given, INTS, INTS, DRAWS, HEAD, INTS, types.bool_, INTS_4)),
            (store_given, (given, INTS, INTS, HEAD, MEMORY)),
        ]
    kernels += [
        (passes.own_words, (STORED, INTS_3, INTS_2, INTS_2)),
        (cuts.words_from, (STORED, INTS, INTS_2)),
        (passes.weigh, (STORED, FLOATS, INTS_2, INTS, INTS_2)),
        (passes.moment_from, (STORED, FLOATS, INTS, INTS_2, INTS_2)),
        (passes.least_of_mass, (STORED, FLOATS, INTS, INTS)),
        (passes.spread, (STORED, FLOATS, INTS_2)),
        (cuts.nth_equal, (STORED, FLOATS, INTS, INTS)),
        (cuts.digits, (STORED, FLOATS, INTS, INTS, int64, types.bool_, INTS_2)),
        (cuts.sums_of_bins, (STORED, FLOATS, INTS, INTS_2)),
        (cuts.search_bins, (STORED, FLOATS, INTS_2, INTS, DOUBLES, INTS_2, INTS_2)),
        (cuts.listed_sets, (INTS_2, INTS, FLOATS, FLOATS, DOUBLES, INTS, INTS, DOUBLES)),
        (passes.set_of_first, (INTS_2, FLOATS, LIMITS, DRAWS, *[INTS_2] * 3, FLOATS, INTS)),
        (laws.law_sums, (LAWS, INTS_2)),
        (laws.residuals, (LAWS, INTS_2, INTS_3, INTS, INTS, INTS_3)),
        (ends.bound_best, (STORED, FLOATS, FLOATS, INTS_2, INTS, int64, INTS_3)),
    ]
    shared = [
        (kernel, (*[int64] * 4, types.BaseTuple.from_types(arguments)))
        for kernel, arguments in kernels
    ]
    # Words are columns of messages to the other ranks, or of the memory of one rank.
    words = int64[:, :], INTS_2
    filtered, tokens = (INTS_2, int32[::1]), (INTS_2, int32[::1], INTS)
    outputs = INTS_2, DOUBLES_2, INTS_2, DOUBLES
    return [
        *shared,
        (safe_temperatures, (FLOATS, FLOATS)),
        (known_best, (INTS_3, INTS_4, FLOATS, FLOATS_2, int64, int64, INTS_2)),
        (passes.least_words, (FLOATS, FLOATS, DOUBLES, INTS)),
        (passes.last_cuts, (FLOATS, FLOATS, *[INTS] * 3)),
        (cuts.list_ends, (INTS_2, INTS, DOUBLES, FLOATS_2, int64, FLOATS, FLOATS, INTS, INTS)),
        (cuts.words_in_bin, (INTS_2, INTS, DOUBLES, FLOATS_2, INTS)),
        (cuts.cuts_of_bins, (INTS_3, PAIR, INTS, types.bool_, TRIPLE, PAIR, INTS, BOOLS)),
        (cuts.set_sizes, (*SIZED, *SIZES)),
        (laws.find_laws, (INTS_3, INTS_2, FLOATS, INTS_2, STATUS, FLOATS_2, FLOATS_2, INTS_2)),
        (laws.accept, (INTS_2, INTS_3, INTS, INTS, types.bool_, INTS_2, INTS_3, DOUBLES_2)),
        (laws.emit, (INTS_4, OF_LAWS, INTS_2, OF_PLACES, INTS, INTS, INTS_2, INTS, int32[::1])),
        (passes.tops_of, (INTS_3, INTS, FLOATS)),
        (first_kept, (INTS_2, INTS_2, int64, FLOATS, ENDS, types.bool_, INTS_2, BOOLS, FLOATS)),
        (list_words, (INTS_3, FLOATS, BOOLS, *[INTS_2] * 3, FLOATS, FLOATS)),
        (told_logprobs, (WORDS, ASKED, INTS, INTS_2, DOUBLES, int64, *outputs)),
        *((decode, (array_type, INTS, *filtered, *tokens)) for array_type in words),
    ]


def missing_of(weight: Tensor, *, screened: bool = False) -> list[tuple[Any, tuple]]:
    """Return the `entries` that are neither in this process nor in the cache."""
    return [entry for entry in entries(weight, screened=screened) if not is_ready(*entry)]


def compile_missing(weight: Tensor, *, screened: bool = False, last_first: bool = False) -> None:
    """Compile the kernels of a head that are neither in this process nor in the cache.

    Processes of one machine share the work: what another one compiles is left to it until nothing
    else is missing.

    Args:
        screened: as for `entries`.
        last_first: whether to begin at the end of the list.
    """
    missing = missing_of(weight, screened=screened)
    if missing:
        announced.append("all")  # by the line below
        seconds = SECONDS_EACH * len(missing)
        level = logging.WARNING if seconds > LONG_S else logging.INFO
        log.log(level, "compiling the kernels of this CPU, once per machine: about %d s", seconds)
    while missing:
        order = missing[::-1] if last_first else missing
        free = (entry for entry in order if not entry[0]._cache.is_locked(entry[1]))
        kernel, types = next(free, order[0])
        kernel.compile(types)
        missing = [entry for entry in missing if not is_ready(*entry)]


@contextmanager
def second_process(weight: Tensor, *, screened: bool) -> Iterator[None]:
    """Let another process compile from the end of the list, while the body does from its front.

    It ends with the body. A Python that cannot start one, or that has one core, compiles alone.
    """
    arguments = (
        f"torch.empty(0, {int(weight.shape[1] > 0)}, dtype={weight.dtype}), screened={screened}"
    )
    code = f"import torch; from {__name__} import *; compile_missing({arguments}, last_first=True)"
    python = spawn.get_executable()
    if not python or (os.cpu_count() or 1) < 2:
        yield
        return
    null = subprocess.DEVNULL
    with subprocess.Popen([python, "-c", code], stdin=null, stdout=null, stderr=null) as process:
        try:
            yield
        finally:
            process.kill()


def load_all(weight: Tensor, *, screened: bool = False) -> None:
    """Compile the missing kernels of a head, and load all of them into this process."""
    many = len(missing_of(weight, screened=screened)) > FEW
    with second_process(weight, screened=screened) if many else nullcontext():
        compile_missing(weight, screened=screened)
    for kernel, its_types in entries(weight, screened=screened):
        kernel.compile(its_types)
