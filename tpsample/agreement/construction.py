"""Compares what the ranks of a sampler were given when it is built, and returns their settings."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NoReturn

import torch
from torch import Tensor

from tpsample.agreement.arguments import checked_arguments
from tpsample.agreement.caller_tensors import local_arguments
from tpsample.agreement.held_rows import HeldRows, check_sliced, resolve_shards
from tpsample.backends.triton_ import tile_table
from tpsample.core.caller_warning import warn
from tpsample.core.checks import check_current
from tpsample.core.machine import compiler_doubt, interpreted, kernels_overlap, numba_missing
from tpsample.core.row_noise import SeedSource
from tpsample.core.score import Head
from tpsample.core.version import __version__
from tpsample.core.vocab_shard import VocabShard
from tpsample.errors import RankMismatch
from tpsample.exchange.choice import choose_exchange, reach
from tpsample.noise import LAYOUT
from tpsample.ranks.process import group_among, launched, ranks_of
from tpsample.ranks.ranks import Ranks, gather_or_raise, require_equal
from tpsample.settings import ChosenBackend, Settings

log = logging.getLogger(__name__)

_OWN = ("weight", "bias", "shard", "head", "backend", "screening")
"""Arguments that are not compared by value. All others must be equal on every rank."""


@contextlib.contextmanager
def agree(
    group: object,
    *,
    logit_scale: Any,
    logit_softcap: Any,
    error: Exception | None = None,
    **given: Any,
) -> Iterator[Settings]:
    """Check this rank's arguments, gather every rank's, and yield what follows. Collective.

    The ranks go on to build a sampler in the body of the `with` statement, and make no other call.

    Args:
        group, logit_scale, logit_softcap: as in `LMHeadSampler`. The error of a wrong group goes to
            the ranks of the default group.
        error: an error that the caller has found before.
        given: the other arguments that `checked_arguments` takes.

    Raises:
        TypeError, ValueError: an argument is wrong, on a rank alone.
        RankMismatch: an argument is wrong or differs on some of several ranks; all raise it.
    """
    given["head"] = Head(logit_scale, logit_softcap)
    group, given, wrong_group = local_arguments(group, given)
    error = error or wrong_group
    try:
        ranks = ranks_of(group)
    except TypeError as wrong:
        ranks, error = ranks_of(None), error or wrong
    record: dict[str, Any] = {}
    backend: ChosenBackend = "torch"
    try:
        weight = given["weight"]
        if isinstance(weight, Tensor) and weight.is_cuda:
            ranks.home = weight.device
        given = checked_arguments(given)
        backend = _backend(given)
        record = _record(given, backend)
        _warn_of_backend(given, backend)
    except Exception as wrong:  # of whatever kind: the other ranks must hear of it
        error = error or wrong
    with ranks.during("building a sampler"):
        yield _agreed_settings(group, ranks, given, backend, record, error)


def refuse_to_build(given: dict[str, Any], error: TypeError) -> NoReturn:
    """Raise an error on every rank of a group that builds a sampler.

    Args:
        given: arguments of the call that builds it; without a group it is the default group.
    """
    known = {"weight": given.get("lm_head_weight"), "group": group_among(given)}
    others = dict.fromkeys(("bias", "shard", "vocab_size", "logit_scale", "logit_softcap"))
    with agree(**known, **others, error=error):
        raise error


def _agreed_settings(
    group: object,
    ranks: Ranks,
    given: dict[str, Any],
    backend: ChosenBackend,
    record: dict[str, Any],
    error: Exception | None,
) -> Settings:
    """Compile this rank's kernels, gather every rank's record or error, and return the settings."""

    def compile_kernels() -> None:
        nonlocal error
        if error is None and backend == "numba":
            try:
                from tpsample.backends.numba_.kernels.compiled_ahead import (
                    compile_missing,  # needs Numba
                )

                compile_missing(given["weight"], screened=given["screening"] is not None)
            except Exception as wrong:
                error = wrong

    ranks.prepare(compile_kernels)
    records = gather_or_raise(ranks, record, error)
    require_equal([r["same"] for r in records])
    if any(record["versions"] != records[0]["versions"] for record in records):
        log.warning("versions differ between ranks: %s", [r["versions"] for r in records])
    try:
        vocab_size, shards = _agreed_shards(given["vocab_size"], given["on_failed"], records)
    except RankMismatch as wrong:
        if ranks.world_size == 1:  # there is nobody to disagree with
            raise ValueError(str(wrong)) from None
        raise
    by_ids = sorted(range(ranks.world_size), key=shards.__getitem__)
    ranks.by_ids = None if by_ids == list(range(ranks.world_size)) else by_ids
    weight, bias = given["weight"], given["bias"]
    named_by = given["vocab_size"], given["shard"]
    if isinstance(group, str) and named_by == (None, None) and (variable := launched()):
        warn(
            f'group: "alone" takes the {vocab_size} rows of this process as the whole LM head, and '
            f"{variable} says that it has peers; pass vocab_size= where that is meant",
        )
    agreed = {
        "vocab_size": vocab_size,
        "shard": shards[ranks.rank],
        "backend": backend,
        "exchange": choose_exchange(given["exchange"], ranks, [r["reach"] for r in records]),
        # A model's own weight may require a gradient, which no step has.
        "weight": weight.detach(),
        "bias": None if bias is None else bias.detach(),
    }
    return Settings(
        ranks=ranks,
        may_fall_back=given["exchange"] == "auto",
        hosts=[record["reach"]["host"] for record in records],
        overlap=kernels_overlap(weight.device),
        seeds=SeedSource(records[0]["seed_root"]),
        **given | agreed,
    )


def _agreed_shards(
    vocab_size: int | None, on_failed: int, records: list[dict[str, Any]]
) -> tuple[int, list[VocabShard]]:
    """Return the vocabulary size and every rank's shard, from every rank's record.

    Raises:
        RankMismatch: they do not fit together, or `on_failed` is no id of that vocabulary.
    """
    held = [HeldRows(**record["held"]) for record in records]
    named = [
        None if record["shard"] is None else VocabShard(*record["shard"]) for record in records
    ]
    check_sliced(vocab_size, named, held)
    resolved_size, shards = resolve_shards(vocab_size, named, [weight.rows for weight in held])
    if on_failed >= resolved_size:
        raise RankMismatch(
            f"on_failed: expected -1 or an id below vocab_size={resolved_size}, got {on_failed}"
        )
    return resolved_size, shards


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute. Others may break near ties differently."""
    by_package = {"torch": str(torch.__version__)}
    for name in ("triton", "numba"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_package[name] = importlib.metadata.version(name)
    return by_package


def _backend(given: dict[str, Any]) -> ChosenBackend:
    """Return the backend that the arguments name, checked."""
    device, backend, screening = given["weight"].device, given["backend"], given["screening"]
    check_current("lm_head_weight", device)
    chosen = default_backend(device) if backend == "auto" else backend
    if chosen == "triton" and device.type != "cuda" and not interpreted():
        raise ValueError(
            f'backend: "triton" needs a GPU, lm_head_weight is on {device}; use backend="auto", '
            "or set TRITON_INTERPRET=1 before Python starts"
        )
    if chosen == "numba" and device.type != "cpu":
        raise ValueError(
            f'backend: "numba" needs a CPU, lm_head_weight is on {device}; use backend="triton"'
        )
    if chosen == "numba" and (reason := numba_missing()) is not None:
        raise ValueError(f'backend: "numba" is not available: {reason}')
    if screening and chosen == "torch":
        way_out = (
            numba_missing() if device.type == "cpu" and backend == "auto" else 'use backend="auto"'
        )
        raise ValueError(
            f'screening: "{screening}" needs backend "triton" or "numba", got "torch": {way_out}'
        )
    return chosen


def _warn_of_backend(given: dict[str, Any], backend: str) -> None:
    """Warn of a slow backend or a doubtful compiler, while ranks still hear of a filter's error."""
    device = given["weight"].device
    if given["backend"] == "auto" and device.type == "cpu" and backend != "numba":
        way_out = "unset TRITON_INTERPRET" if backend == "triton" else numba_missing()
        warn(
            f'backend: "auto" takes "{backend}" on this CPU, which is slow and meant for tests: '
            f'{way_out}; where this is meant, name it by backend="{backend}"',
        )
    if backend == "triton":
        import triton

        gpu = tile_table.Gpu.of(device)
        if doubt := compiler_doubt(0 if gpu.amd else gpu.arch, triton.__version__):
            warn(doubt)


def default_backend(device: torch.device) -> ChosenBackend:
    """Return the backend that backend="auto" means on a device."""
    if device.type == "cuda" or interpreted():
        return "triton"
    return cpu_backend() if device.type == "cpu" else "torch"


def cpu_backend() -> ChosenBackend:
    """Return the fastest available backend of a CPU, which is never the interpreter."""
    return "numba" if numba_missing() is None else "torch"


def _record(given: dict[str, Any], backend: str) -> dict[str, Any]:
    """Return what the ranks compare, as plain JSON values."""
    weight, shard = given["weight"], given["shard"]
    same = {name: value for name, value in given.items() if name not in _OWN} | {
        "layout": LAYOUT,
        "hidden_size": weight.shape[1],
        "dtype": str(weight.dtype),
        "device": weight.device.type,
        "bias": given["bias"] is not None,
        **asdict(given["head"]),
        "backend": backend,
        "tile_table": tile_table.fingerprint() if backend == "triton" else None,
        "tpsample": __version__,
    }
    record = {
        "same": same,
        "shard": None if shard is None else [shard.start, shard.stop],
        "held": asdict(HeldRows.of(weight)),
        "versions": versions(),
        "reach": reach(backend, weight.device),
        "seed_root": SeedSource().root,
    }
    copied: dict[str, Any] = json.loads(json.dumps(record))
    return copied
