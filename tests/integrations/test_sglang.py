"""The adapter for SGLang, against small fakes of what it reads."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import vllm_fakes as fakes
from tests.support.vllm_fakes import EOS, D, V
from tpsample import SamplingBatch, SamplingParams, UnsupportedParameter, reference
from tpsample.integrations import sglang
from tpsample.integrations.sglang import (
    LEFT_TO_SGLANG,
    REFUSED_OF_REQUEST,
    SAMPLED,
    check_request,
    params_of,
    seed_of_request,
)

README = Path(sglang.__file__).with_name("README.md")
HIDDEN = torch.randn(2, D, generator=torch.Generator().manual_seed(4))
CAP = 8

REFUSED = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_new_tokens"), 0),
    **dict.fromkeys(("logit_bias", "json_schema", "regex", "ebnf", "structural_tag")),
    **dict.fromkeys(("custom_params", "watermark", "beam_width")),
    "repetition_penalty": 1,
    "ebnf_full_assistant": False,
}
"""Fields that SGLang applies to logits of all tokens, with the value that asks for nothing."""

ASKS_FOR_NOTHING = {
    **dict.fromkeys((*SAMPLED, *LEFT_TO_SGLANG)),
    **REFUSED,
    "temperature": 1.0,
    "top_k": 1 << 30,
    "top_p": 1.0,
    "min_p": 0.0,
}


class Params(SimpleNamespace):
    """SGLang's `SamplingParams`, of a version with a field that nobody knows here."""

    __struct_fields__ = (*ASKS_FOR_NOTHING, "a_new_field")

    def __init__(self, **given):
        super().__init__(**{**ASKS_FOR_NOTHING, "a_new_field": "off", **given})

    def normalize(self, tokenizer):
        """Say greedy as top_k = 1."""
        if self.temperature == 0:
            self.temperature, self.top_k = 1.0, 1


class Req:
    """SGLang's, as its scheduler has it."""

    def __init__(self, rid, sampling_params):
        self.rid, self.sampling_params, self.aborted = rid, sampling_params, None
        self.return_logprob, self.custom_logit_processor = False, None

    def set_finish_with_abort(self, reason):
        self.aborted = reason


def asked(rid, **more):
    return Req(rid, Params(**more))


def test_every_field_of_sglangs_requests_is_honoured_left_to_it_or_refused():
    theirs = pytest.importorskip("sglang.srt.sampling.sampling_params", reason="needs SGLang")
    known = {*SAMPLED, *LEFT_TO_SGLANG, *REFUSED}
    assert set(theirs.SamplingParams.__struct_fields__) == known


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_OF_REQUEST, "a_new_field"])
def test_a_field_that_is_not_honoured_is_refused_at_the_door(name):
    check_request(asked("a", temperature=0.5, top_k=3, stop=["x"]))
    request = asked("a")
    setattr(request if name in REFUSED_OF_REQUEST else request.sampling_params, name, 0.5)
    with pytest.raises(UnsupportedParameter, match=f"^{name}: not "):
        check_request(request)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"temperature": 1e300}, "temperature: expected a finite fp32 number"),
        ({"sampling_seed": 2**64}, "seed: expected None or an int of 64 bits"),
        ({"top_k": 2.0}, "top_k: expected an int >= -1 .*, got 2.0"),
        ({"top_k": True}, "top_k: expected an int >= -1 .*, got True"),
        ({"top_k": 2**31}, r"top_k: expected at most 2\^31 - 1, got 2147483648"),
        ({"top_p": True}, "top_p: expected a number in"),
        ({"min_p": True}, "min_p: expected a number in"),
    ],
)
def test_a_number_that_cannot_be_taken_is_refused_at_the_door(wrong, told):
    """SGLang takes them, and a step with one would end the server."""
    check_request(asked("a", sampling_seed=2**64 - 1, top_k=2**31 - 1))
    with pytest.raises(ValueError, match=told):
        check_request(asked("a", **wrong))


def test_a_request_that_comes_by_another_door_is_ended_and_told_why():
    """SGLang's server in Rust has no `TokenizerManager`."""
    place, queue = sglang.Hooks(), []

    def original(scheduler, request, *, is_retracted=False):
        queue.append(request)

    refused, logprobs = asked("a", presence_penalty=1.0), asked("b", top_k=2.0)
    logprobs.custom_logit_processor = "x"
    others = [asked("c", top_k=7), refused]
    place.end_refused(original, "scheduler", refused)
    assert queue == [refused] and refused.aborted is None, "of another backend"
    place.armed = True
    for request in (refused, logprobs, others[0]):
        place.end_refused(original, "scheduler", request, is_retracted=False)
    assert queue[1:] == [refused, logprobs, others[0]]
    assert refused.aborted == "presence_penalty: not supported with tpsample"
    assert logprobs.aborted.startswith("custom_logit_processor: not")
    assert others[0].aborted is None and others[0].sampling_params.top_k == 7
    for request in (refused, logprobs):
        check_request(request)
        assert params_of(request).greedy and request.sampling_params.max_new_tokens == 1


def test_deterministic_inference_keeps_the_sampler_that_was_asked_for(caplog):
    hooks = sglang.Hooks()
    hooks.backends.add("tpsample")

    def original(view: SimpleNamespace) -> dict[str, str]:
        return {"sampling_backend": "pytorch"}

    for asked, found in (("tpsample", {}), ("flashinfer", original(SimpleNamespace()))):
        view = SimpleNamespace(sampling_backend=asked, enable_deterministic_inference=True)
        with caplog.at_level(logging.INFO):
            assert hooks.keep_backend(original, view) == found
    assert [record.message for record in caplog.records] == [
        "tpsample samples in deterministic inference, too"
    ]


def test_the_readme_names_what_is_refused():
    text = README.read_text()
    for name in (*REFUSED, *REFUSED_OF_REQUEST, "lora_path"):
        assert f"`{name}`" in text


def test_a_request_without_a_seed_has_that_of_its_name():
    named = SimpleNamespace(rid="a", sampling_params=SimpleNamespace(sampling_seed=None))
    other = SimpleNamespace(rid="b", sampling_params=SimpleNamespace(sampling_seed=None))
    assert seed_of_request(named) == seed_of_request(named) != seed_of_request(other)
    named.sampling_params.sampling_seed = 5
    assert seed_of_request(named) == 5


def test_nothing_changes_in_a_server_with_another_backend():
    place = sglang.Hooks()
    place.backends.add("tpsample")
    original = lambda *args: ("original", *args)  # noqa: E731
    assert place.hand_on(original, 1, 2, 3, 4, 5) == ("original", 1, 2, 3, 4, 5)
    assert place.keep_off(original, 1, 2, 3) == ("original", 1, 2, 3)
    assert place.keep_requests("made", batch_of(asked("a"))) == "made" and not place.requests
    place.backend_in_use = lambda: "flashinfer"
    refused = asked("a", regex="a")
    assert place.admit(refused, "manager", "given") is refused
    place.backend_in_use = lambda: "tpsample"
    with pytest.raises(UnsupportedParameter, match="regex"):
        place.admit(refused, "manager", "given")


def asks_for_nothing(**more):
    fields = {
        "grammar_mask": None,
        "logit_bias": None,
        "acc_additive_penalties": None,
        "acc_scaling_penalties": None,
        "penalizer_orchestrator": None,
        "has_custom_logit_processor": False,
        "update_regex_vocab_mask": lambda: None,
    }
    return SimpleNamespace(**{**fields, **more})


def test_what_came_past_the_door_is_not_dropped():
    place, runner = (
        sglang.Hooks(),
        SimpleNamespace(
            model_config=SimpleNamespace(hf_eos_token_id={EOS}), max_running_requests=300
        ),
    )
    place.armed = place.looked = True
    assert place.keep_off(None, runner, None, asks_for_nothing()) is None
    assert (place.eos, place.max_rows) == (EOS, 300)
    for more in (
        {"logit_bias": torch.zeros(1, V)},
        {"penalizer_orchestrator": SimpleNamespace(is_required=True)},
        {"has_custom_logit_processor": True},
    ):
        with pytest.raises(RuntimeError, match="would change logits, and there are none"):
            place.keep_off(None, runner, None, asks_for_nothing(**more))


def test_tokens_are_the_oracles_and_a_row_of_nan_ends(caplog):
    place = sglang.Hooks()
    place.armed = place.looked = True
    head = fakes.runner().model.lm_head
    head.org_vocab_size = V
    processor = SimpleNamespace(logit_scale=None, final_logit_softcapping=3.0)
    hidden = torch.cat([HIDDEN, torch.full((1, D), torch.nan)])
    handed = place.hand_on(None, processor, hidden, head, None)
    assert handed.shape == (3, 0)
    about = SimpleNamespace(hf_eos_token_id={9, EOS})
    runner = SimpleNamespace(model_config=about, max_running_requests=3)
    place.keep_off(None, runner, None, asks_for_nothing())

    rows = [
        asked("a", temperature=0.8, top_p=0.9, sampling_seed=1),
        asked("b", top_k=1, sampling_seed=2),
        asked("c", top_k=5, sampling_seed=3),
    ]
    place.keep_requests("made", object, batch_of(*rows))
    with caplog.at_level(logging.INFO, logger="tpsample"):
        sampler = place.build("alone", place.max_rows, 8)
    assert ["samples, not SGLang: LMHeadSampler(" in each.message for each in caplog.records] == [
        True
    ]
    found = sampler(hidden, place.rows(with_sets=False).batch, 5).token_ids.tolist()
    logits = reference.logits(HIDDEN, fakes.whole_weight(), logit_softcap=3.0)
    whole = torch.cat([logits, logits[:1]])
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=1),
        SamplingParams(temperature=0.0, seed=2),  # how SGLang's top_k = 1 reads
        SamplingParams(top_k=5, seed=3),
    ]
    oracle = SamplingBatch.from_params(params, vocab_size=V)
    expected = reference.sample(whole, oracle, 5).token_ids[:2].tolist()
    assert found == [*expected, EOS]
    assert expected[1] == int(logits[1].argmax())


def batch_of(*requests):
    return SimpleNamespace(reqs=list(requests))


def serving(rows):
    """Hooks in a server of a plain head, and its sampler for so many rows."""
    place = sglang.Hooks()
    place.armed = place.looked = True
    place.head.lm_head = fakes.runner().model.lm_head
    place.head.lm_head.org_vocab_size = V
    place.processor = SimpleNamespace(logit_scale=None, final_logit_softcapping=None)
    return place, place.build("alone", rows, CAP)


def test_rows_follow_their_requests_through_steps(monkeypatch):
    """Requests that sit a step out, join, leave and move draw what they draw alone."""
    (place, sampler), rows = serving(4), {name: asked(name, top_p=0.7) for name in "abcd"}
    rows["b"].sampling_params.min_p = 0.1
    loaded = []
    monkeypatch.setattr(
        sglang, "params_of", lambda its, seed: loaded.append(its.rid) or params_of(its)
    )
    states = dict(zip("abcd", torch.randn(4, D), strict=True))
    for position, names in enumerate(("ab", "ba", "c", "cba", "dc")):
        place.keep_requests("made", batch_of(*(rows[name] for name in names)))
        hidden = torch.stack([states[name] for name in names])
        found = sampler(hidden, place.rows(with_sets=False).batch, position).token_ids.tolist()
        params = [params_of(rows[name]) for name in names]
        alone = SamplingBatch.from_params(params, vocab_size=V)
        logits = reference.logits(hidden, fakes.whole_weight())
        assert found == reference.sample(logits, alone, position).token_ids.tolist()
    assert loaded == [*"ab", "c", *"ba", "d"]


def test_a_request_may_have_the_name_of_one_that_is_done():
    place, _ = serving(4)
    for seed, fields in ((1, {"top_k": 5}), (2, {"top_p": 0.5})):
        request = asked("a", sampling_seed=seed, **fields)
        place.keep_requests("made", batch_of(request))
        batch = place.rows(with_sets=False).batch
        assert batch.seed.tolist() == [seed]
        assert batch.requests == (params_of(request),)


def test_a_request_that_is_done_is_kept_by_nobody():
    """It has the ids of its prompt, images and rows of a cache, and rows with sets may be rare."""
    (place, _), batch = serving(4), batch_of(asked("a"))
    place.keep_requests("made", batch)
    place.rows(with_sets=True)
    done = weakref.ref(batch.reqs.pop())
    batch.reqs.append(asked("b"))
    place.keep_requests("made", batch)
    assert place.rows(with_sets=False).batch.rows == 1
    assert done() is None


def test_a_request_without_a_seed_has_sglangs_where_it_gives_one():
    (place, _), named = serving(4), asked("b", sampling_seed=7)
    batch = batch_of(asked("a"), named)
    place.keep_requests("made", batch)
    given = place.rows(with_sets=False, seeds=torch.tensor([42, 7])).batch
    assert given.seed.tolist() == [42, 7]
    batch.reqs = [named, asked("c"), asked("a")]
    place.keep_requests("made", batch)
    assert place.rows(with_sets=False, seeds=torch.tensor([7, 43, 42])).batch.seed.tolist() == [
        *(7, 43, 42)
    ]


def test_masks_are_the_kept_sets_of_the_rows_that_ask():
    place, sampler = serving(5)
    filters = ({"top_k": 5}, {"top_k": 1}, {"top_p": 0.99}, {"top_k": 8, "top_p": 0.6}, {})
    rows = [asked(name, **its) for name, its in zip("abcde", filters, strict=True)]
    place.keep_requests("made", batch_of(*rows))
    hidden = torch.randn(5, D, generator=torch.Generator().manual_seed(9))
    hidden[4] = torch.nan
    out = sampler(hidden, place.rows(with_sets=True).batch, 3)
    wanted, support = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 3])
    found = sglang.masks_of(out.kept, out.token_ids, wanted, support, CAP)
    ids, lengths, selected, of_all, statuses = found
    batch = SamplingBatch.from_params([params_of(each) for each in rows], vocab_size=V)
    logits = reference.logits(hidden, fakes.whole_weight())
    mask = reference.kept_mask(logits, batch)
    mask[1] = logits[1] == logits[1].max()
    assert statuses.tolist() == [0, 0, 1, 0, 2] and lengths.tolist()[:2] == [5, 1]
    for row in (0, 1, 3):
        its = mask[row].nonzero().flatten().tolist()
        assert sorted(ids[row, : lengths[row]].tolist()) == its
        expected = logits[row, its].double().log_softmax(0)[its.index(int(out.token_ids[row]))]
        assert selected[row].item() == pytest.approx(float(expected), abs=1e-6)
    assert of_all.shape == (2, CAP)
    assert torch.allclose(of_all.exp().sum(dim=1), torch.ones(2))
    some = sglang.masks_of(out.kept, out.token_ids, wanted[[3, 0]], None, CAP)
    assert torch.equal(some[0], ids[[3, 0]]) and some[3] is None


def test_a_request_of_sglang_is_ours():
    its = asked("a", temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, sampling_seed=4)
    fields = {"top_k": 7, "top_p": 0.9, "min_p": 0.1, "filter_order": "min_p_last"}
    assert params_of(its) == SamplingParams(temperature=0.5, seed=4, **fields)
    assert params_of(asked("a", top_k=1)).greedy
    assert params_of(asked("a")).seed == seed_of_request(asked("a"))


def test_modes_that_were_not_tried_are_refused():
    modes = {
        "speculative_algorithm": (None, "EAGLE"),
        "enable_dp_attention": (False, True),
        "enable_lora": (None, True),
        "enable_watermark": (False, True),
        "dllm_algorithm": (None, "LowConfidence"),
        "pp_size": (1, 2),
        "disable_cuda_graph": (True, False),
        "disable_overlap_schedule": (True, False),
    }
    plain = {"device": "cuda"} | {name: tried for name, (tried, _) in modes.items()}
    sglang.check_modes(SimpleNamespace(**plain))
    for name, (_, value) in modes.items():
        with pytest.raises(UnsupportedParameter, match="SGLang with tpsample does not run with"):
            sglang.check_modes(SimpleNamespace(**{**plain, name: value}))
