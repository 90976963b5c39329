"""Every kernel of the package, and the configurations in which it is compiled for the report."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import triton

import tpsample.kernels
from benchmarks.lab.launches import Launch, Pointer
from benchmarks.static.aot import GPUS, jitted
from benchmarks.static.recorded import recorded
from tpsample.core.machine import OVERLAP_ARCH
from tpsample.local import screen_launches
from tpsample.local.tile_table import (
    MAX_BLOCK_B,
    Gpu,
    Tile,
    fitted,
    is_short,
    list_tile,
    rule,
    short_tile,
)
from tpsample.local.triton_backend import push_arguments

LM_HEAD = "tpsample.kernels.lm_head:lm_head_kernel"
GREEDY = "benchmarks.lab.kernels:greedy_kernel"
ROW_NOISE = "benchmarks.lab.kernels:row_noise_kernel"
SCREEN = "tpsample.kernels.screening:screen_kernel"
HIDDEN_SIZE = 4096

_WEIGHT_TYPED = ("hidden_ptr", "weight_ptr", "bias_ptr")

# Compile-time arguments that are other than recorded; those of a variant come after them.
_CONSTANTS = {
    "HIDDEN_SIZE": HIDDEN_SIZE,
    "PADDED_SIZE": HIDDEN_SIZE,
    "ACCUMULATION": screen_launches.accumulation_error(HIDDEN_SIZE, torch.bfloat16),
}
# The greedy kernels are ours: they have arguments of the LM head, and these.
_OWN = {"value_ptr": Pointer(torch.float32), "index_ptr": Pointer(torch.int32), "BLOCK_B": 64}

# Arguments of the LM head that are None where their feature is off: a kernel that used them then
# would not compile. Penalties and biases use the short tiles.
_TABLES = (
    "state_slot_ptr", "wants_ptr", "penalty_ptr", "touched_ptr", "state_width", "max_drafts",
)  # fmt: skip
_MASKS = (*_TABLES, "mask_ptr")
_BIASES = (*_TABLES, "token_bias_ptr")
_PENALTIES = (*_TABLES, "history_ptr")
_DRAFTS = ("draft_ptr", "num_drafts_ptr")
_PUSH = tuple(name for name in push_arguments(None) if name != "BLOCK_W")
_STORE = ("logits_ptr", "stride_logits_b", "slot_ptr", "num_stored")
_HEAD = ("logit_scale", "logit_softcap", "bias_ptr")
_NO_EDITS = ("num_samples", *_HEAD, *_STORE, *_MASKS, *_PUSH)
_LIST = ("listed_ptr", "num_listed_ptr")
_EVERYTHING = (*_NO_EDITS, *_BIASES, *_PENALTIES, *_DRAFTS)
_NO_STORE = tuple(name for name in _EVERYTHING if name not in (*_STORE, *_PUSH))

# Logits that the caller computed: neither weight nor product. The launch takes the tile of fp32.
_GIVEN = {"weight_ptr": None, "stride_weight_v": None, "HIDDEN_SIZE": 0}

# One feature at a time, whose cost per logit is counted: arguments and constants.
_FEATURES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "7 rounds": ((), {"ROUNDS": 7}),
    "masks": (_MASKS, {}),
    "biases": (_BIASES, {}),
    "penalties": (_PENALTIES, {}),
    "drafts": ((*_PENALTIES, *_DRAFTS), {}),
}


def _gpu(arch: int) -> Gpu:
    """The GPU that the tiles of an architecture are chosen for."""
    return Gpu(arch=arch, shared_bytes=GPUS[arch].program_bytes)


_SMALLEST, _LARGEST = (rule(rows, 2**20, torch.bfloat16, Gpu()) for rows in (1, MAX_BLOCK_B))


@dataclass(frozen=True)
class Subject:
    """One line of the report: a kernel in one configuration on one architecture.

    `tile` is None for kernels that do not touch the weight. With `epilogue` set the greedy kernel
    is compiled too and the difference counted.

    Attributes:
        uses: arguments of the LM head that are not None, though another variant has them so.
    """

    kernel: str
    variant: str
    arch: int
    dtype: torch.dtype | None = None
    tile: Tile | None = None
    epilogue: bool = False
    uses: tuple[str, ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def num_warps(self) -> int:
        """Of the tile, or as recorded."""
        return (
            self.tile.num_warps
            if self.tile
            else recorded().get(self.kernel, {}).get("num_warps", 4)
        )

    @property
    def edits(self) -> bool:
        """Whether biases or penalties change the logits."""
        return bool({"token_bias_ptr", "history_ptr"} & set(self.uses))

    @property
    def product(self) -> bool:
        """Whether it multiplies a weight."""
        return self.tile is not None and "weight_ptr" not in self.constants

    @property
    def overlap(self) -> bool:
        """Whether the kernel overlaps the one before it, or behind it."""
        return self.arch >= OVERLAP_ARCH and "OVERLAP" in jitted(self.kernel).arg_names

    def build(self, kernel: str | None = None) -> tuple[Launch, int]:
        """Return what to compile and for which GPU; `kernel` takes the place of this subject's.

        Pointers and strides count as multiples of 16, as in real use, and no other number does.
        """
        kernel = kernel or self.kernel
        known = recorded().get(kernel) or recorded()[LM_HEAD] | _OWN
        function = jitted(kernel)
        compile_time = {function.arg_names[i] for i in function.constexprs}
        run_time = {n: self._seen(n, known.get(n)) for n in function.arg_names if n in known}
        constants = known | _CONSTANTS | {"OVERLAP": self.overlap, "LEADS": self.overlap}
        constants["PREFETCH"] = 0
        if self.tile is not None:
            if self.overlap and self.product and self.dtype is not None:
                columns = self.tile.num_stages * self.tile.block_d
                constants["PREFETCH"] = columns * self.dtype.itemsize
            constants |= {
                "BLOCK_V": self.tile.block_v,
                "BLOCK_B": self.tile.block_b,
                "BLOCK_D": self.tile.block_d,
                "BLOCK_E": self._block_e(self.tile),
            }
        arguments = run_time | {n: constants[n] for n in compile_time} | self.constants
        if kernel in (LM_HEAD, SCREEN):
            off = {*_EVERYTHING, *_LIST} & set(function.arg_names) - set(self.uses)
            arguments |= dict.fromkeys(off)
        options = {"num_warps": self.num_warps, "enable_fp_fusion": False}
        options["num_stages"] = self.tile.num_stages if self.tile else 1
        return Launch(kernel, tuple((arguments | options).items())), self.arch

    def _block_e(self, tile: Tile) -> int:
        if self.kernel == SCREEN:
            return screen_launches.screen_block_e(tile, self.edits)
        return tile.block_e("num_samples" in self.uses, "mask_ptr" in self.uses, self.edits)

    def _seen(self, argument: str, value: Any) -> Any:
        """Return a run-time argument as it is compiled; the weight has the dtype of the line."""
        if isinstance(value, Pointer):
            # The 8-bit product stands beside 16-bit weights.
            of_weight = argument in _WEIGHT_TYPED and self.dtype not in (None, torch.int8)
            return Pointer(self.dtype if of_weight else value.dtype)  # type: ignore[arg-type]
        if isinstance(value, int):
            return 16 if argument.startswith("stride_") else 17
        return value


def subjects(archs: Sequence[int], tiles: Sequence[tuple[Tile, torch.dtype]]) -> list[Subject]:
    """Return all kernels on `archs`, the LM head with each of `tiles`."""
    if missing := package_kernels() - recorded().keys():
        raise LookupError(f"static report: no step launches {sorted(missing)}; add one")
    # Kernels that do not touch the weight are as they were recorded.
    small = (ROW_NOISE, *sorted(package_kernels() - {LM_HEAD, SCREEN}))
    found = []
    for arch in archs:
        found += [*_lm_heads(arch, tiles), *_screens(arch)]
        found += [Subject(kernel, "", arch) for kernel in small]
    return found


def few(archs: Sequence[int]) -> list[Subject]:
    """Return the LM head with one tile on each of `archs`, and few other kernels.

    They are a screen on sm_90 and where it has the least shared memory, and on sm_90 all else once.
    """
    short = rule(64, 0, torch.bfloat16, Gpu("H200", 90, 132))
    fp32 = rule(64, 0, torch.float32, Gpu())
    screens = [
        subject
        for arch in archs
        if (size := _SCREENED.get(arch))
        for subject in _screens(arch)
        if subject.variant in ("screen", "list") and subject.tile and subject.tile.block_b == size
    ]
    once = ("", "push", "everything", "given logits")
    return [
        subject
        for subject in subjects(archs, [(short, torch.bfloat16), (fp32, torch.float32)])
        if (subject.variant == "plain" and subject.tile == short)
        or (subject.arch == 90 and subject.variant in once)
        or subject in screens
    ]


_SCREENED = {90: 16, 86: 64, 89: 64}
"""The batch tile of the screen that `few` compiles, by architecture."""


def lm_head(arch: int, tile: Tile, dtype: torch.dtype) -> Subject:
    """Return the LM head by itself, plain, against its greedy twin."""
    return Subject(LM_HEAD, "plain", arch, dtype, tile, epilogue=True)


def package_kernels() -> set[str]:
    """Return the jitted functions of `tpsample.kernels` that are launched, named `…_kernel`."""
    found = set()
    for module in pkgutil.iter_modules(tpsample.kernels.__path__, "tpsample.kernels."):
        for name, value in vars(import_module(module.name)).items():
            if name.endswith("_kernel") and isinstance(value, triton.JITFunction):
                found.add(f"{value.__module__}:{name}")
    return found


def _lm_heads(arch: int, tiles: Sequence[tuple[Tile, torch.dtype]]) -> list[Subject]:
    """Return every tile plain, and some variants.

    At batch tile 64 the LM head also pushes to peers, and there and with the smallest and the
    largest tile it has every feature.

    fp16 differs from bf16 in the name of the instruction: one tile shows that.
    """
    found = []
    fit = [(t if d == torch.float32 else fitted(t, _gpu(arch)), d) for t, d in tiles]
    for tile, dtype in dict.fromkeys(fit):
        if dtype == torch.float16 and tile.block_b != 16:
            continue
        if dtype == torch.float32:
            found += [
                Subject(LM_HEAD, "given logits", arch, dtype, tile, False, uses, _GIVEN)
                for uses in ((), _EVERYTHING)
            ]
        bf16 = dtype == torch.bfloat16
        at_64 = tile.block_b == 64 and bf16
        counted = at_64 and arch == 90
        found.append(Subject(LM_HEAD, "plain", arch, dtype, tile, epilogue=counted))
        if at_64:
            found.append(Subject(LM_HEAD, "push", arch, dtype, tile, uses=_PUSH))
        largest = fitted(_LARGEST, _gpu(arch))
        if at_64 or (bf16 and tile in (_SMALLEST, largest)):
            uses = _EVERYTHING if is_short(tile) else _NO_EDITS
            odd = {"HIDDEN_SIZE": HIDDEN_SIZE + 8}
            found.append(Subject(LM_HEAD, "everything", arch, dtype, tile, False, uses, odd))
        if counted:
            for name, (uses, constants) in _FEATURES.items():
                subject = Subject(LM_HEAD, name, arch, dtype, tile, True, uses, constants)
                if is_short(tile) or not subject.edits:
                    found.append(subject)
    return found


def _screens(arch: int) -> list[Subject]:
    """Return the screen with every tile, plain and with every feature, and the LM head after it."""
    found = []
    gpu = _gpu(arch)
    for tile in (screen_launches.screen_tile(size, gpu) for size in screen_launches.SCREEN_TILES):
        for variant, uses in (("screen", ()), ("screen, everything", _NO_STORE)):
            found.append(Subject(SCREEN, variant, arch, torch.int8, tile, uses=uses))
        few, short = (of(tile.block_b, torch.bfloat16, gpu) for of in (list_tile, short_tile))
        found.append(Subject(LM_HEAD, "list", arch, torch.bfloat16, few, uses=_LIST))
        uses = (*_LIST, *_NO_STORE, *_PUSH)
        found.append(Subject(LM_HEAD, "list, everything", arch, torch.bfloat16, short, uses=uses))
    return found
