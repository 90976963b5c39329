"""After a warm-up, stories of random steps launch and compile nothing that was not there then."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, contiguous_format

from benchmarks.lab.launches import Launch, filled, listed
from tests.fuzz import requests
from tests.fuzz.heads import ModelHead, OneRank
from tests.fuzz.requests import ALL_KINDS, THEMES, Theme
from tests.fuzz.story import Story
from tests.support.tiers import long
from tests.support.virtual import small_tiles
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams
from tpsample.core.rules import ENDING
from tpsample.filters import kept_sets
from tpsample.request.kinds import KINDS, Kind
from tpsample.request.row_filter import MAX_TOP_WORDS, MAX_WEIGHED_WORDS

CONTROLS: dict[str, Kind] = {
    "logprobs": "logprobs",
    "allowed_token_ids": "allowed ids",
    "bad_words": "bad words",
    "min_tokens": "min_tokens",
    "repetition_penalty": "penalties",
    "presence_penalty": "penalties",
    "frequency_penalty": "penalties",
    "logit_bias": "bias",
}
"""The kind of a request that has a field."""
ALWAYS: tuple[Kind, ...] = ("plain", "grammar", "forced")
"""Kinds of every story: a request may ask for nothing, and any batch may have masks."""
WARM_UPS = {"samples and drafts": 3, "no arguments": 0, "kinds": 0}
"""Ways to warm up, and the samples and drafts that steps have there."""


class _Aligned(ModelHead):
    """A head whose hidden states are contiguous, as `warm_up` takes for granted."""

    def placed(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone(memory_format=contiguous_format)


def kinds_of(fields: dict[str, Any]) -> set[Kind]:
    """Return the kinds of a request, by the names that a user would give them."""
    found = {CONTROLS[name] for name in fields if name in CONTROLS}
    top_k, top_p = fields.get("top_k", 0), fields.get("top_p", 1.0) < 1
    if top_k > 0 and top_p:
        if top_k > MAX_WEIGHED_WORDS or fields.get("ties") == "keep":
            found.add("top_p in top_k")
        else:
            found.add("top_k, top_p" if top_k <= MAX_TOP_WORDS else "many top_k, top_p")
    elif top_k > 0 or top_p:
        found.add("top_p" if top_p else "top_k")
    found |= {rule.name for rule in ENDING if rule.cuts(fields.get(rule.name, rule.off))}
    return found or {"plain"}


@contextmanager
def _only(kinds: tuple[Kind, ...]) -> Iterator[None]:
    """Draw requests of these kinds alone, and drop all others."""
    draw = requests.request

    def request(pick: random.Random, size: int, theme: Theme) -> dict[str, Any]:
        while True:
            fields = draw(pick, size, theme)
            if kinds_of(fields) <= set(kinds):
                return fields

    with patch.object(requests, "request", request):
        yield


@contextmanager
def _compiled() -> Iterator[list[str]]:
    """List the kernels that Numba compiles, or loads."""
    from numba.core.dispatcher import Dispatcher

    found, add = list[str](), Dispatcher.add_overload

    def noted(self: Any, result: Any) -> None:
        found.append(self.py_func.__name__)
        add(self, result)

    with patch.object(Dispatcher, "add_overload", noted):
        yield found


def _new_launches(seed: int, steps: int, way: str) -> set[Launch]:
    """Warm a sampler up, and return what a story launches for the first time.

    The warm-up runs its kernels. A list of launches that nobody runs lacks what follows from
    results: the memory that no kernel wrote may say that all rows are decided.
    """
    pick, themes, most = random.Random(seed), list(THEMES.values()), WARM_UPS[way]
    theme, kinds = themes[seed % len(themes)], tuple(KINDS)
    if not most:
        theme = replace(theme, verified=0.0, samples=(None,))
    if way == "kinds":
        some = pick.sample(kinds, pick.randint(1, 4))
        theme, kinds = replace(theme, kinds=ALL_KINDS), tuple(dict.fromkeys((*ALWAYS, *some)))
    head = ModelHead.make(pick, 1, exact=True, most=min(300, theme.most_ids))
    how = {"screening": "int8" if seed % 3 == 0 else None, "max_rows": 24}
    ranks = OneRank(0, _Aligned(**vars(head)), pick, backend="triton", **how)
    (sampler,) = ranks.samplers
    small_tiles(sampler)
    with patch("tpsample.core.tensors.READ_ON", ()), listed(run_them=True) as warm, filled():
        drawn = {"num_samples": most, "num_drafts": most} if most else {}
        sampler.warm_up(*([kinds] if way == "kinds" else []), **drawn)
    as_on_a_gpu = patch.object(kept_sets, "readable", return_value=False)
    with as_on_a_gpu, _only(kinds), listed(run_them=True) as later:
        story = Story(pick, ranks.head, ranks, theme, max_rows=4, name=f"seed {seed}")
        story.run(steps).require_none_wrong(f"a warmed sampler, {', '.join(kinds)}")
    assert later
    return set(later) - set(warm)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("way", "seeds", "steps"),
    [
        ("no arguments", range(1, 2), 6),
        ("kinds", range(1, 4), 6),
        *long(*((way, range(1, 11), 50) for way in WARM_UPS)),
    ],
)
@pytest.mark.timeout(1800)
def test_a_warmed_sampler_launches_nothing_new_for_random_steps(way, seeds, steps):
    new = {seed: _new_launches(seed, steps, way) for seed in seeds}
    print(f"{len(seeds) * steps} steps, {sum(map(len, new.values()))} launches were not warm")
    assert not any(new.values()), new


@pytest.mark.heavy
@pytest.mark.parametrize(("seeds", "steps"), [(range(1, 3), 12), *long((range(1, 21), 25))])
@pytest.mark.parametrize("way", ["no arguments", "kinds"])
def test_a_warmed_sampler_of_a_cpu_compiles_nothing_for_random_steps(way, seeds, steps):
    pytest.importorskip("numba")
    for seed in seeds:
        pick = random.Random(seed)
        theme = THEMES[pick.choice(list(THEMES))]
        head = ModelHead.make(pick, 1, exact=False, most=theme.most_ids)
        ranks = OneRank(0, head, pick, backend="numba", from_logits=seed % 3 == 2, max_rows=48)
        ranks.samplers[0].warm_up(*([ALWAYS] if way == "kinds" else []))
        with _compiled() as late:
            Story(pick, head, ranks, theme, max_rows=12, name=f"seed {seed}").run(steps)
        assert late == []
    print(f"{len(seeds) * steps} steps")


def test_a_warmed_sampler_of_a_cpu_compiles_nothing_for_rows_of_every_method(monkeypatch):
    """Rows of each method are cut out of what two threads have found, so they have gaps."""
    pytest.importorskip("numba")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sampler = LMHeadSampler(torch.randn(99, 16), backend="numba")
    sampler.warm_up(["plain"])
    fields: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 300}]
    requests = [SamplingParams(seed=row, **each) for row, each in enumerate([*fields, *fields])]
    for order in (requests, sorted(requests, key=lambda each: each.top_p)):
        batch = SamplingBatch.from_params(order, vocab_size=99)
        with _compiled() as late:
            sampler(torch.randn(8, 16), batch, 5)
        assert late == []


def test_a_warmed_sampler_of_a_cpu_compiles_nothing_for_kept_sets():
    pytest.importorskip("numba")
    sampler = LMHeadSampler(torch.randn(99, 16), backend="numba")
    sampler.warm_up(["plain"])
    with _compiled() as late:
        for kind, fields in KINDS.items():
            requests = [SamplingParams(seed=row, **fields) for row in range(2)]
            batch = SamplingBatch.from_params(requests, vocab_size=99, kept_cap=9)
            kept = sampler(torch.randn(2, 16), batch, 5).kept
            assert kept is not None and kept.sizes.all(), kind
    assert late == []
