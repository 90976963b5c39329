"""Steps of two virtual ranks, whose kernels write words into each other's memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.compiled.emulator.gpu import EmulatedGpu
from tests.support.cases import Case, even_shards
from tests.support.virtual import peer_of, step, virtual
from tpsample import PeerLost, SamplingParams, Status

WRONG = "wrong"
"""How a token that is not the definition's is told."""
V, ROWS = 700, 8


class TwoRanks:
    """Two ranks of one head in bf16, whose products are exact."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1)
        weight = torch.randn(V, 64, generator=self._generator).round().bfloat16()
        params = [SamplingParams(seed=row) for row in range(ROWS)]
        self._case = Case(weight[:ROWS], weight, params, torch.zeros(ROWS, dtype=torch.int64))
        options = {"backend": "triton", "max_rows": ROWS, "chunks": 2}
        self.world, self.samplers = virtual(self._case, even_shards(V, 2), tile=None, **options)
        for sampler in self.samplers:
            peer_of(sampler).timeout_s = 0.5

    def step(self, position: int, alive: int = 2) -> str:
        """Take a step of the first ranks; return "" or what is wrong."""
        hidden = torch.randn(ROWS, 64, generator=self._generator).round().bfloat16()
        positions = self._case.positions + position
        case = replace(self._case, hidden_states=hidden, positions=positions)
        outs = step(self.world, self.samplers[:alive], case)
        if alive == 2:
            expected = case.oracle().token_ids
            return WRONG * any((out.token_ids != expected).any() for out in outs)
        lost = all((out.status == Status.PEER_LOST).all() for out in outs)
        return "" if lost else "a rank that stayed away is not lost"


def pushed(gpu: EmulatedGpu) -> str:
    """Two steps; return "" or what is wrong."""
    ranks = TwoRanks()
    return ranks.step(0) or ranks.step(1) or weak_pushes(gpu)


def lost(gpu: EmulatedGpu) -> str:
    """Steps without the second rank, which the first one waits for in vain; then all recover."""
    ranks = TwoRanks()
    if found := ranks.step(0) or ranks.step(1, alive=1) or ranks.step(2, alive=1):
        return found
    try:
        ranks.samplers[0].check()
        return "no error names the rank that stayed away"
    except PeerLost:
        ranks.world.run([sampler.reset for sampler in ranks.samplers])
    return ranks.step(3) or ranks.step(4)


def weak_pushes(gpu: EmulatedGpu) -> str:
    """Return which stores into other ranks' memory are not of system scope."""
    opcodes = {opcode for kernel, opcode in gpu.report.far_stores if kernel == "lm_head_kernel"}
    others = sorted(opcodes - {"st.global.wt.b64"})
    return f"pushes by {others or 'no store'}" if others or not opcodes else ""
