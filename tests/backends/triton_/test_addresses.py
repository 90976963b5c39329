"""Kernels find their numbers also beyond 2^31 of them."""

from __future__ import annotations

import mmap

import pytest
import torch

from tpsample.backends.triton_.kernels.best_scores import best_scores_kernel
from tpsample.backends.triton_.launcher import launch_kernel
from tpsample.core import word

NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE: pages that nobody writes take no memory."""


def test_the_words_of_many_samples_and_tiles_are_found():
    """Those of one row with 2^19 samples and 4096 tiles take 16 GB."""
    samples, tiles, width = 2**19, 4096, 64
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        memory = mmap.mmap(-1, 8 * (samples + 1) * tiles, flags=flags)
    except OSError as error:
        pytest.skip(f"16 GB of addresses cannot be had: {error}")
    best_of_tiles = torch.frombuffer(memory, dtype=torch.int64)
    best_of_tiles[samples * tiles] = word.pack(torch.tensor(1.0), torch.tensor(5))
    zeros, best = torch.zeros(2).long(), torch.zeros(2, 1 + 2 * samples).long()
    launch_kernel(
        best_scores_kernel,
        (1, 2),
        logits_ptr=torch.zeros(2, width),
        stride_logits=width,
        seed_ptr=zeros,
        position_ptr=zeros,
        temperature_ptr=torch.zeros(2),
        group_ptr=best_of_tiles,
        first_ptr=zeros,
        best_scores_ptr=best,
        num_samples=samples,
        num_groups=tiles,
        blocks=1,
        vocab_start=0,
        lead=0,
        width=width,
        COUNT=1,
        GROUP=width,
        GROUPS=tiles,
        BLOCKS=1,
    )
    assert word.decode(best[:, 1])[0].tolist() == [-1, 0]
