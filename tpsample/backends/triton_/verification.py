"""Verification as Triton launches: three passes over logits, and five kernels over rows.

Twin: `tpsample.backends.torch_.verification`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from tpsample.backends.torch_.verification import Laws, Places, Verification
from tpsample.backends.triton_.kernels.acceptance import (
    accept_kernel,
    coupled_kernel,
    drafted_rows_kernel,
    emit_kernel,
    law_rows_kernel,
)
from tpsample.backends.triton_.kernels.laws import law_sums_kernel, law_tops_kernel, residual_kernel
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.backends.triton_.passes import BLOCK, NUM_WARPS, TritonShardLogits
from tpsample.output import SampleOutput, VerifyOutput

RESIDUAL_PARTS = 2
"""A thread of `residual_kernel` needs 128 registers, so that 4 programs of 4 warps fill an SM."""


def drafted_rows(
    drafts: Tensor, undrawn: Tensor | None, positions: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """See `tpsample.backends.torch_.verification`."""
    num_rows, width = len(drafts), drafts.shape[1] + 1
    own_drafts, at = drafts.new_empty(num_rows, width), drafts.new_empty(num_rows * width)
    if num_rows:
        launch_kernel(
            drafted_rows_kernel,
            (num_rows,),
            drafts_ptr=drafts.contiguous(),
            drawn_ptr=undrawn,
            position_ptr=positions,
            own_drafts_ptr=own_drafts,
            row_position_ptr=at,
            vocab_size=vocab_size,
            num_positions=width,
            POSITIONS=_block_of(width),
            num_warps=1,
        )
    return own_drafts, at


def coupled_output(drafts: Tensor, out: SampleOutput) -> VerifyOutput:
    """See `tpsample.backends.torch_.verification`."""
    num_rows, width = drafts.shape
    accepted, seeds = drafts.new_empty(2, num_rows).unbind()
    tokens, status = torch.empty_like(drafts), out.status.new_empty(num_rows)
    launch_kernel(
        coupled_kernel,
        (num_rows,),
        drafts_ptr=drafts,
        sampled_ptr=out.token_ids,
        status_ptr=out.status,
        seed_ptr=out.seeds,
        accepted_ptr=accepted,
        token_ptr=tokens,
        row_status_ptr=status,
        out_seed_ptr=seeds,
        num_positions=width,
        POSITIONS=_block_of(width),
        num_warps=1,
    )
    return VerifyOutput(accepted, tokens, status, seeds)


def _block_of(positions: int) -> int:
    """Return the size of a block for the positions of a row, which mostly is the same kernel."""
    return max(32, triton.next_power_of_2(positions))


class TritonVerification(Verification):
    """`Verification` on a GPU, or in the interpreter."""

    rows: TritonShardLogits

    @cached_property
    def _memory(self) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros for the words of `tops`, the sums, and what `residuals` finds, made by one fill."""
        (num_rows, width), drafted = self.drafts.shape, self.draft is not None
        places = width if self.block else 1
        shapes = (
            (num_rows, 2 * width - 1 if drafted else width),
            (4 if drafted else 2, num_rows, width),
            (2 if self.block else 1, num_rows, places),
        )
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = self.drafts.new_zeros(sum(sizes)).split(sizes)
        tops, sums, residuals = (x.view(shape) for x, shape in zip(parts, shapes, strict=True))
        return tops, sums, residuals

    def _launch(self, kernel: Any, rows: int, parts: int = 1, **arguments: Any) -> None:
        """Launch a kernel over the logits of so many rows; none of an empty shard.

        Args:
            parts: by how much blocks and programs are smaller. A program takes as many logits.
        """
        shard, draft = self.rows, self.draft
        count, blocks_each = shard.count_of(BLOCK), shard.blocks_each(rows)
        if not count:
            return
        launch_kernel(
            kernel,
            (triton.cdiv(count, blocks_each), rows),
            target_ptr=shard.logits,
            stride_target=shard.logits.stride(0),
            draft_ptr=draft,
            stride_draft_b=None if draft is None else draft.stride(0),
            stride_draft_k=None if draft is None else draft.stride(1),
            num_positions=self.drafts.shape[1],
            vocab_start=shard.first_id,
            lead=shard.first_id % 4,
            width=shard.logits.shape[1],
            **arguments,
            blocks_each=parts * blocks_each,
            BLOCK=BLOCK // parts,
            num_warps=NUM_WARPS // parts,
        )

    def _numbers(self, laws: Laws) -> dict[str, Any]:
        """The arguments by which a kernel finds the numbers of the laws."""
        return {
            "temperature_ptr": self.rows.temperature,
            "top_ptr": laws.top,
            "draft_top_ptr": laws.draft_top,
            "cut_ptr": laws.cut,
            "drafts_ptr": laws.drafts,
        }

    def _row_options(self) -> dict[str, Any]:
        """The sizes and options of the kernels over rows."""
        return {
            "num_positions": self.drafts.shape[1],
            "BLOCKWISE": self.block,
            "POSITIONS": _block_of(self.drafts.shape[1]),
            "num_warps": 1,
        }

    def tops(self) -> Tensor:
        tops = self._memory[0]
        num_drafts = tops.shape[1] - self.drafts.shape[1]
        self._launch(law_tops_kernel, tops.numel(), tops_ptr=tops, num_drafts=num_drafts)
        return tops

    def laws(self, gathered: Tensor) -> Laws:
        num_rows, width = self.drafts.shape
        top, draft_top = self.rows.logits.new_empty(2, num_rows, width).unbind()
        cut, drafts = self.drafts.new_empty(2, num_rows, width).unbind()
        laws = Laws(top, draft_top, cut, drafts, torch.empty_like(self.status))
        launch_kernel(
            law_rows_kernel,
            (width, num_rows),
            gathered_ptr=gathered.contiguous(),
            temperature_ptr=self.rows.noise.temperature,
            status_ptr=self.status,
            drafts_ptr=self.drafts,
            top_ptr=top,
            draft_top_ptr=draft_top,
            cut_ptr=cut,
            own_status_ptr=laws.status,
            own_drafts_ptr=drafts,
            num_positions=width,
            num_drafts=gathered.shape[2] - width,
            num_sources=gathered.shape[0],
            num_warps=1,
        )
        return laws

    def sums(self, laws: Laws) -> Tensor:
        sums = self._memory[1]
        numbers = self._numbers(laws)
        self._launch(law_sums_kernel, laws.cut.numel(), **numbers, sums_ptr=sums)
        return sums

    def accept(self, laws: Laws, sums: Tensor) -> tuple[Laws, Places]:
        num_rows, width = self.drafts.shape
        shape = num_rows, width if self.block else 1
        drafts, index = torch.empty_like(laws.drafts), self.drafts.new_empty(shape)
        weights = self.drafts.new_empty(2, *shape)
        coefficient = torch.empty_like(index, dtype=torch.float64)
        launch_kernel(
            accept_kernel,
            (num_rows,),
            sums_ptr=sums.contiguous(),
            drafts_ptr=laws.drafts,
            seed_ptr=self.seed,
            position_ptr=self.positions,
            own_drafts_ptr=drafts,
            place_ptr=index,
            weights_ptr=weights,
            coefficient_ptr=coefficient,
            CERTAIN=self.draft is None,
            **self._row_options(),
        )
        return replace(laws, drafts=drafts), Places(index, weights, coefficient)

    def residuals(self, laws: Laws, places: Places) -> Tensor:
        residuals = self._memory[2]
        self._launch(
            residual_kernel,
            places.index.numel(),
            RESIDUAL_PARTS,
            **self._numbers(laws),
            place_ptr=places.index,
            weights_ptr=places.weights,
            seed_ptr=self.seed,
            position_ptr=self.positions,
            residual_ptr=residuals,
            num_places=places.index.shape[1],
            SUMS=self.block,
        )
        return residuals

    def output(self, laws: Laws, places: Places, gathered: Tensor) -> VerifyOutput:
        num_rows = len(self.drafts)
        accepted, tokens = self.drafts.new_empty(num_rows), torch.empty_like(self.drafts)
        status = self.status.new_empty(num_rows)
        launch_kernel(
            emit_kernel,
            (num_rows,),
            gathered_ptr=gathered.contiguous(),
            place_ptr=places.index,
            coefficient_ptr=places.coefficient,
            drafts_ptr=laws.drafts,
            status_ptr=laws.status,
            seed_ptr=self.seed,
            position_ptr=self.positions,
            sampled_ptr=self.sampled,
            accepted_ptr=accepted,
            token_ptr=tokens,
            row_status_ptr=status,
            num_sources=gathered.shape[0],
            **self._row_options(),
        )
        return VerifyOutput(accepted, tokens, status, self.seed)
