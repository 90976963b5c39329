"""Rows of a batch: requests, the tokens so far, and masks as the oracle and a batch take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support import oracle
from tests.support.oracle import Context, Request
from tpsample import SamplingBatch, SamplingParams


@dataclass
class Row:
    """The request and the tokens of a row."""

    fields: dict[str, Any]
    seed: int | None
    prompt: list[int]
    output: list[int]
    temperature: float
    grammar: tuple[int, ...] | None = None
    forced: int = -1

    @staticmethod
    def of(fields: dict[str, Any], prompt: list[int], output: list[int]) -> Row:
        return Row(fields, fields["seed"], prompt, output, fields.get("temperature", 1.0))

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.fields)

    @property
    def request(self) -> Request:
        return Request(**self.fields | {"temperature": self.temperature})

    @property
    def so_far(self) -> dict[str, list[int]]:
        """The tokens so far, as `SamplingBatch.add` takes them."""
        return {"prompt_token_ids": self.prompt, "output_token_ids": list(self.output)}

    @property
    def context(self) -> Context:
        return Context(tuple(self.prompt), tuple(self.output), self.grammar, self.forced)


def so_far_of(rows: Sequence[Row]) -> dict[str, list[list[int]]]:
    """The tokens so far of some rows, as batches take them."""
    return {
        "prompt_token_ids": [list(row.prompt) for row in rows],
        "output_token_ids": [list(row.output) for row in rows],
    }


def batch_of(rows: Sequence[Row], vocab_size: int, **options: Any) -> SamplingBatch:
    """A batch of these requests, without their masks."""
    params = [row.params for row in rows]
    return SamplingBatch.from_params(params, vocab_size=vocab_size, **so_far_of(rows), **options)


def bitmask_of(allowed: list[set[int] | None], vocab_size: int) -> Tensor:
    """int32 [B, words] as grammar engines fill it; None allows everything."""
    rows = [None if ids is None else oracle.bits(sorted(ids), vocab_size) for ids in allowed]
    return grammar_tensor(rows, vocab_size)


@torch.inference_mode(False)  # it is written again, wherever that may be
def grammar_tensor(grammars: list[tuple[int, ...] | None], size: int) -> Tensor:
    """int32 [B, words], with every id allowed in a row without a grammar."""
    words = -(-size // 32)
    rows = [(-1,) * words if grammar is None else grammar for grammar in grammars]
    return torch.tensor(rows, dtype=torch.int32, device="cpu").view(len(rows), words)


@torch.inference_mode(False)
def forced_tensor(forced: list[int]) -> Tensor:
    return torch.tensor(forced, dtype=torch.int64, device="cpu")
