"""Penalties and constraints as Hugging Face's logits processors compute them, where rules agree.

Where they part: there bad words match across prompt and output, here in the output alone, so the
processor is shown the output only; a begun word longer than the output is none in either.
"""

import random

import pytest
import torch

from tests.support.controls import Conversation, random_params
from tpsample import SamplingBatch, SamplingParams, reference

hf = pytest.importorskip("transformers.generation.logits_process")
V = 331


def _rows(count: int) -> list[Conversation]:
    rng = random.Random(7)
    return [
        Conversation(
            random_params(rng, V),
            [rng.randrange(6) for _ in range(rng.randint(1, 9))],
            [rng.randrange(6) for _ in range(rng.randint(1, 9))],
        )
        for _ in range(count)
    ]


def _theirs(talk: Conversation, logits: torch.Tensor) -> torch.Tensor:
    """One row [1, V] through their processors, in our order."""
    params = talk.params
    both = torch.tensor([talk.prompt + talk.output])
    output = torch.tensor([talk.output])
    if params.logit_bias:
        bias = {(v,): max(-100.0, min(100.0, b)) for v, b in params.logit_bias.items()}
        logits = hf.SequenceBiasLogitsProcessor(bias)(both, logits)
    if params.min_tokens:
        logits = hf.MinNewTokensLengthLogitsProcessor(
            len(talk.prompt), params.min_tokens, list(params.stop_token_ids or ())
        )(both, logits)
    if params.repetition_penalty != 1:
        seen = both if params.repetition_scope == "all" else output
        logits = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, logits)
    if params.bad_words:
        words = [list(sequence) for sequence in params.bad_words]
        logits = hf.NoBadWordsLogitsProcessor(words)(output, logits)
    return logits


@pytest.fixture(scope="session")
def rows() -> tuple[list[Conversation], torch.Tensor]:
    talks = _rows(200)
    for talk in talks:  # they have neither of these
        object.__setattr__(talk.params, "presence_penalty", 0.0)
        object.__setattr__(talk.params, "frequency_penalty", 0.0)
        object.__setattr__(talk.params, "allowed_token_ids", None)
    return talks, 3 * torch.randn(200, V, generator=torch.Generator().manual_seed(8))


def _batch(talks: list[Conversation]) -> SamplingBatch:
    return SamplingBatch.from_params(
        [talk.params for talk in talks],
        vocab_size=V,
        prompt_token_ids=[talk.prompt for talk in talks],
        output_token_ids=[talk.output for talk in talks],
    )


def test_processed_logits_are_theirs(rows):
    talks, logits = rows
    ours = reference.processed_logits(logits, _batch(talks))
    theirs = torch.cat(
        [_theirs(talk, row.unsqueeze(0)) for talk, row in zip(talks, logits, strict=True)]
    )
    # Their bad words and biases are added, ours set: an infinity either way.
    assert torch.equal(ours, theirs)
    assert (ours == -torch.inf).sum() > 100 and not torch.equal(ours, logits)


@pytest.mark.parametrize(
    ("fields", "warper"),
    [
        ({"top_k": 20}, lambda: hf.TopKLogitsWarper(20)),
        ({"top_p": 0.9}, lambda: hf.TopPLogitsWarper(0.9)),
        ({"min_p": 0.1}, lambda: hf.MinPLogitsWarper(0.1)),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_filters_after_controls_keep_what_theirs_keep(rows, fields, warper):
    talks, logits = rows
    talks = [
        Conversation(
            SamplingParams(
                temperature=0.8,
                repetition_penalty=talk.params.repetition_penalty,
                repetition_scope=talk.params.repetition_scope,
                logit_bias={v: b / 20 for v, b in (talk.params.logit_bias or {}).items()},
                bad_words=talk.params.bad_words,
                **fields,
            ),
            talk.prompt,
            talk.output,
        )
        for talk in talks
    ]
    kept = reference.kept_mask(logits, _batch(talks))
    theirs = torch.cat(
        [
            warper()(None, _theirs(talk, row.unsqueeze(0)) / 0.8)
            for talk, row in zip(talks, logits, strict=True)
        ]
    )
    assert torch.equal(kept, theirs > -torch.inf)
