"""Block sizes of the LM-head kernel, and why.

The choice can change the speed and nothing else: every entry gives the same tokens. A shape that
was measured on this GPU takes what was fastest there, from `measured_tiles.json`, which
`benchmarks.questions.tune` writes. The file that is shipped is empty. Any other shape takes a rule.
The rules are argued from bytes, waves and static counts (`benchmarks.static.report`), and then
by times on one H100.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tpsample.core.machine import ASYNC_ARCHS, OVERLAP_ARCH, amd
from tpsample.core.weight_format import BF16, FP16, FP32, WeightFormat


@dataclass(frozen=True)
class Tile:
    """One launch configuration of `lm_head_kernel`."""

    block_v: int
    block_b: int
    block_d: int
    num_warps: int
    num_stages: int

    def fitting(self, gpu: "Gpu", stage_bytes: int) -> "Tile":
        """Return the tile with as many stages as a program's shared memory has room for.

        Before sm_90, on sm_120 and on AMD's GPUs Triton keeps one stage less in shared memory.
        There the operands of the product that runs are in registers.

        Args:
            stage_bytes: what one stage loads.
        """
        if not gpu.shared_bytes:
            return self
        room = gpu.shared_bytes // stage_bytes + (not gpu.multiplies_shared)
        return replace(self, num_stages=max(1, min(self.num_stages, room)))

    def block_e(self, many_samples: bool, masks: bool, edits: bool) -> int:
        """Batch columns that the epilogue works on at a time.

        Ahead of time for sm_80, sm_90 and sm_100 no entry of the table spills with 32; with all
        columns at once 64 accumulators per thread often spill and 128 always. 64 in one go save 3
        instructions per logit, but not with a loop over samples, which keeps the logits alive.
        Penalties and biases (`edits`) load per element, by 64-bit addresses: 16 columns; so do
        masks, which only a loop over samples on top makes too much. Where a thread has 128
        accumulators, that takes 8.
        """
        if masks and many_samples and self.block_v * self.block_b > 96 * 32 * self.num_warps:
            return 8
        if edits or (masks and many_samples):
            return min(self.block_b, 16)
        return min(self.block_b, 32 if many_samples or self.block_b > 64 else 64)


@dataclass(frozen=True)
class Gpu:
    """A GPU as far as the choice of a tile depends on it; all 0 is no GPU.

    Attributes:
        name: as torch has it.
        arch: 90 for compute capability 9.0.
        shared_bytes: what one program may have of shared memory; 0 if unknown.
        amd: whether it is AMD's, which counts its architectures otherwise.
    """

    name: str = ""
    arch: int = 0
    num_sms: int = 0
    shared_bytes: int = field(default=0, compare=False)
    amd: bool = False

    @property
    def hopper(self) -> bool:
        """Whether it can do what came with compute capability 9.0."""
        return self.arch >= OVERLAP_ARCH and not self.amd

    @property
    def multiplies_shared(self) -> bool:
        """Whether its products read both operands from shared memory."""
        return self.arch in ASYNC_ARCHS and not self.amd

    @staticmethod
    def of(device: torch.device) -> "Gpu":
        if device.type != "cuda":
            return Gpu()
        of = torch.cuda.get_device_properties(device)
        shared_bytes = getattr(of, "shared_memory_per_block_optin", 0)  # without an annotation
        if amd():
            shared_bytes = AMD_SHARED_BYTES
        arch = 10 * of.major + of.minor
        return Gpu(of.name, arch, of.multi_processor_count, shared_bytes, amd())


AMD_SHARED_BYTES = 64 * 1024
"""The local memory of a program on gfx942. One on gfx950 could have more, and gets the same."""

FILE = Path(__file__).with_name("measured_tiles.json")
Shape = tuple[Gpu, int, int, str, int]
"""GPU, rows of the vocabulary, hidden size, name of the weights' format, rows of the batch tile."""


@dataclass(frozen=True)
class MeasuredTile:
    """The fastest tile of one shape, and the reason: its time and that of the rule's tile."""

    gpu: Gpu
    vocab_rows: int
    hidden_size: int
    weights: str
    batch: int
    tile: Tile
    us: float
    rule_us: float

    @staticmethod
    def of(entry: dict[str, Any]) -> "MeasuredTile":
        """Return the entry that `dataclasses.asdict` has made a dictionary."""
        fields = {**entry, "gpu": Gpu(**entry["gpu"]), "tile": Tile(**entry["tile"])}
        return MeasuredTile(**fields)

    @property
    def shape(self) -> Shape:
        return self.gpu, self.vocab_rows, self.hidden_size, self.weights, self.batch


def load(path: Path) -> list[MeasuredTile]:
    """The entries of a file.

    Raises:
        ValueError: an entry is no measured tile; the text names the file and the first such entry.
    """
    tiles = []
    for number, entry in enumerate(json.loads(path.read_text())):
        try:
            tiles.append(MeasuredTile.of(entry))
        except (KeyError, TypeError) as wrong:
            raise ValueError(f"{path}: entry {number} is no measured tile: {wrong}") from wrong
    return tiles


def save(path: Path, entries: Sequence[MeasuredTile]) -> None:
    """Write entries, one a line, in an order that does not depend on when they were measured."""
    ordered = sorted(entries, key=lambda entry: (entry.gpu.name, *entry.shape[1:]))
    lines = [json.dumps(asdict(entry)) for entry in ordered]
    path.write_text("[" + ",".join(f"\n{line}" for line in lines) + "\n" * bool(lines) + "]\n")


@cache
def measured_tiles() -> dict[Shape, Tile]:
    """The shipped file as a table; read once in a process."""
    return {entry.shape: entry.tile for entry in load(FILE)}


MAX_BLOCK_B = 256

# One batch tile up to 256 rows, so the weights are read once, from HBM and through L2. block_v >=
# 64 with at least 4 warps keeps wgmma / tcgen05; more than 8 warps loses tcgen05. Stages fill
# shared memory so that two programs fit an SM (one for 256 rows): one computes its epilogue while
# the other loads.
_TILES = {
    16: Tile(block_v=128, block_b=16, block_d=64, num_warps=4, num_stages=5),
    32: Tile(block_v=128, block_b=32, block_d=64, num_warps=4, num_stages=5),
    64: Tile(block_v=128, block_b=64, block_d=64, num_warps=4, num_stages=4),
    128: Tile(block_v=128, block_b=128, block_d=64, num_warps=4, num_stages=3),
    256: Tile(block_v=128, block_b=256, block_d=64, num_warps=8, num_stages=4),
}
BATCH_TILES = tuple(_TILES)


def tile_ends(max_rows: int) -> list[int]:
    """Return the fewest and the most rows that take each batch tile, of up to so many rows."""
    last = [size for size in BATCH_TILES if size < max_rows] + [min(max_rows, MAX_BLOCK_B)]
    first = [1, *(rows + 1 for rows in last[:-1])]
    return sorted({*first, *last})


# Half the height, for small batches on shards whose tiles then all run at once: a shard of 16032
# rows is 126 tiles of 128, fewer than the 132 SMs of an H200, but 251 of 64. One tile more than run
# at once would cost a second wave, which matters less the more waves there are. Penalties and
# biases always take these, because they leave registers.
_SHORT_TILES = {
    16: Tile(block_v=64, block_b=16, block_d=64, num_warps=4, num_stages=8),
    32: Tile(block_v=64, block_b=32, block_d=64, num_warps=4, num_stages=7),
    64: Tile(block_v=64, block_b=64, block_d=64, num_warps=4, num_stages=5),
    128: Tile(block_v=64, block_b=128, block_d=64, num_warps=4, num_stages=3),
    256: Tile(block_v=64, block_b=256, block_d=64, num_warps=8, num_stages=4),
}
# Before sm_90, where these spill with all controls and other features: a program keeps its operands
# in registers there.
_EIGHT_WARPS = replace(_SHORT_TILES[64], num_warps=8)
_EIGHT_WARPS_OF_128 = replace(_TILES[128], num_warps=8)
# For the few ids that a screen has listed: about as many tiles as SMs. So each has an SM to itself
# and needs all of its shared memory to keep enough bytes under way.
_LIST_TILES = {
    16: Tile(block_v=64, block_b=16, block_d=128, num_warps=4, num_stages=8),
    32: Tile(block_v=64, block_b=32, block_d=128, num_warps=4, num_stages=6),
    64: Tile(block_v=64, block_b=64, block_d=128, num_warps=4, num_stages=5),
}
# On sm_90, where logits are stored. The code of a high tile's epilogue with 128 accumulators per
# thread then exceeds what an SM keeps of instructions: 1118 µs for 256 rows of 151936 × 4096 on an
# H100, and with half as many accumulators 826, though 30 registers spill. Of 128 rows a high tile
# took 579, a short one 556.
_STORING_TILES = {128: _SHORT_TILES[128], 256: replace(_TILES[256], num_warps=16)}
# fp32 runs on the CUDA cores with full precision, which needs registers for both operands.
_FP32 = Tile(block_v=64, block_b=16, block_d=32, num_warps=4, num_stages=2)

# The interpreter pays per operation, not per element: few large tiles.
_INTERPRETER_BLOCK_V = 1024


AT_ONCE = {16: 2, 32: 2, 64: 2, 128: 3}
"""Short tiles per SM, by rows, which are faster where all of a shard run at once. On an H100 those
of 128 rows took 76 µs against 86 for 18992 × 4096, of 64 rows 94 against 98 for 16032 × 8192."""
MANY_WAVES = 4
"""So often short tiles of up to 64 rows fill an H100 where they are faster again: for 151936 × 4096
they took 422 µs against 437 with 64 rows, 413 against 426 with 32, and 415 against 419 with 16. For
18992 × 4096, which fill it 1.1 times, they took 72 against 64 with 64 rows."""
SHORT_COST = 1.17
"""How long two short tiles of 256 rows take by the time of a high one: 1192 µs against 1021 for
128256 × 8192 on an H100."""


@cache
def tile_for(
    num_rows: int,
    vocab_rows: int,
    hidden_size: int,
    weights: WeightFormat,
    gpu: Gpu,
    edits: bool = False,
    stores: bool = False,
) -> Tile:
    """The configuration for a batch of `num_rows` rows over `vocab_rows` of the vocabulary.

    Penalties and biases (`edits`) need registers that only the short tiles leave.

    Args:
        stores: whether logits of some rows are stored.
    """
    if edits:
        return short_tile(num_rows, weights, gpu)
    storing = _STORING_TILES.get(batch_tile(num_rows))
    if stores and storing and gpu.arch == OVERLAP_ARCH and weights.tensor_cores:
        return fitted(storing, gpu)
    shape = gpu, vocab_rows, hidden_size, weights.name, batch_tile(num_rows)
    return measured_tiles().get(shape) or rule(num_rows, vocab_rows, weights, gpu)


def short_tile(num_rows: int, weights: WeightFormat, gpu: Gpu) -> Tile:
    """The configuration for penalties and biases."""
    return fitted(_SHORT_TILES[batch_tile(num_rows)], gpu) if weights.tensor_cores else _FP32


def list_tile(num_rows: int, weights: WeightFormat, gpu: Gpu) -> Tile:
    """The configuration for a list of few ids, of up to 64 rows."""
    return fitted(_LIST_TILES[batch_tile(num_rows)], gpu) if weights.tensor_cores else _FP32


def fitted(tile: Tile, gpu: Gpu) -> Tile:
    """Return a tile of tensor cores with no more stages than fit this GPU.

    Before sm_90, on AMD's GPUs and where a program has 99 KB, half the largest batch tile is
    taken: with masks, samples and stored rows the largest one spills on sm_80, sm_86 and sm_89.
    On sm_120 the smallest short tile spills two registers, and one twice as deep spills none.
    """
    older = gpu.arch > 0 and not gpu.hopper
    small = older or 0 < gpu.shared_bytes < 100 * 1024
    if small and tile in (_TILES[128], _TILES[256]):
        tile = _EIGHT_WARPS_OF_128
    if older and tile == _SHORT_TILES[64]:
        tile = _EIGHT_WARPS
    if gpu.arch >= 120 and tile == _SHORT_TILES[16]:
        tile = _LIST_TILES[16]
    return tile.fitting(gpu, 2 * (tile.block_v + tile.block_b) * tile.block_d)


def rule(num_rows: int, vocab_rows: int, weights: WeightFormat, gpu: Gpu) -> Tile:
    """The configuration of a shape that was not measured."""
    if not weights.tensor_cores:
        return _FP32
    block_b = batch_tile(num_rows)
    at_once = AT_ONCE.get(block_b, 0) * gpu.num_sms
    halves = -(-vocab_rows // _SHORT_TILES[block_b].block_v)
    short = halves <= at_once
    if block_b <= 64 and gpu.arch == OVERLAP_ARCH:
        short |= halves >= MANY_WAVES * at_once
    if block_b == MAX_BLOCK_B and gpu.num_sms:  # an SM runs one of them at a time
        waves_of_halves, waves = (-(-n // gpu.num_sms) for n in (halves, -(-halves // 2)))
        short = SHORT_COST * waves_of_halves < 2 * waves
    return fitted((_SHORT_TILES if short else _TILES)[block_b], gpu)


def batch_tile(num_rows: int) -> int:
    """Rows of one batch tile: all of the batch, padded, up to MAX_BLOCK_B."""
    return min(MAX_BLOCK_B, max(16, next_power_of_2(num_rows)))


def interpreter_tile(num_rows: int, hidden_size: int) -> Tile:
    """The configuration for the interpreter."""
    return Tile(
        block_v=_INTERPRETER_BLOCK_V,
        block_b=min(64, max(4, next_power_of_2(num_rows))),
        block_d=min(1024, max(16, next_power_of_2(hidden_size))),
        num_warps=1,
        num_stages=1,
    )


def storing_tiles(arch: int) -> list[Tile]:
    """The configurations that only steps take which store logits, of an architecture."""
    return list(_STORING_TILES.values()) if arch == OVERLAP_ARCH else []


def all_tiles() -> list[tuple[Tile, WeightFormat]]:
    """Every GPU configuration of any step, with the weights that it serves."""
    tiles = [*_TILES.values(), *_SHORT_TILES.values(), *_LIST_TILES.values()]
    return [*((tile, weights) for tile in tiles for weights in (BF16, FP16)), (_FP32, FP32)]


def is_short(tile: Tile) -> bool:
    """Return whether batches with penalties or biases use the tile."""
    return tile in (*_SHORT_TILES.values(), _EIGHT_WARPS, _FP32)


def fingerprint() -> str:
    """Short hash of the rules and of the measured tiles: what ranks compare when they are built."""
    return hashlib.sha256(Path(__file__).read_bytes() + FILE.read_bytes()).hexdigest()[:16]


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()
