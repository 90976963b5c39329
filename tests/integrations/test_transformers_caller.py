"""Arguments of `model.generate` that transformers drops, ignores or does not check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tried import need_transformers
from tpsample import SamplingParams, UnsupportedParameter

transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")

IDS = torch.tensor([[5, 7, 9, 2], [3, 4, 5, 6]])
PADDED = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
PARAMS = [SamplingParams(seed=1), SamplingParams(seed=2)]
GREEDY = [SamplingParams(temperature=0)] * 2


@pytest.fixture(scope="module")
def model(llama: Path) -> Any:
    need_transformers()
    found = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    found.generation_config = transformers.GenerationConfig()
    return found


def generate(model: Any, ids: Any = IDS, **options: Any) -> list[list[int]]:
    from tpsample.integrations import transformers as adapter

    options = {"max_new_tokens": 4, "pad_token_id": 0, "custom_generate": adapter} | options
    found: list[list[int]] = model.generate(ids, **options)[:, -4:].tolist()
    return found


def config(**fields: Any) -> Any:
    return transformers.GenerationConfig(max_new_tokens=4, pad_token_id=0, **fields)


def test_do_sample_false_is_refused_beside_requests_that_draw(model):
    told = (
        r"^do_sample: expected True, or none, beside params\[1\] of temperature 0\.7, got False; "
        r"leave do_sample out, or pass SamplingParams\(temperature=0\)$"
    )
    params = [GREEDY[0], SamplingParams(seed=1, temperature=0.7)]
    expected = generate(model, params=params)
    for given in ({"do_sample": False}, {"generation_config": config(do_sample=False)}):
        with pytest.raises(UnsupportedParameter, match=told):
            generate(model, params=params, **given)
    assert generate(model, params=params, do_sample=True) == expected
    assert generate(model, params=GREEDY, do_sample=False) == generate(model, params=GREEDY)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"temperature": 0.1, "top_p": 0.1}, "temperature, top_p"),
        ({"generation_config": config(top_k=3)}, "top_k"),
        ({"min_p": 0.1, "typical_p": 0.5}, "min_p, typical_p"),
    ],
    ids=["arguments", "a configuration", "others"],
)
def test_what_transformers_ignores_without_do_sample_is_refused_beside_params(model, given, names):
    told = f"^params: expected neither seeds nor .* beside it, got {names}; set fields of params"
    with pytest.raises(UnsupportedParameter, match=told):
        generate(model, params=PARAMS, **given)


def test_arguments_that_change_nothing_may_stand_beside_params(model):
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "typical_p": 1.0}
    assert generate(model, params=PARAMS, **neutral) == generate(model, params=PARAMS)


def test_the_top_k_that_nobody_asked_for_may_stand_beside_params(model):
    """With do_sample=True transformers adds a top_k of 50, unless somebody sets another one."""
    expected = generate(model, params=PARAMS)
    assert generate(model, params=PARAMS, do_sample=True) == expected
    assert generate(model, params=PARAMS, generation_config=config(do_sample=True)) == expected
    told = r"^params: expected neither .*, got TopKLogitsWarper; set fields of params"
    asked: list[dict[str, Any]] = [
        {"do_sample": True, "top_k": 50},
        {"generation_config": config(do_sample=True, top_k=50)},
        {
            "do_sample": True,
            "logits_processor": [transformers.TopKLogitsWarper(50)],
        },
    ]
    for given in asked:
        with pytest.raises(UnsupportedParameter, match=told):
            generate(model, params=PARAMS, **given)
    model.generation_config.top_k = 50
    try:
        with pytest.raises(UnsupportedParameter, match=told):
            generate(model, params=PARAMS, do_sample=True)
    finally:
        model.generation_config = transformers.GenerationConfig()


def test_another_number_of_params_than_rows_is_named(model):
    for params, got in ((PARAMS[:1], 1), ([*PARAMS, *PARAMS], 4)):
        with pytest.raises(ValueError, match=rf"^params: expected one per row, 2, got {got}$"):
            generate(model, params=params)
    with pytest.raises(ValueError, match=r"^params: expected one per row, 4, got 2$"):
        generate(model, params=PARAMS, do_sample=True, num_return_sequences=2)
    with pytest.raises(TypeError, match=r"^params: expected a list of SamplingParams, one per row"):
        generate(model, params=PARAMS[0])


ONES = torch.ones(3, 6, dtype=torch.int64)
MASKS = {
    "one row, padded": PADDED[:1],
    "three rows, padded": torch.cat([PADDED, PADDED[:1]]),
    "one row": ONES[:1, :4],
    "three rows": ONES[:, :4],
    "too narrow": ONES[:2, :3],
    "too narrow, padded": PADDED[:, :3],
    "too wide": ONES[:2],
    "too wide, padded": torch.cat([PADDED, ONES[:2, :2]], dim=1),
}


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_another_shape_is_named(model, name, use_cache):
    mask, options = MASKS[name], {"params": PARAMS, "use_cache": use_cache}
    told = rf"^attention_mask: expected \[2, 4\], as input_ids has, got \({mask.shape[0]}, "
    told += rf"{mask.shape[1]}\); "
    with pytest.raises(UnsupportedParameter, match=told):
        generate(model, attention_mask=mask, **options)
    with pytest.raises(UnsupportedParameter, match=told):
        generate(
            model, attention_mask=mask, use_cache=use_cache, do_sample=True, num_return_sequences=2
        )


def test_a_mask_is_as_wide_as_the_ids_behind_a_cache_and_those_in_it(model):
    text = generate(model, params=PARAMS)
    for mask, width in ((ONES[:2, :5], 5), (ONES[:2], 6)):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(IDS[:, :3], past_key_values=cache, use_cache=True)
        given = {"params": PARAMS, "past_key_values": cache}
        told = rf"^attention_mask: expected \[2, 4\], as .*, or \[2, 7\] .*, got \(2, {width}\); "
        with pytest.raises(UnsupportedParameter, match=told):
            generate(model, attention_mask=mask, **given)
        assert generate(model, IDS[:, 3:], attention_mask=ONES[:2, :4], **given) == text


def test_embeddings_alone_are_named(model):
    embeds = model.get_input_embeddings()(IDS).detach()
    with pytest.raises(UnsupportedParameter, match=r"^inputs_embeds: .*, got no input_ids; pass"):
        generate(model, None, inputs_embeds=embeds, params=PARAMS)
    beside = {"inputs_embeds": embeds, "params": PARAMS}
    for mask in (None, ONES[:2, :4]):
        assert generate(model, attention_mask=mask, **beside) == generate(model, params=PARAMS)
