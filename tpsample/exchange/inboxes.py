"""The memory of the `peer` exchange: where inboxes live, and how a rank learns their addresses.

    several ranks in one process   their own         any device, for tests
    processes of one host, CPU     SharedFiles       the Triton interpreter, for tests
    one GPU per process            SymmetricMemory   torch symmetric memory, NVLink

`peer_memory` makes the one that fits the device and the ranks. An address is good only in the
process that asked for it.
"""

from __future__ import annotations

import math
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpsample.ranks.ranks import Ranks, gather_or_raise


class PeerMemory:
    """One zeroed int64 tensor per rank, which every rank can write.

    Building it is collective and ends when every rank's tensor is zero and reachable, or with a
    RankMismatch on every rank.

    Attributes:
        own: this rank's tensor.
        addresses: int64 [world_size] on the device, of every rank's tensor, own included.
    """

    own: Tensor
    addresses: Tensor

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def barrier(self) -> None:
        """Wait until every rank is here and has done what it launched before."""
        self._finish()
        self._ranks.gather({})

    def close(self) -> None:
        """Release the memory. Every rank has finished its last step by then."""
        self._finish()
        vars(self).clear()

    def _finish(self) -> None:
        """Wait for what this rank has launched."""
        if self.own.is_cuda:
            torch.cuda.synchronize(self.own.device)


def peer_memory(ranks: Ranks, shape: tuple[int, ...], device: torch.device) -> PeerMemory:
    """Return the memory that fits the ranks and the device. Collective."""
    if ranks.inbox_memory is not None:
        memory: PeerMemory = ranks.inbox_memory(shape)
        return memory
    if device.type == "cuda":
        return SymmetricMemory(ranks, shape, device)
    return SharedFiles(ranks, shape)


class SharedFiles(PeerMemory):
    """A file in shared memory per rank, mapped by every rank and unlinked at once."""

    FOLDER = "/dev/shm"
    _PREFIX = "tpsample-"

    def __init__(self, ranks: Ranks, shape: tuple[int, ...]) -> None:
        super().__init__(ranks)
        path = ""
        try:
            with _on_every_rank(ranks):
                descriptor, path = tempfile.mkstemp(prefix=self._PREFIX, dir=self.FOLDER)
                try:
                    # A file with holes would end the process where the memory runs out.
                    os.posix_fallocate(descriptor, 0, 8 * math.prod(shape))
                finally:
                    os.close(descriptor)
            paths = [record["path"] for record in ranks.gather({"path": path})]
            with _on_every_rank(ranks):
                self.mapped = [self.map_file(path, shape) for path in paths]
        finally:
            if path:
                os.unlink(path)
        self.own = self.mapped[ranks.rank]
        addresses = [tensor.data_ptr() for tensor in self.mapped]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device="cpu")

    @classmethod
    def map_file(cls, path: str, shape: tuple[int, ...]) -> Tensor:
        if os.path.dirname(path) != cls.FOLDER or not os.path.basename(path).startswith(
            cls._PREFIX
        ):
            raise RuntimeError(f"a peer named {path!r}, which is no file of this exchange")
        flat = torch.from_file(path, shared=True, size=math.prod(shape), dtype=torch.int64)
        return flat.view(shape)


class SymmetricMemory(PeerMemory):
    """torch symmetric memory. All use of that interface, which torch calls alpha, is here.

    Memory is allocated outside torch's pool. The pool may give ranks blocks left by *different*
    samplers, and torch would then reuse an old rendezvous that pairs the wrong blocks. Every rank
    also reads a random number of each peer at the address it will write to before it trusts that.
    """

    def __init__(self, ranks: Ranks, shape: tuple[int, ...], device: torch.device) -> None:
        assert ranks.group is not None
        super().__init__(ranks)
        number = secrets.randbits(62)
        with _on_every_rank(ranks):
            self.own = allocate(shape, device)
        with _on_every_rank(ranks):
            self._handle = rendezvous(self.own, ranks.group)
            # The handle's addresses are of allocations; a tensor may begin after a header.
            offset = self.own.data_ptr() - self._handle.buffer_ptrs[ranks.rank]
            addresses = [address + offset for address in self._handle.buffer_ptrs]
            self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
            self.own.fill_(number)
            torch.cuda.synchronize(device)
        numbers = [record["number"] for record in ranks.gather({"number": number})]
        with _on_every_rank(ranks):
            buffers = [
                self._handle.get_buffer(peer, shape, torch.int64)
                for peer in range(ranks.world_size)
            ]
            wrong = [
                peer
                for peer, (buffer, number) in enumerate(zip(buffers, numbers, strict=True))
                if buffer.data_ptr() != addresses[peer] or int(buffer.view(-1)[-1]) != number
            ]
            if wrong:
                raise RuntimeError(f"symmetric memory of ranks {wrong} is not theirs")
        self.own.zero_()
        self.barrier()


@contextmanager
def _on_every_rank(ranks: Ranks) -> Iterator[None]:
    """Raise on every rank if the body raises on one, because its peers must not wait."""
    error: Exception | None = None
    try:
        yield
    except Exception as wrong:
        error = wrong
    gather_or_raise(ranks, {}, error)


def allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    stride = torch.empty(shape, device="meta").stride()
    own: Tensor = _SymmetricMemory.empty_strided_p2p(shape, stride, torch.int64, device)
    return own


def rendezvous(own: Tensor, group: dist.ProcessGroup) -> Any:
    import torch.distributed._symmetric_memory as symm_mem

    return symm_mem.rendezvous(own, group)
