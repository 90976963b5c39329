"""`generate` of transformers with tokens from tpsample, on one rank and on two."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.support.calls import outcome
from tests.support.ranks import same_on_ranks
from tests.support.tiers import long
from tests.support.tiny_model import VOCAB_SIZE
from tests.support.tried import need_transformers
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams, UnsupportedParameter, reference
from tpsample.agreement import construction

transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")

IDS = torch.tensor([[0, 0, 5, 7, 9], [3, 4, 5, 6, 8], [0, 0, 0, 0, 2]])
MASK = (IDS != 0).long()
NEW = 7
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "plain": {"do_sample": True, "temperature": 0.8, "top_k": 0},
    "filters": {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalty": {"do_sample": True, "top_k": 0, "repetition_penalty": 1.4, "min_new_tokens": 3},
}


def adapter():
    from tpsample.integrations import transformers as found

    return found


def load(folder: Path, **options: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    model.generation_config.top_k = 0
    return model


def generate(model: Any, ids: torch.Tensor = IDS, mask: Any = MASK, **options: Any) -> Any:
    seeds = {"seeds": list(range(len(ids)))} if options.get("do_sample") else {}
    options = {"max_new_tokens": NEW, **seeds, **options}
    options = {"custom_generate": adapter().generate, "pad_token_id": 0, **options}
    found = model.generate(ids, attention_mask=mask, **options)
    return found[:, ids.shape[1] :].tolist()


def greedy_of(model: Any, **options: Any) -> Any:
    """The text of its own `generate`."""
    how = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **options}
    return model.generate(IDS, attention_mask=MASK, **how)[:, IDS.shape[1] :].tolist()


@pytest.fixture(scope="session")
def model(llama: Path) -> Any:
    return load(llama)


def test_greedy_text_is_generates_own(model):
    assert generate(model, do_sample=False) == greedy_of(model)


@pytest.mark.parametrize("kind", ["plain", "filters"])
def test_every_token_is_the_one_of_its_seed_and_position(model, kind):
    """The whole text once more, from the model's own logits."""
    options = KINDS[kind]
    rows = generate(model, **options)
    fields = {name: value for name, value in options.items() if name != "do_sample"}
    for row, tokens in enumerate(rows):
        prompt = IDS[row][MASK[row] == 1]
        text = torch.cat([prompt, torch.tensor(tokens)])
        with torch.no_grad():
            logits = model(text.unsqueeze(0)).logits[0, len(prompt) - 1 : -1].float()
        params = [SamplingParams(**fields, seed=row, filter_order="min_p_last")] * NEW
        batch = SamplingBatch.from_params(params, vocab_size=VOCAB_SIZE)
        positions = len(prompt) + torch.arange(NEW)
        assert reference.sample(logits, batch, positions).token_ids.tolist() == tokens


@pytest.mark.parametrize("kind", ["filters", *long("greedy", "plain", "penalty")])
def test_a_row_has_its_text_alone_and_beside_others_with_and_without_a_cache(model, kind):
    rows = generate(model, **KINDS[kind])
    assert generate(model, **KINDS[kind], use_cache=False) == rows
    for row, tokens in enumerate(rows):
        prompt = IDS[row][MASK[row] == 1].unsqueeze(0)
        assert generate(model, prompt, None, **KINDS[kind], seeds=[row]) == [tokens]


def test_a_row_has_its_text_behind_a_cache_that_holds_its_first_ids(model):
    """transformers takes whole prompts, or the ids that the cache does not hold."""
    ids, mask, options = IDS[:2], MASK[:2], KINDS["filters"]
    expected = generate(model, ids, mask, **options)
    for begins in (0, 4):
        cache = transformers.DynamicCache(config=model.config)
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, :4]
        with torch.no_grad():
            model(ids[:, :4], mask[:, :4], places, past_key_values=cache, use_cache=True)
        rest = ids[:, begins:]
        assert generate(model, rest, mask, past_key_values=cache, **options) == expected
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[1:, :4], past_key_values=cache, use_cache=True)
    alone = {"past_key_values": cache, "seeds": [1], **options}
    assert generate(model, ids[1:, 4:], mask[1:], **alone) == expected[1:]  # of a mask of ones


def test_threads_that_share_a_model_write_the_texts_they_write_alone(model):
    """Each step of a call waits for one of the other, which comes if the two overlap."""
    barrier = Barrier(2)

    def meet(input_ids: Any, scores: Any, **_: Any) -> Any:
        with contextlib.suppress(BrokenBarrierError):
            barrier.wait(0.3)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def text(seed: int, **options: Any) -> Any:
        return generate(model, do_sample=True, seeds=[seed, seed + 10, seed + 20], **options)

    expected = [text(1), text(2)]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(text, seed, stopping_criteria=[meet]) for seed in (1, 2)]
        assert [call.result() for call in calls] == expected


def test_the_head_is_as_it_was_and_no_sampler_is_left(model):
    before = model.lm_head.__dict__.get("forward")
    expected = model(IDS).logits
    generate(model, do_sample=True)
    assert model.lm_head.__dict__.get("forward") is before
    assert torch.equal(model(IDS).logits, expected)

    def broken(*_: Any, **__: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, do_sample=True, stopping_criteria=[broken])
    assert model.lm_head.__dict__.get("forward") is before


def test_while_a_call_lasts_there_are_no_logits(model):
    shapes = []
    module = adapter()
    seen = model.register_forward_hook(lambda *args: shapes.append(tuple(args[-1].logits.shape)))
    try:
        generate(model, do_sample=True, max_new_tokens=2)
    finally:
        seen.remove()
    assert shapes[-2:] == [(3, 1, 0), (3, 1, 0)]
    assert "seeds" in inspect.signature(module.generate).parameters


def test_hidden_states_are_those_that_the_head_is_given(llama):
    """Whatever the model does to them between its trunk and its head."""
    model = load(llama)
    head = adapter().TransformersHead(model)
    for factor in (1, 2):
        with head.aside():
            model(IDS)
        assert torch.equal(head.hidden_states, factor * model.base_model(IDS).last_hidden_state)
        model.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def test_rows_that_end_are_padded_and_stopping_criteria_end_them(model):
    rows = generate(model, do_sample=True)
    eos = rows[1][2]
    ended = generate(model, do_sample=True, eos_token_id=eos)
    assert ended[1] == [*rows[1][:3], *[0] * (len(ended[1]) - 3)]

    class After2(transformers.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return torch.full((len(input_ids),), input_ids.shape[1] >= IDS.shape[1] + 2)

    short = generate(model, do_sample=True, stopping_criteria=[After2()])
    assert short == [row[:2] for row in rows]


def test_a_streamer_is_given_the_prompt_every_token_and_the_end(model):
    streamer = Mock()
    rows = generate(model, do_sample=True, stream_to=streamer)
    *puts, (ended, *_) = streamer.method_calls
    prompt, *found = (call.args[0].tolist() for call in puts)
    assert prompt == IDS.tolist() and ended == "end"
    assert [list(row) for row in zip(*found, strict=True)] == rows


def test_several_sequences_of_a_prompt_and_a_sampler_used_again(model):
    sampler = adapter().sampler_of(model, max_rows=6)
    many = {"num_return_sequences": 2, "seeds": [0, 9, 1, 8, 2, 7], "sampler": sampler}
    for _ in range(2):
        found = generate(model, do_sample=True, **many)
        assert found[::2] == generate(model, do_sample=True)
        assert found[1] != found[0]
    unseeded = [generate(model, do_sample=True, seeds=None) for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    sampler.close()


def test_a_sampler_of_another_model_reads_this_one(model, tmp_path):
    from tests.support.tiny_model import save_tiny_model

    sampler = adapter().sampler_of(model, max_rows=6)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.flip(0).contiguous())
    expected = generate(other, do_sample=True)
    assert expected != generate(model, do_sample=True)
    assert generate(other, do_sample=True, sampler=sampler) == expected
    assert generate(model, do_sample=True, sampler=sampler) == generate(model, do_sample=True)
    save_tiny_model(tmp_path)
    capped = load(tmp_path)
    capped.config.final_logit_softcapping = 3.0
    with pytest.raises(ValueError, match=r"^sampler: has another|^lm_head_weight: expected"):
        generate(capped, do_sample=True, sampler=sampler)
    sampler.close()


def test_seeds_of_greedy_text_and_no_list_of_seeds_are_refused(model):
    with pytest.raises(ValueError, match=r"^seeds: do_sample=False takes .* pass do_sample=True"):
        generate(model, do_sample=False, seeds=[1, 2, 3])
    with pytest.raises(TypeError, match=r"^seeds: expected one per row, such as \[1, 2\], got 1"):
        generate(model, do_sample=True, seeds=1)
    with pytest.raises(
        TypeError, match=r"^seed: got 3; pass seeds=, one per row, such as \[1, 2\]"
    ):
        generate(model, do_sample=True, seed=3)
    with pytest.raises(TypeError, match=r"^generate: is called by transformers; call model\.gen"):
        adapter().generate(model, torch.tensor([[1, 2]]))


@contextlib.contextmanager
def _nan_of_row_0(model: Any, step: int) -> Any:
    """Spoil the hidden states of row 0 from a step on; the first pass is a probe."""
    passes: list[int] = []

    def spoil(lm_head: Any, given: Any) -> Any:
        passes.append(0)
        states = given[0].clone()
        if len(passes) > 1 + step:
            states[0] = torch.nan
        return (states,)

    with model.get_output_embeddings().register_forward_pre_hook(spoil):
        yield


def test_nobody_sees_the_id_of_no_token(model):
    streamer, seen = Mock(), []

    def criterion(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        seen.append(int(input_ids.min()))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    options = {"do_sample": True, "stream_to": streamer, "stopping_criteria": [criterion]}
    with (
        _nan_of_row_0(model, 1),
        pytest.raises(RuntimeError, match="row 0 has no token 1 behind its prompt, status NAN"),
    ):
        generate(model, **options)
    *puts, (last, *_) = streamer.method_calls
    assert last == "end" and len(seen) == 1
    assert min(seen) >= 0 and all(int(put.args[0].min()) >= 0 for put in puts)


def test_a_row_that_has_ended_may_have_no_token(model):
    """Without an end of text the model goes on to read what is drawn of such a row."""
    ended = [lambda input_ids, scores, **_: torch.arange(len(input_ids)) == 0]
    options = {"do_sample": True, "stopping_criteria": ended}
    with mock.patch.object(model.generation_config, "eos_token_id", None):
        expected = generate(model, **options)
        with _nan_of_row_0(model, 2):
            assert generate(model, **options)[1:] == expected[1:]


def test_what_is_no_model_no_sampler_and_no_streamer_is_refused(model):
    with pytest.raises(TypeError, match=r"^model: expected a model of transformers, got 'x'"):
        adapter().sampler_of("x", 2)
    with pytest.raises(TypeError, match=r"^sampler: expected one of sampler_of\(model\), got 'x'"):
        generate(model, do_sample=True, sampler="x")
    with pytest.raises(TypeError, match=r"^stream_to: expected a streamer of transformers, such"):
        generate(model, do_sample=True, stream_to=3)


def test_the_module_stands_for_its_function(model):
    """transformers would draw by itself without a word, because it calls no module."""
    options = {**KINDS["plain"], "seeds": [4, 5, 6]}
    assert generate(model, custom_generate=adapter(), **options) == generate(model, **options)


def test_a_soft_cap_and_a_scale_of_the_configuration_are_known(tmp_path):
    from tests.support.tiny_model import save_tiny_model

    need_transformers()
    save_tiny_model(tmp_path)
    capped = load(tmp_path)
    found = generate(capped, do_sample=False, repetition_penalty=1.0, max_new_tokens=4)
    assert found == greedy_of(capped, max_new_tokens=4)
    head = adapter().TransformersHead(capped)
    assert head.options == {"logit_scale": 1.0, "logit_softcap": 4.0}


class _OwnLinear(torch.nn.Linear):
    """As a quantised layer is one."""


def test_what_cannot_be_honoured_is_refused_by_name(model, llama, monkeypatch):
    refused: list[tuple[str, dict[str, Any]]] = [
        ("expected sampling or greedy search", {"num_beams": 2}),
        ("return_dict_in_generate, output_scores", {"return_dict_in_generate": True}),
        ("streamer: transformers does not hand it on .*; pass stream_to=", {"streamer": Mock()}),
        ("NoRepeatNGramLogitsProcessor is not supported", {"no_repeat_ngram_size": 2}),
        ("seeds: expected one per row, 3, got 2", {"seeds": [1, 2]}),
    ]
    for told, options in refused:
        with pytest.raises(ValueError, match=told):
            generate(model, **{"do_sample": True, **options})
    other = load(llama)
    other.lm_head.__class__ = _OwnLinear
    with pytest.raises(UnsupportedParameter, match=r"LlamaForCausalLM has _OwnLinear; a quantised"):
        generate(other)
    other.lm_head.__class__ = torch.nn.Linear
    with pytest.raises(UnsupportedParameter, match="its LM head is offloaded; load it onto one"):
        generate(load(llama).to("meta"))
    other.config.logits_scaling = 3.0  # which a Llama does not look at
    with pytest.raises(UnsupportedParameter, match="changes what its LM head returns in a way"):
        generate(other)
    other.config.logits_scaling = None
    forward = type(other).forward

    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        out.logits = out.logits + 1.0
        return out

    monkeypatch.setattr(type(other), "forward", shifted)
    with pytest.raises(UnsupportedParameter, match="scale and soft-cap of the configuration are"):
        generate(other)


def test_a_row_without_a_token_ends_the_call(model):
    others = [i for i in range(VOCAB_SIZE) if i != 5]
    rows = generate(model, do_sample=True, suppress_tokens=others, max_new_tokens=2)
    assert rows == [[5, 5]] * 3
    with pytest.raises(RuntimeError, match="row 0 has no token 0 behind its prompt, status EMPTY"):
        generate(model, do_sample=True, suppress_tokens=[*others, 5])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"suppress_tokens": [VOCAB_SIZE]}, "suppress_tokens: expected ids in"),
        ({"suppress_tokens": [-1]}, "suppress_tokens: expected token ids >= 0, got -1"),
        ({"bad_words_ids": [[VOCAB_SIZE, 1]]}, "bad_words_ids: expected ids in"),
        (
            {"bad_words_ids": [[VOCAB_SIZE, 1]], "suppress_tokens": [1]},
            "bad_words_ids or suppress_tokens: expected ids in",
        ),
        ({"sequence_bias": [[[VOCAB_SIZE], 1.0]]}, "sequence_bias: expected ids in"),
        ({"min_new_tokens": 2, "eos_token_id": VOCAB_SIZE}, "eos_token_id: expected ids in"),
    ],
    ids=str,
)
def test_an_error_names_the_argument_of_generate(given, told, model):
    with pytest.raises(ValueError) as raised:
        generate(model, do_sample=True, **given)
    assert str(raised.value).startswith(told)


def test_prompts_that_are_long_enough_need_no_least_length(model, recwarn):
    assert generate(model, min_length=1) == generate(model)
    assert not [each for each in recwarn if "stop_token_ids" in str(each.message)]


def test_a_loop_that_does_more_with_scores_is_named_with_the_way_out():
    drawn: Any = adapter()._Drawn(torch.tensor([3]))
    assert torch.argmax(drawn, dim=-1).tolist() == [3]
    with pytest.raises(RuntimeError, match=r"it called softmax; pip install 'transformers==5"):
        torch.softmax(drawn, dim=-1)


def test_rows_have_requests_of_their_own_with_any_version(model, monkeypatch):
    # Not by its name, under which transformers may have put another module meanwhile.
    monkeypatch.setattr(adapter().transformers, "__version__", "5.0.0")
    with pytest.raises(ImportError, match=r"^tpsample\.integrations\.transformers: transformers 5"):
        generate(model, do_sample=True)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1.5, seed=2, presence_penalty=1.0, logit_bias={7: 2.0}),
    ]
    rows = generate(model, params=params)
    for row, request in enumerate(params):
        prompt = IDS[row][MASK[row] == 1].unsqueeze(0)
        assert generate(model, prompt, None, params=[request]) == [rows[row]]
    monkeypatch.undo()
    assert rows[0] == generate(model, do_sample=False)[0]
    assert rows[1] == generate(model, do_sample=True, temperature=0.8)[1]
    for beside in ({"repetition_penalty": 1.2}, {"do_sample": True, "temperature": 0.5}):
        with pytest.raises(
            ValueError, match=r"^params: expected neither seeds nor .*, got .*Logits"
        ):
            generate(model, params=params, **{**beside, "seeds": None})
    with pytest.raises(ValueError, match=r"^params: .*, got seeds; set fields of params"):
        generate(model, params=params, seeds=[1, 2, 3])
    for asked in ({"logprobs": 0}, {"logprob_token_ids": [3]}):
        with pytest.raises(UnsupportedParameter, match=r"^params: logprobs and logprob_token_ids"):
            generate(model, params=[*params[:2], SamplingParams(**asked)])


def _on_ranks(folder: Path) -> dict[str, Any]:
    # As `without_the_interpreter` does in the process of the tests.
    mock.patch.object(construction, "interpreted", lambda: False).start()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{world_size}", LOCAL_RANK=f"{rank}")
    model = load(folder, tp_plan="auto")
    kind = type(model.lm_head.weight).__name__
    found: dict[str, Any] = {name: generate(model, **how) for name, how in KINDS.items()}
    with torch.no_grad():
        found["logits"] = model(IDS).logits.shape[-1]  # its own forward is back
    assert found["greedy"] == greedy_of(model)
    with torch.inference_mode():
        assert found["filters"] == generate(model, **KINDS["filters"])
    return found | {"kind": kind}


def _wrong_on_one_rank(folder: Path) -> list[str]:
    """Return what this rank is told of arguments that are wrong on rank 1."""
    mock.patch.object(construction, "interpreted", lambda: False).start()
    rank = dist.get_rank()
    os.environ.update(RANK=f"{rank}", WORLD_SIZE="2", LOCAL_RANK=f"{rank}")
    model = load(folder, tp_plan="auto")
    sampler = adapter().sampler_of(model, max_rows=3)
    whole = model.lm_head.weight.detach().full_tensor()
    alone, closed = (LMHeadSampler(whole, group="alone") for _ in range(2))
    closed.close()
    expected, told = generate(model, **KINDS["plain"]), []
    right: dict[str, Any] = {"sampler": sampler}
    wrongs = [("sampler", wrong) for wrong in ("x", alone, closed, None)]
    for name, wrong in [*wrongs, ("seeds", [1, 2]), ("mask", MASK[:2]), ("mask", 0 * MASK[:1] + 1)]:
        options = {**KINDS["plain"], **right, **({name: wrong} if rank else {})}
        told.append(outcome(lambda how=options: generate(model, **how))[1])
        assert generate(model, **KINDS["plain"], sampler=sampler) == expected
    plain = load(folder)
    shared = adapter().TransformersHead(plain).sampler(rank=rank, world_size=2, max_rows=3)
    for seeds in ([1, 2], [0, 1, 2]):
        options = KINDS["plain"] | {"sampler": shared} | ({"seeds": seeds} if rank else {})
        told.append(outcome(lambda how=options: generate(plain, **how))[1])
    return told


def test_what_is_wrong_on_one_rank_is_told_to_every_rank_before_the_model_runs(llama):
    told = same_on_ranks(2, _wrong_on_one_rank, llama, group_timeout_s=20)
    assert told == [
        "rank 1: sampler: expected one of sampler_of(model), got 'x'",
        "rank 1: sampler: has another size, dtype, scale, soft-cap or bias than the model's head; "
        "pass one of sampler_of(model), or leave sampler out",
        "rank 1: sampler: closed; build a new LMHeadSampler",
        "sampler: must be the same on every rank, got rank 0: given, rank 1: left out",
        "rank 1: seeds: expected one per row, 3, got 2",
        "rank 1: attention_mask: expected [3, 5], as input_ids has, got (2, 5); pass 1 for each "
        "id, and 0 for padding",
        "rank 1: attention_mask: expected [3, 5], as input_ids has, got (1, 5); pass 1 for each "
        "id, and 0 for padding",
        "rank 1: seeds: expected one per row, 3, got 2",  # of a whole head and a sharded sampler
        "",
    ]


def test_two_ranks_of_tensor_parallelism_write_the_text_of_one(model, llama):
    expected = {name: generate(model, **how) for name, how in KINDS.items()}
    kind = {"kind": "DTensor", "logits": VOCAB_SIZE}
    assert same_on_ranks(2, _on_ranks, llama) == expected | kind
