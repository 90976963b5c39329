"""The modules of the server from which `tests.support.ranks` forks its processes.

A rank that did any of it by itself would take seconds. The first test that calls something of
torch's compiler or of DTensor imports them. The interpreter rewrites a kernel when it is first
launched. Numba imports SciPy and lists its operations before it first loads a kernel. A rank would
do all of it in a process of its own.
"""

import gc
import pkgutil
from importlib import import_module

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.tensor  # noqa: F401
import triton.language.standard
from numba.core.registry import cpu_target
from triton.runtime.interpreter import InterpretedFunction

import tests.fuzz.story
import tests.support.local_step
import tests.support.virtual  # noqa: F401
import tpsample.backends.numba_.cuts
import tpsample.backends.numba_.passes
import tpsample.backends.triton_.kernels
import tpsample.backends.triton_.launch
import tpsample.exchange.peer

for module in [
    triton.language.standard,
    *(
        import_module(found.name)
        for found in pkgutil.iter_modules(
            tpsample.backends.triton_.kernels.__path__, "tpsample.backends.triton_.kernels."
        )
    ),
]:
    for value in [*vars(module).values()]:
        if isinstance(value, InterpretedFunction):
            value.rewrite()

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()

# A process that collects garbage would write to the memory of all this, and so copy it.
gc.collect()
gc.freeze()
