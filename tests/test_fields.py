"""No list of requests lacks a field that a request may have."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.agreement import test_batches_differ
from tests.fuzz.requests import request
from tests.speculative import test_coupled, test_law, test_shards
from tests.support import filtered, golden_parts, oracle
from tests.support.commands import ROOT
from tests.support.fields import FILTERS, REFUSED, VALUES
from tpsample import SamplingParams
from tpsample.core.rules import ENDING, RULES

FIELDS = {field.name for field in fields(SamplingParams)}
REPORTS = {"logprobs", "logprob_token_ids", "logprobs_mode"}


def _drawn() -> list[dict[str, Any]]:
    pick = random.Random(1)
    return [request(pick, 500) for _ in range(2000)]


GOLDEN: list[dict[str, Any]] = [
    *golden_parts.REQUESTS.values(),
    *golden_parts.REPORTING,
    *golden_parts.RULES,
]
LISTS: dict[str, tuple[Iterable[dict[str, Any]], set[str]]] = {
    "fuzz": (_drawn(), set()),
    "golden tokens": (GOLDEN, set()),
    "batches differ": (test_batches_differ.FIELDS, {"seed"}),
    "coupled drafts": (test_coupled.REQUESTS, REPORTS | {"seed", "repetition_scope"}),
    "drafts on shards": (test_shards.REQUESTS, REPORTS | {"seed", "repetition_scope"}),
    "laws of verified tokens": (test_law.FILTERED, FIELDS.difference(FILTERS)),
    "filters on ranks": (filtered.filter_requests(), FIELDS.difference(FILTERS, ["filter_order"])),
}
"""By name, requests, and the fields that they may lack."""


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_requests_has_every_field(name):
    requests, exempt = LISTS[name]
    named = set().union(*requests)
    missing = FIELDS - named - exempt
    assert not missing, f"{name}: no request has {', '.join(sorted(missing))}"


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_decides_some_rows_of_the_grid(name):
    """A row in which another one keeps less says nothing of it."""
    off = {rule.name: rule.off for rule in RULES}
    params, kinds = filtered.grid(), filtered.kinds_of_logits()
    rows, without = (
        filtered.Rows([kinds["normal"], kinds["zipf"]], its)
        for its in (params, [replace(each, **{name: off[name]}) for each in params])
    )
    differ = (rows.kept_mask() != without.kept_mask()).any(dim=1).sum().item()
    assert differ >= 20, f"{name} decides {differ} of {len(rows.params)} rows"


def test_every_field_has_values_and_values_that_are_refused():
    assert FIELDS - set(VALUES) == set(), "tests.support.fields.VALUES"
    assert FIELDS - set(REFUSED) == set(), "tests.support.fields.REFUSED"


def test_the_page_of_the_library_has_every_filter():
    ends = {rule.name: "a logit" for rule in ENDING}
    ends |= {"top_k": "a number of tokens", "top_p": "a share of the mass"}
    rows = [f"| `{rule.name}` | {rule.expected} | {ends[rule.name]} |" for rule in RULES]
    assert "\n".join(rows) in (ROOT / "tpsample" / "README.md").read_text()


def test_the_oracle_has_every_field_with_its_default():
    own = {field.name: field.default for field in fields(oracle.Request)}
    assert FIELDS - set(own) == set(), "tests.support.oracle.Request"
    assert own == {field.name: field.default for field in fields(SamplingParams)}
