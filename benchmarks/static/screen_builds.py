"""How the kernels of the screen are compiled for the report: as their launches have them
(`tpsample.local.screen_launches`)."""

from __future__ import annotations

from typing import Any

import torch

from tpsample.local.screen_launches import LIST_BLOCK, MAX_SLOTS, accumulation_error

SCREEN = "tpsample.kernels.screening:screen_kernel"
SCREEN_TYPES = {
    "limb_ptr": "*i8",
    "copy_ptr": "*i8",
    "unit_ptr": "*fp32",
    "norm_ptr": "*fp32",
    "error_ptr": "*fp32",
    "copy_unit_ptr": "*fp32",
    "residual_ptr": "*fp32",
    "weight_norm_ptr": "*fp32",
    "upper_ptr": "*fp32",
    "bar_ptr": "*fp32",
    "listed_ptr": "*i32",
    "num_listed_ptr": "*i32",
}


def small_screen_kernels(hidden_size: int) -> dict[str, tuple[dict[str, Any], int]]:
    """Constants and warps of the kernels before and behind the product."""
    rows: dict[str, Any] = {
        "ACCUMULATION": accumulation_error(hidden_size, torch.bfloat16),
        "HIDDEN_SIZE": hidden_size,
        "BLOCK": 1024,
    }
    return {
        "tpsample.kernels.limbs:screening_rows_kernel": (rows, 4),
        "tpsample.kernels.screening:list_groups_kernel": (
            {"BLOCK": LIST_BLOCK, "BLOCK_S": MAX_SLOTS},
            4,
        ),
    }
