"""Symmetric memory that cannot be had on one rank is had on none."""

from __future__ import annotations

import errno
import os
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpsample.exchange.inboxes as peer_memory
from tests.support.ranks import run_ranks
from tpsample import RankMismatch
from tpsample.exchange.inboxes import SymmetricMemory
from tpsample.ranks.process import ranks_of
from tpsample.ranks.ranks import Ranks


def _symmetric_memory(fails: str) -> str:
    """torch symmetric memory with files as a stand-in, failing on rank 1."""
    ranks, cpu = ranks_of(None), torch.device("cpu")
    files = peer_memory.SharedFiles(ranks, (2, 4))

    def step(name: str, value: Any) -> Any:
        if name == fails and dist.get_rank() == 1:
            raise RuntimeError(f"{name} planted")
        return value

    # A header of one word; the addresses of the handle are those of the headers.
    mapped = files.mapped[::-1] if fails == "pairs" and ranks.rank == 1 else files.mapped
    elsewhere = fails == "addresses" and ranks.rank == 1
    handle = types.SimpleNamespace(
        buffer_ptrs=[tensor.data_ptr() - 8 for tensor in files.mapped],
        get_buffer=lambda rank, *_: mapped[rank].clone() if elsewhere else mapped[rank],
    )
    peer_memory.allocate = lambda *_: step("allocate", files.own)
    peer_memory.rendezvous = lambda *_: step("rendezvous", handle)
    torch.cuda.synchronize = lambda *_: None
    if not fails:
        memory = SymmetricMemory(ranks, (2, 4), cpu)
        assert memory.addresses.tolist() == files.addresses.tolist()
        return f"{memory.own.tolist()}"
    with pytest.raises(RankMismatch) as error:
        SymmetricMemory(ranks, (2, 4), cpu)
    return str(error.value)


SYMMETRIC = {
    "": "[[0, 0, 0, 0], [0, 0, 0, 0]]",
    "allocate": "rank 1: allocate planted",
    "rendezvous": "rank 1: rendezvous planted",
    "pairs": "rank 1: symmetric memory of ranks [0, 1] is not theirs",
    "addresses": "rank 1: symmetric memory of ranks [0, 1] is not theirs",
}


@pytest.mark.parametrize("fails", SYMMETRIC)
def test_symmetric_memory_that_fails_on_one_rank_fails_on_all(fails):
    assert run_ranks(2, _symmetric_memory, fails) == [SYMMETRIC[fails]] * 2


def test_a_file_of_shared_memory_has_its_memory_or_is_refused(monkeypatch, tmp_path):
    """A write to a page that cannot be had would end the process."""
    monkeypatch.setattr(peer_memory.SharedFiles, "FOLDER", str(tmp_path))
    files = peer_memory.SharedFiles(Ranks(), (2, 4))
    assert files.own.tolist() == [[0] * 4] * 2

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space left"):
        peer_memory.SharedFiles(Ranks(), (2, 4))
    assert os.listdir("/proc/self/fd") == before and not os.listdir(tmp_path)
