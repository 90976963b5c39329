"""Random steps of batches that no story has: one request for all rows, and an engine's tensors."""

from __future__ import annotations

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
from tpsample import RankMismatch, SamplingBatch, SamplingParams

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


def engine_tensors(pick: random.Random, head: ModelHead, ranks: Any, rank: int, name: str) -> Tally:
    """Steps over an engine's own tensors, by every order; ranks with other orders are told so."""
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
        if judge.number % 2:
            orders = orders[:1] * 8
        for key, values in choices.items():  # in place, as an engine does
            its[key].copy_(torch.tensor([pick.choice(values) for _ in range(count)]))
        batch = SamplingBatch.over(vocab_size=size, **its, filter_order=orders[rank])
        chosen = pick.sample(range(count), pick.randint(1, count))
        rows = batch.select(torch.tensor(chosen)) if pick.random() < 0.5 else batch
        chosen = chosen if rows is not batch else list(range(count))
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
            fields = {key: values[at].item() for key, values in its.items()}
            fields["filter_order"] = orders[0]
            its_rows.append(
                Row(fields, int(fields["seed"]), [], [], fields["temperature"], None, forced_id)
            )
        answers = judge.answers(its_rows, head.raw(hidden_states), [position] * len(chosen), 1)
        for out in outs:
            judge.sampled(its_rows, out, answers)
    return judge.tally
