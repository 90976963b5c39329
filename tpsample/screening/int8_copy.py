"""An 8-bit copy of the weights, with how far every row of it lies from the row itself.

    ŵ_v = s_v q_v,   s_v = max|w_v| / 127,   q_v = rint(w_v / s_v) int8 of -127 … 127

    residual_vj >= ‖w_v − ŵ_v‖ over the columns of block j
    norm_v      >= ‖w_v‖

One scale per row keeps the product of a row one exact integer, in a single int32 accumulator. Eight
residual norms in place of one cost 32 bytes per row. On the head of SmolLM2-135M (V = 49152,
D = 576, 185 positions, T = 1) the candidates of a row are then 3.7 on average and 16 at the 99th
percentile, against 4.6 and 21 with one norm, and 1.8 and 5 with a scale per 64 columns, which would
need a float accumulator. All of these fit one tile of 64 rows.

Columns are not equalised (W · diag(c) and h · diag(1 / c) in place of W and h), because it saves
little. On 120 rows of that model, T = 1, the candidates are 4.8 without it, 4.1 with c =
‖column‖^-1/4 and 5.8 with ‖column‖^-1/2, and 16 rows have 1.9, 1.5 or 2.0 % of the weights read.

The copy does not follow a weight that changes: `refresh` it. `is_current` finds out. Changes that
torch does not count, such as through `.data`, are seen on a CPU by sums of some rows, others in
each step: at once where most rows changed, and else when it comes to one that did.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tpsample.core.digest import column_factors, sum_rows
from tpsample.screening.bound import TINY, round_up

BLOCKS = 8
NUMBERS = 4 * (1 + BLOCKS + 1 + 1)
"""Bytes of a row beside its integers: the scale, and the norms of blocks, residual and row."""
LOOKED_AT = 8
"""Rows that a step compares with their sums."""
CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS = 2**18, 2**24
"""Weights converted at a time: 2 MB of float64 stay in a CPU's cache. A GPU launches some 25 small
kernels per chunk, so it takes 128 MB."""


class Int8Copy:
    """The copy of a weight, [V_local, D] of any floating dtype.

    A row with a number that is not finite has infinite norms, so nothing is proved of it.

    Args:
        width: columns of `quantised`, zero behind D; default D.

    Attributes:
        quantised: int8 [V_local, width].
        scale: fp32 [V_local].
        residual: fp32 [V_local, blocks], rounded up.
        residual_norm: fp32 [V_local], of whole rows, rounded up.
        norm: fp32 [V_local], rounded up.
        bounds: int [blocks + 1], where the blocks of columns begin and end.
    """

    def __init__(self, weight: Tensor, width: int | None = None) -> None:
        num_ids, hidden_size = weight.shape
        width = hidden_size if width is None else width
        self.bounds = [hidden_size * j // BLOCKS for j in range(BLOCKS + 1)]
        self.quantised = torch.zeros(num_ids, width, dtype=torch.int8, device=weight.device)
        self.scale = torch.ones(num_ids, dtype=torch.float32, device=weight.device)
        self.residual = torch.zeros(num_ids, BLOCKS, dtype=torch.float32, device=weight.device)
        self.norm = torch.zeros(num_ids, dtype=torch.float32, device=weight.device)
        self.residual_norm = torch.zeros(num_ids, dtype=torch.float32, device=weight.device)
        self._weight, self._turn = weight, 0
        self._key: Tensor | None = None  # factors of the columns in the sums of rows
        if weight.is_cpu and weight.numel():
            self._key = column_factors(hidden_size, weight.device)
        self._sums = torch.zeros(num_ids, dtype=torch.int64, device=weight.device)
        self.refresh()

    @property
    def num_bytes(self) -> int:
        """The memory of the copy."""
        return self.quantised.nbytes + NUMBERS * len(self.norm)

    def refresh(self) -> None:
        """Make the copy of the weight as it is now, in the same memory."""
        weight = self._weight
        self._source = self._memory()
        elements = GPU_CHUNK_ELEMENTS if weight.is_cuda else CHUNK_ELEMENTS
        step = max(1, elements // max(1, weight.shape[1]))
        for start in range(0, weight.shape[0], step):
            self._fill(weight, slice(start, start + step))
        self.residual_norm.copy_(round_up(self.residual.double().norm(dim=1)))

    def follow(self, weight: Tensor) -> None:
        """Be of this weight, of the same shape and dtype, from the next `refresh` on."""
        self._weight = weight

    def is_current(self) -> bool:
        """Return whether nothing is known of a change of the weight. Waits for no device."""
        if self._memory() != self._source:
            return False
        if self._key is None:
            return True
        stride = -(-len(self._sums) // LOOKED_AT)
        some = slice(self._turn % stride, None, stride)
        self._turn += 1
        return torch.equal(sum_rows(self._weight[some], self._key), self._sums[some])

    def _memory(self) -> tuple[int, int | None]:
        """Return where the weight lies, and its version if torch counts changes."""
        weight = self._weight
        return weight.data_ptr(), None if weight.is_inference() else weight._version

    def _fill(self, weight: Tensor, ids: slice) -> None:
        if self._key is not None:
            self._sums[ids] = sum_rows(weight[ids], self._key)
        exact = weight[ids].double()
        finite = exact.isfinite().all(dim=1)
        exact = exact.where(finite.unsqueeze(1), 0.0)
        # A scale too small for fp32, or of a zero row, is 1: the residual is then the row itself.
        largest = torch.cat([exact.abs(), exact.new_zeros(len(exact), 1)], dim=1).amax(dim=1)
        scale = (largest / 127).float()
        scale = scale.where(scale >= TINY, 1.0)
        quantised = (exact / scale.double().unsqueeze(1)).round_().clamp_(-127, 127)
        lost = exact - quantised * scale.double().unsqueeze(1)
        self.quantised[ids, : quantised.shape[1]] = quantised.to(torch.int8)
        self.scale[ids] = scale
        norms = block_norms(lost, self.bounds)
        self.residual[ids] = round_up(norms).where(finite.unsqueeze(1), torch.inf)
        self.norm[ids] = round_up(exact.norm(dim=1)).where(finite, torch.inf)


def block_norms(values: Tensor, bounds: list[int]) -> Tensor:
    """Return the norms of blocks of columns, float64 [n, blocks] of float64 [n, D]."""
    blocks = [values[:, a:b].norm(dim=1) for a, b in pairwise(bounds)]
    return torch.stack(blocks, dim=1)
