"""Faults of a launch, options of the emulator, and its record of what launches did."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np


class Fault(Exception):
    """A kernel did what no GPU allows; the launch ends."""


@dataclass
class Options:
    """How launches are executed.

    Attributes:
        programs: how many run at once, one basic block after another; 0 is as many as fit.
        order: the seed of a random order of programs, atomics and stores; None is ascending.
        late: asynchronous copies and products take effect when they are waited for, not at once.
        weak: stores wait in the program, and become visible to others in any allowed order.
        count: accesses of memory are counted.
        truncate: tensor cores round sums toward zero.
        noise: the seed of errors of approximate instructions, see `approximations`; or None.
        sign: of all these errors, -1 or 1; 0 draws it.
    """

    programs: int = 0
    order: int | None = None
    late: bool = True
    weak: bool = False
    count: bool = False
    truncate: bool = False
    noise: int | None = None
    sign: int = 0


RAN, HELD, FAILED = 1, 2, 4
"""Bits of what came of an instruction: a thread executed it, and a predicate before it."""


@dataclass
class Report:
    """A record of launches.

    Attributes:
        launches: by kernel.
        instructions: instructions × threads.
        doubts: what is wrong without ending a launch, such as a race, by its text.
        conflicts: by kernel and opcode, accesses of shared memory in parts of 128 bytes, and their
            cycles.
        far_stores: stores into tensors that are no argument, by kernel and opcode.
        reads: the least and the most times that 4 bytes were read, by kernel and tensor.
        prefetched: bytes.
        coverage: by PTX text, bits of each instruction.
    """

    launches: Counter[str] = field(default_factory=Counter)
    instructions: int = 0
    doubts: Counter[str] = field(default_factory=Counter)
    conflicts: dict = field(default_factory=lambda: defaultdict(lambda: np.zeros(2, np.int64)))
    far_stores: Counter[tuple[str, str]] = field(default_factory=Counter)
    reads: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    prefetched: int = 0
    coverage: dict[str, np.ndarray] = field(default_factory=dict)
