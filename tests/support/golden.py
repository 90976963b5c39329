"""Tokens that must never change: every plan, control and way to verify.

`python -m tests.support.golden` writes golden.json anew, and a diff in that file is a change of the
definition.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, VocabShard, sample_draft, verify

FILE = Path(__file__).with_name("golden.json")
V, D, STEPS, DRAFTS = 401, 6, 4, 2
OUTPUT = [3, 5, 5, 7]

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    **{
        f"top_k {k}, top_p {p}, min_p {m}": {"top_k": k, "top_p": p, "min_p": m}
        for k, p, m in itertools.product((0, 7, 300), (1.0, 0.8), (0.0, 0.02))
        if (k, p, m) != (0, 1.0, 0.0)
    },
    "keep ties": {"top_k": 5, "ties": "keep", "temperature": 3.0},
    "joint": {"top_k": 20, "top_p": 0.5, "filter_order": "joint"},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "output alone": {"repetition_penalty": 2.0, "repetition_scope": "output"},
    "bias": {"logit_bias": {4: 3.5, 5: -100.0, 9: 250.0}},
    "allowed": {"allowed_token_ids": [3, 50, 200, 399], "top_p": 0.9},
    "bad words": {"bad_words": [[7, 8], [5, 7, 9], [200]]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [2, 100, 101]},
    "unlike seeds": {"seed": 2**64 - 1},
    "negative seed": {"seed": -5},
}


def requests() -> list[SamplingParams]:
    return [
        SamplingParams(**{"seed": 40 + row, **fields})
        for row, fields in enumerate(REQUESTS.values())
    ]


def head(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Small integers, whose products are exact in every order and dtype."""
    generator = torch.Generator().manual_seed(77)
    hidden_states = torch.randint(-2, 3, (rows, DRAFTS + 1, D), generator=generator)
    weight = torch.randint(-2, 3, (V, D), generator=generator)
    return hidden_states.float(), weight.float()


def cancelling_head(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Real numbers whose products, of ±1.5e7, cancel by seven digits."""
    generator = torch.Generator().manual_seed(78)
    hidden_states, weight, rest = (
        torch.randint(-(2**20), 2**20, (size, 24), generator=generator) / scale
        for size, scale in ((rows, 300.0), (V, 200.0), (V, 1e9))
    )
    return hidden_states.repeat(1, 2), torch.cat([weight, rest - weight], dim=1)


def tokens(make_sampler: Callable[[torch.Tensor], LMHeadSampler]) -> dict[str, Any]:
    """By name of what was done, the tokens of every row.

    Args:
        make_sampler: from the whole weight, the sampler of this rank.
    """
    params = requests()
    rows = len(params)
    hidden_states, weight = head(rows)
    sampler = make_sampler(weight)

    def batch() -> SamplingBatch:
        made = SamplingBatch.from_params(
            params,
            vocab_size=V,
            prompt_token_ids=[[1, 3, 9]] * rows,
            output_token_ids=[OUTPUT] * rows,
        )
        made.prepare(sampler.shard)
        return made

    found: dict[str, Any] = {}
    told = batch()
    for step in range(STEPS):
        out = sampler(hidden_states[:, 0], told, 100 * step + torch.arange(rows))
        told.append(out.token_ids)
        found[f"step {step}"] = out.token_ids.tolist()
    found["samples"] = sampler(hidden_states[:, 1], batch(), 9, num_samples=2).token_ids.tolist()

    asked = batch()
    bits = torch.full((rows, -(-V // 32)), -1, dtype=torch.int32)
    bits[::2, ::3] = 0
    asked.grammar_bitmask = bits
    asked.forced_token_ids = torch.where(torch.arange(rows) % 5 == 4, torch.arange(rows), -1)
    found["masks"] = sampler(hidden_states[:, 0], asked, 7).token_ids.tolist()

    logits = (hidden_states[:, 1] @ weight.T)[:, sampler.shard.start : sampler.shard.stop]
    for method in ("coupled", "rejection", "block"):
        drafting = batch()
        drafted = [
            sample_draft(sampler, logits, drafting, 20 + i, i, method=method) for i in range(DRAFTS)
        ]
        laws = {} if method == "coupled" else {"draft": torch.stack([logits] * DRAFTS, dim=1)}
        verified = verify(
            sampler, hidden_states, torch.stack(drafted, 1), drafting, 20, method=method, **laws
        )
        found[f"drafts, {method}"] = torch.stack(drafted, 1).tolist()
        found[f"verified, {method}"] = verified.token_ids.tolist()

    hidden_states, weight = cancelling_head(rows)
    sampler = make_sampler(weight)
    for step in range(STEPS):
        out = sampler(hidden_states, batch(), 100 * step + torch.arange(rows))
        found[f"cancelling, step {step}"] = out.token_ids.tolist()
    return found


def on_shard(rank: int, world_size: int, backend: str = "torch") -> dict[str, Any]:
    """The tokens as a rank of the default process group finds them."""
    shard = VocabShard.even(V, rank, world_size)

    def make(weight: torch.Tensor) -> LMHeadSampler:
        return LMHeadSampler(
            weight[shard.start : shard.stop],
            vocab_size=V,
            shard=shard,
            backend=backend,
            max_rows=len(REQUESTS) * (DRAFTS + 1),
        )

    return tokens(make)


if __name__ == "__main__":
    FILE.write_text(json.dumps(on_shard(0, 1), indent=1) + "\n")
