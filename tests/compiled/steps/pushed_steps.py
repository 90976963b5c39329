"""Steps of two virtual ranks, whose kernels write words into each other's memory."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.lab.virtual_ranks import VirtualWorld
from tests.compiled.emulator.gpu import EmulatedGpu
from tpsample import (
    LMHeadSampler,
    PeerLost,
    SamplingBatch,
    SamplingParams,
    Status,
    VocabShard,
    reference,
)

WRONG = "wrong"
"""How a token that is not the definition's is told."""
V, ROWS = 700, 8


class TwoRanks:
    """Two ranks of one head in bf16, whose products are exact."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._weight = torch.randn(V, 64, generator=self._generator).round().bfloat16()
        params = [SamplingParams(seed=row) for row in range(ROWS)]
        self._batch = SamplingBatch.from_params(params, vocab_size=V)
        self.world = VirtualWorld([VocabShard.even(V, rank, 2) for rank in range(2)])
        self.samplers = []
        for shard, ranks in zip(self.world.shards, self.world.ranks, strict=True):
            own = self._weight[shard.start : shard.stop]
            options = {"exchange": "peer", "backend": "triton", "max_rows": ROWS, "chunks": 2}
            sampler = LMHeadSampler(own, group=ranks, **options)
            exchange: Any = sampler.exchange
            exchange.timeout_s = 0.5
            self.samplers.append(sampler)

    def step(self, position: int, alive: int = 2) -> str:
        """Take a step of the first ranks; return "" or what is wrong."""
        hidden = torch.randn(ROWS, 64, generator=self._generator).round().bfloat16()
        logits = reference.logits(hidden, self._weight)
        expected = reference.sample(logits, self._batch, position).token_ids
        outs = self.world.step(self.samplers[:alive], hidden, self._batch, position)
        if alive == 2:
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
