"""Request controls on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="needs typer and rich")

from tests.support.commands import GENERATE, TORCHRUN, invoke, run_command, texts
from tests.support.tiers import long
from tpsample.cli.requests import Request, fields_of, requests_of
from tpsample.request.as_json import from_json

COMMAND = ("generate", "--backend", "torch", "--max-new-tokens", 8, "--temperature", 1.2)


@pytest.mark.parametrize("world_size", [1, *long(2)])
def test_controls_change_the_texts_and_pass_the_check(tiny: Path, world_size: int) -> None:
    """Filters beside them."""
    plain = invoke(*COMMAND, "--model", tiny)
    first = texts(plain.stdout).split()[-1]
    settings = (
        *("repetition_penalty=1.5", "presence_penalty=1", "frequency_penalty=0.5"),
        *('logit_bias={"7": 3}', f'bad_words=["{first}"]', "min_tokens=4"),
        *("top_k=300", "top_p=0.95", "min_p=0.001"),
    )
    controls = tuple(word for setting in settings for word in ("--set", setting))
    if world_size == 1:
        done = invoke(*COMMAND, "--model", tiny, *controls)
    else:
        options = (*COMMAND[1:], "--model", tiny, *controls)
        done = run_command(*TORCHRUN, 2, *GENERATE, *options)
    every = {1: "1 rank", 2: "1 rank = 2 ranks"}[world_size]
    assert f"same tokens: {every} = oracle (40 tokens compared, 0 differ" in done.stdout
    assert texts(done.stdout) != texts(plain.stdout)
    answers = texts(done.stdout).replace("w5 w7 w9", "")
    assert first in texts(plain.stdout).split() and first not in answers.split()


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ("top_q=1", "top_q: not a field"),
        ("two\nlines\u001b[2J=1", "two lines [2J: not a field"),
        ("max_tokens=0", "max_tokens: has an option of its own; pass --max-new-tokens"),
        ("n=2", "n: has an option of its own; pass --num-samples"),
        ("temperature=1", "temperature: has an option of its own; pass --temperature"),
        ("seed=1", "seed: has an option of its own; pass --seed"),
        ('bad_words=[""]', "bad_words: expected texts that are not empty, got ''"),
        ('stop=[""]', "stop: expected a text or a list of texts, got ['']"),
        ("stop=\udcff", "set: stop: expected text in UTF-8, got '\\udcff'"),
        ('bad_words=["a\\ud800"]', "set: bad_words: expected text in UTF-8, got 'a\\ud800'"),
        ("top_p=2", "top_p: expected"),
        ("top_k=x", "top_k: expected"),
        ("bad_words=[[]]", "bad_words: expected"),
        ("bad_words=5", "bad_words: expected a list, got 5"),
        ("bad_words=[5]", "bad_words: "),
        ("bad_words=" + "[" * 100_000, "bad_words: expected a list, got str '[[["),
        ("stop_token_ids=5", "stop_token_ids: expected a list"),
        ("logit_bias=[1]", "logit_bias: expected an object"),
        ('logit_bias={"x": 1}', "logit_bias: expected token ids as keys"),
        ('logit_bias={"%s": 1}' % ("1" * 5000), "logit_bias: expected token ids as keys"),
        ('logit_bias={"05": 1}', "logit_bias: expected token ids as keys, got '05'"),
        ('logit_bias={"5": 1, "5": 2}', "logit_bias: expected an object"),
        ('logit_bias={"5": NaN}', "logit_bias[5]: expected a number"),
        ("min_tokens=-1", "min_tokens: expected"),
        ("epsilon_cutoff=hot", "epsilon_cutoff: expected"),
        ("min_p=Infinity", "min_p: expected"),
        ("logprobs=true", "logprobs: generate shows none; launch/examples/topk_trace.py does"),
        ("logprob_token_ids=[3]", "logprob_token_ids: generate shows none"),
        ("best_of=3", "best_of: not a field of SamplingParams; answers are not"),
        ("top_logprobs=2", "top_logprobs: not a field of SamplingParams; give logprobs="),
    ],
    ids=lambda value: value[:40],
)
def test_wrong_settings_are_refused_before_a_model_is_loaded(setting, match) -> None:
    options = ("--prompt", "w5", "--temperature", 1, "--set", setting, "--model", "/nowhere")
    done = invoke("generate", *options)
    assert done.exit_code == 1 and match in done.stderr, done.output
    assert len(done.stderr.splitlines()) == 1


def test_a_prompt_of_bytes_that_are_no_text_is_refused_before_a_model_is_loaded() -> None:
    done = invoke("generate", "--prompt", "w5", "--prompt", "a\udcff", "--model", "/nowhere")
    told = "prompt: expected text in UTF-8, got 'a\\udcff'; convert it"
    assert done.exit_code == 1 and told in done.stderr, done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--num-samples", 300, "--record", "x"),
            "record: expected at most 16384 tokens in a file,",
        ),
        ((), "max-new-tokens: expected at most 8191, because "),
    ],
    ids=["record", "model"],
)
def test_more_tokens_than_there_is_room_for_are_refused_before_one_is_drawn(
    tiny: Path, words: tuple[object, ...], told: str
) -> None:
    prompts = ("--prompt", "w5 w6", "--prompt", "w5")
    done = invoke(*COMMAND, "--model", tiny, *prompts, *words, "--max-new-tokens", 8192)
    assert done.exit_code == 1 and told in done.stderr, done.output
    done = invoke(*COMMAND, "--model", tiny, *prompts, "--max-new-tokens", 2, "--no-check")
    assert done.exit_code == 0, done.output


def test_a_seed_from_which_rows_count_too_far_is_refused_as_it_was_given() -> None:
    last = 2**64 - 1
    told = f"seed: expected at most {last - 3}, because row i draws with seed . i, got {last}"
    with pytest.raises(ValueError, match=told):
        requests_of(["p", "q"], (1.0,), last, num_samples=2)
    assert [drawn(row)[1] for row in requests_of("pq", (1.0,), last - 1)] == [last - 1, last]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="allowed_token_ids: "):
        requests_of(["p"], (1.0,), 0, ["allowed_token_ids=[5]", "bad_words=[[5]]"])


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ({"seed": None, "temperature": None, "top_k": None, "logit_bias": None}, {}),
        ({"logit_bias": {"17": -5, "3": 250, "4": -1e400}}, {17: -5.0, 3: 100.0, 4: -100.0}),
        ({"logprobs": 4, "top_k": -1}, {"logprobs": 4, "top_k": -1}),
    ],
    ids=["null", "string keys", "ours"],
)
def test_fields_of_a_json_object(sent: dict[str, Any], taken: dict[Any, Any]) -> None:
    found = from_json("sent", json.loads(json.dumps(sent)))
    assert found == ({"logit_bias": taken} if 17 in taken else taken)


def drawn(request: Request) -> tuple[float, int]:
    return request.fields["temperature"], request.fields["seed"]


def test_one_prompt_has_one_answer_and_others_by_request() -> None:
    (one,) = requests_of(["p"], (0.7,), 3)
    assert drawn(one) == (0.7, 3)
    rows = requests_of(["p", "q"], (0.0, 1.0), 5, ["top_k=2"], num_samples=2)
    assert [(each.prompt, *drawn(each)) for each in rows] == [
        ("p", 0, 5), ("p", 0, 6), ("q", 1, 7), ("q", 1, 8)
    ]  # fmt: skip
    rows = requests_of(["p"], (0.5, 1.0), 40, ["stop=end"], num_samples=2)
    assert [drawn(each) for each in rows] == [(0.5, 40), (0.5, 41), (1, 42), (1, 43)]
    assert [each.stop for each in rows] == [["end"]] * 4


def test_more_temperatures_than_prompts_are_refused() -> None:
    """Several prompts go through the temperatures, and would leave the last ones out."""
    options = ("--prompt", "w5", "--prompt", "w6", "--model", "/nowhere")
    hot = [word for t in (0.5, 0.7, 0.9) for word in ("--temperature", t)]
    done = invoke("generate", *options, *hot)
    told = "temperature: expected at most 2, one per prompt, got 3; leave 1 out, or pass one prompt"
    assert done.exit_code == 1 and told in done.stderr, done.output
    assert [each.fields["temperature"] for each in requests_of("pqr", (0.5, 0.7), 0)] == [
        0.5, 0.7, 0.5
    ]  # fmt: skip


def test_bad_words_may_be_texts_alone() -> None:
    for words in (["the"], [[5], "the"], [[5]]):
        assert from_json("params", {"bad_words": words}) == {"bad_words": words}


def test_a_setting_is_a_field_with_json_or_a_text() -> None:
    settings = ['logit_bias={"17": -5}', "stop=the end", "top_p=.5"]
    assert fields_of(settings) == ({"logit_bias": {17: -5.0}, "top_p": 0.5}, ["the end"])
    for settings, match in (
        (["top_k"], "^set: expected NAME=VALUE as in top_k=5, got 'top_k'"),
        (["top_k=x"], "^set: top_k: expected"),
        (["top_k=1", "top_k=2"], "'top_k' is given twice"),
        (["topk=1"], r"^set: topk: not a field of SamplingParams; did you mean top_k\?"),
    ):
        with pytest.raises(ValueError, match=match):
            fields_of(settings)


def letters(text: str) -> list[int]:
    """A token per character."""
    return [ord(letter) for letter in text]


def test_texts_are_forbidden_with_and_without_a_space() -> None:
    request = Request("p", {"bad_words": ["ab", [5]], "min_tokens": 2})
    params = request.params(letters, [9, 8])
    assert params.bad_words == ((97, 98), (32, 97, 98), (5,))
    assert (params.min_tokens, params.stop_token_ids) == (2, (8, 9))


def test_ends_of_a_model_that_is_not_loaded_yet_are_none_of_the_allowed_ids() -> None:
    fields = {"allowed_token_ids": [0, 1], "bad_words": [[1]], "min_tokens": 2}
    request = Request("p", fields)
    assert request.params(letters, [2]).allowed_token_ids == (0, 1)
    with pytest.raises(ValueError, match="forbid every id"):
        request.params(letters, [0])
