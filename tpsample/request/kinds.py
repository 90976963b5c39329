"""Kinds of requests: one example of each launches what every request of its kind launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch

from tpsample.core.checks import check_int, describe
from tpsample.request.batch import SamplingBatch
from tpsample.request.params import SamplingParams

Kind = Literal[
    "plain", "top_k", "top_p", "top_k, top_p", "top_p in top_k", "min_p", "logprobs", "allowed ids",
    "bad words", "min_tokens", "penalties", "bias",
]  # fmt: skip

KINDS: dict[Kind, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "top_p in top_k": {"top_p": 0.9, "top_k": 300},
    "top_k, top_p": {"top_k": 5, "top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "logprobs": {"logprobs": 3},
    "allowed ids": {"allowed_token_ids": [0, 1, 2]},
    "bad words": {"bad_words": [[0, 1], [1]]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [0]},
    "penalties": {"repetition_penalty": 1.2},
    "bias": {"logit_bias": {0: 1.0}},
}
"""The fields of an example; a top_k of at most 256 and a larger one are two kinds."""


def check_kinds(kinds: Sequence[Kind], rows: Sequence[int], max_rows: int) -> None:
    """Raise ValueError where `warm_up` can take no step of them."""
    for kind in kinds:
        if kind not in KINDS:
            names = ", ".join(map(repr, get_args(Kind)))
            raise ValueError(f"kinds: expected some of {names}, got {describe(kind)}")
    for num_rows in rows:
        check_int("rows", num_rows, 1, max_rows)


def batches_of(
    kinds: Sequence[Kind], rows: Sequence[int], vocab_size: int, device: torch.device
) -> Iterator[SamplingBatch]:
    """Yield batches of each kind by itself and one of all; filtered ones also in fixed rounds."""
    mixes = [[kind] for kind in kinds] + [list(kinds)] * (len(kinds) > 1)
    for num_rows in rows:
        for mix in mixes:
            requests = [
                SamplingParams(seed=row, **KINDS[mix[row % len(mix)]])
                for row in range(max(num_rows, len(mix)))
            ]
            for fixed_rounds in (False, True):
                batch = SamplingBatch.from_params(
                    requests,
                    vocab_size=vocab_size,
                    device=device,
                    prompt_token_ids=[[0]] * len(requests),
                    output_token_ids=[[0]] * len(requests),
                    fixed_rounds=fixed_rounds,
                )
                yield batch
                if batch.plan.filters is None:
                    break
