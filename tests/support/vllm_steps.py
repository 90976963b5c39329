"""Steps of both runners of vLLM, of fakes, and the oracle's tokens of their requests."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch

from tests.support import vllm_fakes as fakes
from tests.support.vllm_fakes import D, LogprobsTensors, Output, Request, V, V1State
from tpsample import SamplingBatch, reference
from tpsample.integrations import vllm_v1, vllm_v2, vllm_v2_drafts
from tpsample.integrations.vllm_params import to_params

WEIGHT = fakes.whole_weight()
HIDDEN = torch.randn(8, D, generator=torch.Generator().manual_seed(4))
B_ENDS = 9
REQUESTS = {
    "a": Request(temperature=0.8, seed=1),
    "b": Request(temperature=0.0, logprobs=2, eos_token_id=B_ENDS),
    "c": Request(top_p=0.6, seed=3, repetition_penalty=1.6, presence_penalty=0.4),
    "d": Request(seed=4, logprob_token_ids=[5, 9, 11]),
}
PROMPTS = {"a": [1, 2], "b": [3], "c": [4, 5, 6], "d": [8, 8]}


def v1(depth: int = 1, group="alone", **config):
    runner = fakes.v1_runner(**config)
    if depth > 1:
        runner.rejection_sampler = None
    head = fakes.head_of(runner, group=group, depth=depth)
    vllm_v1.attach(runner, head, Output, LogprobsTensors)
    for name, request in REQUESTS.items():
        runner.requests[name] = V1State(request, PROMPTS[name])
    return runner


def v2(depth: int = 1, group="alone", fused=True, **config):
    runner = fakes.v2_runner(**config)
    kinds = Output, LogprobsTensors, fakes.SamplingMaskLists, fakes.count_sampled
    head = fakes.head_of(runner, group=group, depth=depth, fused=fused)
    sampler = vllm_v2.attach(runner, head, vllm_v2.Kinds(*kinds))
    if depth > 1:
        vllm_v2_drafts.attach(runner, sampler)
    for slot, (name, request) in enumerate(REQUESTS.items(), 1):
        fakes.v2_request(runner, name, slot, request, PROMPTS[name])
    return runner


def step_v1(runner, names, hidden, unfinished=()) -> Output:
    fakes.v1_batch(runner, names, unfinished)
    handed = runner.model.compute_logits(hidden)
    assert handed.shape == (len(names), 0)  # nobody can take these for logits
    runner.execute_model_state = None
    out = runner.sampler(logits=handed, sampling_metadata=runner.input_batch.sampling_metadata)
    for name, token_id in zip(names, out.sampled_token_ids[:, 0].tolist(), strict=True):
        if name not in unfinished:
            runner.requests[name].output_token_ids.append(token_id)
    return out


def step_v2(runner, names, hidden) -> Output:
    batch = fakes.v2_batch(runner, names)
    out = runner.sampler(runner.model.compute_logits(hidden), batch)
    for row, slot in enumerate(batch.idx_mapping.tolist()):
        if out.num_sampled[row]:
            fakes.v2_append(runner, slot, int(out.sampled_token_ids[row, 0]))
    return out


def drafted_v1(runner, drafts, hidden) -> Output:
    """A step of requests with drafts, right behind their prompts."""
    fakes.v1_batch(runner, list(drafts))
    counts = [len(its) for its in drafts.values()]
    runner.seq_lens[: len(counts)] += torch.tensor(counts, dtype=torch.int32)
    every = [token_id for its in drafts.values() for token_id in its]
    metadata = SimpleNamespace(
        num_draft_tokens=counts,
        max_spec_len=max(counts),
        draft_token_ids=torch.tensor(every, dtype=torch.int32),
    )
    handed = runner.model.compute_logits(hidden)
    return runner.rejection_sampler(metadata, None, handed, runner.input_batch.sampling_metadata)


def drafted_v2(runner, drafts, hidden, invalid=None) -> Output:
    """A step of requests with drafts, right behind their prompts."""
    batch = fakes.v2_batch(runner, list(drafts), drafts=list(drafts.values()))
    # vLLM drafts behind a token that it sampled, so the last one of a prompt stands for that.
    runner.sampler.req_states.prefill_len.gpu[batch.idx_mapping] -= 1
    return runner.rejection_sampler(runner.model.compute_logits(hidden), batch, None, invalid)


STEPS = {"V1": (v1, step_v1), "V2": (v2, step_v2)}
DRAFTED = {"V1": (v1, drafted_v1), "V2": (v2, drafted_v2)}
TRACE = random.Random(2)
ORDERS = [TRACE.sample("abcd", count) for count in (2, 4, 3, 3, 2, 1, 4, 3, 4, 2, 3, 4, 3, 2)]


def rows_of(names):
    return HIDDEN[[ord(name) - ord("a") for name in names]]


def expected(name: str, output: list[int], weight=WEIGHT, **head) -> int:
    """The oracle's token of a request that has this output."""
    batch = SamplingBatch.from_params(
        [to_params(REQUESTS[name], V, "raw_logprobs")],
        vocab_size=V,
        prompt_token_ids=[PROMPTS[name]],
        output_token_ids=[output],
    )
    logits = reference.logits(rows_of([name]), weight, **head)
    position = len(PROMPTS[name]) + len(output)
    return int(reference.sample(logits, batch, position).token_ids[0])
