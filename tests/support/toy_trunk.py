"""A trunk that looks at one token, in place of the bundled model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

V, D = 500, 16


def load(_: Any, job: Any, dtype: torch.dtype) -> Any:
    """Return the toy, as `tpsample.cli.model.load` returns a model."""
    generator = torch.Generator().manual_seed(4)
    weight, embedding = (torch.randn(V, D, generator=generator).to(dtype) for _ in range(2))

    def trunk(ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=embedding[ids], past_key_values=None)

    return SimpleNamespace(
        causal_lm=SimpleNamespace(base_model=trunk),
        lm_head=SimpleNamespace(weight=weight),
        prompt_token_ids=lambda text: [len(text), 7],
    )
