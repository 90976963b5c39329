"""Did every rank sample the same? A digest of what was sampled, compared across ranks.

Tokens are the same on every rank by construction; this is for what construction cannot see: a
flipped bit, inputs that differ where no rank looks, a rank that is a step behind.

    row     mix(row, position, seed, token ids), 64 bits
    step    sum over the rows, modulo 2^64, so that no order of summation enters
    digest  mix(digest + step), over the steps since the last comparison

mix is the finaliser of SplitMix64 (Steele et al., OOPSLA 2014). The digest stays on the device; a
comparison gathers every rank's, so that the error can say whose is different, and waits for it.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from tpsample.errors import Desync
from tpsample.exchange.integers import IntegerExchange
from tpsample.output import SampleOutput
from tpsample.step_buffer import capturing

# The constants of SplitMix64 as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


class DesyncDetector:
    """What this rank sampled since the last comparison.

    Args:
        every: compare after this many steps; 0: only when asked, and then the last step alone.
    """

    def __init__(self, every: int, integers: IntegerExchange, device: torch.device) -> None:
        self.every = every
        self._integers = integers
        self._digest = torch.zeros((), dtype=torch.int64, device=device)
        self._last: tuple[Tensor, Tensor, Tensor] | None = None
        self._steps = 0

    def add(self, positions: Tensor, out: SampleOutput) -> None:
        """Count a step in. Does not wait, unless it is time to compare.

        Raises:
            Desync: it was, and ranks differ.
        """
        self._last = (positions, out.seeds, out.token_ids)
        if self.every == 0:
            return
        self._digest.copy_(mix(self._digest + step_digest(*self._last)))
        self._steps += 1
        # While a CUDA graph is captured the host may not wait, and replays do not pass here.
        if self._steps >= self.every and not capturing(self._digest.device):
            self.compare()

    def forget_step(self) -> None:
        """Let go of the tensors of the last step."""
        self._last = None

    def compare(self) -> None:
        """Compare with the other ranks. Collective.

        Raises:
            Desync: naming the ranks that differ from most.
        """
        if self.every == 0 and self._last is not None:
            self._digest.copy_(step_digest(*self._last))
        digests = self._integers.gather(self._digest.view(1)).flatten().tolist()
        steps = self._steps if self.every else 1
        self.reset()
        if len(set(digests)) == 1:
            return
        (common, count), *_ = Counter(digests).most_common()
        majority = 2 * count > len(digests)
        ranks = [r for r, digest in enumerate(digests) if not majority or digest != common]
        each = ", ".join(f"rank {rank}: {d & (2**64 - 1):016x}" for rank, d in enumerate(digests))
        raise Desync(
            f"ranks {', '.join(map(str, ranks))} sampled other tokens, or from other seeds or "
            f"positions, in the last {steps} steps: {each}",
            ranks,
        )

    def reset(self) -> None:
        """Forget the steps so far; on all ranks."""
        self._digest.zero_()
        self._last, self._steps = None, 0


def step_digest(positions: Tensor, seeds: Tensor, token_ids: Tensor) -> Tensor:
    """int64 scalar of a step: positions and seeds int64 [B], token_ids int64 [B] or [B, S]."""
    digest = mix(torch.arange(positions.shape[0], device=positions.device) + _GOLDEN)
    for values in (positions, seeds, *token_ids.view(positions.shape[0], -1).unbind(1)):
        digest = mix(digest + values)
    return digest.sum()


def mix(x: Tensor) -> Tensor:
    """A bijection of 64 bits in which every input bit moves about half of the output bits."""
    for shift, factor in _FACTORS:
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, whose own shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
