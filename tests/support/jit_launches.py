"""Launches every kernel as a step does, through Triton's own launch path, for a GPU that is absent.

    python -m tests.support.jit_launches    # prints one line per launch: case, kernel; one per
                                            # exchange of integers; and how many torch operators
                                            # work on stored logits beside them

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

from benchmarks.lab.absent import AbsentGpu
from benchmarks.lab.allocations import Operators
from benchmarks.lab.virtual_ranks import VirtualWorld
from tests.support.settings import settings_of
from tpsample import SamplingBatch, SamplingParams, VocabShard
from tpsample.backends import room_of
from tpsample.backends.triton_.launch import TritonBackend
from tpsample.backends.triton_.tile_table import Gpu, Tile
from tpsample.core.score import Head
from tpsample.exchange.base import Exchange
from tpsample.exchange.peer import PeerExchange
from tpsample.filters.finish import draw_filtered, logprobs_of, shard_logits
from tpsample.output import SampleOutput
from tpsample.ranks.ranks import Ranks
from tpsample.request.kinds import KINDS
from tpsample.request.plan import BatchView
from tpsample.request.selection import Selection
from tpsample.request.step import Inputs
from tpsample.request.step_batch import StepBatch
from tpsample.settings import Settings
from tpsample.speculative import drawn_drafts
from tpsample.speculative.acceptance import verify_by_ratio

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
    Gpu.of = staticmethod(lambda _: Gpu("NVIDIA H200", 90, 132))  # type: ignore[assignment]


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


FREE = (
    *("unsqueeze", "squeeze", "expand", "transpose", "split_with_sizes", "unbind"),
    *("empty", "new_empty", "empty_like"),
)
"""More operators that launch nothing on a GPU, beside the views that `Operators` leaves out."""


class Echoes(Ranks):
    """Ranks that all answer what this one sends; the exchanges are listed among the launches."""

    can_exchange_tensors = True

    def __init__(self, world_size: int, launches: list[tuple[Any, str]]) -> None:
        self.world_size = world_size
        self._launches = launches

    def gather_tensor(self, own: Tensor) -> Tensor:
        self._launches.append((None, "exchange"))
        return own.expand(self.world_size, *own.shape).contiguous()

    def sum_tensor(self, own: Tensor) -> Tensor:
        self._launches.append((None, "exchange"))
        return own * self.world_size


def _settings(ranks: Ranks, chunks: int) -> Settings:
    weight = torch.empty(V, 0, device=CPU)
    shape = {"max_rows": MAX_ROWS, "chunks": chunks}
    return Settings(ranks, weight, V, VocabShard(0, V), "triton", overlap=True, **shape)


def exchange(world_size: int) -> Exchange:
    if world_size == 1:
        return Exchange(_settings(Ranks(), 1))
    shards = [VocabShard.even(V, rank, world_size) for rank in range(world_size)]
    return [PeerExchange(_settings(ranks, 2)) for ranks in VirtualWorld(shards).ranks][1]


def step(
    batch: StepBatch,
    *,
    world_size: int = 1,
    num_samples: int = 1,
    head: Head | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tile: Tile = TILE,
    odd_address: bool = False,
    exchanged_by: Ranks | None = None,
    screened: bool = False,
    given: torch.dtype | None = None,
) -> int:
    """The launches of one step of rank 1, or of the only one.

    Args:
        exchanged_by: what the integers of filtered rows go to; None for the ranks of the words.
        given: of logits that the caller computed; None: the step makes them of hidden states.

    Returns:
        How many torch operators launch something beside them, after the logits were stored.
    """
    words = exchange(world_size)
    shard = VocabShard.even(V, words.ranks.rank, world_size)
    weight = torch.empty(len(shard), D + 1, dtype=dtype)[:, odd_address : D + odd_address]
    if not odd_address:
        weight = weight.contiguous()
    bias = None if head is None else weight[:, 0].clone()
    head = head or Head(1.0, None)
    options = {"max_rows": MAX_ROWS, "screening": "int8" if screened else None}
    weight = weight.zero_() if screened else weight
    backend = TritonBackend(settings_of(weight, shard, bias=bias, head=head, **options))
    backend.tile = tile
    if isinstance(batch, Selection):
        backend.read_slots(batch)
    positions, view = torch.zeros(batch.rows, dtype=torch.int64), batch._view_of(batch.rows)
    hidden_states = torch.empty(view.rows, D, dtype=dtype)
    out = SampleOutput.empty(view.seed, None if num_samples == 1 else num_samples)
    logits = None if given is None else torch.empty(view.rows, len(shard), dtype=given)
    begun = backend.prepare(hidden_states, view, positions, num_samples, out, logits)
    for part, own in enumerate(words.begin(begun.num_words)):
        backend.best_words(begun, own, part, words.parts, words.push)
    written = out, view.seed, view.undrawn
    arrived = words.wait(*written)
    if view.plan.stored_index is None:
        words.finish(arrived, *written)
        return 0
    with Operators() as operators:
        ranks, rows = exchanged_by or words.ranks, shard_logits(begun, shard, "triton")
        filtered = draw_filtered(rows, begun, ranks)
        words.finish(arrived, *written, filtered.words)
        if view.plan.logprobs is not None:
            logprobs_of(rows, view, ranks, out.token_ids, *filtered[1:])
    names = (name.split(".")[1] for name in operators.called)
    return sum(name not in FREE for name in names)


class Stepping:
    """The parts of a sampler, and of its pipeline, that a verification uses on one rank."""

    backend = "triton"

    def __init__(self, ranks: Ranks, shard: VocabShard) -> None:
        self.ranks, self.shard = ranks, shard
        weight = torch.empty(len(shard), D, dtype=torch.bfloat16)
        self.local = TritonBackend(settings_of(weight, shard, max_rows=MAX_ROWS))
        self.local.tile = TILE
        self.exchange = exchange(1)
        self.pipeline = self.agreement = self

    def compare(self) -> None:
        """There are no other calls to compare with."""

    def begin(self, inputs: Inputs, batch: BatchView, *its: Any, **_: object) -> Any:
        positions, out = its
        hidden_states = inputs.given.flatten(0, 1)
        begun = self.local.prepare(hidden_states, batch, positions, 1, out, None)
        for part, own in enumerate(self.exchange.begin(begun.num_words)):
            self.local.best_words(begun, own, part)
        return begun


def verification(
    batch: SamplingBatch, method: str, draft: torch.dtype | None, ranks: Ranks | None = None
) -> int:
    """The launches of a verification of two drafts; returns how many operators launch something.

    Args:
        draft: of the drafter's logits; None if the drafts are certain.
    """
    ranks = ranks or Ranks()
    sampler: Any = Stepping(ranks, VocabShard.even(V, 0, ranks.world_size))
    room, at = room_of("triton"), torch.zeros(batch.rows).long()
    drafts = torch.tensor([[3, 5, -1]] * batch.rows)
    law = None if draft is None else torch.empty(batch.rows, 2, len(sampler.shard), dtype=draft)
    inputs = Inputs(torch.empty(batch.rows, 3, D, dtype=torch.bfloat16))
    view = batch._with_drafts(drafts[:, :-1])
    with patch.object(drawn_drafts, "LOOKS", 0), Operators() as operators:
        _, at_rows = room.drafted_rows(drafts[:, :-1], None, at, V)
        given = inputs, drafts, view, at, at_rows
        if method == "coupled":
            out = SampleOutput.empty(view.seed, None)
            sampler.begin(inputs, view, at_rows, out)
            written = out, view.seed, view.undrawn
            sampler.exchange.finish(sampler.exchange.wait(*written), *written)
            room.coupled_output(drafts, out)
        else:
            verify_by_ratio(sampler, *given, block=method == "block", draft=law)
    return sum(name.split(".")[1] not in FREE for name in operators.called)


def batch_of(*, fixed_rounds: bool = False, **params: Any) -> SamplingBatch:
    return batch_of_rows([params] * ROWS, fixed_rounds=fixed_rounds)


def batch_of_rows(
    requests: Sequence[dict[str, Any]], *, fixed_rounds: bool = False
) -> SamplingBatch:
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
    drafts = torch.zeros(ROWS, 2, dtype=torch.int64)
    slots = SamplingBatch.of_slots(ROWS, vocab_size=V)
    grammar = torch.full((ROWS, -(-V // 32)), -1, dtype=torch.int32)
    forced = torch.full((ROWS,), -1, dtype=torch.int64)
    for name, requests in FIXED.items():
        for world_size in (1, 8):
            words = "peer, " if world_size > 1 else ""
            ranks = Ranks() if world_size == 1 else Echoes(world_size, launches)
            found[f"{words}fixed rounds, {name}"] = lambda requests=requests, ranks=ranks: step(
                batch_of_rows(requests, fixed_rounds=True),
                world_size=ranks.world_size,
                exchanged_by=ranks,
            )
    return found | {
        "filters, samples": lambda: step(batch_of(top_p=0.9), num_samples=2),
        "grammar": lambda: step(masked(grammar_bitmask=grammar)),
        "forced ids": lambda: step(masked(forced_token_ids=forced)),
        "all together": lambda: step(batch_of(**everything)),
        "drafts": lambda: step(batch_of(**everything)._with_drafts(drafts)),
        "samples, head": lambda: step(batch_of(), num_samples=2, head=Head(0.5, 30.0)),
        "slots": lambda: step(slots.select(torch.arange(ROWS))),
        "fp32": lambda: step(batch_of(), dtype=torch.float32, tile=Tile(64, 16, 32, 4, 2)),
        "weight at an odd address": lambda: step(batch_of(), odd_address=True),
        "screened": lambda: step(batch_of(), screened=True),
        "peer, screened": lambda: step(
            batch_of(repetition_penalty=1.2, logit_bias={5: 1.0}),
            world_size=2,
            num_samples=2,
            head=Head(0.5, 30.0),
            screened=True,
        ),
        "given logits": lambda: step(batch_of(), given=torch.float32),
        "given logits, all together": lambda: step(batch_of(**everything), given=torch.bfloat16),
        "peer, given logits": lambda: step(batch_of(), world_size=2, given=torch.float16),
        "coupled": lambda: verification(batch_of(), "coupled", None),
        "rejection, certain": lambda: verification(batch_of(), "rejection", None),
        "rejection": lambda: verification(batch_of(), "rejection", torch.bfloat16),
        "block": lambda: verification(batch_of(), "block", torch.float32),
        "block, 8 ranks": lambda: verification(
            batch_of(), "block", torch.float16, Echoes(8, launches)
        ),
        "peer, 2 ranks": lambda: step(batch_of(), world_size=2),
        "peer, 8 ranks": lambda: step(batch_of(), world_size=8, num_samples=2),
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
    # Memory that no kernel has written is then the same in each run: rows count as decided.
    torch.use_deterministic_algorithms(True)
    for name, launch in cases(launches).items():
        before = len(launches)
        operators = launch()
        for kernel, function in launches[before:]:
            assert kernel is None or kernel.asm["ttgir"]
            print(f"{name}: {function}")
            if function in OVERLAPPING:
                print(f"overlap, {name}: {overlap_of(kernel)}")
        print(f"{name}: {operators} torch operators")


if __name__ == "__main__":
    main()
