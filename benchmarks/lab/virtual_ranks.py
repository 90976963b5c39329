"""Several ranks in one process, with which tests and one GPU run the kernels of `peer`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tpsample.core.row_noise import SeedSource
from tpsample.core.vocab_shard import VocabShard
from tpsample.exchange.inboxes import PeerMemory
from tpsample.output import SampleOutput
from tpsample.ranks.ranks import Ranks
from tpsample.request.step import Inputs

T = TypeVar("T")


def even_shards(vocab_size: int, world_size: int) -> list[VocabShard]:
    """Return the shards of all ranks, in rank order."""
    return [VocabShard.even(vocab_size, rank, world_size) for rank in range(world_size)]


class VirtualWorld:
    """Several ranks in one process, on one device. They launch all the kernels of `peer`.

        world = VirtualWorld(even_shards(V, 4), device)
        samplers = [LMHeadSampler(weight[s.start : s.stop], group=ranks, exchange="peer")
                    for s, ranks in zip(world.shards, world.ranks)]
        outputs = world.step(samplers, hidden_states, batch, positions)

    Args:
        shards: the ranks' shards, in rank order; samplers need not repeat them.
        device: of the weights.

    Attributes:
        ranks: one `Ranks` per rank, for the `group` argument of its `LMHeadSampler`. Every rank
            builds as many samplers as the others, in the same order.
        running: whether a `run` is under way.
    """

    def __init__(self, shards: list[VocabShard], device: torch.device | str = "cpu") -> None:
        self.shards = list(shards)
        self.device = torch.device(device)
        self.seed_root = SeedSource().root
        self.ranks = [VirtualRanks(self, rank) for rank in range(len(shards))]
        self._allocations: list[Tensor] = []
        self.running = False
        self._turn, self._meeting = threading.Lock(), threading.Barrier(1)
        self._own: list[Tensor | None] = []  # by rank; None of one that has ended
        self._all: list[Tensor] = []

    def step(
        self, samplers: Sequence[Any], hidden_states: Tensor, *arguments: Any, **options: Any
    ) -> list[SampleOutput]:
        """Return what the `LMHeadSampler` of every rank returns, called with these arguments.

        All local steps come first, since one process cannot wait for its own other ranks. The last
        ranks may be left out, as if they had died.
        """

        def step(sampler: Any, ranks: VirtualRanks) -> SampleOutput:
            with sampler.agreement:
                started = sampler.pipeline.start(Inputs(hidden_states), *arguments, **options)
            ranks.meet()
            with sampler.agreement:
                out: SampleOutput = sampler.pipeline.finish(started)
            return out

        each = zip(samplers, self.ranks, strict=False)
        return self.run([partial(step, *of_rank) for of_rank in each])

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run bodies[rank]() of every rank, and return their results in rank order.

        Calls in which ranks exchange integers, such as `prompt_logprobs`, must be made here. Each
        rank has a thread, and one runs at a time: until it has something to tell the others, hands
        that in and sleeps. When all have, each goes on with what all handed in. Because two never
        run at once, they may launch kernels in the Triton interpreter, which allows one launch at a
        time. Nothing depends on a scheduler.

        Raises:
            Exception: a body raised it, that of the lowest rank; the others stop where they meet.
            RuntimeError: the ranks did not meet equally often.
        """
        self._own, self.running = [None] * len(bodies), True
        self._meeting = threading.Barrier(len(bodies), self._share)
        # These belong to a thread.
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def in_turn(rank: int, body: Callable[[], T]) -> T:
            with self._turn:
                try:
                    with (
                        torch.cuda.stream(stream),
                        torch.inference_mode(inference),
                        torch.set_grad_enabled(grad),
                    ):
                        result = body()
                    self.gather(rank, None)
                    return result
                except BaseException:
                    self._meeting.abort()
                    raise

        try:
            with ThreadPoolExecutor(len(bodies)) as threads:
                futures = [threads.submit(in_turn, *each) for each in enumerate(bodies)]
            for future in futures:  # an error is raised before the broken barriers it has caused
                if not isinstance(future.exception(), threading.BrokenBarrierError):
                    future.result()
            return [future.result() for future in futures]
        finally:
            self.running = False

    def gather(self, rank: int, own: Tensor | None) -> list[Tensor]:
        """Wait for all ranks, and return what each handed in, in rank order.

        Args:
            own: what this rank hands in; None if its body has ended.
        """
        self._own[rank] = own
        self._turn.release()
        try:
            self._meeting.wait()
        finally:
            self._turn.acquire()
        return self._all

    def _share(self) -> None:
        """Keep what all ranks have handed in, as the last of them meets the others.

        Raises:
            RuntimeError: some ranks have ended, and others go on.
        """
        self._all = [own for own in self._own if own is not None]
        if self._all and len(self._all) < len(self._own):
            raise RuntimeError("virtual ranks: they did not make the same calls")

    def allocation(self, index: int, shape: tuple[int, ...]) -> Tensor:
        """Return int64 [world_size, *shape], one tensor for every rank's request number `index`."""
        if index == len(self._allocations):
            zeros = torch.zeros(len(self.ranks), *shape, dtype=torch.int64, device=self.device)
            self._allocations.append(zeros)
        if self._allocations[index].shape[1:] != shape:
            raise ValueError(
                f"group: the virtual ranks built different samplers, {tuple(shape)} after "
                f"{tuple(self._allocations[index].shape[1:])}"
            )
        return self._allocations[index]


class VirtualMemory(PeerMemory):
    """A slice of one tensor per rank."""

    def __init__(self, ranks: VirtualRanks, shape: tuple[int, ...]) -> None:
        super().__init__(ranks)
        tensors = ranks.world.allocation(ranks.num_allocations, shape)
        ranks.num_allocations += 1
        self.own = tensors[ranks.rank]
        addresses = [tensor.data_ptr() for tensor in tensors]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=tensors.device)


class VirtualRanks(Ranks):
    """One of several ranks in this process, whose world knows what the others would answer."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.num_allocations = 0

    @property
    def world_size(self) -> int:  # type: ignore[override]
        return len(self.world.shards)

    def inbox_memory(self, shape: tuple[int, ...]) -> VirtualMemory:  # type: ignore[override]
        return VirtualMemory(self, shape)

    def meet(self) -> None:
        """Wait for every rank of the world."""
        self.gather_tensor(torch.zeros(0))

    def gather_tensor(self, own: Tensor) -> Tensor:
        if self.world_size == 1:
            return own.unsqueeze(0)
        if not self.world.running:
            raise RuntimeError("virtual ranks: they meet inside VirtualWorld.step or .run alone")
        return torch.stack(self.world.gather(self.rank, own))

    def sum_tensor(self, own: Tensor) -> Tensor:
        return self.gather_tensor(own).sum(dim=0, dtype=own.dtype)

    def gather(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the record as each rank would give it, were it built with the same arguments."""
        records = []
        for rank, shard in enumerate(self.world.shards):
            known: dict[str, Any] = {
                "shard": [shard.start, shard.stop],
                "seed_root": self.world.seed_root,
            }
            if rank != self.rank and "held" in record:
                known["held"] = record["held"] | {"rows": len(shard), "digest": None}
            records.append({**record, **known})
        return records
