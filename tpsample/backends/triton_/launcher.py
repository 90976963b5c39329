"""Launches kernels. Triton finds the binary of a new launch, and this module that of a known one.

In each launch Triton binds the arguments, and writes a text of what its compiler sees of them. It
compares the globals of the kernel, and asks the driver about every pointer. All this takes the host
longer than the launch itself. Here a dictionary has the binary that Triton's own launch returned.
The binary gets addresses, as in Triton's tutorial on kernels that are compiled ahead. The driver is
not asked whether these are of a GPU: the arguments of a step are checked before its first launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tpsample.core.checks import check_current
from tpsample.core.machine import amd

ALIGNED = 16
"""Triton compiles for addresses that are multiples of this, or for any."""
MOST_KNOWN = 1024
"""Launches of a kernel that are known at a time. Each number of rows makes another one."""
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
"""Arguments of a launch that are Triton's, and not the kernel's."""
UNFUSED = {"enable_fp_fusion": False}
"""Every kernel rounds every product, as its twin does; by itself each Triton does as it likes."""
_RUN = JITFunction.run  # a function in its place sees every launch
_NONE: Mapping[str, Any] = {}


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], named: dict[str, Any] | None = None, **arguments: Any
) -> None:
    """Launch a kernel on the current device and stream.

    Args:
        kernel: made by `triton.jit`. The names of its pointers, and no others, end in "_ptr".
        grid: programs, in up to three dimensions.
        named: the arguments in a dictionary, which is not copied.
        arguments: all of the kernel's by name, and options of Triton such as num_warps.
    """
    if named is not None:
        arguments = named
    known = _KNOWN.get(id(kernel))
    if known is None and _can_be_known(kernel):
        known = _KNOWN[id(kernel)] = KnownLaunches(kernel)
    if known is None or JITFunction.run is not _RUN:
        kernel[grid](**arguments, **UNFUSED)
    else:
        known.launch(grid, arguments)


class PreparedLaunch:
    """Launches of a kernel that differ in few arguments, so that the host looks at these alone.

    Args:
        kernel, grid: as of `launch_kernel`.
        fixed: arguments that stay as they are. Their tensors stay where they are.

    Attributes:
        fixed: the same, by name.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **fixed: Any) -> None:
        self._kernel, self._grid, self.fixed = kernel, grid, fixed
        self._known = KnownLaunches(kernel, fixed) if _can_be_known(kernel) else None

    def __call__(self, **others: Any) -> None:
        """Launch the kernel with its other arguments, by name."""
        if self._known is None or JITFunction.run is not _RUN:
            self._kernel[self._grid](**self.fixed, **others, **UNFUSED)
        else:
            self._known.launch(self._grid, others)


class KnownLaunches:
    """The launches of one kernel, each by all that its compiler may see of it.

    Args:
        kernel: for a GPU of NVIDIA. For AMD's the size of a tensor matters, too.
        fixed: arguments of all of these launches, as of `PreparedLaunch`.
    """

    def __init__(self, kernel: JITFunction[Any], fixed: Mapping[str, Any] = _NONE) -> None:
        self._kernel, self._fixed = kernel, fixed
        params = [param for param in kernel.params if param.name not in fixed]
        pointers = [param for param in params if param.name.endswith("_ptr")]
        numbers = [param for param in params if param not in pointers]
        kept = {param.name: fixed[param.name] for param in kernel.params if param.name in fixed}
        self._kept = [
            value.data_ptr() if isinstance(value, Tensor) else value for value in kept.values()
        ]
        names = [*(param.name for param in (*pointers, *numbers)), *kept]
        self._pointers = _values_of([param.name for param in pointers])
        self._numbers = _values_of([param.name for param in numbers])
        self._in_order = _values_of([names.index(name) for name in kernel.arg_names])
        self._aligned = [
            index
            for index, param in enumerate(pointers)
            if not (param.do_not_specialize or param.do_not_specialize_on_alignment)
        ]
        self._binaries: dict[tuple[Any, ...], Callable[..., None]] = {}

    def launch(self, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """Launch by the binary of an equal launch, or by Triton if there was none.

        Args:
            arguments: those of the kernel that are not fixed, and `OPTIONS`.

        Raises:
            ValueError: a tensor of a new launch is on another GPU than the current one, where the
                kernel would start.
        """
        pointers, numbers = self._pointers(arguments), self._numbers(arguments)
        addresses = [0 if pointer is None else pointer.data_ptr() for pointer in pointers]
        dtypes = [None if pointer is None else pointer.dtype for pointer in pointers]
        rests = [addresses[index] % ALIGNED for index in self._aligned]
        device = driver.active.get_current_device()
        options = map(arguments.get, OPTIONS)
        kind = device, grid, len(arguments), numbers, *dtypes, *rests, *options
        binary = self._binaries.get(kind)
        if binary is not None:
            stream = driver.active.get_current_stream(device)
            binary(stream, *self._in_order((*addresses, *numbers, *self._kept)))
            return
        named = {**self._fixed, **arguments}
        for value in named.values():
            if isinstance(value, Tensor):
                check_current("a tensor of this call", value.device)
        assert named.keys() <= {*self._kernel.arg_names, *OPTIONS}
        compiled = self._kernel[grid](**named, **UNFUSED)
        # Triton returns something else while another thread compiles, and None if a hook said so.
        if not isinstance(compiled, CompiledKernel):
            return
        if len(self._binaries) >= MOST_KNOWN:  # two threads may pass it together
            self._binaries.clear()
        self._binaries[kind] = _binary_of(compiled, (*grid, 1, 1)[:3])


def _binary_of(compiled: CompiledKernel, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return what launches a binary on a stream, with its arguments in order.

    Triton itself prepares each launch for hooks, which a profiler adds. Where there are none, the
    binary runs at once.
    """
    own_way, run = compiled[grid], compiled.run
    tail = compiled.function, compiled.packed_metadata, None, None, None

    def launch(stream: Any, *arguments: Any) -> None:
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            own_way(*arguments, stream=stream)
        else:
            run(*grid, stream, *tail, *arguments)

    return launch


def _can_be_known(kernel: Any) -> bool:
    """Return whether a kernel is Triton's own, for a GPU whose launches are known by their kind."""
    return type(kernel) is JITFunction and not amd()


_KNOWN: dict[int, KnownLaunches] = {}


def _values_of(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what returns the values of some keys; `itemgetter` does, of two or more."""
    return itemgetter(*keys) if len(keys) > 1 else lambda given: tuple(given[key] for key in keys)
