"""Kinds of requests: one example of each launches what every request of its kind launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch

from tpsample.core.checks import check_int, describe
from tpsample.core.rules import ENDING
from tpsample.request.batch import SamplingBatch
from tpsample.request.controls.tables import num_words
from tpsample.request.params import SamplingParams
from tpsample.request.plan import BatchView
from tpsample.request.row_filter import FEW_LOGPROBS, MAX_TOP_WORDS
from tpsample.request.step_batch import StepBatch

Kind = str
"""A name of `KINDS`."""

_ENDING = tuple(rule.name for rule in ENDING)

KINDS: dict[Kind, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.9},
    "top_p in top_k": {"top_p": 0.9, "top_k": 1, "ties": "keep"},
    "top_k, top_p": {"top_k": 2, "top_p": 0.9},
    "many top_k, top_p": {"top_k": MAX_TOP_WORDS + 1, "top_p": 0.9},
    "top_k beside top_p": {"top_k": 2, "top_p": 0.9, "filter_order": "joint"},
    **{rule.name: {rule.name: rule.example} for rule in ENDING},
    "logprobs": {"logprobs": 2, "logprobs_mode": "processed_logprobs"},
    "allowed ids": {"allowed_token_ids": [0]},
    "bad words": {"bad_words": [[0, 0]]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [0]},
    "penalties": {"repetition_penalty": 1.2},
    "bias": {"logit_bias": {0: 1.0}},
    "grammar": {},
    "forced": {},
    "kept sets": {},
}
"""The fields of an example, which fit any vocabulary. Three more kinds have both top_k and top_p:
in a top_k over 1024 or with ties, in another top_k over 256, and beside a top_k up to 256. The last
three kinds belong to a batch: two masks, and a `kept_cap`."""

_BY_FIRST_WORDS: tuple[Kind, ...] = (
    "top_k", "top_k, top_p", "many top_k, top_p", "top_k beside top_p",
)  # fmt: skip
"""If all rows are of these kinds, their kept sets follow from first words."""

_REPORTS: tuple[Kind, ...] = ("kept sets", "logprobs")
"""Reports that need the ends of the kept sets of filtered rows, which then decide the tokens."""

_OF_ONE_ROW: tuple[Kind, ...] = ("plain", *_BY_FIRST_WORDS, "top_p", "top_p in top_k", *_ENDING)
"""A request is of exactly one of these kinds; those by first words precede the other filters."""

_SEARCHED: Kind = "top_p in top_k"
"""The best scores decide no row of this kind."""

_JUDGED: dict[Kind, dict[str, Any]] = {_SEARCHED: {"filter_order": "joint"}}
"""Further fields of an example. With them a step in fixed rounds judges the best scores before it
searches, as it does beside rows of other kinds. Without them it searches first."""

_OF_THE_HEAD: tuple[tuple[Kind, ...], ...] = (
    ("allowed ids", "bad words", "min_tokens", "grammar", "forced"),
    ("penalties",),
    ("bias",),
    (*_OF_ONE_ROW[1:], "logprobs", "kept sets"),
)
"""Kinds that the LM head cannot tell apart; it is compiled for each set of these."""

_OF_THE_MASK: tuple[tuple[Kind, ...], ...] = (
    ("allowed ids",), ("bad words", "min_tokens"), ("grammar",), ("forced",),
)  # fmt: skip
"""Likewise of the kernel that makes masks."""


def check_kinds(kinds: Sequence[Kind], rows: Sequence[int], most: int) -> None:
    """Raise a TypeError or ValueError for arguments of `warm_up` that no step can have.

    Args:
        most: the largest number of rows of a step.
    """
    for name, given in (("kinds", kinds), ("rows", rows)):
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise TypeError(f"{name}: expected a list or a tuple, got {describe(given)}")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KINDS:
            names = ", ".join(map(repr, KINDS))
            raise ValueError(f"kinds: expected some of {names}, got {describe(kind)}")
    for num_rows in rows:
        check_int("rows", num_rows, 1, most)


def batches_of(
    kinds: Sequence[Kind],
    num_rows: int,
    vocab_size: int,
    device: torch.device,
    *,
    most: int,
    num_drafts: int = 0,
    compiled: bool = False,
) -> Iterator[StepBatch | BatchView]:
    """Yield batches whose steps make every launch that steps of these kinds make, in any mix.

    There is a batch of each kind alone, and of all together with and without kept sets and
    logprobs. Kept sets and logprobs decide how a token is found. A filtered batch comes in fixed
    rounds as well, as steps over slots do on a GPU. The best scores may decide all rows of a
    filter, while other logits need a search. So a filter brings along a kind that is always
    searched.

    Args:
        num_rows: rows of each batch; a mix with more filters has more.
        most: the largest number of rows of a step.
        num_drafts: 0 leaves out the batches of a verification.
        compiled: whether a kernel is compiled for the arguments that are absent. Then there are
            also batches of slots, and one of each set of kinds that such a kernel tells apart.
    """
    how: dict[str, Any] = {"vocab_size": vocab_size, "device": device}
    if any(kind in _OF_ONE_ROW[1:] for kind in kinds):
        kinds = tuple(dict.fromkeys((*kinds, _SEARCHED)))
    reports = [kind for kind in _REPORTS if kind in kinds]
    by_first = [kind for kind in _BY_FIRST_WORDS if kind in kinds]
    reported = [(kind, report) for report in reports[:1] for kind in by_first]  # one is as another
    together: dict[tuple[Kind, ...], None] = {}
    for left_out in ((), ("kept sets",), _REPORTS):
        some = [kind for kind in kinds if kind not in left_out]
        together |= dict.fromkeys(_all_of(some, most))
    for mix in (*((kind,) for kind in kinds), *reported, *together):
        batch = _batch_of(mix, num_rows, **how)
        yield batch
        if batch.plan.filters is not None:
            for judged in (False, True)[: 1 + (_SEARCHED in mix)]:
                yield _batch_of(mix, num_rows, fixed_rounds=True, judged=judged, **how)
    if "logprobs" in kinds:
        filtered = [kind for kind in kinds if kind in _OF_ONE_ROW[1:]][:1]
        controlled = [kind for kind in kinds if kind not in (*_OF_ONE_ROW, *_REPORTS)][:1]
        mixes = (("logprobs", *others) for others in ((), filtered, controlled))
        for mix in dict.fromkeys(mixes):
            yield _batch_of(mix, num_rows, many_logprobs=True, **how)
    if compiled:
        yield from _batches_by_kernel(kinds, num_rows, num_drafts, **how)


def _batches_by_kernel(
    kinds: Sequence[Kind],
    num_rows: int,
    num_drafts: int,
    *,
    vocab_size: int,
    device: torch.device,
) -> Iterator[StepBatch | BatchView]:
    """Yield batches for kernels that are compiled for absent arguments; see `batches_of`."""
    how: dict[str, Any] = {"vocab_size": vocab_size, "device": device}
    by_first = [kind for kind in _BY_FIRST_WORDS if kind in kinds]
    stored = [kind for kind in kinds if kind in (*_OF_ONE_ROW[1:], "kept sets")][:1]
    for kind in ("plain", *stored):
        cap = 2 if kind == "kept sets" else None
        slots = SamplingBatch.of_slots(num_rows, kept_cap=cap, **how)
        slots.put(0, SamplingParams(seed=0, **KINDS[kind]))
        yield slots.select(torch.arange(num_rows, device=device), host=list(range(num_rows)))
    if by_first:  # beside their slots there may be some without filters, where nothing is searched
        yield _batch_of(("min_p",), num_rows, fixed_rounds=True, **how)
    for mix in dict.fromkeys((*_sets_of(kinds, _OF_THE_HEAD), *_sets_of(kinds, _OF_THE_MASK))):
        yield _batch_of(mix, num_rows, **how)
        if num_drafts:
            drafts = torch.zeros(1, max(1, num_rows - 1), dtype=torch.int64, device=device)
            batch = _batch_of(mix, 1, masked_rows=drafts.shape[1] + 1, **how)
            view = batch._with_drafts(drafts)
            yield view
            yield view._replace(plan=view.plan.storing_every_row)


def _all_of(kinds: Sequence[Kind], most: int) -> Iterator[tuple[Kind, ...]]:
    """Yield mixes of all kinds, each with as many filters as a step has rows.

    A step treats filters differently if first words decide them. The first filter is of that kind
    if any is, so it is in every mix.
    """
    filters = [kind for kind in _OF_ONE_ROW if kind in kinds]
    others = [kind for kind in kinds if kind not in _OF_ONE_ROW]
    first, rest, width = filters[:1], filters[1:], max(1, most - 1)
    for start in range(0, max(1, len(rest)), width):
        mix = (*first, *rest[start : start + width], *others)
        if len(mix) > 1 and (most > 1 or not rest):
            yield mix


def _sets_of(
    kinds: Sequence[Kind], exclusive: Sequence[Sequence[Kind]]
) -> Iterator[tuple[Kind, ...]]:
    """Yield each set of kinds that has at most one of each exclusive group.

    The empty set stands for plain rows, so it is left out unless they are among the kinds.
    """
    present = [[kind for kind in group if kind in kinds][:1] for group in exclusive]
    one_each = [kind for (kind,) in filter(None, present)]
    fewest = 0 if "plain" in kinds else 1
    for count in range(fewest, len(one_each) + 1):
        yield from combinations(one_each, count)


def _batch_of(
    mix: Sequence[Kind],
    num_rows: int,
    *,
    vocab_size: int,
    device: torch.device,
    fixed_rounds: bool = False,
    judged: bool = False,
    many_logprobs: bool = False,
    masked_rows: int | None = None,
) -> SamplingBatch:
    """Return a batch of a mix, whose masks allow all ids.

    Args:
        many_logprobs: ask for one more than `FEW_LOGPROBS`, which takes other kernels.

    A `kept_cap` of 2 stands for all larger ones. A set of one token is found in another way.
    """
    more = _JUDGED if judged else {}
    of_rows = [KINDS[kind] | more.get(kind, {}) for kind in mix if kind in _OF_ONE_ROW] or [{}]
    shared: dict[str, Any] = {}
    for kind in mix:
        shared |= {} if kind in _OF_ONE_ROW else KINDS[kind]
    if many_logprobs:
        ids = range(min(vocab_size, FEW_LOGPROBS + 1))
        shared |= {"logprobs": len(ids), "logprob_token_ids": list(ids)}
    num_rows = max(num_rows, len(of_rows))
    batch = SamplingBatch.from_params(
        [SamplingParams(seed=i, **shared, **of_rows[i % len(of_rows)]) for i in range(num_rows)],
        vocab_size=vocab_size,
        device=device,
        prompt_token_ids=[[0]] * num_rows,
        output_token_ids=[[0]] * num_rows,
        kept_cap=2 if "kept sets" in mix else None,
        fixed_rounds=fixed_rounds,
    )
    masked_rows = num_rows if masked_rows is None else masked_rows
    if "grammar" in mix:
        shape = masked_rows, num_words(vocab_size)
        batch.grammar_bitmask = torch.full(shape, -1, dtype=torch.int32, device=device)
    if "forced" in mix:
        batch.forced_token_ids = torch.full((masked_rows,), -1, device=device)
    return batch
