"""The trunk over slots: every request keeps its keys and values in one, at its own positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Slots:
    """A trunk of transformers, and the keys and values of a few requests.

    Args:
        trunk: of a causal language model whose attention is full and causal in every layer.
        count: requests that can be held.
        length: tokens that one may have, prompt and answer.
    """

    def __init__(self, trunk: torch.nn.Module, count: int, length: int) -> None:
        self.trunk = trunk
        self.cache = _Cache(count, length)

    def hidden_states(self, slots: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the last hidden states [n, D] after n requests went on by q tokens each.

        Args:
            slots: int64 [n], where the requests are; none twice.
            token_ids: int64 [n, q].
            positions: int64 [n, q], of these tokens, from 0.
        """
        self.cache.begin(slots, positions)
        seen = torch.arange(self.cache.width, device=positions.device)
        mask = seen <= positions[:, None, :, None]
        out = self.trunk(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.last_hidden_state[:, -1].contiguous()


class _Cache:
    """Holds keys and values by slot and position; attention layers call `update`.

    Attributes:
        width: positions that the present call can see.
    """

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length, self.width = count, length, 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, slots: Tensor, positions: Tensor) -> None:
        """Say where the tokens of the next call stand."""
        self.slots, self.positions = slots, positions
        self.width = int(positions.max()) + 1

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [n, heads, q, size]; return all [n, heads, width, size] so far."""
        if layer not in self.layers:
            shape = (self.count, self.length, keys.shape[1], keys.shape[3])
            self.layers[layer] = keys.new_zeros(shape), values.new_zeros(shape)
        found = []
        for stored, new in zip(self.layers[layer], (keys, values), strict=True):
            stored[self.slots[:, None], self.positions] = new.transpose(1, 2)
            found.append(stored[self.slots, : self.width].transpose(1, 2))
        return found[0], found[1]
