"""`tpsample generate --draft`: the text of plain decoding, and what the drafts were worth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.commands import invoke
from tests.support.tiny_model import VOCAB_SIZE, save_tiny_model
from tpsample import LMHeadSampler, SamplingParams
from tpsample.cli import decode as decoding
from tpsample.cli.decode import continuation, decode
from tpsample.cli.model import load
from tpsample.cli.requests import Row
from tpsample.distributed import Job

pytest.importorskip("transformers", reason="needs the extra hf")


PROMPTS = [[5], [7, 8, 9, 7, 8, 9, 7, 8], [3, 1, 4], [2, 7, 1, 8, 2, 8]]
PARAMS = [SamplingParams(temperature=t, seed=40 + i) for i, t in enumerate((0, 0.5, 1, 0.8))]


def test_decoding_with_drafts_writes_the_plain_text(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are the plain text but for every fifth token, or n-grams."""
    model = load(str(llama), Job(), torch.float32)
    sampler = LMHeadSampler(model.lm_head.weight, max_rows=4 * 5, backend="torch")

    def run(num_drafts: int) -> decoding.Decoded:
        rows = [Row(model, *each, 17) for each in zip(PROMPTS, PARAMS, strict=True)]
        return decode(model, rows, sampler, num_drafts=num_drafts)

    plain = run(0)
    texts = [row.prompt + row.answer for row in plain.rows]
    assert len({tuple(row.answer) for row in plain.rows}) == 4

    def scripted(so_far: list[int], count: int) -> list[int]:
        (text,) = (each for each in texts if each[: len(so_far)] == so_far)
        start = len(so_far)
        drafts = enumerate(text[start : start + count - len(so_far) % 2], start)
        return [(token_id + (at % 5 == 0)) % VOCAB_SIZE for at, token_id in drafts]

    ngram = run(4)
    monkeypatch.setattr(decoding, "continuation", scripted)
    done = run(4)
    assert done.forwards <= 9 and done.accepted > done.proposed / 2
    for each in (ngram, done):
        assert 0 <= each.accepted <= each.proposed
        for ours, row in zip(each.rows, plain.rows, strict=True):
            torch.testing.assert_close(ours.states, row.states, atol=2e-5, rtol=2e-6)
            assert (ours.prompt, ours.drawn) == (row.prompt, row.drawn)


def test_drafts_continue_the_longest_suffix() -> None:
    texts = [[1, 2, 3, 9, 2, 3], [4, 5, 6], [7, 7], [8]]
    assert [continuation(text, 3) for text in texts] == [[9, 2, 3], [], [7], []]


def _options(llama: Path) -> tuple[object, ...]:
    return (
        *("--model", llama, "--max-new-tokens", 8, "--prompt", "w5 w7 w9 w5 w7"),
        *("--draft", "ngram", "--num-samples", 5),
    )


def test_the_command_reports_what_drafts_were_worth(llama: Path) -> None:
    done = invoke("generate", "--backend", "torch", *_options(llama))
    assert done.exit_code == 0, done.output
    assert "same tokens: 1 rank = oracle (40 tokens compared, 0 differ" in done.stdout
    assert re.search(r"draft +ngram", done.stdout)
    assert re.search(r"accepted +[\d.]+% of [1-9]\d* drafts", done.stdout)
    assert re.search(r"tokens per target step +\d\.\d\d", done.stdout)
    assert re.search(r"same text as plain decoding +5 of 5 rows", done.stdout)


def test_a_model_whose_cache_forgets_nothing_decodes_without_drafts(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    options = _options(tmp_path)
    drafted = invoke("generate", "--backend", "torch", *options)
    assert drafted.exit_code == 1 and "cannot forget tokens; decode without" in drafted.stderr
    plain = invoke("generate", "--backend", "torch", *options[:6], "--num-samples", 5)
    assert "same tokens: 1 rank = oracle (40 tokens compared, 0 differ" in plain.stdout
