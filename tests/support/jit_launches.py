"""Launches every kernel as a step does, through Triton's own launch path, for a GPU that is absent.

    python -m tests.support.jit_launches    # prints one line per launch: case, kernel; and one per
                                            # exchange of integers

A driver that only says "sm_90" lets Triton specialise the real arguments and compile them, up to
the layouts of tiles; nothing runs. It sees what compiling by a signature does not: a None where a
branch still loads, an integer whose value makes another kernel. Machine code of these kernels is
made by `benchmarks.static.report` and `tests.compiled`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.runtime.jit import JITFunction

import tpsample.backends.triton_.launch  # it keeps Triton's way to launch, which is replaced here
import tpsample.exchange
from benchmarks.lab.absent import AbsentGpu
from benchmarks.lab.problem import override_tile
from benchmarks.lab.virtual_ranks import VirtualRanks, VirtualWorld, even_shards
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, verify
from tpsample.agreement import construction
from tpsample.backends.triton_.tile_table import Gpu, Tile
from tpsample.core import tensors
from tpsample.ranks.ranks import Ranks
from tpsample.request.kinds import KINDS
from tpsample.request.step_batch import StepBatch
from tpsample.speculative import drawn_drafts
from tpsample.speculative.drafting import Method

V, D, ROWS, MAX_ROWS = 8000, 64, 3, 16
CPU = torch.device("cpu")
TILE = Tile(64, 16, 64, num_warps=4, num_stages=2)


def _launcher(source: Any, metadata: Any) -> Any:
    """Return the launcher that Triton 3.6 builds with a C compiler, where it does so."""
    return nvidia.CudaLauncher(source, metadata) if hasattr(nvidia, "make_launcher") else None


def be_absent_h200(launcher: Callable[[Any, Any], Any] = _launcher) -> None:
    """Compile for a GPU that is absent from now on.

    Args:
        launcher: returns what launches a kernel's binary, of its source and its metadata.
    """
    AbsentGpu.launcher_cls = staticmethod(launcher)  # type: ignore[method-assign]
    AbsentGpu().take()
    # Memory that nothing fills is filled alike: each row is decided, and each list too long.
    torch.use_deterministic_algorithms(True, warn_only=True)
    patch.object(Gpu, "of", lambda _: Gpu("NVIDIA H200", 90, 132)).start()
    patch.object(construction, "interpreted", lambda: True).start()
    patch.object(construction, "kernels_overlap", lambda _: True).start()
    # The host reads nothing of a GPU, and swaps nothing with other hosts.
    patch.object(tensors, "READ_ON", ()).start()
    patch.object(drawn_drafts, "LOOKS", 0).start()
    patch.object(tpsample.exchange, "SWAPS_ON", ()).start()


def only_compile() -> list[tuple[Any, str]]:
    """Make launches compile and no more; returns where they are listed."""
    be_absent_h200()
    launches: list[tuple[Any, str]] = []
    run = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert not kernel.metadata.enable_fp_fusion, f"{self.__name__} may fuse products"
        launches.append((kernel, self.__name__))
        return kernel

    JITFunction.run = compile_it
    return launches


def stop_at_layouts() -> None:
    """Make no machine code from now on: half of the processor time of compiling goes into it."""

    def no_code(module: Any, metadata: dict[str, Any]) -> str:
        metadata.update(name="", shared=0)  # which LLVM tells
        return ""

    def leave_out(backend: Any = None, stages: Any = None, *options: Any) -> tuple[str, str]:
        if stages is not None:
            stages |= dict.fromkeys(("llir", "ptx", "cubin"), no_code)
        return "no code", "no code"  # so that Triton's cache has them beside whole kernels

    triton.knobs.runtime.add_stages_inspection_hook = leave_out


class Echoes(VirtualRanks):
    """Rank 1 of several that answer what it sends; exchanges are listed among the launches."""

    def __init__(self, world_size: int, launches: list[tuple[Any, str]]) -> None:
        super().__init__(VirtualWorld(even_shards(V, world_size)), 1)
        self._launches = launches

    def gather_tensor(self, own: Tensor) -> Tensor:
        self._launches.append((None, "exchange"))
        return own.expand(self.world_size, *own.shape).contiguous()

    def sum_tensor(self, own: Tensor) -> Tensor:
        self._launches.append((None, "exchange"))
        return own * self.world_size


def sampler_of(
    ranks: Ranks | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tile: Tile = TILE,
    odd_address: bool = False,
    **options: Any,
) -> LMHeadSampler:
    """Return the sampler of a rank, by default of the only one."""
    shard = ranks.world.shards[ranks.rank] if isinstance(ranks, Echoes) else range(V)
    weight = torch.zeros(len(shard), D + 1, dtype=dtype)[:, odd_address : D + odd_address]
    if not odd_address:
        weight = weight.contiguous()
    of_several = {"group": ranks, "exchange": "peer", "chunks": 2} if ranks else {"group": "alone"}
    options = of_several | {"backend": "triton", "max_rows": MAX_ROWS, "on_failed": 0} | options
    sampler = LMHeadSampler(weight, **options)
    override_tile(sampler, tile)
    return sampler


def step(
    batch: StepBatch,
    ranks: Ranks | None = None,
    num_samples: int | None = None,
    given: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Launch the kernels of a step.

    Args:
        given: of logits that the caller computed; None: the step makes them of hidden states.
        options: of `sampler_of`.
    """
    sampler, positions = sampler_of(ranks, **options), torch.zeros(batch.rows, dtype=torch.int64)
    if given is not None:
        logits = torch.zeros(batch.rows, len(sampler.shard), dtype=given)
        sampler.sample_logits(logits, batch, positions, num_samples=num_samples)
    else:
        hidden_states = sampler.weight.new_zeros(batch.rows, D)
        sampler(hidden_states, batch, positions, num_samples=num_samples)


def verification(
    batch: SamplingBatch,
    method: Method,
    draft: torch.dtype | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Launch the kernels of a verification of two drafts.

    Args:
        draft: of the drafter's logits; None if the drafts are certain.
    """
    sampler, at = sampler_of(ranks), torch.zeros(batch.rows, dtype=torch.int64)
    law = None if draft is None else torch.zeros(batch.rows, 2, len(sampler.shard), dtype=draft)
    hidden_states = sampler.weight.new_zeros(batch.rows, 3, D)
    drafts = torch.tensor([[3, 5]] * batch.rows)
    verify(sampler, hidden_states, drafts, batch, at, method=method, draft_logits=law)


def batch_of(*, fixed_rounds: bool = False, **params: Any) -> SamplingBatch:
    return batch_of_rows([params] * ROWS, fixed_rounds=fixed_rounds)


def batch_of_rows(requests: Sequence[dict[str, Any]], *, fixed_rounds: bool) -> SamplingBatch:
    rows = [SamplingParams(seed=row, **params) for row, params in enumerate(requests)]
    return SamplingBatch.from_params(
        rows, vocab_size=V, output_token_ids=[[1]] * len(rows), fixed_rounds=fixed_rounds
    )


def masked(**masks: Tensor) -> SamplingBatch:
    """A plain batch with `grammar_bitmask` or `forced_token_ids`."""
    batch = batch_of()
    for name, value in masks.items():
        setattr(batch, name, value)
    return batch


FIXED: dict[str, list[dict[str, Any]]] = {
    "top_p": [{"top_p": 0.9}],
    "top_k 5": [{"top_k": 5}],
    "top_k 300": [{"top_k": 300}],
    "min_p": [{"min_p": 0.1}],
    "top_k 5, top_p": [{"top_k": 5, "top_p": 0.9}],
    "top_k 300, top_p": [{"top_k": 300, "top_p": 0.9}],
    "top_k 2000, top_p": [{"top_k": 2000, "top_p": 0.9}],
    "mixture": [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}],
    "logprobs of a mixture": [{"top_p": 0.9, "logprobs": 3}, {"top_k": 5, "logprobs": 3}],
}
"""Requests of the rows of a step in fixed rounds, as in a captured graph."""


EXAMPLES = KINDS | {
    "top_k": {"top_k": 5},
    "top_p in top_k": {"top_p": 0.9, "top_k": 2000},
    "many top_k, top_p": {"top_p": 0.9, "top_k": 300},
    "top_k, top_p": {"top_k": 5, "top_p": 0.9},
    "logprobs": {"logprobs": 3},
}
"""Fields of the request of all rows, with more than the least that launches a kernel."""
for masks in ("grammar", "forced"):
    del EXAMPLES[masks]


def cases(launches: list[tuple[Any, str]]) -> dict[str, Any]:
    """By name, what makes the launches of a step; exchanges are listed in `launches`."""
    found: dict[str, Any] = {
        name: lambda params=params: step(batch_of(**params)) for name, params in EXAMPLES.items()
    }
    everything = {name: value for params in EXAMPLES.values() for name, value in params.items()}
    slots = SamplingBatch.of_slots(ROWS, vocab_size=V)
    two, eight = Echoes(2, launches), Echoes(8, launches)
    bias = torch.zeros(V, dtype=torch.bfloat16)
    head = {"bias": bias, "logit_scale": 0.5, "logit_softcap": 30.0}
    grammar = torch.full((ROWS, -(-V // 32)), -1, dtype=torch.int32)
    forced = torch.full((ROWS,), -1, dtype=torch.int64)
    for name, requests in FIXED.items():
        for world_size in (1, 8):
            words = "peer, " if world_size > 1 else ""
            ranks = Echoes(world_size, launches) if world_size > 1 else None
            found[f"{words}fixed rounds, {name}"] = lambda requests=requests, ranks=ranks: step(
                batch_of_rows(requests, fixed_rounds=True), ranks
            )
    return found | {
        "filters, samples": lambda: step(batch_of(top_p=0.9), num_samples=2),
        "grammar": lambda: step(masked(grammar_bitmask=grammar)),
        "forced ids": lambda: step(masked(forced_token_ids=forced)),
        "all together": lambda: step(batch_of(**everything)),
        "samples, head": lambda: step(batch_of(), num_samples=2, **head),
        "slots": lambda: step(slots.select(torch.arange(ROWS))),
        "fp32": lambda: step(batch_of(), dtype=torch.float32, tile=Tile(64, 16, 32, 4, 2)),
        "weight at an odd address": lambda: step(batch_of(), odd_address=True),
        "screened": lambda: step(batch_of(), screening="int8"),
        "peer, screened": lambda: step(
            batch_of(repetition_penalty=1.2, logit_bias={5: 1.0}),
            two,
            num_samples=2,
            screening="int8",
            **head | {"bias": bias[: V // 2]},
        ),
        "given logits": lambda: step(batch_of(), given=torch.float32),
        "given logits, all together": lambda: step(batch_of(**everything), given=torch.bfloat16),
        "peer, given logits": lambda: step(batch_of(), two, given=torch.float16),
        "coupled": lambda: verification(batch_of(), "coupled"),
        "coupled, all together": lambda: verification(batch_of(**everything), "coupled"),
        "rejection, certain": lambda: verification(batch_of(), "rejection"),
        "rejection": lambda: verification(batch_of(), "rejection", torch.bfloat16),
        "block": lambda: verification(batch_of(), "block", torch.float32),
        "block, 8 ranks": lambda: verification(batch_of(), "block", torch.float16, eight),
        "peer, 2 ranks": lambda: step(batch_of(), two),
        "peer, 8 ranks": lambda: step(batch_of(), eight, num_samples=2),
    }


OVERLAPPING = (
    "screening_rows_kernel",
    "screen_kernel",
    "list_groups_kernel",
    "lm_head_kernel",
    "decode_kernel",
    "peer_finish_kernel",
)


def overlap_of(kernel: Any) -> str:
    """How a kernel overlaps its neighbours: PTX within it, and the launch's attribute."""
    instructions = ("prefetch.L2", "griddepcontrol.launch_dependents", "griddepcontrol.wait")
    found = [each.rpartition(".")[2] for each in instructions if each in kernel.asm["ttgir"]]
    return "+".join([*found, *["early"] * kernel.metadata.launch_pdl])


def main() -> None:
    launches = only_compile()
    stop_at_layouts()
    for name, launch in cases(launches).items():
        before = len(launches)
        launch()
        for kernel, function in launches[before:]:
            assert kernel is None or kernel.asm["ttgir"]
            print(f"{name}: {function}")
            if function in OVERLAPPING:
                print(f"overlap, {name}: {overlap_of(kernel)}")


if __name__ == "__main__":
    main()
