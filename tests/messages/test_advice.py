"""Advice is right: a test does what a message says and compares the tokens.

Every advice of the package is found by reading its source. It is followed here, or a short list
says why it is not.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.support.advice import advices, is_said_in
from tests.support.followed import FOLLOWED, right_of
from tests.support.mistakes import said
from tests.support.wrong_batches import BATCHES
from tests.support.wrong_ranks import FOLLOWED_BY_RANKS, TOGETHER
from tests.support.wrong_samplers import SAMPLERS

ALONE = BATCHES | SAMPLERS

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "no text of an error": (
        "compare hidden states",
        "Write two short",
        "What to ask; repeat",
        "0 is greedy; repeat",
        "A field of SamplingParams for",
        "Write what each token",
        "Write each step's",
        "int8: read an 8-bit",
        "Let a record name",
    ),
    "of the command line, which checks its own tokens: tests/cli": (
        "in a clone of tpsample, pip",
        "tpsample bench: ",
        "draft: this model's cache",
        "triton missing: ",
        "no GPU is visible: ",
        "one rank: several",
        "see --allow-download",
        "the package with the weights",
        "max_tokens and max_completion_tokens",
        "texts that are not empty, got ''; leave",
        "n: expected at most",
        "leave --tp out",
        "start {} ranks",
        "names the model {} in place of a head",
    ),
    "needs a GPU, or more ranks than there are": (
        'backend: "numba" needs a CPU',
        "but the current device of this process is cuda",
        "GPUs visible to rank",
        "without NVLink between all pairs",
        "sees one GPU and its peers",
        'exchange: "peer" takes up to',
        "kept_cap: not in a captured graph",
    ),
    "needs a network that is lost: tests/ranks/test_lost_ranks.py, make hosts": (
        "{}; call reset() on every rank first",
        "and {} does not answer either",
        "did not answer within {} s. If",
        "did not come within {} s",
        "exchange: {}{}{}. If",
        "does not reach all others",
        "give the address of one",
        "give an address of the machine",
    ),
    "needs a launcher: tests/test_distributed.py": (
        "start with torchrun, or",
        "although other variables of {} are",
        "does not tell where rank",
    ),
    "needs torch.compile: tests/test_compiled.py": (
        "out: not inside torch.compile",
        "SamplingBatch inside torch.compile",
        "sample_logits: not inside",
    ),
    "needs an engine, or its package: tests/integrations": (
        "is supported, {} is installed; pip",
        "pass stream_to=",
        "leave them off",
        "expected a torch.nn.Linear as LM head",
        "its LM head is offloaded",
        "padding on the left alone",
        "logits_processor: expected the order",
        "leave it out, or call generate",
        "uninstall its package",
        "pass --no-async-scheduling",
        "it is an argument of transformers' generate",
        'pip install "tpsample[cpu]"',
    ),
    "decides no token: tests/test_trace.py": ("ask for them with SamplingParams(logprobs=",),
    "the sampler says it first": ("exchange: closed",),
    "needs virtual ranks: tests/ranks/test_rendezvous.py": ("these ranks have no process group",),
}
"""Advice that no test here follows, by the reason."""


@pytest.mark.parametrize("name", FOLLOWED)
def test_advice_leads_to_the_right_tokens(name: str) -> None:
    assert name in ALONE
    found, right = FOLLOWED[name]()
    assert found == (right_of(right) if isinstance(right, torch.Tensor) else right)


def test_every_advice_is_followed_or_a_list_says_why_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        told = [said(ALONE[name][0]) for name in FOLLOWED]
    told += [(ALONE | TOGETHER)[name][1] for name in FOLLOWED_BY_RANKS]
    excused = {part for parts in ELSEWHERE.values() for part in parts}
    found = advices()
    assert len(found) > 90
    left = {advice for advice in found if not any(is_said_in(advice, text) for text in told)}
    unexcused = {advice for advice in left if not any(part in advice for part in excused)}
    assert unexcused == set(), "nobody tried what these texts advise"
    assert {part for part in excused if not any(part in advice for advice in left)} == set()
