"""An 8-bit copy of the weights, with how far every row of it lies from the row itself.

    ŵ_v = s_v q_v,   s_v = max|w_v| / 127,   q_v = rint(w_v / s_v) int8 of -127 … 127

    residual_v >= ‖w_v − ŵ_v‖      norm_v >= ‖w_v‖

The hidden states of a row become whole numbers of a unit, ĥ = t z, in two 8-bit limbs:

    z = rint(h / t) = 256 hi + lo,   hi = floor((z + 128) / 256) of -127 … 127,   lo of -128 … 127

On a GPU t = max|h| / (127 · 256); on a CPU it is larger, and hi is 0 in most columns
(`backends.numba_.kernels.int8`). n = 256 (q · hi) + q · lo is an integer that is exact in any
order. On a GPU its int32 sums are exact for D <= MAX_COLUMNS, on a CPU because of the unit. With n,

    product_vb = s_v t_b n
    |product − definition's product| <= residual_v ‖h_b‖ + (norm_v + residual_v) lost_b
                                        + γ norm_v ‖h_b‖

    w·h − ŵ·ĥ = (w − ŵ)·h + ŵ·(h − ĥ)      Cauchy-Schwarz for both terms
    ‖ŵ_v‖ <= norm_v + residual_v

    lost_b = ‖h_b − ĥ_b‖;  γ is what the definition's own product may be off, relative to
    norm_v ‖h_b‖.  Eight fp32 roundings of the approximate product, which is at most ‖ŵ_v‖ ‖ĥ_b‖,
    are allowed for: 2^-21 (‖h_b‖ + lost_b) joins lost_b everywhere. No other error of fp32 enters,
    because norms are rounded up and the bound itself is computed in float64.

On a CPU the definition's product is rounded once from the exact one. A kernel whose exact products
are summed in fp32 passes its own γ (`backends.triton_.screen_launches.accumulation_error`).

One scale per row keeps the product of a row one exact integer, in a single int32 accumulator. On
the head of SmolLM2-135M (V = 49152, D = 576, 185 positions, T = 1) the candidates of a row are 4.6
on average. They are 21 at the 99th percentile, which fit one tile of 64 rows. Eight residual norms
per row, one per block of columns, would leave 3.7 and 16, for 28 bytes more per row. A scale per 64
columns would leave 1.8 and 5, but would need a float accumulator.

Columns are not equalised (W · diag(c) and h · diag(1 / c) in place of W and h), because it saves
little. On 120 rows of that model, T = 1, the candidates are 4.8 without it, 4.1 with c =
‖column‖^-1/4 and 5.8 with ‖column‖^-1/2. 16 rows then have 1.9, 1.5 or 2.0 % of the weights read.

The copy does not follow a weight that changes: `refresh` it. `is_current` finds out. Changes that
torch does not count, such as through `.data`, are seen on a CPU by sums of some rows, others in
each step: at once where most rows changed, and else when it comes to one that did.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpsample.backends.screening.bound import TINY, round_up
from tpsample.core.digest import column_factors, sum_rows

NUMBERS = 4 * (1 + 1 + 1)
"""Bytes of a row beside its integers: the scale, and the norms of residual and row."""
LOOKED_AT = 8
"""How many rows a step compares with their sums."""
BLOCK = 64
"""Most ids of a block of a CPU's kernels, which multiply one block after the other."""
GROUP, OFFSET = 4, 128
"""A CPU reads GROUP columns at a time, and OFFSET is added to their numbers. That makes them
unsigned, for an instruction that multiplies unsigned numbers by signed ones."""
MAX_COLUMNS = 2**17
"""Most columns of a weight: 127 · 128 · 2^17 is below 2^31, where the int32 sums of a GPU end."""
CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS = 2**18, 2**24
"""Weights converted at a time: 2 MB of float64 stay in a CPU's cache. A GPU launches some 25 small
kernels per chunk, so it takes 128 MB."""


class Int8Copy:
    """The copy of a weight, [V_local, D] of any floating dtype.

    A row with a number that is not finite has infinite norms, so nothing is proved of it.

    Args:
        width: columns of `quantised`; those after D are zero. Default: D.
        lane: the lane of the first id in its block, for a CPU, which reads blocks. The rows are
            then the lanes of all blocks, and lanes outside of the shard are zeros. Default: no
            blocks.

    Attributes:
        quantised: int8 [V_local, width]; in blocks uint8 [blocks, width / GROUP, BLOCK, GROUP], to
            which OFFSET was added, and `width` is rounded up to a multiple of GROUP.
        scale: fp32 [rows].
        residual_norm, norm: fp32 [rows], rounded up.
    """

    def __init__(self, weight: Tensor, width: int | None = None, lane: int | None = None) -> None:
        num_ids, hidden_size = weight.shape
        width, device = width or hidden_size, weight.device
        self.lane, rows = lane, num_ids
        if lane is None:
            self.quantised = torch.zeros(rows, width, dtype=torch.int8, device=device)
        else:
            rows = whole(lane + num_ids, BLOCK)
            shape = rows // BLOCK, whole(width, GROUP) // GROUP, BLOCK, GROUP
            self.quantised = torch.empty(shape, dtype=torch.uint8, device=device)
        self.scale = torch.ones(rows, dtype=torch.float32, device=device)
        self.norm = torch.zeros(rows, dtype=torch.float32, device=device)
        self.residual_norm = torch.zeros(rows, dtype=torch.float32, device=device)
        self._weight, self._turn = weight, 0
        self._key: Tensor | None = None  # factors of the columns in the sums of rows
        if weight.is_cpu and weight.numel():
            self._key = column_factors(hidden_size, weight.device)
        self._sums = torch.zeros(num_ids, dtype=torch.int64, device=weight.device)
        self.refresh()

    def refresh(self) -> None:
        """Make the copy of the weight as it is now, in the same memory."""
        weight = self._weight
        self._source: tuple[int, int | None] | None = self._memory()
        elements = GPU_CHUNK_ELEMENTS if weight.is_cuda else CHUNK_ELEMENTS
        step = whole(elements // max(1, weight.shape[1]) + 1, BLOCK)
        for start in range(0, len(self.norm), step):
            self._fill(weight, start, start + step)

    def rebind_weight(self, weight: Tensor) -> None:
        """Copy this weight, of the same shape and dtype, at the next `refresh`.

        Until then the copy is not current: torch counts changes per tensor, and the address of the
        new tensor may be that of an earlier one.
        """
        self._weight, self._source = weight, None

    def is_current(self) -> bool:
        """Return False if the weight is known to have changed. It does not wait for a device."""
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

    def _fill(self, weight: Tensor, start: int, stop: int) -> None:
        """Fill some rows of the copy."""
        lane = self.lane or 0
        ids = slice(max(start - lane, 0), max(stop - lane, 0))
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
        rows = slice(ids.start + lane, ids.start + lane + len(exact))
        self.scale[rows] = scale
        self.residual_norm[rows] = round_up(lost.norm(dim=1)).where(finite, torch.inf)
        self.norm[rows] = round_up(exact.norm(dim=1)).where(finite, torch.inf)
        if self.lane is None:
            self.quantised[rows, : quantised.shape[1]] = quantised.to(torch.int8)
            return
        blocks = self.quantised[start // BLOCK : stop // BLOCK]
        lanes = quantised.new_full((len(blocks) * BLOCK, blocks.shape[1] * GROUP), OFFSET)
        lanes[rows.start - start : rows.stop - start, : quantised.shape[1]] += quantised
        blocks.copy_(lanes.to(torch.uint8).view(len(blocks), BLOCK, -1, GROUP).transpose(1, 2))


def whole(number: int, part: int) -> int:
    """Return the least multiple of a part that is not below a number."""
    return -(-number // part) * part


def limbs(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hi and lo, int8 [B, D], and t, float64 [B, 1], of hidden states in float64.

    Every t is an fp32 number, as a kernel would have it.
    """
    unit = (hidden.abs().amax(dim=1, keepdim=True) / (127 * 256)).float()
    unit = unit.where((unit >= TINY) & unit.isfinite(), 1.0).double()
    number = (hidden / unit).round().nan_to_num(0.0, 0.0, 0.0)
    high = torch.floor((number + 128) / 256)
    return high.to(torch.int8), (number - 256 * high).to(torch.int8), unit
