"""A batch that follows an engine's: rows join, leave, move and sit steps out."""

from __future__ import annotations

import random

import torch

from tpsample import LMHeadSampler, SamplingBatch, SamplingParams
from tpsample.integrations.engine_rows import EngineRequest, EngineRows

V, D, ROWS = 61, 8, 5


def request_of(name: int) -> EngineRequest:
    kinds = [
        SamplingParams(seed=name),
        SamplingParams(seed=name, top_p=0.7),
        SamplingParams(seed=name, repetition_penalty=1.5, presence_penalty=0.5),
        SamplingParams(seed=name, temperature=0.0, bad_words=[[3, 4], [name % V]]),
        SamplingParams(seed=name, logprobs=2, logit_bias={name % V: 5.0}),
    ]
    return EngineRequest(kinds[name % len(kinds)], [name % V, 3], [], end=name % V)


def test_a_row_has_the_tokens_it_has_alone_however_the_batch_moves():
    """120 steps of random adds, removals, swaps and condensing, against a dictionary of rows."""
    trace = random.Random(1)
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(1))
    sampler = LMHeadSampler(weight, group="alone", max_rows=ROWS, backend="torch")
    rows = EngineRows(V, ROWS, torch.device("cpu"))
    waiting, running, outputs, loads = list(range(30)), [], {}, []

    def load(name):
        loads.append(name)
        return request_of(name)._replace(output_token_ids=outputs[name])

    for _ in range(120):
        while waiting and len(running) < ROWS and trace.random() < 0.4:
            running.append(waiting.pop(0))
            outputs.setdefault(running[-1], [])
        if running and trace.random() < 0.3:  # preempted, or done: the last takes its place
            row = trace.randrange(len(running))
            last, gone = running.pop(), running[row : row + 1]
            if gone:
                running[row] = last
            waiting += gone or [last]
        if len(running) > 1 and trace.random() < 0.3:
            i, j = trace.sample(range(len(running)), 2)
            running[i], running[j] = running[j], running[i]
        scheduled = [name for name in running if trace.random() < 0.9]
        batch = rows.arrange(scheduled, load).batch
        assert rows.rows.ends.tolist() == [name % V for name in scheduled]
        if not scheduled:
            continue
        hidden = torch.stack([hidden_of(name, len(outputs[name])) for name in scheduled])
        positions = torch.tensor([2 + len(outputs[name]) for name in scheduled])
        out = sampler(hidden, batch, positions)
        batch.append(out.token_ids)
        for name, token_id in zip(scheduled, out.token_ids.tolist(), strict=True):
            assert token_id == alone(sampler, name, outputs[name])
            outputs[name].append(token_id)
    assert len(loads) > len(set(loads)) > 10  # rows sat steps out, and were loaded again


def hidden_of(name: int, step: int) -> torch.Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(1000 * name + step))


def alone(sampler: LMHeadSampler, name: int, output: list[int]) -> int:
    params, prompt, *_ = request_of(name)
    batch = SamplingBatch.from_params(
        [params], vocab_size=V, prompt_token_ids=[prompt], output_token_ids=[output]
    )
    hidden = hidden_of(name, len(output)).unsqueeze(0)
    return int(sampler(hidden, batch, len(output) + 2).token_ids[0])


def test_a_batch_that_did_not_change_is_not_touched():
    rows = EngineRows(V, ROWS, torch.device("cpu"))
    before = rows.arrange([1, 2], request_of)
    plan = before.batch.plan
    assert rows.arrange([1, 2], request_of) is before
    assert before.batch.plan is plan
