"""Tensor descriptors of matrices, made on the host: a kernel then needs no scratch memory, and one
made while a CUDA graph is captured is kept in it by value."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpsample.local.tiles import Tile


def fits_descriptor(matrix: Tensor) -> bool:
    """Whether TMA can read the rows: 16-byte aligned, all of them, else it reads other ones."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0 and matrix.element_size() == 2


def describe(matrix: Tensor, block_rows: int, tile: Tile) -> TensorDescriptor:
    """The descriptor of a matrix [rows, D] that is loaded in blocks [block_rows, tile.block_d]."""
    return TensorDescriptor(
        matrix, list(matrix.shape), [matrix.stride(0), 1], [block_rows, tile.block_d]
    )
