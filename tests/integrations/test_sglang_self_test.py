"""The step that SGLang takes before it serves: right, wrong, and of another version."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.test_sglang import Params, asks_for_nothing
from tests.support import vllm_fakes as fakes
from tests.support.stand_ins import stand_in
from tests.support.vllm_fakes import EOS, D, V
from tpsample.integrations import sglang

PASSED = "a first step of 3 requests returned the definition's tokens"


class Req:
    """SGLang's request."""

    lock: str
    extend_end: int

    def __init__(self, rid: str, text: str, ids: Any, params: Params) -> None:
        self.rid, self.ids, self.sampling_params, self.last_node = rid, list(ids), params, "root"
        self.full_untruncated_fill_ids: list[int] = []

    def init_next_round_input(self, tree_cache: Any) -> None:
        self.full_untruncated_fill_ids = self.ids


class Batch(SimpleNamespace):
    """SGLang's `ScheduleBatch`, which puts its requests in another order."""

    @staticmethod
    def init_new(reqs: list[Req], *its: Any) -> Batch:
        return Batch(reqs=reqs[::-1])

    def prepare_for_extend(self) -> None:
        self.seq_lens = torch.tensor([request.extend_end for request in self.reqs])


class Scheduler:
    """A scheduler whose model has no layer but its head, and whose hooks are these."""

    req_to_token_pool = token_to_kv_pool_allocator = tokenizer = spec_algorithm = None
    enable_overlap, is_generation, max_running_requests = False, True, 8

    def __init__(self, hooks: sglang.Hooks, late: int = 0) -> None:
        self.hooks, self.late, self.released = hooks, late, list[str]()
        self.disaggregation_mode = SimpleNamespace(value="null")
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        self.tree_cache = SimpleNamespace(lock=lambda node: "locked")
        self.lm_head = fakes.runner().model.lm_head
        self.lm_head.org_vocab_size = V

    def run_batch(self, batch: Batch) -> Any:
        hooks = self.hooks
        hooks.keep_requests("made", object, batch)
        generator = torch.Generator().manual_seed(7)
        of_token = torch.randn(V, D, generator=generator)
        hidden = of_token[[request.ids[-1] for request in batch.reqs]]
        hidden = hidden + 1e-3 * torch.randn(hidden.shape, generator=generator)
        processor = SimpleNamespace(logit_scale=0.5, final_logit_softcapping=3.0)
        handed = hooks.hand_on(None, processor, hidden, self.lm_head, None)
        about = SimpleNamespace(hf_eos_token_id={EOS})
        runner = SimpleNamespace(model_config=about, max_running_requests=8)
        hooks.keep_off(None, runner, None, asks_for_nothing())
        given = hooks.head.consume(handed)
        if hooks.head._sampler is None:
            hooks.build("alone", 8, 8)
        at = batch.seq_lens + self.late
        out = hooks.head.sampler(given, hooks.rows(with_sets=False).batch, at)
        return SimpleNamespace(next_token_ids=out.token_ids)

    def get_init_info(self) -> dict[str, str]:
        return {"status": "ready"}

    def release(self, request: Req, tree_cache: Any, *, checkpoint: bool) -> None:
        assert request.lock == "locked" and not checkpoint
        self.released.append(request.rid)


def start(monkeypatch: Any, late: int = 0) -> tuple[sglang.Hooks, Scheduler]:
    """Return hooks and a scheduler, beside stand-ins for SGLang's modules."""
    hooks = sglang.Hooks()
    hooks.armed = True
    scheduler = Scheduler(hooks, late)
    fake: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "9.9"},
        "sglang.srt.managers.schedule_batch": {"Req": Req, "ScheduleBatch": Batch},
        "sglang.srt.mem_cache.common": {"release_kv_cache": scheduler.release},
        "sglang.srt.sampling.sampling_params": {"SamplingParams": Params},
    }
    stand_in(monkeypatch, fake)
    monkeypatch.delitem(sys.modules, "tpsample.integrations.sglang_self_test", raising=False)
    return hooks, scheduler


def test_a_right_step_passes_and_gives_its_memory_back(monkeypatch, caplog):
    hooks, scheduler = start(monkeypatch)
    with caplog.at_level("INFO"):
        assert hooks.look_first(Scheduler.get_init_info, scheduler) == {"status": "ready"}
    assert PASSED in caplog.text and hooks.looked
    assert sorted(scheduler.released) == sorted(
        ["_tpsample_0_", "_tpsample_1_", "_tpsample_2_"] * 2
    )


def test_a_wrong_token_is_refused_with_both(monkeypatch):
    hooks, scheduler = start(monkeypatch, late=1)  # another version counts lengths differently
    expected = r"SGLang 9\.9 with tpsample returned the tokens \{.*\}, the definition has \{.*\};"
    with pytest.raises(RuntimeError, match=f"^self-test: a step of {expected}"):
        hooks.look_first(Scheduler.get_init_info, scheduler)


def test_a_structure_that_has_changed_is_refused_with_what_is_missing(monkeypatch):
    hooks, scheduler = start(monkeypatch)
    monkeypatch.delattr(Batch, "prepare_for_extend")
    with pytest.raises(
        RuntimeError, match=r"tpsample failed: AttributeError: .*prepare_for_extend"
    ):
        hooks.look_first(Scheduler.get_init_info, scheduler)


def test_a_version_that_starts_otherwise_serves_no_request(monkeypatch):
    _, scheduler = start(monkeypatch)
    batch = Batch.init_new([Req("a", "", [1, 2], Params(temperature=1.0, sampling_seed=1))])
    batch.seq_lens = torch.tensor([2])
    with pytest.raises(RuntimeError, match=r"^self-test: SGLang has another start .*was tried"):
        scheduler.run_batch(batch)


@pytest.mark.parametrize("where", ["prefill", "is_encoder_decoder"])
def test_where_a_step_needs_more_than_a_prompt_it_says_that_it_was_left_out(
    where, monkeypatch, caplog
):
    hooks, scheduler = start(monkeypatch)
    if where == "prefill":
        scheduler.disaggregation_mode.value = where
    else:
        scheduler.model_config.is_encoder_decoder = True
    hooks.look_first(Scheduler.get_init_info, scheduler)
    assert "no self-test" in caplog.text and hooks.looked and not scheduler.released


@pytest.mark.parametrize("where", ["armed", "is_generation"])
def test_a_process_that_samples_nothing_takes_no_step(where, monkeypatch):
    hooks, scheduler = start(monkeypatch)
    setattr(hooks if where == "armed" else scheduler, where, False)
    assert hooks.look_first(Scheduler.get_init_info, scheduler) == {"status": "ready"}
    assert not scheduler.released
