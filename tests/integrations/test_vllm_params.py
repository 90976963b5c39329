"""Every field of vLLM's requests, and every mode of its servers: honoured, or refused by name."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import vllm_fakes as fakes
from tests.support.vllm_fakes import EOS, Request, V
from tpsample import SamplingParams, UnsupportedParameter
from tpsample.integrations import vllm_modes, vllm_params
from tpsample.integrations.vllm_params import LEFT_TO_VLLM, REFUSED, SAMPLED, admit, to_params

README = Path(vllm_params.__file__).with_name("README.md")
MODE = "raw_logprobs"


def test_every_field_of_vllms_requests_is_honoured_left_to_it_or_refused():
    sampling_params = pytest.importorskip("vllm.sampling_params", reason="needs vLLM")
    fields = set(sampling_params.SamplingParams.__struct_fields__)
    known = [*SAMPLED, *LEFT_TO_VLLM, *REFUSED]
    assert fields == set(known)
    assert len(known) == len(set(known))


def test_the_fields_become_ours():
    same: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "logit_bias": {3: 1.5},
        "allowed_token_ids": [2, 3, EOS],
        "min_tokens": 4,
        "logprobs": 2,
    }
    words, stop = [[2, 3], [5]], {EOS, 9}
    request = Request(**same, top_k=V + 5, bad_words_token_ids=words, all_stop_token_ids=stop)
    assert to_params(request, V, "processed_logits") == SamplingParams(
        **same, bad_words=words, stop_token_ids=[EOS, 9], logprobs_mode="processed_logits"
    )


def test_chosen_ids_are_told_without_the_most_likely():
    params = to_params(Request(logprobs=2, logprob_token_ids=[5, 6]), V, MODE)
    assert params.logprobs == 0 and params.logprob_token_ids == (5, 6)
    assert to_params(Request(), V, MODE) == SamplingParams()


def test_min_tokens_without_ids_to_hold_back_is_nothing(recwarn):
    assert to_params(Request(min_tokens=3, all_stop_token_ids=set()), V, MODE).min_tokens == 0
    assert not recwarn.list


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_not_honoured_is_refused_by_name(name):
    with pytest.raises(UnsupportedParameter, match=rf"^{name}: .*{REFUSED[name][:30]}"):
        to_params(Request(**{name: [1]}), V, MODE)


def test_a_field_of_a_later_vllm_is_refused_where_a_request_sets_it(monkeypatch):
    monkeypatch.setitem(fakes.ASKS_FOR_NOTHING, "top_a", 0.5)
    monkeypatch.setitem(fakes.ASKS_FOR_NOTHING, "_top_a_of_the_front_end", None)
    assert to_params(Request(_top_a_of_the_front_end=0.2), V, MODE) == SamplingParams()
    with pytest.raises(UnsupportedParameter, match=r"^top_a: not .* does not know the field$"):
        to_params(Request(top_a=0.2), V, MODE)


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (Request(thinking_token_budget=5, logprobs=3), "thinking_token_budget: not supported"),
        (Request(bad_words_token_ids=[[V]]), rf"bad_words: expected ids in \[0, {V}\)"),
        (Request(allowed_token_ids=[3], bad_words_token_ids=[[3]]), "forbid every id in it"),
    ],
    ids=["field", "id", "contradiction"],
)
def test_what_the_front_end_lets_through_ends_one_request(request_, told, caplog):
    with caplog.at_level(logging.ERROR):
        params = admit("request 1", request_, V, MODE)
    assert params.allowed_token_ids == (EOS,)
    assert (params.logprobs is None) == (request_.logprobs is None)
    (record,) = caplog.records
    assert "request 1 is ended" in record.message and re.search(told, record.message)


@pytest.mark.parametrize(
    ("request_", "end"),
    [
        (Request(), EOS),
        (Request(eos_token_id=None, stop_token_ids=[11]), 11),
        (Request(eos_token_id=None, all_stop_token_ids=set()), 0),
        (Request(eos_token_id=V, stop_token_ids=[V, 11]), 11),
        (Request(eos_token_id=None, stop_token_ids=[-1], all_stop_token_ids={-1, 9}), 9),
        (Request(eos_token_id=None, stop_token_ids=[2**70], all_stop_token_ids={2**70}), 0),
    ],
)
def test_the_token_that_ends_a_request_is_its_own_and_of_the_vocabulary(request_, end):
    assert vllm_params.end_of(request_, V) == end
    request_.thinking_token_budget = 5  # which is refused
    assert admit("request 1", request_, V, MODE).allowed_token_ids == (end,)


def drafts(method: str = "ngram", *, v2: bool = False, **settings: Any) -> dict[str, Any]:
    """Settings of a server with drafts."""
    its = SimpleNamespace(method=method, **settings)
    return {"vllm_config.speculative_config": its, "vllm_config.use_v2_model_runner": v2}


REFUSED_MODES: list[tuple[str, dict[str, Any]]] = [
    ("--logits-processors", {"model_config.logits_processors": ["own.Processor"]}),
    (
        "--logits-processors beside --speculative-config",
        {"model_config.logits_processors": ["own.Processor"], **drafts(v2=True)},
    ),
    (
        "--logits-processors with raw logprobs",
        {"model_config.logits_processors": ["a.B"], "vllm_config.use_v2_model_runner": True},
    ),
    ("--watermark-config", {"vllm_config.watermark_config": object()}),
    ("--enable-trace-replay", {"model_config.enable_trace_replay": True}),
    ("--enable-prompt-embeds", {"model_config.enable_prompt_embeds": True}),
    (
        "--enable-batch-sharded-sampling",
        {"vllm_config.parallel_config.enable_batch_sharded_sampling": True},
    ),
    (
        "--prefill-context-parallel-size",
        {"vllm_config.parallel_config.prefill_context_parallel_size": 2},
    ),
    ("--speculative-config method", drafts("eagle3")),
    ("--speculative-config method", drafts("suffix", v2=True)),
    ("--speculative-config rejection_sample_method", drafts(rejection_sample_method="block")),
    (
        "--speculative-config enable_adaptive_verification",
        drafts("eagle", v2=True, enable_adaptive_verification=True),
    ),
    ("--async-scheduling", {"vllm_config.scheduler_config.async_scheduling": True}),
    ("--distributed-executor-backend external_launcher", {"broadcast_pp_output": True}),
    ("--runner pooling", {"is_pooling_model": True}),
]


def runner_with(settings: dict[str, Any]) -> Any:
    """A runner with some attributes, by their paths, that are not what a server has."""
    runner = fakes.runner()
    for path, value in settings.items():
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, runner), name, value)
    return runner


@pytest.mark.parametrize(("name", "settings"), REFUSED_MODES, ids=lambda x: str(x)[:30])
def test_a_mode_that_is_not_honoured_is_refused_by_name(name, settings):
    with pytest.raises(UnsupportedParameter, match=rf"does not run so: {name}: [^;]*(; |$)"):
        vllm_modes.check_modes(runner_with(settings))


def test_modes_of_the_surroundings_are_refused_too(monkeypatch):
    vllm_modes.check_modes(fakes.runner())
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    monkeypatch.setattr(vllm_modes, "entry_points", lambda group: [group])
    told = "entry points vllm.logits_processors: .*; .*VLLM_COMPUTE_NANS_IN_LOGITS: "
    with pytest.raises(UnsupportedParameter, match=told):
        vllm_modes.check_modes(fakes.runner())
    monkeypatch.delenv("VLLM_COMPUTE_NANS_IN_LOGITS")
    monkeypatch.setattr(vllm_modes, "entry_points", lambda group: [])  # as without the package
    vllm_modes.check_modes(fakes.runner())


def test_processors_are_taken_by_runner_v2_where_logprobs_are_processed():
    own = {"model_config.logits_processors": ["a.B"], "vllm_config.use_v2_model_runner": True}
    vllm_modes.check_modes(runner_with({**own, "model_config.logprobs_mode": "processed_logits"}))


@pytest.mark.parametrize("either", [False, True])
def test_without_asynchronous_scheduling_or_with_runner_v2_a_server_starts(either):
    paths = "vllm_config.scheduler_config.async_scheduling", "vllm_config.use_v2_model_runner"
    vllm_modes.check_modes(runner_with(dict.fromkeys(paths, either)))


def test_a_server_starts_with_drafts_that_are_verified():
    standard = {"rejection_sample_method": "standard", "enable_adaptive_verification": False}
    for runner, methods in vllm_modes.VERIFIED.items():
        for method in methods:
            vllm_modes.check_modes(runner_with(drafts(method, v2=runner == "V2", **standard)))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (drafts(v2=False), "needs --speculative-config and vLLM's runner V2; leave it out"),
        ({"vllm_config.use_v2_model_runner": True}, "needs --speculative-config"),
        (
            drafts("eagle", v2=True, draft_sample_method="probabilistic")
            | {"device": torch.device("cuda"), "model_config.enforce_eager": False},
            "draws no drafts in a CUDA graph; pass --enforce-eager, or leave draft_sample_method",
        ),
    ],
    ids=["V1", "no drafts", "a CUDA graph"],
)
def test_a_rule_of_verification_that_would_have_no_effect_or_a_wrong_one_is_refused(settings, told):
    runner = runner_with(settings)
    vllm_modes.check_verification(runner, "coupled")
    named = "--additional-config: tpsample: verification: 'block'"
    with pytest.raises(UnsupportedParameter, match=f"^{named} {told}"):
        vllm_modes.check_verification(runner, "block")


def test_a_rule_of_verification_is_taken_with_drafts_of_runner_v2():
    cuda = {"device": torch.device("cuda"), "model_config.enforce_eager": False}
    eager = cuda | {"model_config.enforce_eager": True}
    for more, drawn in (({}, "probabilistic"), (cuda, "greedy"), (eager, "probabilistic")):
        settings = drafts("eagle", v2=True, draft_sample_method=drawn) | more
        vllm_modes.check_verification(runner_with(settings), "rejection")


def test_every_refused_mode_has_a_case():
    cases = {name for name, _ in REFUSED_MODES}
    surroundings = {"entry points vllm.logits_processors", "VLLM_COMPUTE_NANS_IN_LOGITS"}
    assert cases | surroundings == set(vllm_modes.REFUSED)


def test_the_readme_says_what_is_refused_and_why():
    text = README.read_text()
    for name, reason in [
        *REFUSED.items(),
        *((name, why) for name, (_, why) in vllm_modes.REFUSED.items()),
    ]:
        assert f"| `{name}` | {reason} |" in text, name
    assert "Look for `UnsupportedParameter` in the log." in text
    assert 'the text so far and `finish_reason: "stop"`.' in text  # of a row without a token
