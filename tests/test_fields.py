"""No list of requests lacks a field that a request may have."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.agreement import test_batches_differ
from tests.filters import test_kept_modes, test_kept_set, test_lists
from tests.fuzz.requests import request
from tests.speculative import test_coupled, test_law, test_shards
from tests.support import filtered, golden_parts, oracle
from tests.support.commands import ROOT
from tests.support.fields import FILTERS, OTHER_FILTERS, REFUSED, VALUES, with_others
from tpsample import SamplingParams
from tpsample.core.rules import ENDING, RULES, TOP_K

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
    "kept sets by hand": (
        [changes for _, changes, _ in test_kept_set.GOLDEN.values()],
        FIELDS.difference(FILTERS),
    ),
    "kept sets of first words": (test_kept_modes.FIRST_WORDS, FIELDS.difference(FILTERS)),
    "kept sets by lists": (test_lists.REQUESTS.values(), FIELDS.difference(FILTERS) | {"top_k"}),
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
    """A row in which top_k, top_p or min_p keeps less says nothing of it.

    The other filters are off, because a new one would take rows from those before it.
    """
    off = {rule.name: rule.off for rule in RULES}
    others = {other: off[other] for other in OTHER_FILTERS if other != name}
    params = [replace(each, **others) for each in filtered.grid()]
    kinds = filtered.kinds_of_logits()
    rows, without = (
        filtered.Rows([kinds["normal"], kinds["zipf"]], its)
        for its in (params, [replace(each, **{name: off[name]}) for each in params])
    )
    differ = (rows.kept_mask() != without.kept_mask()).any(dim=1).sum().item()
    assert differ >= 20, (
        f"{name} decides {differ} of {len(rows.params)} rows; give it numbers in "
        "tests.support.fields.VALUES that remove more"
    )


def test_a_new_rule_moves_no_other_one(monkeypatch):
    new, *others = OTHER_FILTERS
    found = with_others([{}] * 50, 0)
    monkeypatch.setattr("tests.support.fields.OTHER_FILTERS", tuple(others))
    without = [{name: its for name, its in each.items() if name != new} for each in found]
    assert with_others([{}] * 50, 0) == without, f"rows have other numbers without {new}"


def test_every_field_has_values_and_values_that_are_refused():
    for name, values in (("VALUES", VALUES), ("REFUSED", REFUSED)):
        missing = sorted(FIELDS - set(values))
        assert not missing, f"tests.support.fields.{name} lacks {', '.join(missing)}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_numbers_of_a_rule_fit_together(rule):
    for number in (rule.off, rule.low, rule.high, rule.example, *VALUES.get(rule.name, ())):
        assert rule.valid(number), f"{rule.name}: {number} is no number that a request may have"
    for number in (rule.example, *VALUES.get(rule.name, ())):
        assert rule.cuts(number), f"{rule.name}: {number} keeps every token"
    assert not rule.cuts(rule.off), f"{rule.name}: its number that is off cuts"
    beyond = math.nextafter(rule.high, math.inf)
    assert rule is TOP_K or not rule.valid(beyond), f"{rule.name}: {rule.high} is not its end"


def test_the_page_of_the_library_has_every_filter():
    ends = {rule.name: "a logit" for rule in ENDING}
    ends |= {"top_k": "a number of tokens", "top_p": "a share of the mass"}
    rows = [f"| `{rule.name}` | {rule.expected} | {ends[rule.name]} |" for rule in RULES]
    page = (ROOT / "tpsample" / "README.md").read_text()
    missing = [row for row in rows if row not in page]
    assert not missing, "tpsample/README.md: the table of filters lacks\n" + "\n".join(missing)
    assert "\n".join(rows) in page, "tpsample/README.md: the filters are in another order"


def test_the_changelog_names_every_filter():
    words = re.findall(r"\w+", (ROOT / "CHANGELOG.md").read_text())
    missing = {rule.name for rule in RULES}.difference(words)
    assert not missing, f"CHANGELOG.md: no line names {', '.join(sorted(missing))}"


def test_the_page_of_masses_has_the_operations_of_every_rule():
    headings = re.findall(r"^## \d+\. (.+)$", (ROOT / "tpsample" / "MASSES.md").read_text(), re.M)
    missing = {rule.name for rule in ENDING} - set(headings)
    assert not missing, f"tpsample/MASSES.md: no section is named {', '.join(sorted(missing))}"


def test_the_oracle_has_every_field_with_its_default():
    own = {field.name: field.default for field in fields(oracle.Request)}
    missing = sorted(FIELDS - set(own))
    assert not missing, f"tests.support.oracle.Request lacks {', '.join(missing)}"
    assert own == {field.name: field.default for field in fields(SamplingParams)}
