"""Whether every rank sampled the same, by a digest that is compared across ranks.

Tokens are the same on every rank by construction. This finds what construction cannot see: a
flipped bit, inputs that differ where no rank looks, a rank that is a step behind. From hidden
states that differ all ranks draw the same wrong tokens. So these have a digest of their own, of a
single step.

    row     mix(row, position, seed, token ids), 64 bits
    step    sum over the rows, modulo 2^64, so that no order of summation enters

`mix` is that of `tpsample.core.digest`. A comparison waits for the GPU and gathers every rank's
digest of its last step. So the error can name the rank whose digest differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from tpsample.core.digest import column_factors, digest_rows, sum_rows
from tpsample.errors import Desync
from tpsample.ranks.ranks import Ranks, each_rank


class DesyncDetector:
    """Compares what the ranks sampled in their last step.

    Attributes:
        last: positions, seeds and token ids of that step; None if it is let go of.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.last: tuple[Tensor, Tensor, Tensor] | None = None

    def compare(self, hidden_states: Tensor | None, device: torch.device) -> None:
        """Compare with the other ranks, hidden states [n, D] as well if they are given. Collective.

        Args:
            device: of the sampler.

        Raises:
            Desync: ranks differ; it names those that differ from most.
        """
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        given = nothing if hidden_states is None else _digest_of(hidden_states)
        sampled = nothing if self.last is None else step_digest(*self.last)
        digests = self._ranks.gather_integers(torch.stack([given, sampled])).tolist()
        self.last = None
        _require_equal([digest for digest, _ in digests], _OTHER_STATES)
        _require_equal(
            [digest for _, digest in digests],
            "sampled other tokens, or from other seeds or positions, in the last step",
        )

    def compare_states(self, hidden_states: Tensor, wait: Callable[[], None]) -> None:
        """Compare hidden states [n, D] alone. Collective; waits for the GPU.

        Args:
            wait: waits for the GPU, and raises if another rank does not come.

        Raises:
            Desync: ranks differ; it names those that differ from most.
        """
        digests = self._ranks.gather_integers(_digest_of(hidden_states))
        wait()
        _require_equal(digests.tolist(), _OTHER_STATES)


_OTHER_STATES = (
    "were given other hidden states; every rank must pass the same, so look for a missing "
    "all-reduce or broadcast before the LM head"
)


def _digest_of(hidden_states: Tensor) -> Tensor:
    factors = column_factors(hidden_states.shape[1], hidden_states.device)
    return digest_rows(sum_rows(hidden_states.detach().contiguous(), factors))


def _require_equal(digests: list[int], did: str) -> None:
    """Raise a Desync that says of the ranks whose digest differs from most what they did."""
    if len(set(digests)) == 1:
        return
    (common, count), *_ = Counter(digests).most_common()
    majority = 2 * count > len(digests)
    ranks = [r for r, digest in enumerate(digests) if not majority or digest != common]
    listed = each_rank([f"{digest & (2**64 - 1):016x}" for digest in digests])
    raise Desync(f"ranks {', '.join(map(str, ranks))} {did}: {listed}", ranks)


def step_digest(positions: Tensor, seeds: Tensor, token_ids: Tensor) -> Tensor:
    """Return an int64 scalar for positions and seeds int64 [B], token_ids int64 [B] or [B, S]."""
    columns = token_ids.unsqueeze(1) if token_ids.ndim == 1 else token_ids
    return digest_rows(positions, seeds, *columns.unbind(1))
