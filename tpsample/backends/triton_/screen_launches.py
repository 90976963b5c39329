"""The screen as Triton launches: the groups of ids that can still win, before the LM head."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tpsample.backends.screening.int8_copy import Int8Copy
from tpsample.backends.triton_.arguments import early_launch, has_edits, head_arguments
from tpsample.backends.triton_.kernels import head
from tpsample.backends.triton_.kernels.limbs import screening_rows_kernel
from tpsample.backends.triton_.kernels.screening import list_groups_kernel, screen_kernel
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.backends.triton_.tile_table import Gpu, Tile
from tpsample.core.machine import interpreted
from tpsample.core.weight_format import FORMATS, WeightFormat
from tpsample.request.step import Step
from tpsample.settings import Settings

MAX_SLOTS = 64
"""Most rows × samples of a screened step. More read the limbs so often, and find so many
candidates, that the whole product is as fast."""
GROUP: int = head.GROUP.value

SCREEN_TILES = {
    16: Tile(block_v=128, block_b=16, block_d=128, num_warps=4, num_stages=4),
    32: Tile(block_v=128, block_b=32, block_d=128, num_warps=4, num_stages=4),
    64: Tile(block_v=128, block_b=64, block_d=128, num_warps=8, num_stages=5),
}
_INTERPRETER_BLOCK_V = 1024
LIST_BLOCK = 256


def screen_tile(num_rows: int, gpu: Gpu) -> Tile:
    """Return the launch configuration of `screen_kernel` for up to MAX_SLOTS rows.

    A stage has the 8-bit weights and both limbs of the hidden states.
    """
    tile = SCREEN_TILES[max(16, triton.next_power_of_2(num_rows))]
    tile = tile.fitting(gpu, (tile.block_v + 2 * tile.block_b) * tile.block_d)
    if interpreted():
        return Tile(_INTERPRETER_BLOCK_V, tile.block_b, tile.block_d, 1, 1)
    return tile


def screen_block_e(tile: Tile, edits: bool) -> int:
    """Return how many rows the epilogue of `screen_kernel` works on at a time.

    It keeps both ends of an interval per logit. 32 rows never spill registers. With penalties or
    biases (`edits`), which load numbers per logit, 8 rows never spill.
    """
    return min(tile.block_b, 8 if edits else 32)


def accumulation_error(hidden_size: int, weights: WeightFormat) -> float:
    """Return the relative error, in ‖w‖ ‖h‖, of the exact and of the 8-bit product together.

    Tensor cores align and truncate the products of each instruction, 16 of them:
    (D / 16 + 32) · 2^-22. Others are added one by one and rounded. The 8-bit product is exact up to
    four roundings of what comes of it, for which 2^-19 is enough.
    """
    product = hidden_size * 2.0**-23
    if weights.tensor_cores:
        product = (hidden_size / 16 + 32) * 2.0**-22
    return product + 2.0**-19


class Screen:
    """Finds the groups of ids in which a row of a step can have its winner.

    All buffers are made here, so that a step allocates nothing.

    Args:
        settings: of the sampler. The 8-bit copy of the weight is made now.

    Attributes:
        copy: the 8-bit copy.
        listed_ptr, num_listed_ptr: what `lm_head_kernel` takes: a list of groups, and its length.
        num_groups: how many groups the shard has.
        group_upper: fp32 [≥ num_groups, MAX_SLOTS], what no score of a group exceeds, by sample and
            row.
        row_lower: fp32 [MAX_SLOTS], what the best score reaches, by sample and row.
    """

    def __init__(self, settings: Settings) -> None:
        weight, shard, device = settings.weight, settings.shard, settings.device
        self._gpu = Gpu.of(device)
        self._overlap = settings.overlap
        block_d = screen_tile(1, self._gpu).block_d
        padded = -(-weight.shape[1] // block_d) * block_d
        self.copy = Int8Copy(weight[: len(shard)], padded)
        self._hidden_size, self._format = weight.shape[1], FORMATS[weight.dtype]
        first_id = shard.start // 4 * 4
        self.num_groups = -(-(shard.stop - first_id) // GROUP) if len(shard) else 0
        padded_groups = self.num_groups + _INTERPRETER_BLOCK_V // GROUP
        limbs = torch.zeros(2, MAX_SLOTS, padded, dtype=torch.int8, device=device)
        numbers = torch.zeros(4, MAX_SLOTS, dtype=torch.float32, device=device)
        self.row_lower = numbers[3]
        self._limbs = {
            "limb_ptr": limbs,
            "stride_limb_half": limbs.stride(0),
            "stride_limb_b": limbs.stride(1),
            **dict(
                zip(("unit_ptr", "norm_ptr", "error_ptr", "row_lower_ptr"), numbers, strict=True)
            ),
        }
        self.group_upper = torch.zeros(padded_groups, MAX_SLOTS, dtype=torch.float32, device=device)
        self.listed_ptr = torch.zeros(padded_groups, dtype=torch.int32, device=device)
        self.num_listed_ptr = torch.zeros(1, dtype=torch.int32, device=device)
        self._first_id = first_id
        self._common = {
            "vocab_start": shard.start,
            "vocab_stop": shard.stop,
            **head_arguments(settings.head, settings.bias),
        }

    def takes(self, step: Step) -> bool:
        """Return whether a step is screened: it is small, has a product, and no row's logits are
        stored, for a filter or for logprobs."""
        return (
            self.num_groups > 0
            and 0 < step.num_words <= MAX_SLOTS
            and step.local_logits is None
            and not step.batch.plan.stored_list
        )

    def launch(self, step: Step, controls: dict[str, Any], streams: Tensor, scale: Tensor) -> None:
        """List the groups of a step.

        Args:
            controls: what `lm_head_kernel` takes of the request controls.
            streams, scale: the memory in which the LM head keeps them too, see `NoiseRows`.
        """
        hidden_states, noise, num_slots = step.hidden_states, step.noise, step.num_words
        num_rows = hidden_states.shape[0]
        tile = screen_tile(num_rows, self._gpu)
        rows = {
            "num_rows": num_rows,
            "num_samples": None if noise.num_samples == 1 else noise.num_samples,
            "stream_ptr": streams,
            "stride_stream": streams.stride(0),
            "scale_ptr": scale,
            **self._limbs,
        }
        launch_kernel(
            screening_rows_kernel,
            (num_rows,),
            hidden_ptr=hidden_states,
            stride_hidden_b=hidden_states.stride(0),
            seed_ptr=step.batch.seed,
            position_ptr=noise.positions,
            temperature_ptr=step.batch.temperature,
            **rows,
            num_listed_ptr=self.num_listed_ptr,
            ACCUMULATION=accumulation_error(self._hidden_size, self._format),
            HIDDEN_SIZE=self._hidden_size,
            BLOCK=min(1024, triton.next_power_of_2(self._hidden_size)),
            LEADS=self._overlap,
        )
        copy = self.copy
        padded = copy.quantised.shape[1]
        launch_kernel(
            screen_kernel,
            (-(-self.num_groups * GROUP // tile.block_v),),
            **rows,
            copy_ptr=copy.quantised,
            stride_copy_v=copy.quantised.stride(0),
            copy_unit_ptr=copy.scale,
            residual_ptr=copy.residual_norm,
            weight_norm_ptr=copy.norm,
            **controls,
            **self._common,
            upper_ptr=self.group_upper,
            stride_upper=self.group_upper.stride(0),
            PADDED_SIZE=padded,
            BLOCK_V=tile.block_v,
            BLOCK_B=tile.block_b,
            BLOCK_D=tile.block_d,
            BLOCK_E=screen_block_e(tile, has_edits(controls)),
            OVERLAP=self._overlap,
            PREFETCH=min(tile.num_stages * tile.block_d, padded) if self._overlap else 0,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **early_launch(self._overlap),
        )
        launch_kernel(
            list_groups_kernel,
            (-(-self.num_groups // LIST_BLOCK),),
            upper_ptr=self.group_upper,
            stride_upper=self.group_upper.stride(0),
            row_lower_ptr=self.row_lower,
            groups=self.num_groups,
            num_slots=num_slots,
            first_id=self._first_id,
            listed_ptr=self.listed_ptr,
            num_listed_ptr=self.num_listed_ptr,
            BLOCK=LIST_BLOCK,
            BLOCK_S=max(16, triton.next_power_of_2(num_slots)),
            OVERLAP=self._overlap,
            **early_launch(self._overlap),
        )
