"""The objects as a user sees them: types of options, integers, with, len and repr."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import pydoc
import re
import runpy
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

import tpsample
from tests.support.cases import Case
from tests.support.commands import ROOT, run_command
from tests.support.mistakes import WEIGHT, D, V
from tests.support.tried import need_transformers
from tpsample import (
    KeptSets,
    LMHeadSampler,
    Logprobs,
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    TopKTrace,
    VerifyOutput,
    VocabShard,
    distributed,
    record,
    reference,
    sample,
    sample_draft,
    verify,
)
from tpsample.core.sealed import Sealed
from tpsample.distributed import Job
from tpsample.integrations.engine_rows import EngineRows
from tpsample.record import RowVerdict
from tpsample.request.graph_rows import GraphRows

NAMED = re.compile(r"`(\w+)`")
PUBLIC = (tpsample, record, distributed)
INTEGERS = [np.int32, np.uint8, lambda n: torch.tensor(n), lambda n: torch.tensor(n).int()]
IDS = ["int32", "uint8", "torch int64", "torch int32"]


def _texts(annotation: Any) -> bool:
    """Whether any text is of this type."""
    return annotation is str or str in get_args(annotation)


def test_every_option_that_is_one_of_some_texts_says_which() -> None:
    hints = [get_type_hints(each) for each in (LMHeadSampler.__init__, verify, sample_draft)]
    hints.append(get_type_hints(SamplingParams))
    assert [name for found in hints for name, each in found.items() if _texts(each)] == []
    assert get_origin(hints[1]["method"]) is Literal


@pytest.mark.parametrize("field", ["logprobs_mode", "ties", "filter_order", "repetition_scope"])
def test_the_texts_of_a_type_are_those_that_are_taken(field: str) -> None:
    for value in get_args(get_type_hints(SamplingParams)[field]):
        assert getattr(SamplingParams(**{field: value}), field) == value
    with pytest.raises(ValueError, match=f"^{field}: expected one of "):
        SamplingParams(**{field: "other"})


@pytest.mark.parametrize("make", INTEGERS, ids=IDS)
def test_integers_of_other_libraries_are_integers(make: Callable[[int], Any]) -> None:
    plain = LMHeadSampler(WEIGHT, max_rows=4, backend="torch")
    sampler = LMHeadSampler(
        WEIGHT,
        vocab_size=make(V),
        shard=VocabShard(make(0), make(V)),
        max_rows=make(4),
        chunks=make(1),
        on_failed=make(3),
        backend="torch",
    )
    params = SamplingParams(
        seed=make(5), top_k=make(9), logprobs=make(2), allowed_token_ids=[make(i) for i in range(9)]
    )
    batch = SamplingBatch.from_params([params], vocab_size=make(V), max_rows=make(2))
    batch.add(SamplingParams(seed=1), prompt_token_ids=[make(3)])
    assert params == SamplingParams(seed=5, top_k=9, logprobs=2, allowed_token_ids=range(9))
    hidden_states = torch.ones(2, D)
    expected = plain(hidden_states, batch, 7, num_samples=2).token_ids
    position = torch.tensor(7) if isinstance(make(7), torch.Tensor) else make(7)
    found = sampler(hidden_states, batch, position, num_samples=make(2)).token_ids
    assert torch.equal(found, expected)
    assert type(sampler.vocab_size) is type(sampler.max_rows) is type(batch.vocab_size) is int
    assert sampler.prompt_logprobs(hidden_states, torch.tensor([1, 2]), top=make(2)) is not None
    TopKTrace(make(1), make(2), make(3))


@pytest.mark.parametrize("wrong", [True, np.bool_(True), torch.tensor(True), 2.0, np.float32(2)])
def test_what_is_no_integer_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^max_rows: expected an int from 1 to"):
        LMHeadSampler(WEIGHT, max_rows=wrong)
    with pytest.raises(TypeError, match=r"^seed: expected None or an int of 64 bits"):
        SamplingParams(seed=wrong)


def test_a_sampler_is_closed_at_the_end_of_with_whatever_happens() -> None:
    with LMHeadSampler(WEIGHT, backend="torch", max_rows=3) as sampler:
        assert repr(sampler) == (
            "LMHeadSampler(vocab_size=20, ids 0 to 20 on rank 0 of 1, exchange='none', "
            "backend='torch', max_rows=3)"
        )
    assert repr(sampler).endswith("max_rows=3, closed)")
    with (
        pytest.raises(KeyError),
        LMHeadSampler(WEIGHT, backend="torch") as sampler,
    ):
        raise KeyError
    with pytest.raises(RuntimeError, match="sampler: closed; build a new LMHeadSampler"):
        sampler.check()


def test_a_batch_has_a_length_and_says_what_it_is() -> None:
    batch = SamplingBatch.from_params([SamplingParams()] * 2, vocab_size=V, max_rows=5)
    assert len(batch) == batch.rows == 2
    batch.drop(0)
    assert len(batch) == 1
    assert repr(batch) == "SamplingBatch(1 rows of at most 5, vocab_size=20, on cpu)"


def test_the_package_can_be_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("typer", reason="needs typer and rich")
    monkeypatch.setattr(sys, "argv", ["tpsample", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("tpsample", run_name="__main__")
    assert capsys.readouterr().out.startswith("tpsample 0.")


def test_the_public_names_are_those_that_the_page_lists():
    page = (ROOT / "tpsample" / "README.md").read_text()
    table = page[page.index("## Public names") :].partition("### ")[0]
    listed = {name for row in re.findall(r"^\| `.*$", table, re.M) for name in NAMED.findall(row)}
    assert listed - {"TypeError", "ValueError"} == set(tpsample.__all__)
    assert len(tpsample.__all__) == len(set(tpsample.__all__))


def test_public_fields_and_arguments_are_documented() -> None:
    for each in (LMHeadSampler, SamplingParams, SamplingBatch.from_params, verify, sample_draft):
        text = inspect.getdoc(each) or ""
        names = (
            [field.name for field in dataclasses.fields(each)]
            if dataclasses.is_dataclass(each)
            else list(inspect.signature(each).parameters)
        )
        missing = [name for name in names if name not in text]
        assert not missing, f"the docstring of {each.__qualname__} lacks {', '.join(missing)}"


def _objects() -> list[object]:
    """An object of each public class, and of each class that public methods return."""
    sampler = LMHeadSampler(WEIGHT, backend="torch")
    params = [SamplingParams(seed=1, top_k=3, logprobs=1)]
    batch = SamplingBatch.from_params(params, vocab_size=V, kept_cap=4)
    out = sampler(torch.ones(1, D), batch, 0)
    drafts = torch.zeros(1, 0, dtype=torch.int64)
    slots = SamplingBatch.of_slots(1, vocab_size=V)
    return [
        *(sampler, batch, out, out.logprobs, out.kept, params[0]),
        *(verify(sampler, torch.ones(1, 1, D), drafts, batch, 0), VocabShard(0, V)),
        *(TopKTrace(1, 1, 1), slots.select(torch.tensor([0]))),
        *(batch._view_of(1), batch.plan, EngineRows(V, 1, torch.device("cpu"))),
        GraphRows(batch, batch.temperature, batch.seed, {}),
    ]


def _below(kind: type) -> set[type]:
    """Return the classes that derive from a class."""
    found: set[type] = set(kind.__subclasses__())
    return found.union(*map(_below, found))


def test_an_attribute_that_an_object_does_not_have_is_refused() -> None:
    """Nothing would read it. Every class of the public modules is tried, and every kind of batch.
    Errors are left out, because Python itself adds notes to them."""
    objects = _objects()
    made = {type(each) for each in objects}
    public = {each for module in PUBLIC for each in vars(module).values() if inspect.isclass(each)}
    public = {each for each in public if each.__module__.startswith("tpsample.")}
    public = {each for each in public if not issubclass(each, (Exception, enum.Enum))}
    assert {KeptSets, Logprobs, SampleOutput, VerifyOutput, RowVerdict, Job} <= public
    sealed = {each for each in _below(Sealed) if not each.__subclasses__()}
    # Adapters are for packages that may be absent, and are imported by other tests.
    sealed = {each for each in sealed if "integrations" not in each.__module__}
    assert (public & _below(Sealed)) | sealed <= made, "an object of each is needed"
    for each in (*objects, *(object.__new__(kind) for kind in public - made)):
        for name in ("temprature", "mask"):
            with pytest.raises((AttributeError, TypeError)):
                setattr(each, name, None)
            assert not hasattr(each, name)


def test_an_adapter_is_there_as_an_attribute():
    """`tpsample.integrations.transformers`, as the README's line reads."""
    need_transformers()
    command = "import tpsample; print(tpsample.integrations.transformers.generate.__name__)"
    done = run_command(sys.executable, "-c", command)
    assert done.stdout == "generate\n", done.stderr


def test_a_name_of_no_adapter_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'integration'"):
        _ = tpsample.integration
    with pytest.raises(AttributeError, match="no attribute 'transformer'"):
        _ = tpsample.integrations.transformer


LISTED = {
    LMHeadSampler: {
        *("check", "close", "compare", "count_failed", "counters", "draw_seeds"),
        *("prompt_logprobs", "refresh", "reset", "sample_logits", "warm_up"),
    },
    SamplingBatch: {
        *("add", "append", "arrange", "drop", "free", "permute", "prepare", "put", "update"),
        *("from_params", "from_tensors", "of_slots", "select", "requests", "rows", "capture_key"),
        *("temperature", "seed", "plan", "unseeded", "grammar_bitmask", "forced_token_ids"),
    },
}
"""The public methods and properties of the two classes that every user meets."""


@pytest.mark.parametrize("kind", LISTED)
def test_help_lists_what_is_public_and_nothing_else(kind: type) -> None:
    shown = pydoc.plain(pydoc.render_doc(kind))
    names = re.findall(r"^ \|  (\w+)(?:\(| = |$)", shown, re.M)
    assert {n for n in names if n[0] != "_"} - {kind.__name__} == LISTED[kind]


def test_one_call_counts_the_tokens_so_far() -> None:
    case = Case.make(300, 4)
    params = [SamplingParams(temperature=0, presence_penalty=2.0, repetition_penalty=3.0)] * 4
    step = case.hidden_states, case.weight, params
    first = sample(*step, positions=5, prompt_token_ids=[[]] * 4).token_ids
    so_far: dict[str, Any] = {
        "prompt_token_ids": first.unsqueeze(1),
        "output_token_ids": first.unsqueeze(1),
    }
    batch = SamplingBatch.from_params(params, vocab_size=300, **so_far)
    logits = reference.logits(*step[:2])
    found = sample(*step, positions=6, **so_far).token_ids
    assert torch.equal(found, reference.sample(logits, batch, 6).token_ids)
    assert not torch.equal(found, first)
    for name in so_far:
        fewer = sample(*step, positions=6, **{**so_far, name: [[]] * 4})
        others = SamplingBatch.from_params(params, vocab_size=300, **{**so_far, name: [[]] * 4})
        assert torch.equal(fewer.token_ids, reference.sample(logits, others, 6).token_ids)
