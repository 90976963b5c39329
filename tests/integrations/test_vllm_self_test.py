"""The step that a worker of vLLM takes before it serves: right, wrong, and of another version."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import vllm_fakes as fakes
from tests.support.ranks import run_ranks
from tests.support.stand_ins import stand_in
from tests.support.vllm_fakes import D, LogprobsTensors, Output, Request, V, V1State
from tpsample import VocabShard
from tpsample.integrations import self_test, vllm_v1

PASSED = "a first step of 3 requests returned the definition's tokens"


class Scheduled(SimpleNamespace):
    """vLLM's `SchedulerOutput`."""

    @staticmethod
    def make_empty() -> Scheduled:
        return Scheduled(scheduled_new_reqs=[], finished_req_ids=set())


def _check() -> Any:
    """Return `check_first_step`, imported beside stand-ins for vLLM's modules."""
    fake: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": lambda max_tokens, **its: Request(**its), "__version__": "9.9"},
        "vllm.v1.core.sched.output": {
            "SchedulerOutput": Scheduled,
            "NewRequestData": SimpleNamespace,
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, fake)
        patch.delitem(sys.modules, "tpsample.integrations.vllm_self_test", raising=False)
        from tpsample.integrations.vllm_self_test import check_first_step

        patch.delitem(sys.modules, "tpsample.integrations.vllm_self_test")
        return check_first_step


class Worker:
    """A worker whose runner puts the rows of a step in another order than they came."""

    def __init__(self, group: Any = "alone", **config: Any) -> None:
        self.model_runner = fakes.v1_runner(**config)
        self.vllm_config = self.model_runner.vllm_config
        self.vllm_config.kv_transfer_config = None
        self.model_config = self.model_runner.model_config
        self.model_config.is_encoder_decoder = False
        self.model_runner.kv_cache_config = SimpleNamespace(kv_cache_groups=["a", "b"])
        self.head = fakes.head_of(self.model_runner, group=group)
        vllm_v1.attach(self.model_runner, self.head, Output, LogprobsTensors)
        self.blocks: list[Any] = []
        self.order: list[str] = []

    def execute_model(self, scheduled: Any) -> None:
        runner = self.model_runner
        for name in scheduled.finished_req_ids:
            del runner.requests[name]
        if new := scheduled.scheduled_new_reqs:
            self.blocks = [each.block_ids for each in new]
            for each in new:
                runner.requests[each.req_id] = V1State(each.sampling_params, each.prompt_token_ids)
            self.order = [each.req_id for each in reversed(new)]
            fakes.v1_batch(runner, self.order)

    def sample_tokens(self, grammar_output: None) -> Any:
        runner, names = self.model_runner, self.model_runner.input_batch.req_ids
        generator = torch.Generator().manual_seed(7)
        of_token = torch.randn(V, D, generator=generator)
        last = [runner.requests[name].prompt_token_ids[-1] for name in self.order]
        noise = 1e-3 * torch.randn(len(names), D, generator=generator)  # of a batch, in bf16
        handed = runner.model.compute_logits(of_token[last] + noise)
        out = runner.sampler(handed, runner.input_batch.sampling_metadata)
        return SimpleNamespace(req_ids=names, sampled_token_ids=out.sampled_token_ids.tolist())


@pytest.mark.parametrize("config", [{}, {"method": fakes.Int8Method()}], ids=["fused", "int8"])
def test_a_right_step_passes_and_leaves_no_request(config, caplog):
    worker = Worker(**config)
    forward = worker.model_runner.model.processor.forward
    with caplog.at_level("INFO"):
        _check()(worker, worker.head)
    assert PASSED in caplog.text
    assert worker.model_runner.requests == {}
    assert worker.model_runner.model.processor.forward == forward
    assert worker.blocks == [([1], [1]), ([2], [2]), ([3], [3])], "no two rows share a block"


def test_a_wrong_token_is_refused_with_both(monkeypatch):
    worker = Worker()
    real = fakes.v1_batch

    def late(runner: Any, names: Any) -> None:  # another version counts lengths from elsewhere
        real(runner, names)
        runner.seq_lens += 1

    monkeypatch.setattr(fakes, "v1_batch", late)
    expected = r"vLLM 9\.9 with tpsample returned the tokens \{.*\}, the definition has \{.*\};"
    with pytest.raises(RuntimeError, match=f"^self-test: a step of {expected}"):
        _check()(worker, worker.head)


def test_rows_in_another_order_than_their_names_are_refused(monkeypatch):
    worker = Worker()
    real = fakes.v1_batch
    monkeypatch.setattr(fakes, "v1_batch", lambda runner, names: real(runner, names[::-1]))
    with pytest.raises(RuntimeError, match="the definition has"):
        _check()(worker, worker.head)


def test_a_model_that_hides_its_requests_counts_rows_as_they_come():
    identity = self_test._identity
    assert torch.equal(identity(torch.zeros(3, D), torch.zeros(3, D)), torch.eye(3, D))


def test_a_structure_that_has_changed_is_refused_with_what_is_missing():
    worker = Worker()
    del worker.model_runner.discard_request_mask
    with pytest.raises(RuntimeError, match=r"tpsample failed: AttributeError: .*discard_request"):
        _check()(worker, worker.head)


@pytest.mark.parametrize("where", ["kv_transfer_config", "is_encoder_decoder"])
def test_where_a_step_needs_more_than_a_prompt_it_says_that_it_was_left_out(where, caplog):
    worker = Worker()
    owner = worker.vllm_config if where == "kv_transfer_config" else worker.model_config
    setattr(owner, where, True)
    _check()(worker, worker.head)
    assert "no self-test" in caplog.text and worker.blocks == []


def test_a_rank_that_samples_nothing_takes_part_in_the_step():
    worker = Worker()
    worker.sample_tokens = lambda grammar_output: None
    _check()(worker, None)
    assert len(worker.blocks) == 3 and worker.model_runner.requests == {}


def _of_two_ranks() -> str:
    worker = Worker(group=None, shard=VocabShard.even(V, dist.get_rank(), 2))
    told: list[str] = []
    check = _check()
    check.__globals__["logger"] = SimpleNamespace(info=lambda text, *its: told.append(text % its))
    check(worker, worker.head)
    return told[0]


def test_two_ranks_compare_with_logits_of_both_shards():
    assert all(PASSED in told for told in run_ranks(2, _of_two_ranks))
