"""Random problems for the fuzz suite: heads, shards, rows and requests of every odd kind."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.cases import Case
from tpsample import SamplingParams, VocabShard

SEEDS = (0, 1, -1, 2**63, 2**64 - 1, -(2**63))
POSITIONS = (0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1)
ODD_SIZES = (1, 2, 3, 5, 7, 63, 64, 65, 127, 255, 257, 511, 1000)


@dataclass
class Problem:
    """A head cut into shards, and rows to sample from it.

    Attributes:
        head: `bias` [V] or None, `logit_scale`, `logit_softcap`.
        philox_rounds, chunks, num_samples: as `LMHeadSampler` takes them.
    """

    case: Case
    shards: list[VocabShard]
    head: dict[str, Any]
    philox_rounds: int
    chunks: int
    num_samples: int | None


def problem(pick: random.Random, world_size: int, max_rows: int, *, plain: bool = False) -> Problem:
    """A random problem, the same for the same state of `pick`.

    Args:
        plain: integer inputs and no filters, soft-cap or scale: what the interpreter's arithmetic
            and ranks without a process group can do.
    """
    generator = torch.Generator().manual_seed(pick.getrandbits(32))
    vocab_size = pick.choice(ODD_SIZES) if pick.random() < 0.5 else pick.randint(1, 1500)
    hidden_size, rows = pick.randint(1, 24), pick.randint(1, max_rows)
    dtype = torch.float32 if plain else pick.choice([torch.float32, torch.bfloat16, torch.float16])
    hidden_states = torch.randn(rows, hidden_size, generator=generator)
    weight = torch.randn(vocab_size, hidden_size, generator=generator)
    if plain or pick.random() < 0.3:  # exact products, many ties
        hidden_states, weight = hidden_states.round(), weight.round()
    params = [request(pick, vocab_size, plain) for _ in range(rows)]
    positions = [
        pick.choice(POSITIONS) if pick.random() < 0.2 else pick.getrandbits(20) for _ in range(rows)
    ]
    # Few distinct ids, which the bad words below have too.
    tokens = [
        [pick.randrange(min(vocab_size, 4)) for _ in range(pick.randint(0, 6))] for _ in params
    ]
    case = Case(hidden_states.to(dtype), weight.to(dtype), params, torch.tensor(positions), tokens)
    _poison(pick, case.hidden_states, (float("nan"), float("inf"), -float("inf")))
    bias = None
    if not plain and pick.random() < 0.6:
        bias = torch.randn(vocab_size, generator=generator)
        if pick.random() < 0.5:  # masked: some tokens, all but one, or all
            left = pick.choice([vocab_size // 2, 1, 0])
            bias[torch.randperm(vocab_size, generator=generator)[left:]] = -float("inf")
        _poison(pick, bias, (float("nan"), float("inf"), -float("inf")))
    cuts = sorted(pick.randint(0, vocab_size) for _ in range(world_size - 1))
    bounds = [0, *cuts, vocab_size]
    return Problem(
        case=case,
        shards=[VocabShard(a, b) for a, b in itertools.pairwise(bounds)],
        head={
            "bias": bias,
            "logit_scale": 1.0 if plain else pick.choice([1.0, 1.0, 0.25, -2.0]),
            "logit_softcap": None if plain else pick.choice([None, None, 5.0, 30.0]),
        },
        philox_rounds=pick.choice([10, 10, 7]),
        chunks=pick.choice([1, 1, 2, 5]),
        num_samples=pick.choice([None, None, None, 1, 3]),
    )


def request(pick: random.Random, vocab_size: int, plain: bool) -> SamplingParams:
    """Random parameters: plain, greedy, or any filters together, with or without controls."""
    seed = pick.choice(SEEDS) if pick.random() < 0.1 else pick.getrandbits(64)
    temperature = pick.choice([0.0, 1e-6, 1e-5, 0.01, 0.5, 1.0, 1.0, 1.0, 2.0, 50.0])
    own = {"temperature": temperature, "seed": seed}
    if pick.random() < 0.4:
        own |= controls(pick, vocab_size)
    if plain or pick.random() < 0.5:
        return SamplingParams(**own)
    return SamplingParams(
        **own,
        top_k=pick.choice([0, -1, 1, 2, 20, 256, 300, vocab_size, vocab_size + 1]),
        top_p=pick.choice([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999]),
        min_p=pick.choice([0.0, 0.0, 0.01, 0.5, 1.0]),
        ties=pick.choice(["exact", "keep"]),
        filter_order=pick.choice(["sequential", "joint", "min_p_last"]),
    )


def controls(pick: random.Random, vocab_size: int) -> dict[str, Any]:
    """Random penalties, biases and masks that do not contradict each other."""

    def ids(most: int) -> list[int]:
        return [pick.randrange(vocab_size) for _ in range(pick.randint(1, most))]

    found = {
        "repetition_penalty": pick.choice([1.0, 0.5, 1.3, 10.0]),
        "presence_penalty": pick.choice([0.0, -2.0, 1.5]),
        "frequency_penalty": pick.choice([0.0, -0.3, 2.0]),
        "logit_bias": {v: pick.uniform(-150, 150) for v in ids(5)},
        "bad_words": [
            [pick.randrange(min(vocab_size, 4)) for _ in range(pick.randint(2, 4))]
            for _ in range(pick.randint(1, 9))
        ],
        "min_tokens": pick.choice([0, 1, 5]),
        "repetition_scope": pick.choice(["all", "output"]),
    }
    if pick.random() < 0.5:
        found["allowed_token_ids"] = ids(40)
    else:
        found["bad_words"] += [[v] for v in ids(3)]
        found["stop_token_ids"] = ids(3)
    kept = pick.sample(sorted(found), pick.randint(1, len(found)))
    if "stop_token_ids" not in kept:
        kept = [name for name in kept if name != "min_tokens"]
    return {name: found[name] for name in kept}


def _poison(pick: random.Random, tensor: Tensor, values: tuple[float, ...]) -> None:
    """Sometimes, a few elements of one of `values`; rarely, several kinds."""
    while pick.random() < 0.15:
        value = pick.choice(values)
        for _ in range(pick.randint(1, 2)):
            tensor.view(-1)[pick.randrange(tensor.numel())] = value
