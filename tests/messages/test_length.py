"""No message is as long as what came from outside, whoever brings it."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import tpsample
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams
from tpsample.ranks.ranks import require_equal
from tpsample.record.format import KEY, Record, read
from tpsample.request.as_json import from_json

LONGEST = 500
LONG = "x" * 10**5
HOSTILE = (
    *(LONG, [LONG], [[LONG]], {LONG: 1}, {1: LONG}, {"1": LONG}, {"1" * 4000: 1}, [{LONG: LONG}]),
    *([-1] * 10**5, [[-1] * 10**5], 10**4000, -(10**4000), 1.5),
)
FIELDS = [field.name for field in fields(SamplingParams)]
PACKAGE = Path(tpsample.__file__).parent


def said_by(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Return the text of the error that a call raises, "" if it raises none."""
    try:
        call(*arguments, **named)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [*FIELDS, "top_logprobs", LONG], ids=lambda n: n[:20])
def test_no_message_of_a_request_is_long(name: str) -> None:
    sent = [json.loads(json.dumps({name: value})) for value in HOSTILE]
    texts = [said_by(from_json, "params[0]", each) for each in sent]
    if name in FIELDS:
        texts += [said_by(SamplingParams, **{name: value}) for value in HOSTILE]
    assert max(map(len, texts)) <= LONGEST
    assert sum(map(bool, texts)) > len(texts) // 2


def test_no_message_of_a_batch_is_long() -> None:
    two = [SamplingParams(seed=1)] * 2
    calls = [
        *(lambda v: SamplingBatch.from_params(v, vocab_size=9),
          lambda v: SamplingBatch.from_params(two, vocab_size=v),
          lambda v: SamplingBatch.from_params(two, vocab_size=9, prompt_token_ids=v),
          lambda v: SamplingBatch.from_params(two, vocab_size=9, output_token_ids=[v, []]),
          lambda v: SamplingBatch.from_params(two, vocab_size=9, device=v),
          lambda v: SamplingBatch.from_params(two, vocab_size=9).arrange(v),
          lambda v: SamplingBatch.from_params(two, vocab_size=9).select(v),
          lambda v: SamplingBatch.from_params(two, vocab_size=9).put(v, [SamplingParams()]),
          lambda v: LMHeadSampler(torch.zeros(9, 4), shard=v)),
    ]  # fmt: skip
    for call in calls:
        texts = [said_by(call, value) for value in HOSTILE]
        assert any(texts) and max(map(len, texts)) <= LONGEST


def test_no_message_of_a_record_is_long(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs the extra hf")
    from safetensors.torch import save_file

    path = tmp_path / "record"
    tensors = {name: torch.zeros(1, dtype=torch.int64) for name in ("positions", "seeds")}
    tensors |= {"token_ids": torch.zeros(1, dtype=torch.int64)}
    tensors |= {"status": torch.zeros(1, dtype=torch.int32), "hidden_states": torch.zeros(1, 4)}
    tensors |= {"lm_head_weight": torch.zeros(9, 4)}
    head = {"logit_scale": 1.0, "logit_softcap": None}
    Record(tensors, [SamplingParams(seed=0)], {}, head).save(path)
    with __import__("safetensors").safe_open(str(path), framework="pt") as file:
        right = json.loads(file.metadata()[KEY])
    assert len(read(path).params) == 1
    values = [value for value in HOSTILE if not isinstance(value, int)]
    texts = []
    for name in (*right, LONG):
        for value in values:
            save_file(tensors, str(path), metadata={KEY: json.dumps(right | {name: value})})
            texts.append(said_by(read, path))
    for metadata in ({LONG: ""}, {KEY: LONG}, {KEY: json.dumps(LONG)}):
        save_file(tensors, str(path), metadata=metadata)
        texts.append(said_by(read, path))
    save_file(tensors | {LONG: torch.zeros(1)}, str(path), metadata={KEY: json.dumps(right)})
    texts.append(said_by(read, path))
    assert max(map(len, texts)) <= LONGEST and sum(map(bool, texts)) > len(texts) - 20


def test_a_file_that_cannot_be_read_is_not_called_a_wrong_one(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs the extra hf")
    there = said_by(read, tmp_path / "nowhere")
    assert there.startswith("cannot be read: No such file or directory")
    assert said_by(read, tmp_path).endswith(" is a folder; name a file in it")


OWN = {
    *("__init__.py", "integrations/__init__.py"),
    *("record/format.py", "cli/model.py", "exchange/inboxes.py"),
}
"""Files whose messages quote whole what a user has typed, or what this process has made."""


def test_errors_show_a_value_by_describe() -> None:
    """The representation of a value is as long as the value."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for error in ast.walk(ast.parse(path.read_text())):
            for part in ast.walk(error) if isinstance(error, ast.Raise) else ():
                if isinstance(part, ast.FormattedValue) and part.conversion == ord("r"):
                    found.add(str(path.relative_to(PACKAGE)))
    assert found == OWN


def test_no_message_of_a_difference_between_ranks_is_long() -> None:
    records = [{"allowed_token_ids": str([rank] * 10**5)} for rank in range(8)]
    said = said_by(require_equal, records)
    assert "allowed_token_ids: must be the same" in said and len(said) <= 8 * 100 + 60
