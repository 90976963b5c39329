"""The kernel that appends tokens, and its twin in plain PyTorch."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch

from tests.support.slots import V
from tpsample import SamplingBatch, SamplingParams, VocabShard
from tpsample.backends.triton_.arguments import append_tokens

KINDS: dict[str, list[dict[str, Any]]] = {
    "penalties": [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}, {}, {}],
    "masks": [{"bad_words": [[5, 6, 7, 8]]}, {"min_tokens": 3, "stop_token_ids": [4]}, {}, {}],
    "both": [{"presence_penalty": 0.1, "bad_words": [[1, 2]]}, {"repetition_penalty": 2.0}, {}, {}],
}


def _state(batch: SamplingBatch) -> dict[str, torch.Tensor]:
    """All that an append may write, without the slot that nobody reads."""
    tables = batch._table.controls
    assert tables is not None
    found = {"length": tables.length[:-1], "recent": tables.recent[:-1]}
    for shard, state in tables.states.items():
        if state.history.shape[1] > 1:
            found[f"history of {shard}"] = state.history[:-1]
            found[f"touched of {shard}"] = state.touched[:-1]
    return found


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("shards", [[], [(0, V)], [(3, 41), (41, V), (5, 5)]])
def test_appended_tokens_are_counted_as_by_plain_pytorch(kind, shards):
    """One token or several, of ids in and out of the vocabulary, by rows and by slots."""
    params = [SamplingParams(seed=row, **fields) for row, fields in enumerate(KINDS[kind])]
    tokens = {"prompt_token_ids": [[1, 2]] * 4, "output_token_ids": [[3, 4]] * 4}
    plain = SamplingBatch.of_slots(6, vocab_size=V)
    plain.put(range(4), params, **tokens)
    for start, stop in shards:
        plain.prepare(VocabShard(start, stop))
    plain._table.controls.keeps_digests = False
    by_kernel = copy.deepcopy(plain)
    by_kernel._table.controls.append_by = append_tokens
    pick, before = random.Random(kind), {name: its.clone() for name, its in _state(plain).items()}
    for named in ([2, 0, 3, 1], [1, -1, 1, 99, 0], [5, 3]):
        columns = torch.tensor([[pick.randrange(-9, V + 30) for _ in named] for _ in range(3)]).T
        for token_ids in (columns, columns[:, :1], columns[:, 2]):
            for batch in (plain, by_kernel):
                batch.select(torch.tensor(named)).append(token_ids)
        for (name, one), other in zip(
            _state(plain).items(), _state(by_kernel).values(), strict=True
        ):
            assert one.equal(other), f"{name} after {named}"
    changed = [name for name, its in _state(plain).items() if not its.equal(before[name])]
    assert bool(changed) == (kind != "penalties" or bool(shards))


def test_a_batch_is_pickled_without_the_backend_of_its_last_step():
    tokens = {"prompt_token_ids": [[1]], "output_token_ids": [[]]}
    params = [SamplingParams(seed=0, repetition_penalty=1.3)]
    batch = SamplingBatch.from_params(params, vocab_size=V, **tokens)
    batch._table.controls.append_by = append_tokens
    pickled = pickle.dumps(batch)
    assert b"tpsample.request" in pickled and b"tpsample.backends" not in pickled
    assert batch._table.controls.append_by is append_tokens
    assert pickle.loads(pickled)._table.controls.append_by is None
