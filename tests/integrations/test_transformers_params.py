"""Logits processors of transformers as requests: the same law, or a refusal by name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tried import need_transformers

need_transformers(module=True)

from transformers.generation import logits_process as lp  # noqa: E402

from tpsample import SamplingBatch, UnsupportedParameter, reference  # noqa: E402
from tpsample.integrations import transformers_params as params_of  # noqa: E402
from tpsample.integrations.transformers_params import HONOURED, REFUSED, Prompts, requests_of  # noqa: E402

V, EOS = 40, torch.tensor([38, 39])
PAD = 0
IDS = torch.tensor([[PAD, PAD, 5, 6, 7], [1, 2, 3, 4, 5], [PAD, 9, 9, 9, 9]])
MASK = (IDS != PAD).long()
PROMPTS = Prompts.of(IDS, MASK)
README = Path(params_of.__file__).with_name("README.md")


def requests(*processors: Any, do_sample: bool = True, prompts: Prompts = PROMPTS):
    return requests_of(processors, do_sample=do_sample, prompts=prompts, seeds=[1, 2, 3])


def classes() -> set[str]:
    own = (each for each in vars(lp).values() if inspect.isclass(each))
    return {
        each.__name__
        for each in own
        if issubclass(each, lp.LogitsProcessor) and each is not lp.LogitsProcessor
    }


def test_every_processor_is_honoured_or_refused():
    assert classes() == set(HONOURED) | set(REFUSED)
    assert not set(HONOURED) & set(REFUSED)


def test_the_readme_names_every_processor_and_says_why_it_is_refused():
    text = README.read_text().partition("## vLLM")[0]
    named = set(re.findall(r"`(\w+(?:Processor|Warper|Penalty|Normalization|Detection))`", text))
    assert named == classes()
    for name, reason in REFUSED.items():
        assert f"| `{name}` | {reason} |" in text


COUNTED = (MASK == 0).sum(dim=1)
CASES = {
    "temperature": [lp.TemperatureLogitsWarper(0.6)],
    "top_k": [lp.TopKLogitsWarper(7)],
    "top_p": [lp.TemperatureLogitsWarper(1.4), lp.TopPLogitsWarper(0.7)],
    "min_p": [lp.MinPLogitsWarper(0.2)],
    "epsilon": [lp.TemperatureLogitsWarper(0.6), lp.EpsilonLogitsWarper(0.03)],
    "eta": [lp.TemperatureLogitsWarper(0.6), lp.EtaLogitsWarper(0.2)],
    "filters": [
        lp.TemperatureLogitsWarper(2.0),
        lp.TopKLogitsWarper(20),
        lp.TopPLogitsWarper(0.8),
        lp.MinPLogitsWarper(0.3),
    ],
    "repetition": [lp.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=COUNTED)],
    "repetition of output": [lp.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=5)],
    "min_length": [lp.MinLengthLogitsProcessor(8, EOS)],
    "min_length, over": [lp.MinLengthLogitsProcessor(6, EOS)],
    "min_new_tokens": [
        lp.MinLengthLogitsProcessor(1, EOS),
        lp.MinNewTokensLengthLogitsProcessor(5, 3, EOS),
    ],
    "bad words": [lp.NoBadWordsLogitsProcessor([[4], [5, 8], [9, 9, 9, 12]], EOS)],
    "bad words, longer than a prompt": [
        lp.NoBadWordsLogitsProcessor([[1] * 9, [11, 13, 4]], EOS),
        lp.MinNewTokensLengthLogitsProcessor(5, 3, EOS),
    ],
    "suppressed": [lp.SuppressTokensLogitsProcessor([3, 7])],
    "bias": [
        lp.SequenceBiasLogitsProcessor([[[3], 4.5], [[7], -2.0]]),
        lp.RepetitionPenaltyLogitsProcessor(0.6, prompt_ignore_length=COUNTED),
        lp.LogitNormalization(),
    ],
}
OUTPUTS = [[], [11], [11, 13], [11, 13, 11, 7]]


@pytest.mark.parametrize("name", CASES)
def test_the_law_is_that_of_the_processors(name):
    """After 0, 1, 2 and 4 new tokens: the same kept set, and the same probabilities in it."""
    processors = lp.LogitsProcessorList(CASES[name])
    generator = torch.Generator().manual_seed(5)
    batch = SamplingBatch.from_params(**requests(*processors), vocab_size=V)
    done = 0
    for output in OUTPUTS:
        for token in output[done:]:
            batch.append(torch.tensor([token] * 3))
        done = len(output)
        logits = 2 * torch.randn(3, V, generator=generator)
        ids = torch.cat([IDS, torch.tensor([output] * 3, dtype=torch.int64).view(3, -1)], dim=1)
        expected = processors(ids, logits.clone()).softmax(dim=1)
        kept = reference.kept_mask(logits, batch)
        assert torch.equal(kept, expected > 0), f"after {done}"
        scaled = reference.processed_logits(logits, batch) / batch.temperature.unsqueeze(1)
        law = scaled.masked_fill(~kept, -torch.inf).softmax(dim=1)
        assert torch.allclose(law, expected, atol=1e-6), f"after {done}"


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_keeps_the_ties_that_transformers_keeps(k):
    asked, generator = requests(lp.TopKLogitsWarper(k)), torch.Generator().manual_seed(k)
    batch = SamplingBatch.from_params(**asked, vocab_size=V)
    logits = torch.randint(0, 3, (3, V), generator=generator).float()
    expected = lp.TopKLogitsWarper(k)(IDS, logits.clone())
    assert torch.equal(reference.kept_mask(logits, batch), expected > -torch.inf)


def test_greedy_rows_have_penalties_and_no_noise():
    (first, *_) = requests(CASES["repetition"][0], do_sample=False)["params"]
    assert first.greedy and first.repetition_penalty == 1.7


class _OwnTopK(lp.TopKLogitsWarper):
    """May do anything."""


@pytest.mark.parametrize(
    ("processors", "told"),
    [
        ([lp.TypicalLogitsWarper()], "TypicalLogitsWarper is not supported .* typicality"),
        ([lp.NoRepeatNGramLogitsProcessor(2)], "NoRepeatNGram.* no n-grams are kept"),
        ([_OwnTopK(3)], "_OwnTopK is not supported with tpsample: it is not known here"),
        ([lambda ids, scores: scores], "function is not supported with tpsample"),
        ([lp.TopKLogitsWarper(3, min_tokens_to_keep=2)], "top_k with min_tokens_to_keep"),
        ([lp.TopPLogitsWarper(0.5, filter_value=-1.0)], "top_p with min_tokens_to_keep or filter"),
        ([lp.TopKLogitsWarper(3), lp.TopKLogitsWarper(4)], "top_k twice"),
        ([lp.MinPLogitsWarper(0.1), lp.TopKLogitsWarper(4)], "expected the order .*, got MinP"),
        ([lp.TopPLogitsWarper(0.9), lp.EpsilonLogitsWarper(0.1)], "come before top_p, not after"),
        ([lp.EpsilonLogitsWarper(0.1, min_tokens_to_keep=2)], "with min_tokens_to_keep"),
        ([lp.EpsilonLogitsWarper(0.1), lp.EtaLogitsWarper(0.1)], "before epsilon_cutoff, not"),
        ([lp.TopPLogitsWarper(0.5), lp.TemperatureLogitsWarper(2.0)], "expected the order"),
        ([lp.LogitNormalization(), *CASES["repetition"]], "expected the order .*, got LogitNorm"),
        ([lp.RepetitionPenaltyLogitsProcessor(1.1)], "prompt_ignore_length=.0, 0, 0. for part"),
        ([lp.RepetitionPenaltyLogitsProcessor(1.1, 3)], "prompt_ignore_length=3 for part"),
        ([lp.SequenceBiasLogitsProcessor([[[3, 4], 1.0]])], "one id with a bias up to"),
        ([lp.SequenceBiasLogitsProcessor([[[3], 101.0]])], "one id with a bias up to"),
        (
            [lp.MinLengthLogitsProcessor(9, EOS), lp.MinLengthLogitsProcessor(9, EOS[:1])],
            "two sets of eos_token_id",
        ),
        (
            [
                lp.RepetitionPenaltyLogitsProcessor(1.1, prompt_ignore_length=5),
                lp.NoBadWordsLogitsProcessor([[5, 8]], EOS),
            ],
            "bad_words_ids: not with a repetition penalty of output alone",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(processors, told):
    with pytest.raises(UnsupportedParameter, match=told):
        requests(*processors)


def test_padding_is_on_the_left():
    assert PROMPTS.rows == [[5, 6, 7], [1, 2, 3, 4, 5], [9] * 4]
    assert Prompts.of(IDS, None).padding == [0, 0, 0]
    with pytest.raises(UnsupportedParameter, match="attention_mask: expected padding on the left"):
        Prompts.of(IDS, MASK.flip(1))
    with pytest.raises(UnsupportedParameter, match="at least one id"):
        Prompts.of(IDS[:, :0], None)
    with pytest.raises(UnsupportedParameter, match=r"^attention_mask: row 0 has no id that is not"):
        Prompts.of(IDS, torch.zeros_like(MASK))
