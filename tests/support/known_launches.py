"""Makes each launch by Triton's own way and by the known one, for a GPU that is absent.

    python -m tests.support.known_launches    # prints how many launches were the same, by kernel

The arguments that a kernel's binary gets are taken down in both ways, and have to be equal: the
grid, the stream, and each argument, of a tensor its address.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

from tests.support.jit_launches import be_absent_h200, cases, stop_at_layouts
from tests.support.other_gpu import OnAnotherGpu
from tests.support.settings import settings_of
from tpsample import SamplingBatch, SamplingParams, VocabShard
from tpsample.backends.triton_ import launcher
from tpsample.backends.triton_.kernels.decode import decode_kernel
from tpsample.backends.triton_.launch import TritonBackend
from tpsample.backends.triton_.launcher import KnownLaunches, launch_kernel

same: Counter[str] = Counter()
"""Launches by kernel, each made in three ways."""
made: list[tuple[object, ...]] = []
told: list[bool] = []
"""Whether each launch brought what hooks are told."""


def _taking_down(source: Any, metadata: Any) -> Callable[..., None]:
    """Return what stands for the launch of a binary: its arguments are appended to `made`."""

    def launch(*launched: Any) -> None:
        grid_and_stream, arguments = launched[:4], launched[9:]
        named = zip(source.fn.arg_names, arguments, strict=True)
        seen = [_address(value) if name.endswith("_ptr") else value for name, value in named]
        made.append((metadata.hash, *grid_and_stream, *seen))
        told.append(all(part is not None for part in launched[6:9]))

    return launch


def _address(pointer: Any) -> int:
    """Return the address that a launch of Triton reads of a pointer; of None it is 0."""
    return pointer if isinstance(pointer, int) else 0 if pointer is None else pointer.data_ptr()


def _three_ways(known: KnownLaunches, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Launch by Triton, then as something new may be, then as something known."""
    whole = {**known._fixed, **arguments}
    named_so = {name for name, value in whole.items() if isinstance(value, torch.Tensor)}
    assert all(name.endswith("_ptr") for name in named_so), f"a pointer by another name: {named_so}"
    made.clear()
    known._kernel[grid](**whole, **launcher.UNFUSED)
    for _ in range(2):
        _known_way(known, grid, arguments)
    by_triton, *others = made
    name = known._kernel.fn.__name__
    assert others == [by_triton] * 2, f"{name} {grid}: {others} in place of {by_triton}"
    same[name] += 1


_known_way, KnownLaunches.launch = KnownLaunches.launch, _three_ways  # type: ignore[method-assign]


def decoding(**changes: object) -> dict[str, Any]:
    """The arguments of a kernel that are others where a binary is another, and those that stay."""
    names = "words_ptr", "seed_ptr", "token_ptr", "status_ptr", "out_seed_ptr"
    none = "undrawn_ptr", "bad_ptr", "filtered_ptr", "place_ptr"
    numbers = "stride_words_s", "num_rows", "num_filtered", "num_samples", "num_sources"
    sizes = {"BLOCK": 64, "OVERLAP": False}
    rows = torch.zeros(64, dtype=torch.int64)
    given = dict.fromkeys(names, rows) | dict.fromkeys(none) | dict.fromkeys(numbers, 64)
    return given | sizes | changes


def variants() -> None:
    """One kernel with all that makes another binary, each twice and in turns with the others."""
    words = torch.zeros(64, dtype=torch.int64)
    for _, first, dtype, samples, warps, programs in itertools.product(
        range(2), (0, 1, 2), (torch.int64, torch.int32), (1, 2, 16, 2**40), (4, 8), (1, 3)
    ):
        changes = {"words_ptr": words[first:], "token_ptr": words.to(dtype), "num_samples": samples}
        launch_kernel(decode_kernel, (programs,), decoding(num_warps=warps, **changes))


def compiled_aside() -> None:
    """A kernel that another thread compiles: the first launch returns something else than it."""
    arguments, known = decoding(num_warps=2), KnownLaunches(decode_kernel)
    made.clear()
    with ThreadPoolExecutor(1) as executor, triton.AsyncCompileMode(executor):
        for _ in range(3):
            _known_way(known, (8,), arguments)
    first, *others = made
    assert others == [first] * 2


def hooked() -> None:
    """A known launch while a profiler has a hook for its begin, then for its end, then none."""
    arguments, known = decoding(num_warps=8), KnownLaunches(decode_kernel)
    runtime = triton.knobs.runtime
    _known_way(known, (8,), arguments)
    told.clear()
    for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        hooks.add(print)
        _known_way(known, (8,), arguments)
        hooks.remove(print)
    _known_way(known, (8,), arguments)
    assert told == [True, True, False]


def misplaced() -> None:
    """Tensors on a GPU that is not the current one are refused before their kernel starts."""
    torch.cuda.current_device = lambda: 0
    arguments = decoding(num_warps=4) | {"token_ptr": OnAnotherGpu(64, dtype=torch.int64)}
    try:
        _known_way(KnownLaunches(decode_kernel), (8,), arguments)
    except ValueError as error:
        assert str(error).startswith("a tensor of this call: is on cuda:1, but the current"), error
    else:
        raise AssertionError("a kernel starts on another GPU than its tensors are on")


def moved_weight() -> None:
    """A backend whose weight lies elsewhere for its second step."""
    weight, shard = torch.zeros(64, 32, dtype=torch.bfloat16), VocabShard(0, 64)
    backend = TritonBackend(settings_of(weight, shard, max_rows=1))
    batch = SamplingBatch.from_params([SamplingParams(seed=0)], vocab_size=64)
    view, at, words = batch._view_of(1), torch.zeros(1, dtype=torch.int64), torch.zeros(1).long()
    for _ in range(2):
        backend.best_words(backend.prepare(weight[:1].clone(), view, at, 1), words)
        weight.data = moved = torch.zeros_like(weight)
        backend.rebind_weight(moved)


def main() -> None:
    be_absent_h200(_taking_down)
    stop_at_layouts()
    for launch in cases([]).values():
        launch()
    moved_weight()
    variants()
    launcher.MOST_KNOWN = 1
    launcher._KNOWN.clear()
    variants()
    compiled_aside()
    hooked()
    misplaced()
    for name, count in sorted(same.items()):
        print(name, count)


if __name__ == "__main__":
    main()
