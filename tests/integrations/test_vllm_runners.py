"""The adapter on both runners of vLLM, against small fakes of what it reads."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support import vllm_fakes as fakes
from tests.support.ranks import same_on_ranks
from tests.support.vllm_fakes import EOS, D, Request, V
from tests.support.vllm_steps import (
    B_ENDS,
    DRAFTED,
    ORDERS,
    PROMPTS,
    REQUESTS,
    STEPS,
    WEIGHT,
    drafted_v2,
    expected,
    rows_of,
    step_v1,
    step_v2,
    v1,
    v2,
)
from tpsample import SamplingBatch, SamplingParams, Status, VocabShard, reference
from tpsample.integrations.vllm_params import to_params
from tpsample.integrations.vllm_steps import Failures


@pytest.mark.parametrize("runner", STEPS)
def test_every_token_is_the_oracles_however_the_batch_moves(runner):
    """Rows join, move, sit steps out and come back, with penalties that count what came out."""
    make, step = STEPS[runner]
    each, outputs = make(), {name: [] for name in REQUESTS}
    for names in (*ORDERS, ORDERS[-1]):
        out = step(each, names, rows_of(names))
        assert out.sampled_token_ids.shape == (len(names), 1)
        for row, name in enumerate(names):
            token_id = int(out.sampled_token_ids[row, 0])
            assert token_id == expected(name, outputs[name]), name
            outputs[name].append(token_id)


def test_a_batch_that_did_not_change_is_not_touched():
    runner = v1()
    fakes.v1_batch(runner, ["a", "b"])
    before = runner.sampler.rows()
    plan = before.batch.plan
    assert runner.sampler.rows() is before and before.batch.plan is plan


@pytest.mark.parametrize("runner", STEPS)
def test_logprobs_stand_where_vllm_reads_them(runner):
    make, step = STEPS[runner]
    names = ["b", "d", "a"]
    found = step(make(), names, rows_of(names)).logprobs_tensors
    logprobs = reference.logits(rows_of(names), WEIGHT).log_softmax(dim=1)
    assert found.logprob_token_ids.dtype == torch.int32 and found.logprobs.dtype == torch.float32
    top = logprobs[0].topk(2).indices.tolist()
    assert found.logprob_token_ids[0, :3].tolist() == [top[0], *top]
    # Chosen ids come right behind the drawn token, whatever other rows ask for.
    assert found.logprob_token_ids[1, 1:4].tolist() == [5, 9, 11]
    ids = found.logprob_token_ids[1, :4].long()
    assert torch.allclose(found.logprobs[1, :4], logprobs[1, ids].float(), atol=1e-5)
    assert (found.logprob_token_ids >= 0).all() and not found.logprobs.isnan().any()


def test_sampling_masks_are_the_kept_sets_of_the_tokens():
    """Row c has top_p and penalties, b is greedy, a and d could have drawn any id."""
    runner, names = v2(return_sampling_mask=True), ["c", "b", "a", "d"]
    fakes.v2_request(runner, "e", 5, Request(top_k=3, seed=8, allowed_token_ids=[4, 9]), [1, 1])
    runner.sampler.req_states.prefill_len.gpu[runner.sampler.req_states.req_id_to_index["a"]] = 9
    names.append("e")
    hidden = rows_of(names[:4])
    out = step_v2(runner, names, torch.cat([hidden, hidden[:1]]))
    lists = out.sampling_mask_tensors.to_cpu_nonblocking().tolists(out.num_sampled.numpy())
    found = np.split(lists.token_ids, lists.offsets[1:-1])
    params = to_params(REQUESTS["c"], V, "raw_logprobs")
    batch = SamplingBatch.from_params(
        [params], vocab_size=V, prompt_token_ids=[PROMPTS["c"]], output_token_ids=[[]]
    )
    mask = reference.kept_mask(reference.logits(hidden[:1], WEIGHT), batch)
    assert found[0].tolist() == mask[0].nonzero().flatten().tolist()
    assert found[1].tolist() == out.sampled_token_ids[1].tolist()
    assert lists.cu_num_generated_tokens == [0, 1, 2, 2, 3, 4], "the prompt of a goes on"
    assert found[2].tolist() == list(range(V)) and found[2].dtype == np.int32
    assert found[3].tolist() == [4, 9]
    assert step_v2(v2(), names[:4], hidden).sampling_mask_tensors is None


@pytest.mark.parametrize("runner", STEPS)
def test_a_row_of_nan_ends_its_request_and_no_other(runner, caplog):
    make, step = STEPS[runner]
    names = ["b", "a", "c"]
    hidden = rows_of(names)
    hidden[0] = torch.nan
    with caplog.at_level(logging.ERROR):
        out = step(make(), names, hidden)
    tokens = out.sampled_token_ids[:, 0].tolist()
    assert tokens == [B_ENDS, expected("a", []), expected("c", [])]
    assert out.logprobs_tensors.logprob_token_ids[0, 0] == B_ENDS
    assert out.logprobs_tensors.logprobs[0, 0] == -torch.inf
    told = [record.message for record in caplog.records]
    assert len(told) == 1 and "no token could be drawn, status NAN" in told[0]
    assert told[0].startswith("request b is ended")


def test_a_status_that_came_from_a_gpu_is_counted_once(caplog):
    counted = []
    failures = Failures(torch.device("cpu"), lambda status: counted.append(status.tolist()))
    status = torch.tensor([int(Status.OK), int(Status.EMPTY)])
    for done in (False, True):
        failures._last = (["a", "b"], status, SimpleNamespace(query=lambda done=done: done))
        failures.tell()
    failures.tell()
    assert counted == [[0, 2]] and len(caplog.records) == 1


def test_rows_in_the_middle_of_their_prompt_count_nothing_and_fail_silently(caplog):
    runner = v1()
    hidden = rows_of(["c", "a"])
    hidden[0] = torch.nan
    step_v1(runner, ["c", "a"], hidden, unfinished=["c"])
    assert not caplog.records
    # Of this seed, c would draw another token with a token of its own before.
    fakes.v1_batch(runner, ["c", "a"], ["c"])
    handed = runner.model.compute_logits(rows_of("ca"))
    runner.sampler(handed, runner.input_batch.sampling_metadata)
    out = step_v1(runner, ["c", "a"], rows_of(["c", "a"]))
    assert int(out.sampled_token_ids[0, 0]) == expected("c", [])


@pytest.mark.parametrize("runner", STEPS)
def test_a_step_that_warms_up_draws_nothing_and_changes_nothing(runner):
    make, step = STEPS[runner]
    each = make()
    step(each, ["a", "b"], rows_of(["a", "b"]))
    handed = each.model.compute_logits(torch.zeros(3, D))
    if runner == "V1":
        out = each.sampler(logits=handed, sampling_metadata=object())
    else:
        out = each.sampler(handed, fakes.v2_batch(each, ["x", "y", "z"], [1, 1, 1]))
    assert out.sampled_token_ids.tolist() == [[0]] * 3
    first = expected("a", [])
    assert int(step(each, ["a"], rows_of(["a"])).sampled_token_ids[0, 0]) == expected("a", [first])


def allowing(*token_ids: int) -> np.ndarray:
    bits = np.zeros(160, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("runner", STEPS)
def test_grammars_reach_their_rows_once(runner):
    make, step = STEPS[runner]
    each, names, constrained = make(), ["a", "b", "c"], ["c", "gone", "a"]
    bits = np.stack([allowing(17), allowing(18), allowing(19)])
    if runner == "V1":
        fakes.v1_batch(each, names)
        its = SimpleNamespace(scheduled_spec_decode_tokens={}, scheduled_new_reqs=[])
        each.execute_model_state = SimpleNamespace(scheduler_output=its)
        grammar = SimpleNamespace(structured_output_request_ids=constrained, grammar_bitmask=bits)
        assert each.sample_tokens(grammar) is None  # else vLLM would write on the logits
    else:
        batch = fakes.v2_batch(each, names)
        each.structured_outputs_worker.apply_grammar_bitmask(None, batch, constrained, bits)
    first = step(each, names, rows_of(names)).sampled_token_ids[:, 0].tolist()
    assert first == [19, expected("b", []), 17]
    out = step(each, names, rows_of(names)).sampled_token_ids[:, 0]
    assert out[0] == expected("a", [19])


@pytest.mark.parametrize("name", ["a", "new"])
def test_a_slot_that_is_given_to_another_request_is_loaded_anew(name):
    """Another one has its name, too, as one that was preempted has."""
    runner = v2()
    step_v2(runner, ["a", "b"], rows_of("ab"))
    del runner.sampler.req_states.req_id_to_index["a"]
    fakes.v2_request(runner, name, 1, Request(allowed_token_ids=[21]), [3])
    out = runner.sampler(
        runner.model.compute_logits(rows_of("cb")), fakes.v2_batch(runner, [name, "b"])
    )
    assert out.sampled_token_ids[0, 0] == 21
    assert runner.sampler.added == [1, 2, 3, 4, 1]  # vLLM's own states are kept


def test_a_request_that_has_the_name_of_one_that_left_is_loaded_anew():
    """One is aborted and sent again in a step, or a session of streamed input goes on."""
    runner, names = v1(), ["a", "c"]
    step_v1(runner, names, rows_of(names))
    runner.requests["a"] = fakes.V1State(Request(allowed_token_ids=[21]), [3])
    its = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id="a")])
    runner.execute_model_state = SimpleNamespace(scheduler_output=its)
    runner.sample_tokens(None)
    fakes.v1_batch(runner, names)
    loaded = runner.sampler.rows()
    assert loaded.batch.requests[0].allowed_token_ids == (21,)
    assert runner.sampler.rows() is loaded, "it is new once"
    out = step_v1(runner, names, rows_of(names)).sampled_token_ids[:, 0].tolist()
    assert out == [21, expected("c", [expected("c", [])])], "the output of c still counts"


def test_a_slot_is_free_once_its_request_has_left():
    """Else every step would go on to do what that request needed."""
    runner = v2()
    step_v2(runner, ["a", "c"], rows_of("ac"))  # c has filters and penalties
    known = runner.sampler.req_states.req_id_to_index
    for name in ("b", "c", "d"):
        del known[name]
    fakes.v2_request(runner, "new", 5, Request(seed=9), [3])
    names = ["a", "new"]
    out = runner.sampler(runner.model.compute_logits(rows_of("ab")), fakes.v2_batch(runner, names))
    assert int(out.sampled_token_ids[0, 0]) == expected("a", [expected("a", [])])
    assert runner.sampler.batch.select(torch.tensor([1, 5])).plan.stored_index is None


def test_what_a_client_may_ask_and_we_cannot_do_ends_its_request(caplog):
    runner = v1()
    runner.requests["a"].sampling_params = Request(thinking_token_budget=3, logprobs=1)
    out = step_v1(runner, ["a", "b"], rows_of("ab"))
    assert out.sampled_token_ids[:, 0].tolist() == [EOS, expected("b", [])]
    assert "thinking_token_budget" in caplog.text


@pytest.mark.parametrize("runner", DRAFTED)
def test_drafts_that_are_decoded_tokens_are_accepted_and_others_not(runner):
    """Rows with 2, 0 and 1 drafts; what comes out is what decoding without drafts draws."""
    make, step = DRAFTED[runner]
    each, first = make(depth=3), {name: expected(name, []) for name in "abc"}
    second = expected("a", [first["a"]])
    drafts = {"a": [first["a"], second + 1], "b": [], "c": [first["c"]]}
    out = step(each, drafts, rows_of("aaabcc"))
    assert out.sampled_token_ids.tolist() == [
        [first["a"], second, -1],
        [first["b"], -1, -1],
        [first["c"], expected("c", [first["c"]]), -1],
    ]
    tables = out.logprobs_tensors
    assert tables.logprob_token_ids.shape[0] == 9
    if runner == "V2":
        assert tables.cu_num_generated_tokens == [0, 3, 6, 9]
        assert out.num_sampled.tolist() == [2, 1, 2] and out.num_rejected.tolist() == [1, 0, 0]
    # The penalties of c count both tokens in the next step.
    after = expected("c", [first["c"], expected("c", [first["c"]])])
    for token_id in out.sampled_token_ids[2, :2].tolist():
        if runner == "V1":
            each.requests["c"].output_token_ids.append(token_id)
        else:
            fakes.v2_append(each, 3, token_id)
    assert int(STEPS[runner][1](each, ["c"], rows_of("c")).sampled_token_ids[0, 0]) == after


@pytest.mark.parametrize("runner", DRAFTED)
def test_a_step_in_which_no_row_has_drafts_is_a_plain_one(runner):
    make, step = DRAFTED[runner]
    out = step(make(depth=3), {"a": [], "b": []}, rows_of("ab"))
    assert out.sampled_token_ids.tolist() == [[expected("a", [])], [expected("b", [])]]


@pytest.mark.parametrize("runner", DRAFTED)
def test_a_row_of_nan_behind_its_drafts_ends_there(runner):
    make, step = DRAFTED[runner]
    hidden = torch.stack([rows_of("a")[0], torch.full((D,), torch.nan)])
    out = step(make(depth=2), {"a": [expected("a", [])]}, hidden)
    assert out.sampled_token_ids.tolist() == [[expected("a", []), EOS]]


@pytest.mark.parametrize("runner", DRAFTED)
def test_a_head_that_is_no_product_verifies_drafts_by_its_logits(runner):
    make, step = DRAFTED[runner]
    first = expected("a", [])
    out = step(make(depth=2, method=fakes.Int8Method()), {"a": [first]}, rows_of("aa"))
    assert out.sampled_token_ids.tolist() == [[first, expected("a", [first])]]


def test_drafts_within_a_prompt_or_behind_a_grammar_are_none():
    first, runner = expected("a", []), v2(depth=2)
    invalid = torch.tensor([False, True])
    out = drafted_v2(runner, {"a": [first]}, rows_of("aa"), invalid)
    assert out.sampled_token_ids.tolist() == [[first, -1]]
    runner = v2(depth=2)
    # Its prompt ends with the first position of this step, whose draft is a stand-in.
    runner.sampler.req_states.prefill_len.gpu[1] += 1
    out = drafted_v2(runner, {"a": [first]}, rows_of("aa"))
    assert out.sampled_token_ids.tolist() == [[first, -1]] and out.num_sampled.tolist() == [1]
    runner.sampler.req_states.prefill_len.gpu[1] += 7
    out = drafted_v2(runner, {"a": [first]}, rows_of("aa"))
    assert out.num_sampled.tolist() == [0] == out.num_rejected.tolist()


@pytest.mark.parametrize("allowed", [(16, 17, 18), (16, 15, 17, 18)])
def test_a_grammar_has_bits_for_every_position_of_runner_v2(allowed):
    """vLLM 0.33 has as many rows for a request without drafts, whose last ones nobody reads."""
    runner = v2(depth=2)
    runner.sampler.req_states.prefill_len.gpu[:] -= 1
    batch = fakes.v2_batch(runner, ["b", "a"], drafts=[[], [17]])
    bits = np.stack([allowing(token_id) for token_id in allowed])
    keep = runner.structured_outputs_worker.apply_grammar_bitmask
    for wrong in (bits[:2], np.concatenate([bits, bits[:1], bits])):
        with pytest.raises(RuntimeError, match=rf"^grammar_bitmask: .*, got {len(wrong)}; this"):
            keep(None, batch, ["b", "a"], wrong)
    keep(None, batch, ["b", "a"], bits)
    handed = runner.model.compute_logits(rows_of("baa"))
    out = runner.rejection_sampler(handed, batch, None, None)
    assert out.sampled_token_ids.tolist() == [[16, -1], [17, 18]]


def test_a_verification_that_warms_up_draws_nothing():
    runner = v2(depth=2)
    batch = fakes.v2_batch(runner, ["x", "y"], [1, 1], [[5], []])
    out = runner.rejection_sampler(
        runner.model.compute_logits(torch.zeros(3, D)), batch, None, None
    )
    assert out.sampled_token_ids.tolist() == [[0, 0], [0, 0]]
    assert not runner.rejection_sampler.enable_adaptive_verification


def test_sampling_masks_of_drafts_are_those_of_the_tokens_that_came_out():
    runner, first = v2(depth=3, return_sampling_mask=True), expected("b", [])
    out = drafted_v2(runner, {"a": [0, 0], "b": [first]}, rows_of("aaabb"))
    lists = out.sampling_mask_tensors.to_cpu_nonblocking().tolists(out.num_sampled.numpy())
    assert out.num_sampled.tolist() == [1, 2] and lists.cu_num_generated_tokens == [0, 1, 3]
    assert lists.offsets.tolist() == [0, V, V + 1, V + 2], "of a every id, of b the drawn ones"
    assert lists.token_ids[V:].tolist() == [first, expected("b", [first])]


def _tokens(**options) -> list[list[list[int]]]:
    runner = v1(**options)
    return [step_v1(runner, n, rows_of(n)).sampled_token_ids.tolist() for n in ORDERS]


def _tokens_of_two_ranks():
    return _tokens(group=None, shard=VocabShard.even(V, dist.get_rank(), 2))


def test_two_ranks_draw_the_tokens_of_one():
    assert same_on_ranks(2, _tokens_of_two_ranks) == _tokens()


def test_a_row_that_asks_for_no_seed_gets_one():
    runner = v1()
    runner.requests["a"].sampling_params = Request()
    step_v1(runner, ["a"], rows_of("a"))
    assert runner.sampler.rows().batch.unseeded == []
    assert to_params(Request(), V, "raw_logprobs") == SamplingParams()
