"""Rates of GPUs that are absent, from public figures: what one SM finishes per cycle, and memory.

A figure that no source has is derived, and its source says from what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.static.sass import PIPES, pipe_of

LANES = {
    "issue": (128, 128, 128, 128, 128, 128),
    "fp32": (64, 128, 128, 128, 128, 128),
    "integer": (64, 64, 64, 64, 64, 128),
    "multiply": (64, 64, 64, 64, 64, 64),
    "float64": (32, 2, 64, 64, 2, 2),
    "convert": (16, 16, 16, 16, 16, 16),
    "special": (16, 16, 16, 16, 16, 16),
    "memory": (32, 32, 32, 32, 32, 32),
}
"""Results per cycle and SM, by kind of instruction, for each of `ARCHS`."""
ARCHS = (80, 89, 90, 100, 103, 120)

_GUIDE = "CUDA C++ Programming Guide, throughput of native arithmetic instructions"
LANE_SOURCES = {
    "issue": "four schedulers of a warp of 32 each (white papers of A100 and H100)",
    "fp32": f"{_GUIDE}; sm_103 from its 75 TFLOP/s of fp32",
    "integer": f"{_GUIDE}, compare and minimum; sm_100 and sm_103 derived from sm_90; sm_120: "
    "white paper of RTX Blackwell, one kind of core for fp32 and integers",
    "multiply": f"{_GUIDE}, 32-bit integer multiply-add; sm_100 and later derived from sm_90",
    "float64": f"{_GUIDE}; sm_100 and sm_103 from 37 and 1.25 TFLOP/s of float64",
    "convert": f"{_GUIDE}, other conversions; sm_90 and later derived from sm_89",
    "special": f"{_GUIDE}; sm_100 and later derived from sm_90",
    "memory": f"{_GUIDE}, warp shuffle; derived for loads and stores",
}

_COMPARED = ("FSETP", "FSEL", "FMNMX", "FMNMX3", "FSET", "FCHK")
_PACKED = ("FADD2", "FMUL2", "FFMA2")
_FLOAT64 = ("DFMA", "DMUL", "DADD", "DSETP", "DMNMX")
_KINDS = {"alu": "integer", "imad": "multiply", "fp": "fp32", "mufu": "special"}
assert set(_KINDS) < set(PIPES)


def results(opcodes: Iterable[str]) -> Counter[str]:
    """Return the results that a thread asks of each kind of unit.

    Comparisons of fp32 numbers are made where integers are. A packed instruction has two results.
    """
    found: Counter[str] = Counter()
    for op in opcodes:
        name, pipe = op.split(".")[0], pipe_of(op)
        kind = _KINDS.get(pipe, pipe)
        if name in _COMPARED:
            kind = "integer"
        elif name in _FLOAT64:
            kind = "float64"
        found["issue"] += 1
        if kind in LANES:
            found[kind] += 2 if name in _PACKED else 1
    return found


@dataclass(frozen=True)
class Chip:
    """One GPU.

    Attributes:
        clock: GHz, the highest that its fp32 rate stands for.
        memory: TB/s.
        l2: TB/s of reading; None where only `L2_BYTES` is known.
        bf16, int8: dense products, TFLOP/s and TOP/s.
        sources: of the figures.
    """

    name: str
    arch: int
    sms: int
    clock: float
    memory: float
    l2: float | None
    bf16: float
    int8: float
    sources: str

    @property
    def l2_rate(self) -> float:
        """TB/s of reading from L2."""
        return self.l2 or L2_BYTES * self.sms * self.clock / 1000

    def lanes(self, kind: str) -> int:
        """Results per cycle and SM."""
        return LANES[kind][ARCHS.index(self.arch)]

    def issue_us(self, threads: float, needed: Mapping[str, float]) -> dict[str, float]:
        """Return the time that each kind of unit is busy, µs, if all SMs are always at work.

        Args:
            needed: the results that one thread asks of each kind.
        """
        return {
            kind: threads * count / (self.sms * self.lanes(kind) * self.clock * 1000)
            for kind, count in needed.items()
        }

    def read_us(self, num_bytes: float) -> float:
        """Return the time to read from memory, µs."""
        return num_bytes / self.memory / 1e6

    def read_l2_us(self, num_bytes: float) -> float:
        """Return the time to read from L2, µs."""
        return num_bytes / self.l2_rate / 1e6


L2_BYTES = 36.0
"""Per SM and cycle: the 9.42 TB/s that one H100 read, by its 132 SMs at 1.98 GHz."""
_BLACKWELL = "L2 derived (L2_BYTES)"

CHIPS = (
    Chip("A100", 80, 108, 1.41, 2.039, 7.22, 312, 624,
         "data sheet of the 80 GB SXM; L2: white paper, 5120 bytes per cycle"),
    Chip("H100", 90, 132, 1.98, 3.35, 9.42, 989, 1979,
         "data sheet of the SXM, clock from its 67 TFLOP/s of fp32; L2 measured, page ceilings"),
    Chip("H200", 90, 132, 1.98, 4.8, None, 989, 1979,
         "data sheet, clock from its 67 TFLOP/s of fp32; L2 derived (L2_BYTES)"),
    Chip("L4", 89, 58, 2.04, 0.3, None, 121, 242,
         "data sheet, halves of its rates with sparsity; L2 derived (L2_BYTES)"),
    Chip("L40S", 89, 142, 2.52, 0.864, None, 362, 733,
         "data sheet, clock from its 91.6 TFLOP/s of fp32; L2 derived (L2_BYTES)"),
    Chip("B200", 100, 148, 1.98, 8.0, None, 2250, 4500,
         f"data sheet of HGX, clock from its 75 TFLOP/s of fp32; 148 SMs: Chips and Cheese; "
         f"{_BLACKWELL}"),
    Chip("B300", 103, 148, 1.98, 8.0, None, 2250, 150,
         f"data sheet of HGX, clock from its 75 TFLOP/s of fp32; SMs derived from B200; "
         f"{_BLACKWELL}"),
    Chip("RTX 5090", 120, 170, 2.407, 1.792, None, 209.5, 838,
         f"white paper of RTX Blackwell, products summed in fp32; {_BLACKWELL}"),
)  # fmt: skip
