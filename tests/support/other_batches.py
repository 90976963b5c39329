"""Random steps of batches that no story has: one request for all rows, and an engine's tensors."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import torch

from tests.support import oracle
from tests.support.judging import Judge, Tally
from tests.support.random_heads import ModelHead
from tests.support.random_requests import (
    Row,
    forced_tensor,
    grammar_tensor,
    request,
    tokens_so_far,
)
from tpsample import Needs, RankMismatch, SamplingBatch, SamplingParams

ORDERS = ("sequential", "joint", "min_p_last")


def one_request_for_all(pick: random.Random, head: ModelHead, ranks: Any, name: str) -> Tally:
    """Steps of one request over any number of rows; its masks count for them, or are refused.

    A refusal is a ValueError, on every rank.
    """
    size, judge = head.size, Judge(f"{name}, one request", head.size)
    fields = request(pick, size) | {"seed": pick.getrandbits(64)}
    prompt, output = (tokens_so_far(pick, size, prompt=p) for p in (True, False))
    batch = SamplingBatch.from_params(
        SamplingParams(**fields),
        vocab_size=size,
        prompt_token_ids=[prompt],
        output_token_ids=[output],
    )
    temperature = fields.get("temperature", 1.0)
    if pick.random() < 0.3:
        batch.temperature[0] = temperature = pick.choice([0.0, 3.0])
    for judge.number, count in enumerate([1, 3, 2, 3, 5]):
        hidden_states, position = head.hidden_states(pick, count), pick.getrandbits(20)
        grammar = oracle.bits(range(0, size, 2), size) if pick.random() < 0.5 else None
        forced = pick.randrange(size) if pick.random() < 0.5 else -1
        try:
            batch.grammar_bitmask = batch.forced_token_ids = None
            if grammar is not None:
                batch.grammar_bitmask = grammar_tensor([grammar] * count, size)
            if forced >= 0:
                batch.forced_token_ids = forced_tensor([forced] * count)
            outs = ranks.sample(hidden_states, batch, position)
        except ValueError:
            continue
        rows = [Row(fields, fields["seed"], prompt, output, temperature, grammar, forced)] * count
        answers = judge.answers(rows, head.raw(hidden_states), [position] * count, 1)
        for out in outs:
            judge.sampled(rows, out, answers)
    return judge.tally


def _write(pick: random.Random, its: dict[str, Any], choices: dict[str, Any]) -> None:
    """Write other values in place, as an engine does."""
    for name, values in choices.items():
        its[name].copy_(torch.tensor([pick.choice(values) for _ in its[name]]))


def engine_tensors(
    pick: random.Random, head: ModelHead, ranks: Any, name: str, *, rank: int | None = None
) -> Tally:
    """Steps over an engine's own tensors and over copies, by every order.

    Args:
        rank: of this process. Ranks with other orders are told so; None gives all the same.
    """
    size, judge, count = head.size, Judge(f"{name}, over", head.size), pick.randint(1, 8)
    with torch.inference_mode(False):
        its = {
            "temperature": torch.ones(count),
            "seed": torch.zeros(count, dtype=torch.int64),
            "top_k": torch.zeros(count, dtype=torch.int32),
            "top_p": torch.ones(count, dtype=torch.float64),
            "min_p": torch.zeros(count, dtype=torch.float64),
        }
    choices: dict[str, Any] = {
        "temperature": [0.0, 0.5, 1.0, 30.0],
        "seed": [pick.getrandbits(62) for _ in range(9)],
        "top_k": [0, -1, 1, 2, 20, size],
        "top_p": [1.0, 0.01, 0.5, 0.9],
        "min_p": [0.0, 0.0, 0.1, 0.9],
    }
    for judge.number in range(4):
        orders = [pick.choice(ORDERS) for _ in range(8)]
        if judge.number % 2 or rank is None:
            orders = orders[:1] * 8
        _write(pick, its, choices)
        batch = SamplingBatch.over(vocab_size=size, **its, filter_order=orders[rank or 0])
        chosen = pick.sample(range(count), pick.randint(1, count))
        rows = batch.select(torch.tensor(chosen)) if pick.random() < 0.5 else batch
        chosen = chosen if rows is not batch else list(range(count))
        change, read = pick.choice(["nothing", "values", "copy", "copied batch"]), its
        judge.log.append(f"{change} after select")
        if change == "values":
            _write(pick, its, choices)
        elif change == "copy" and rows is not batch:
            rows, used = copy.copy(rows), rows
            batch.select(torch.zeros(len(chosen), dtype=torch.int64), out=used)
        elif change == "copied batch":  # and what it was copied of means something else
            read = {key: each.clone() for key, each in its.items()}
            ways = [copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))]
            old, batch = batch, pick.choice(ways)(batch)
            rows = batch if rows is old else batch.select(torch.tensor(chosen))
            old.forced_token_ids, old.needs = torch.zeros(count, dtype=torch.int64), Needs()
            _write(pick, its, choices)
        hidden_states, position = head.hidden_states(pick, len(chosen)), pick.getrandbits(20)
        forced = [pick.randrange(size) if pick.random() < 0.2 else -1 for _ in chosen]
        if pick.random() < 0.3:
            rows.forced_token_ids = forced_tensor(forced)
        else:
            forced = [-1] * len(chosen)
        differ = len(set(orders[: len(head.shards)])) > 1
        try:
            outs = ranks.sample(hidden_states, rows, position)
        except RankMismatch as error:
            if not differ or not str(error).startswith("filter_order: must be the same"):
                judge.wrong(None, f"orders {orders}: {error}")
            continue
        if differ:
            judge.wrong(None, f"orders {orders} were taken for one")
            continue
        its_rows = []
        for at, forced_id in zip(chosen, forced, strict=True):
            fields = {key: values[at].item() for key, values in read.items()}
            fields["filter_order"] = orders[0]
            its_rows.append(
                Row(fields, int(fields["seed"]), [], [], fields["temperature"], None, forced_id)
            )
        answers = judge.answers(its_rows, head.raw(hidden_states), [position] * len(chosen), 1)
        for out in outs:
            judge.sampled(its_rows, out, answers)
    return judge.tally
