"""Small drafters that need no model of their own, for `tpsample generate --draft`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tpsample.cli.model import Model
from tpsample.core import word
from tpsample.request.batch import SamplingBatch
from tpsample.sampler import LMHeadSampler

LONGEST_NGRAM = 4


@dataclass
class Decoding:
    """How far decoding is. All tokens of the rows but the last are in the cache.

    Attributes:
        texts: prompt and generated tokens of each row.
        cache: keys and values of all layers.
        mask: int64 [B, L], which of the cached tokens are the row's; rejected drafts are not.
        last: int64 [B, 1].
        positions: int64 [B], index of the next token.
    """

    texts: list[list[int]]
    cache: Any
    mask: Tensor
    last: Tensor
    positions: Tensor


class Drafter(Protocol):
    """Proposes up to `count` tokens per row, int64 [B, count], -1 behind the end."""

    def propose(self, decoding: Decoding, count: int) -> Tensor: ...


class PromptLookup:
    """Proposes what followed the last occurrence of the row's longest suffix, up to 4 tokens."""

    def propose(self, decoding: Decoding, count: int) -> Tensor:
        found = [_continuation(text, count) for text in decoding.texts]
        padded = [ids + [word.NO_TOKEN] * (count - len(ids)) for ids in found]
        return torch.tensor(padded, dtype=torch.int64, device=decoding.last.device)


def _continuation(text: Sequence[int], count: int) -> list[int]:
    for length in range(min(LONGEST_NGRAM, len(text) - 1), 0, -1):
        suffix = list(text[-length:])
        for start in range(len(text) - length - 1, -1, -1):
            if list(text[start : start + length]) == suffix:
                return list(text[start + length : start + length + count])
    return []


class EarlyExit:
    """Samples from the model's own first layers, final norm and head, with the position's noise.

    The layers find their keys and values of earlier tokens in the model's cache, and leave it as it
    was.

    Raises:
        ValueError: the trunk is not a stack of layers, or has no more than `layers`.
    """

    def __init__(
        self, model: Model, sampler: LMHeadSampler, batch: SamplingBatch, layers: int
    ) -> None:
        trunk: Any = model.trunk
        depth = len(getattr(trunk, "layers", ()))
        if not 0 < layers < depth:
            raise ValueError(
                f"draft_layers: expected 1 to {depth - 1}, fewer than the {depth} layers of "
                f"{model.name}, got {layers}"
            )
        self._trunk, self._layers = copy.copy(trunk), layers
        # A copy of the module shares its tables: it gets one of its own before it is cut.
        self._trunk._modules = dict(trunk._modules)
        self._trunk.layers = trunk.layers[:layers]
        self._sampler, self._batch = sampler, batch

    def propose(self, decoding: Decoding, count: int) -> Tensor:
        token_ids, mask, drafts = decoding.last, decoding.mask, []
        for i in range(count):
            mask = torch.cat([mask, torch.ones_like(token_ids)], dim=1)
            out = self._trunk(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=(decoding.positions + i - 1).unsqueeze(1),
                past_key_values=decoding.cache,
                use_cache=True,
            )
            hidden_states = out.last_hidden_state[:, -1].contiguous()
            sampled = self._sampler(hidden_states, self._batch, decoding.positions + i)
            drafts.append(sampled.token_ids)
            token_ids = sampled.token_ids.clamp(min=0).unsqueeze(1)
        for layer in decoding.cache.layers[: self._layers]:
            layer.crop(-count)
        return torch.stack(drafts, dim=1)


@dataclass(frozen=True)
class Drafting:
    """The options of `tpsample generate` that concern drafts."""

    name: str
    num_drafts: int
    layers: int

    def drafter(self, model: Model, sampler: LMHeadSampler, batch: SamplingBatch) -> Drafter:
        """Return the drafter called `name`."""
        if self.name == "ngram":
            return PromptLookup()
        return EarlyExit(model, sampler, batch, self.layers)
