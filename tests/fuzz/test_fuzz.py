"""Random steps of mixed rows against the oracle that shares no code with the library."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from functools import reduce
from operator import iadd

import pytest
import torch
import torch.distributed as dist

from tests.fuzz.heads import EveryRank, ModelHead, OneRank
from tests.fuzz.judge import Tally
from tests.fuzz.requests import THEMES
from tests.fuzz.story import Story
from tests.support.ranks import run_ranks
from tests.support.tiers import long

EXCHANGES = ("collective", "p2p", "two_level")
EVERY_THEME = tuple(THEMES)
STEPS = 12


def on_ranks(first_seed: int, num_rows: int, max_rows: int, themes: Sequence[str]) -> Tally:
    """Stories until a rank has compared `num_rows` rows; every step is compared by one in turn."""
    rank, world_size = 0, 1
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        socket.gethostname = lambda: "ab"[rank % 2]
    tally, rows, seed = Tally(), 0, first_seed
    while rows < num_rows * world_size:
        pick = random.Random(seed)
        theme = THEMES[pick.choice(themes)]
        head = ModelHead.make(pick, world_size, exact=False, most=theme.most_ids)
        screening = pick.choice([None, None, "int8"])
        options = {
            "backend": "numba" if screening else pick.choice(["numba", "numba", "torch"]),
            "screening": screening,
            "exchange": pick.choice(EXCHANGES) if world_size > 1 else "auto",
            "chunks": pick.choice([1, 1, 2, 5]),
            "max_rows": 4 * max_rows,
        }
        ranks = OneRank(rank, head, pick, from_logits=seed % 3 == 2, **options)
        story = Story(
            pick,
            head,
            ranks,
            theme,
            max_rows=max_rows,
            name=f"run_ranks({world_size}, on_ranks, {seed}, 1, {max_rows}, {list(themes)})",
            judged=lambda number: number % world_size == rank,
        )
        tally += story.run(STEPS)
        ranks.close()
        rows, seed = rows + story.taken, seed + 1
    return tally


def through_the_kernels(first_seed: int, num_rows: int, themes: Sequence[str]) -> Tally:
    """The kernels and `peer`, several ranks in this process, in the interpreter."""
    tally, seed = Tally(), first_seed
    while tally.rows < num_rows:
        pick = random.Random(seed)
        world_size = pick.choice([1, 2, 3, 5])
        theme = THEMES[pick.choice(themes)]
        head = ModelHead.make(pick, world_size, exact=True, most=min(300, theme.most_ids))
        how = {"chunks": pick.choice([1, 2]), "max_rows": 24}
        ranks = EveryRank(head, pick, from_logits=seed % 3 == 2, **how)
        name = f"through_the_kernels({seed}, 1, {list(themes)})"
        tally += Story(pick, head, ranks, theme, max_rows=4, name=name).run(4)
        ranks.close()
        seed += 1
    return tally


@pytest.mark.parametrize("theme", THEMES)
def test_random_steps_of_one_rank_are_the_oracles(theme):
    num_rows = 400 if theme == "mixed" else 250
    on_ranks(1, num_rows, 12, [theme]).require_none_wrong("1 rank")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("world_size", "first_seed", "rows", "max_rows", "themes"),
    [
        (2, 200, 60, 12, EVERY_THEME),
        (2, 200, 150, 12, ["controls", "texts"]),
        *long((3, 300, 60, 12, EVERY_THEME), (5, 500, 20, 12, EVERY_THEME)),
        *long(*((n, 10_000 * n, 13_000 // n, 24, EVERY_THEME) for n in (1, 2, 3, 5))),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_random_steps_of_ranks_are_the_oracles(world_size, first_seed, rows, max_rows, themes):
    how = {"timeout_s": 240 + rows, "group_timeout_s": 300}
    results = run_ranks(world_size, on_ranks, first_seed, rows, max_rows, themes, **how)
    reduce(iadd, results).require_none_wrong(f"{world_size} ranks")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("first_seed", "rows", "themes"),
    [
        *((seed, 10, EVERY_THEME) for seed in (1, 4)),
        *((1, 20, [theme]) for theme in ("controls", "texts")),
        *long((90_000, 1000, EVERY_THEME)),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_random_steps_of_the_kernels_are_the_oracles(first_seed, rows, themes):
    tally = through_the_kernels(first_seed, rows, themes)
    tally.require_none_wrong("virtual ranks, interpreter")


def test_a_wrong_token_is_noticed_with_its_story(monkeypatch):
    pick = random.Random(5)
    head = ModelHead.make(pick, 1, exact=False)
    ranks = OneRank(0, head, pick, backend="torch", max_rows=64)
    true_sample = ranks.sample

    def wrong(*arguments, **options):
        (out,) = true_sample(*arguments, **options)
        next_ids = (out.token_ids + 1) % head.size
        out.token_ids = torch.where(out.token_ids >= 0, next_ids, -1)
        return [out]

    monkeypatch.setattr(ranks, "sample", wrong)
    tally = Story(pick, head, ranks, max_rows=8).run(8)
    with pytest.raises(AssertionError, match="tokens"):
        tally.require_none_wrong("planted")
