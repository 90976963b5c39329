"""The launches that the report compiles: every kernel of the package, in its configurations.

Steps are taken on a CPU that passes for a GPU of an architecture. Nothing is launched: each launch
goes on a list (`benchmarks.lab.launches`), so no second list of arguments is kept here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
import triton

import tpsample.backends.triton_.kernels
from benchmarks.lab.absent import AMD_ARCHS
from benchmarks.lab.launches import Launch, Pointer, filled, listed
from benchmarks.lab.problem import make_sampler, override_tile
from benchmarks.lab.virtual_ranks import VirtualWorld, even_shards
from benchmarks.static.aot import GPUS
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, sample_draft, verify
from tpsample.agreement import construction
from tpsample.backends.over_zeros import list_over_zeros
from tpsample.backends.screening.int8_copy import Int8Copy
from tpsample.backends.triton_.pairs import add_weighted_rows, pair_products
from tpsample.backends.triton_.screen_launches import MAX_SLOTS, SCREEN_TILES
from tpsample.backends.triton_.tile_table import (
    AMD_SHARED_BYTES,
    MAX_BLOCK_B,
    Gpu,
    Tile,
    fitted,
    is_short,
    rule,
    storing_tiles,
)
from tpsample.core.weight_format import BF16, FP16, FP32, WeightFormat
from tpsample.request.kinds import KINDS, Kind, batches_of
from tpsample.request.step_batch import StepBatch
from tpsample.speculative.drafting import Method

LM_HEAD = "tpsample.backends.triton_.kernels.lm_head:lm_head_kernel"
SCREEN = "tpsample.backends.triton_.kernels.screening:screen_kernel"
GREEDY = "benchmarks.lab.kernels:greedy_kernel"
ROW_NOISE = "benchmarks.lab.kernels:row_noise_kernel"

WIDE, ODD, LARGE, NONE = (2048, 4096), (2048, 4112), (128256, 64), (2048, 0)
"""Weights [V, D]: blocks grow with D or V, none divides the odd D, and 0 is a head without one."""
ROWS, NUM_DRAFTS, CHUNKS = 32, 2, 2
_ABSENT = {arch: Gpu(arch=arch, shared_bytes=gpu.program_bytes) for arch, gpu in GPUS.items()}
_ABSENT |= {arch: Gpu(arch=94, shared_bytes=AMD_SHARED_BYTES, amd=True) for arch in AMD_ARCHS}
_FULLEST = 128
"""The rows of the tile that spills first: a thread of its 4 warps has 128 accumulators, as one of
the largest tile's 8 has, and twice as many of a piece. With pieces of 16 columns it spills 136
bytes on sm_100, and the largest tile none. It compiles in a tenth of the time (Triton 3.7.1)."""
STORED_ROWS = "stored rows"
"""The variant of tiles that only steps take which store logits."""
EDITS: tuple[Kind, ...] = ("penalties", "bias")
"""Kinds that change logits, for which tiles that are not short leave no registers."""
CONTROLS: tuple[Kind, ...] = ("allowed ids", "bad words", "min_tokens", *EDITS)
EVERYTHING: dict[str, Any] = {"samples": 2, "head": True, "world_size": 8}

# One feature at a time, whose cost per logit is counted: kinds of requests and more of the step.
_FEATURES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "masks": ("allowed ids", {}),
    "biases": ("bias", {}),
    "penalties": ("penalties", {}),
    "drafts": ("penalties", {"drafts": True}),
}


@dataclass(frozen=True)
class Subject:
    """One line of the report: a launch on one architecture.

    Attributes:
        epilogue: whether the greedy kernel is compiled too and the difference counted.
    """

    variant: str
    arch: int
    launch: Launch
    epilogue: bool = False

    @property
    def tile(self) -> Tile | None:
        """None for kernels that do not touch the weight."""
        if self.launch.kernel not in (LM_HEAD, SCREEN):
            return None
        names = ("BLOCK_V", "BLOCK_B", "BLOCK_D", "num_warps", "num_stages")
        return Tile(*(self.launch.named[name] for name in names))

    @property
    def greedy(self) -> Launch:
        """The plain greedy kernel with the same product."""
        own = {"value_ptr": Pointer(torch.float32), "index_ptr": Pointer(torch.int32)}
        return _ours(GREEDY, self.launch.named | own)


def subjects(archs: Sequence[int], tiles: Sequence[tuple[Tile, WeightFormat]]) -> list[Subject]:
    """Return all kernels on `archs`, the LM head with each of `tiles`."""
    of_archs = (
        (*_lm_heads(arch, tiles), *_storing(arch), *_screens(arch), *_small(arch)) for arch in archs
    )
    return list(dict.fromkeys(chain.from_iterable(of_archs)))


def few(archs: Sequence[int]) -> list[Subject]:
    """Return the LM head with one tile on each of `archs`, and few other kernels.

    They are a screen on sm_90 and where it has the least shared memory, and on sm_90 all else once.
    On sm_100 a tile of 64 rows has every feature: it takes 230 registers, as the fullest tile does,
    and compiles in an eighth of the time (Triton 3.7.1).
    """
    tiles = [(rule(64, 0, of, Gpu("H200", 90, 132)), of) for of in (FP32, BF16)]
    full = rule(64, 2**20, BF16, _ABSENT[100])
    chosen: list[Subject] = []
    for arch in archs:
        variants = ("plain", *_FEW.get(arch, ()))
        chosen += _lm_heads(arch, tiles if "given logits" in variants else tiles[1:], variants)
        chosen += _screens(arch, [max(SCREEN_TILES)]) if _SCREENED[0] in variants else ()
        chosen += _small(arch) if "" in variants else ()
        chosen += _lm_heads(100, [(full, BF16)], ("everything",)) if arch == 100 else ()
    found = {
        (each.arch, each.launch.kernel, each.variant): each
        for each in chosen
        if each.variant in ("plain", *_FEW.get(each.arch, ()))
    }
    return list(found.values())  # of two that are alike, the last


_SCREENED = ("screen", "list")
_FEW = {
    90: ("", "push", "everything", "drafts, everything", "given logits", *_SCREENED),
    100: ("everything",),
    **dict.fromkeys((86, 89), _SCREENED),
}
"""The variants that `few` takes beside the plain one, by architecture."""


def lm_head(arch: int, tile: Tile, weights: WeightFormat) -> Subject:
    """Return the LM head by itself, plain, against its greedy twin."""
    return _lm_head(arch, "plain", "plain", epilogue=True, tile=tile, weights=weights)


def package_kernels() -> set[str]:
    """Return the jitted functions of the package that are launched, named `…_kernel`."""
    found = set()
    for module in pkgutil.iter_modules(
        tpsample.backends.triton_.kernels.__path__, "tpsample.backends.triton_.kernels."
    ):
        for name, value in vars(import_module(module.name)).items():
            if name.endswith("_kernel") and isinstance(value, triton.JITFunction):
                found.add(f"{value.__module__}:{name}")
    return found


def _lm_heads(
    arch: int,
    tiles: Sequence[tuple[Tile, WeightFormat]],
    variants: Container[str] = ("given logits", "plain", "push", "everything", *_FEATURES),
) -> Iterator[Subject]:
    """Yield every tile plain, and some variants.

    At batch tile 64 the LM head also pushes to peers. There and with the smallest, the fullest and
    the largest tile it has every feature. One tile shows that fp16 differs from bf16 in the name of
    the instruction alone.
    """
    ends = [rule(rows, 2**20, BF16, _ABSENT[arch]) for rows in (1, _FULLEST, MAX_BLOCK_B)]
    fit = [(fitted(t, _ABSENT[arch]) if of.tensor_cores else t, of) for t, of in tiles]
    for tile, weights in dict.fromkeys(fit):
        if weights is FP16 and tile.block_b != 16:
            continue
        subject = partial(_lm_head, arch, tile=tile, weights=weights)
        if not weights.tensor_cores and "given logits" in variants:
            yield subject("given logits", "plain", shape=NONE)
            yield subject("given logits", *KINDS, shape=NONE, **EVERYTHING)
        at_64 = tile.block_b == 64 and weights is BF16
        if "plain" in variants:
            yield subject("plain", "plain", epilogue=at_64 and arch == 90)
        if at_64 and "push" in variants:
            yield subject("push", "plain", world_size=8)
        if "everything" in variants and (at_64 or (tile in ends and weights is BF16)):
            kinds = [kind for kind in KINDS if is_short(tile) or kind not in EDITS]
            every = partial(subject, shape=ODD, head=True, world_size=8)
            yield every("everything", *kinds, samples=2)
            if is_short(tile):  # a verification draws one sample
                yield every("drafts, everything", *kinds, drafts=True)
        for name, (kind, options) in _FEATURES.items() if at_64 and arch == 90 else ():
            if name in variants and (is_short(tile) or kind not in EDITS):
                yield subject(name, kind, epilogue=True, **options)


def _lm_head(
    arch: int, variant: str, *kinds: Kind, epilogue: bool = False, **options: Any
) -> Subject:
    """Return the LM head in a step whose requests are of these kinds."""
    return Subject(variant, arch, _fullest(launches(arch, *kinds, **options), LM_HEAD), epilogue)


def _storing(arch: int) -> Iterator[Subject]:
    """Yield the LM head with the tiles of steps that store logits."""
    for tile in storing_tiles(arch):
        yield _lm_head(arch, STORED_ROWS, "top_p", tile=tile)


def _screens(arch: int, sizes: Iterable[int] = SCREEN_TILES) -> Iterator[Subject]:
    """Yield the screen of so many rows, plain and with every feature, and the LM head after it."""
    for size in sizes:
        step, drafts = partial(launches, arch, screening="int8"), size // (NUM_DRAFTS + 1)
        for more, found in (
            ("", step("plain", rows=size)),
            (", everything", step(*CONTROLS, rows=min(size, MAX_SLOTS // 2), **EVERYTHING)),
            (", drafts, everything", step(*CONTROLS, rows=drafts, drafts=True, **EVERYTHING)),
        ):
            for launch in found:
                if name := {SCREEN: "screen", LM_HEAD: "list"}.get(launch.kernel):
                    yield Subject(f"{name}{more}", arch, launch)


def _small(arch: int) -> Iterator[Subject]:
    """Yield the kernels that do not touch the weight, one launch of each."""
    every: list[Launch] = []
    for options in ({"shape": LARGE}, {"screening": "int8"}, {"world_size": 8}):
        steps = partial(launches, arch, head=True, **options)
        every += [*steps(*KINDS, each=True), *steps(*KINDS, each=True, samples=2)]
        every += steps(*CONTROLS, each=True, drafts=True)
        for method in ("rejection", "block"):
            every += steps("plain", drafts=True, method=method)
    kernels = {each.kernel for each in every}
    if missing := package_kernels() - kernels:
        raise LookupError(f"static report: no step launches {sorted(missing)}; add one")
    own = {"BLOCK_B": 64, "num_warps": 4, "num_stages": 1}
    yield Subject("", arch, _ours(ROW_NOISE, _fullest(every, LM_HEAD).named | own))
    for kernel in sorted(kernels - {LM_HEAD, SCREEN}):
        yield Subject("", arch, _fullest(every, kernel))


def launches(
    arch: int,
    *kinds: Kind,
    tile: Tile | None = None,
    rows: int = ROWS,
    each: bool = False,
    samples: int | None = None,
    drafts: bool = False,
    method: Method = "coupled",
    **options: Any,
) -> list[Launch]:
    """Return the launches of a step with requests of these kinds, as a GPU would make them.

    Args:
        tile: in place of that of the tile table.
        each: whether there are steps of each kind by itself, too, and masks of the caller.
        drafts: whether the step verifies drafts, one sample each.
        method: how it does; the others have logits of the drafter, in the dtype of the weight.
        options: of `samplers_of`.
    """
    world, samplers = samplers_of(arch, **options)
    vocab_size, width = world.shards[-1].stop, NUM_DRAFTS + 1 if drafts else 1
    left_out = ("grammar", "forced") if each else ("grammar", "forced", "logprobs")
    of_rows = [kind for kind in kinds if kind not in left_out]  # masks come below
    every = batches_of(of_rows, rows, vocab_size, world.device, most=max(rows, len(KINDS)))
    batches: list[StepBatch] = [batch for batch in every if isinstance(batch, SamplingBatch)]
    batches = batches[0 if each else -1 :]
    if each:
        slots = SamplingBatch.of_slots(rows, vocab_size=vocab_size, device=world.device)
        slots.put(range(rows), [SamplingParams(seed=row) for row in range(rows)])
        batches.append(slots.select(torch.arange(rows, device=world.device)))

    def step(sampler: LMHeadSampler, batch: StepBatch) -> None:
        override_tile(sampler, tile)
        hidden = sampler.weight.new_zeros(batch.rows, width, sampler.weight.shape[1])
        if drafts:
            guessed = torch.zeros(batch.rows, NUM_DRAFTS, dtype=torch.int64)
            law = sampler.weight.new_zeros(batch.rows, NUM_DRAFTS, len(sampler.shard))
            its = None if method == "coupled" else law
            sample_draft(sampler, law[:, 0], batch, 0, 0, method=method)
            verify(sampler, hidden, guessed, batch, 0, method=method, draft_logits=its)
        elif hidden.numel():
            sampler(hidden[:, 0], batch, 0, num_samples=samples)
        else:
            logits = sampler.weight.new_zeros(batch.rows, len(sampler.shard))
            sampler.sample_logits(logits, batch, 0, num_samples=samples, head_applied=True)

    with listed() as found, filled():
        for batch in batches:
            if each:
                bits = torch.full((batch.rows * width, -(-vocab_size // 32)), -1, dtype=torch.int32)
                batch.grammar_bitmask, batch.forced_token_ids = bits, bits[:, 0].long()
            world.run([partial(step, sampler, batch) for sampler in samplers])
            if (controls := batch._table.controls) is not None:
                controls.keeps_digests = False  # as on a GPU
                batch.append(torch.full((batch.rows, width), -1))
        if each and "top_p" in kinds:
            list_over_zeros(samplers[0].shard, vocab_size, len(samplers), world.device)
        if each:
            _score(samplers[0].weight)
    return list(dict.fromkeys(_general(launch) for launch in found))


def _score(weight: torch.Tensor) -> None:
    """Launch the kernels of a trainer's scores."""
    index, ends = torch.zeros(1, dtype=torch.int64), torch.arange(2)
    sums = weight.new_zeros(1, weight.shape[1], dtype=torch.float64)
    pair_products(weight, index, weight, index)
    add_weighted_rows(sums, ends, sums.new_zeros(1), weight, index)


@lru_cache(16)  # more than one architecture has
def samplers_of(
    arch: int,
    shape: tuple[int, int] = WIDE,
    weights: WeightFormat = BF16,
    world_size: int = 1,
    head: bool = False,
    **options: Any,
) -> tuple[VirtualWorld, list[LMHeadSampler]]:
    """Return the samplers of virtual ranks on a CPU that passes for a GPU.

    Args:
        head: whether the head has a bias, a scale and a softcap.
    """
    weight, gpu = torch.zeros(shape, dtype=weights.dtype), _ABSENT[arch]
    world = VirtualWorld(even_shards(len(weight), world_size))
    samplers = []
    with (
        patch.object(construction, "interpreted", lambda: True),
        patch.object(construction, "kernels_overlap", lambda device: gpu.hopper),
        patch.object(Gpu, "of", lambda device: gpu),
        patch.object(Int8Copy, "_fill", lambda *_: None),  # no kernel reads it
    ):
        for shard, group in zip(world.shards, world.ranks, strict=True):
            own = weight[shard.start : shard.stop]
            if head:
                options |= {
                    "bias": own.new_zeros(len(own)),
                    "logit_scale": 0.5,
                    "logit_softcap": 30.0,
                }
            # Nothing runs, so that no row has a token; one is named, and nobody is warned.
            own_options = {"group": group, "chunks": CHUNKS, "on_failed": 0, **options}
            samplers.append(make_sampler(own, ROWS, **own_options))
    return world, samplers


def _ours(kernel: str, known: dict[str, Any]) -> Launch:
    """Return the launch of a kernel of the benchmarks, with arguments of the LM head."""
    names = (*Launch(kernel, ()).function.arg_names, "num_warps", "num_stages", "enable_fp_fusion")
    return Launch(kernel, tuple((name, known[name]) for name in names))


def _general(launch: Launch) -> Launch:
    """Return a launch in which strides and the width of states alone are multiples of 16."""
    numbers = (name for name, value in launch.arguments if value == 16 and name.islower())
    kept = ("state_width", "num_warps")
    odd = {name: 17 for name in numbers if "stride" not in name and name not in kept}
    return Launch(launch.kernel, tuple((launch.named | odd).items()))


def _fullest(found: Iterable[Launch], kernel: str) -> Launch:
    """Return the launch of a kernel with most tensors, then with the largest constants.

    Where an argument is None there, the value is another launch's.
    """

    def fullness(launch: Launch) -> tuple[int, list[Any]]:
        values = launch.named.values()
        pointers, numbers = ([v for v in values if isinstance(v, kind)] for kind in (Pointer, int))
        return len(pointers), numbers

    known: dict[str, Any] = {}
    of_kernel = (launch for launch in found if launch.kernel == kernel)
    for launch in sorted(of_kernel, key=fullness, reverse=True):
        known |= {name: value for name, value in launch.arguments if known.get(name) is None}
    return Launch(kernel, tuple(known.items()))
