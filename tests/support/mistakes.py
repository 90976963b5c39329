"""A head of 20 ids, its batches and samplers, and objects that users pass by mistake."""

from __future__ import annotations

from typing import Any

import torch

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams

V, D, B = 20, 4, 2
WEIGHT = torch.arange(V * D, dtype=torch.float32).reshape(V, D).sin()
HIDDEN = torch.ones(B, D)


def batch_of(cap: int | None = None, fixed_rounds: bool = False, **fields: Any) -> SamplingBatch:
    params = [SamplingParams(**{"seed": row, **fields}) for row in range(B)]
    how = {"kept_cap": cap, "fixed_rounds": fixed_rounds}
    return SamplingBatch.from_params(params, vocab_size=V, **how)


def request(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def sampler_over(weight: torch.Tensor = WEIGHT, **options: Any) -> LMHeadSampler:
    return LMHeadSampler(weight, **{"backend": "torch", "max_rows": 4, **options})


def under_meta() -> SamplingBatch:
    """Return a batch that was built under a default device, as engines build models."""
    with torch.device("meta"):
        return batch_of()


def closed() -> object:
    with sampler_over() as sampler:
        pass
    return sampler(HIDDEN, batch_of(), 0)


class Mesh:
    """As `init_device_mesh(...)["tp"]` is: it has a group, and is none."""

    def get_group(self) -> None: ...

    def __repr__(self) -> str:
        return "Mesh"


class Model:
    """As one of transformers is: its head is a module inside it."""

    lm_head = torch.nn.Linear(D, V)

    def __repr__(self) -> str:
        return "Model"


class DTensor(torch.Tensor):
    """Goes by the name of torch's."""


SHARDED = torch.ones(B, D).as_subclass(DTensor)


def half(rank: int) -> torch.Tensor:
    """Return the rows of one of two ranks."""
    return WEIGHT[V // 2 * rank : V // 2 * (rank + 1)]


def tokens(
    sampler: LMHeadSampler, batch: Any = None, *, hidden: Any = HIDDEN, position: int = 0
) -> list[int]:
    """Return what a sampler draws of a batch, or of two plain rows."""
    found: list[int] = sampler(hidden, batch or batch_of(), position).token_ids.tolist()
    return found
