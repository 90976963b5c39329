"""The committed tokens, on every backend and exchange, on one rank and on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import golden, golden_parts
from tests.support.cases import even_shards, uneven_shards
from tests.support.golden import EXACT, differing
from tests.support.golden_parts import PARTS, V
from tests.support.ranks import run_ranks
from tests.support.virtual import SMALL_TILE
from tpsample import VocabShard

WEIGHTED = [part for part in PARTS if part != "logits"]


def assert_as_committed(found: dict[str, Any], parts: Sequence[str]) -> None:
    """Compare all that was recorded of some parts; a part that recorded less fails, too."""
    differ = differing(found, parts)
    assert not differ, f"{differ[0]}: `python -m tests.support.golden` writes golden.json anew"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("backend", "screening", "parts"),
    [
        ("torch", None, tuple(PARTS)),
        ("numba", None, tuple(PARTS)),
        ("numba", "int8", WEIGHTED),
        ("triton", None, ["logits"]),
        ("triton", "int8", ["heads"]),
        pytest.param("triton", None, EXACT, marks=pytest.mark.long),
    ],
)
def test_one_rank_draws_the_committed_tokens(backend, screening, parts):
    options = {"backend": backend, "screening": screening}
    assert_as_committed(golden.record(golden.maker(VocabShard(0, V), **options), parts), parts)


def test_the_tokens_of_a_rule_do_not_depend_on_its_place(monkeypatch):
    """A new rule may stand before others, and changes no committed token of theirs."""
    monkeypatch.setattr(golden_parts, "RULES", golden_parts.RULES[::-1])
    found = golden.record(golden.maker(VocabShard(0, V), backend="torch"), ["rules"])
    assert_as_committed(found, ["rules"])


def _on_rank(shards: list[VocabShard], options: dict[str, Any]) -> dict[str, Any]:
    return golden.record(golden.maker(shards[dist.get_rank()], **options))


@pytest.mark.parametrize(
    ("shards", "options"),
    [
        (even_shards(V, 2), {"backend": "numba", "exchange": "collective"}),
        (uneven_shards(V, 2), {"backend": "torch", "exchange": "two_level"}),
        (uneven_shards(V, 3), {"backend": "numba", "exchange": "p2p", "chunks": 2}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_several_ranks_draw_the_committed_tokens(shards, options):
    for of_rank in run_ranks(len(shards), _on_rank, shards, options):
        assert_as_committed(of_rank, tuple(PARTS))


@pytest.mark.parametrize(
    ("shards", "parts"),
    [
        (even_shards(V, 2), ["changes"]),
        (uneven_shards(V, 3), ["heads"]),
        pytest.param(uneven_shards(V, 3), EXACT, marks=pytest.mark.long),
    ],
)
def test_peers_in_one_process_draw_the_committed_tokens(shards, parts):
    for of_rank in golden.on_virtual_ranks(parts, shards, tile=SMALL_TILE, backend="triton"):
        assert_as_committed(of_rank, parts)
