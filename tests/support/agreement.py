"""Checks of a backend against the definition, shared by the real tests and the tests of the tests.

Each check raises AssertionError. `step` runs the local step of any number of ranks one after
another in this process, so that the checks need neither processes nor an exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.support import oracle
from tests.support.cases import Case, uneven_shards
from tests.support.settings import settings_of
from tpsample import SampleOutput, SamplingParams, Status, VocabShard, noise, reference
from tpsample.backends import room_of
from tpsample.backends.numba_.launch import NativeBackend
from tpsample.backends.torch_.launch import TorchBackend
from tpsample.backends.triton_.launch import TritonBackend
from tpsample.backends.triton_.tile_table import Tile
from tpsample.core.score import Head
from tpsample.exchange.base import Exchange
from tpsample.reference import NEAR_TIE

# (seed, planted id, its word, its Gumbel noise, id with noise near 0): position and sample
# 0. Found by searching seeds for words that fp32 -log(-log(rand)), which ends at 16.64, cannot use.
PLANTED_TAILS = [
    (481, 12239, 35, 18.61, 5),
    (2, 84308, 135, 17.27, 29),
    (345, 91596, 148, 17.18, 34),
]

BACKENDS: dict[str, Any] = {"torch": TorchBackend, "numba": NativeBackend, "triton": TritonBackend}


def tile(block_v: int, block_b: int, block_d: int) -> Tile:
    """Blocks for the interpreter, which knows neither warps nor stages."""
    return Tile(block_v, block_b, block_d, num_warps=1, num_stages=1)


def step(
    case: Case,
    shards: Sequence[VocabShard] | None = None,
    *,
    backend: str = "torch",
    num_samples: int | None = None,
    bias: torch.Tensor | None = None,
    head: Head | None = None,
    padding: torch.Tensor | None = None,
    **override: Any,
) -> SampleOutput:
    """One step of the ranks that own `shards` (default: one rank), words merged by maximum.

    Args:
        bias: [V].
        padding: rows put behind every rank's shard, and behind its bias.
        override: `tile` of TritonBackend or `block_v` of TorchBackend.
    """
    shards = shards or [VocabShard(0, case.vocab_size)]
    samples, batch = num_samples or 1, case.batch
    slots = case.hidden_states.shape[0] * samples
    words = []
    for shard in shards:
        weight, shard_bias = case.weight[shard.start : shard.stop], bias
        if bias is not None:
            shard_bias = bias[shard.start : shard.stop]
        if padding is not None:
            weight = torch.cat([weight, padding.to(weight)])
            if shard_bias is not None:
                shard_bias = torch.cat([shard_bias, torch.full((len(padding),), 1e6)])
        settings = settings_of(
            weight,
            shard,
            max_rows=slots,
            bias=shard_bias,
            head=head or Head(),
        )
        exchange = Exchange(settings)
        local = BACKENDS[backend](settings)
        for name, value in override.items():
            setattr(local, name, value)
        step = local.prepare(
            case.hidden_states, batch._view_of(batch.rows), case.positions, samples
        )
        (own,) = exchange.begin(slots)
        local.best_words(step, own)
        words.append(own.clone())
    out = SampleOutput.empty(batch.seed, num_samples)
    room_of(backend).decoder()(torch.stack(words), batch.seed, out)
    return out


def tokens_are_the_oracles(out: SampleOutput, case: Case, logits: torch.Tensor) -> None:
    """The status and tokens of `reference.sample`, near-ties between the two best scores aside."""
    num_samples = out.token_ids.shape[1] if out.token_ids.ndim == 2 else None
    expected = reference.sample(logits, case.batch, case.positions, num_samples=num_samples)
    assert out.status.tolist() == expected.status.tolist()
    tokens, wanted = (x.view(len(logits), -1) for x in (out.token_ids, expected.token_ids))
    for row, sample in (tokens != wanted).nonzero().tolist():
        scores = reference.scores(logits, case.batch, case.positions, sample=sample)
        best, second = scores[row].topk(2).values.tolist()
        assert best - second < NEAR_TIE, (
            f"row {row}, sample {sample}: token {tokens[row, sample]}, the oracle says "
            f"{wanted[row, sample]} with {best} to {second}"
        )


def shards_agree(case: Case, **how: Any) -> None:
    """The oracle's tokens, bit for bit, however the vocabulary is cut."""
    expected = case.oracle()
    for world_size in (1, 2, 3, 4, 8):
        even = [VocabShard.even(case.vocab_size, r, world_size) for r in range(world_size)]
        for shards in (even, uneven_shards(case.vocab_size, world_size)):
            out = step(case, [s for s in shards if len(s)], **how)
            assert out.token_ids.tolist() == expected.token_ids.tolist(), f"shards {shards}"
            assert out.status.tolist() == expected.status.tolist(), f"shards {shards}"


def padding_is_never_seen(case: Case, **how: Any) -> None:
    """Rows behind a shard that would win, or poison, every row of the batch change nothing."""
    expected = case.oracle().token_ids.tolist()
    toward = 1e6 * case.hidden_states[:1].float().sign()
    for filling in (toward, -toward, torch.full_like(toward, float("nan"))):
        for shards in (None, uneven_shards(case.vocab_size, 3)):
            out = step(case, shards, padding=filling.expand(5, -1), **how)
            assert out.token_ids.tolist() == expected, f"padding {filling[0, 0]}, shards {shards}"
            assert (out.status == Status.OK).all()


def planted_tail_wins(golden: tuple[int, int, int, float, int], **how: Any) -> None:
    """A token that only noise beyond fp32 -log(-log(rand)) can lift is drawn, and by 0.2 nats."""
    seed, planted, word, gumbel, head = golden
    assert noise.words(seed, 0, planted).item() == word
    ids = np.array([planted])
    assert oracle.noise_words(seed, 0, ids)[0][0] == word
    natural = -(oracle.noise(seed, 0, ids) + math.log2(math.log(2))) * math.log(2)
    assert math.log(word / (word + 1)) < natural[0] - gumbel < 0.01  # the table has 32 bits
    logits = torch.full((planted + 13, 1), -60.0)
    logits[head] = 0.0
    logits[planted] = -(gumbel - 0.3)
    params = [SamplingParams(seed=seed)]
    case = Case(torch.ones(1, 1), logits, params, torch.zeros(1, dtype=torch.int64))
    assert step(case, **how).token_ids.tolist() == [planted]
