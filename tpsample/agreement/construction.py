"""What the ranks of a sampler agree on when it is built; the one place where they compare notes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
from dataclasses import dataclass
from typing import Any

import torch

from tpsample.agreement.arguments import SamplerArguments, check_sliced, resolve_shards
from tpsample.core.checks import check_current
from tpsample.core.digest import digest_bits
from tpsample.core.interpreted import interpreted
from tpsample.core.version import __version__
from tpsample.core.vocab_shard import VocabShard
from tpsample.errors import RankMismatch
from tpsample.exchange.choice import choose_exchange, reach
from tpsample.local import tile_table
from tpsample.noise import LAYOUT
from tpsample.ranks.ranks import Ranks, gather_or_raise, ranks_of, require_equal
from tpsample.request.seeds import SeedSource

log = logging.getLogger(__name__)

_MUST_MATCH = [
    "layout",
    "vocab_size",
    "hidden_size",
    "dtype",
    "bias",
    "logit_scale",
    "logit_softcap",
    "max_rows",
    "exchange",
    "chunks",
    "philox_rounds",
    "backend",
    "tile_table",
    "device",
    "desync_every",
    "tpsample",
]


@dataclass(frozen=True)
class Agreement:
    """The same on every rank, but for `ranks.rank` and what each gave.

    Attributes:
        shards: every rank's, in rank order.
        exchange: a name that `make_exchange` knows.
        hosts: name of every rank's host.
        seed_root: random number that rank 0 drew, from which unseeded rows get their seeds.
    """

    ranks: Ranks
    arguments: SamplerArguments
    backend: str
    vocab_size: int
    shards: list[VocabShard]
    exchange: str
    hosts: list[str]
    seed_root: int

    @property
    def shard(self) -> VocabShard:
        """This rank's."""
        return self.shards[self.ranks.rank]


def agree(group: object, **given: Any) -> Agreement:
    """Check this rank's arguments, gather every rank's, and settle what follows. Collective.

    Args:
        group: as `LMHeadSampler` takes it. If it is no group, the default group is told.
        given: the fields of `SamplerArguments`.

    Raises:
        TypeError, ValueError: a wrong argument, on one rank.
        RankMismatch: a wrong or differing argument on some of several ranks, on every rank.
    """
    error: Exception | None = None
    try:
        ranks = ranks_of(group)
    except TypeError as wrong:
        ranks, error = ranks_of(None), wrong
    record: dict[str, Any] = {}
    try:
        arguments = SamplerArguments(**given)
        backend = _backend(arguments.backend, arguments.weight.device)
        record = _record(arguments, backend)
    except (TypeError, ValueError) as wrong:
        error = error or wrong
    records = gather_or_raise(ranks, record, error)
    require_equal(records, _MUST_MATCH)
    rows = [r["weight_rows"] for r in records]
    if arguments.shard is None:
        check_sliced(arguments.vocab_size, rows, [r["weight"] for r in records])
    if any(record["versions"] != records[0]["versions"] for record in records):
        log.warning("versions differ between ranks: %s", [r["versions"] for r in records])
    named = [None if r["shard"] is None else VocabShard(*r["shard"]) for r in records]
    try:
        vocab_size, shards = resolve_shards(arguments.vocab_size, named, rows)
    except RankMismatch as wrong:
        if ranks.world_size == 1:  # there is nobody to disagree with
            raise ValueError(str(wrong)) from None
        raise
    return Agreement(
        ranks=ranks,
        arguments=arguments,
        backend=backend,
        vocab_size=vocab_size,
        shards=shards,
        exchange=choose_exchange(arguments.exchange, ranks, [r["reach"] for r in records]),
        hosts=[record["reach"]["host"] for record in records],
        seed_root=records[0]["seed_root"],
    )


def _versions() -> dict[str, str]:
    """Of what computes: tokens are the same if they differ, their near-ties might not be."""
    found = {"torch": str(torch.__version__)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    return found


def _backend(backend: str, device: torch.device) -> str:
    """The backend for the argument, checked."""
    check_current(device)
    if backend == "auto":
        return default_backend(device)
    if backend == "triton" and device.type != "cuda" and not interpreted():
        raise ValueError(
            f'backend: "triton" needs a GPU, lm_head_weight is on {device}; use backend="torch", '
            "or set TRITON_INTERPRET=1 before Python starts"
        )
    return backend


def default_backend(device: torch.device) -> str:
    """What backend="auto" stands for on a device."""
    return "triton" if device.type == "cuda" or interpreted() else "torch"


def _weight_digest(weight: torch.Tensor) -> int | None:
    """Of a few rows, by which ranks that hold the same ones are found; None if the rows are alike,
    as of a weight that is not loaded yet."""
    few = torch.cat([weight[:16], weight[-16:]])
    if weight.shape[0] == 0 or bool((few == few[:1]).all()):
        return None
    return digest_bits(few)


def _record(arguments: SamplerArguments, backend: str) -> dict[str, Any]:
    """What the ranks compare, as plain JSON values."""
    weight, shard = arguments.weight, arguments.shard
    record = {
        "layout": LAYOUT,
        "vocab_size": arguments.vocab_size,
        "shard": None if shard is None else [shard.start, shard.stop],
        "weight_rows": weight.shape[0],
        "weight": _weight_digest(weight),
        "hidden_size": weight.shape[1],
        "dtype": str(weight.dtype),
        "bias": arguments.bias is not None,
        "logit_scale": arguments.head.logit_scale,
        "logit_softcap": arguments.head.logit_softcap,
        "max_rows": arguments.max_rows,
        "exchange": arguments.exchange,
        "chunks": arguments.chunks,
        "philox_rounds": arguments.philox_rounds,
        "backend": backend,
        "tile_table": tile_table.fingerprint() if backend == "triton" else None,
        "desync_every": arguments.desync_every,
        "tpsample": __version__,
        "versions": _versions(),
        "device": weight.device.type,
        "reach": reach(backend, weight.device),
        "seed_root": SeedSource().root,
    }
    copied: dict[str, Any] = json.loads(json.dumps(record))
    return copied
