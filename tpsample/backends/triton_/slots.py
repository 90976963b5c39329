"""The rows of a step over slots, as Triton launches; see `tpsample.request.selection`."""

from __future__ import annotations

from torch import Tensor

from tpsample.backends.triton_.kernels.slots import read_slots_kernel
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.request.plan import SlotRows
from tpsample.request.table import RequestTable

ROW_BLOCK = 64
"""Rows of a program of the kernel."""


def read_slots(slots: Tensor, table: RequestTable, rows: SlotRows) -> None:
    """Fill the rows that these slots of a table name, by one launch."""
    num_rows = slots.shape[0]
    launch_kernel(
        read_slots_kernel,
        (-(-num_rows // ROW_BLOCK),),
        slot_ptr=slots,
        occupancy_ptr=table.occupancy,
        temperature_ptr=table.temperature,
        seed_ptr=table.seed,
        index_ptr=rows.slots,
        undrawn_ptr=rows.undrawn.rows,
        bad_ptr=rows.undrawn.bad,
        row_temperature_ptr=rows.temperature,
        row_seed_ptr=rows.seed,
        num_rows=num_rows,
        num_slots=table.slots,
        BLOCK=ROW_BLOCK,
    )
