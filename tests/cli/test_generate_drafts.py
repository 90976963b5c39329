"""`tpsample generate --draft`: the text of plain decoding, and what the drafts were worth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.support.commands import GENERATE, TORCHRUN, invoke, run_command
from tests.support.tiny_model import save_tokenizer
from tpsample import LMHeadSampler, SamplingBatch, SamplingParams
from tpsample.cli.app import app
from tpsample.cli.decode import decode
from tpsample.cli.drafters import Decoding, Drafting, EarlyExit, PromptLookup
from tpsample.cli.model import Model, load
from tpsample.cli.speculate import decode_with_drafts
from tpsample.distributed import Job

TRANSFORMERS = pytest.importorskip("transformers", reason="needs the extra hf")
VOCAB_SIZE = 307


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tokenizer(folder, VOCAB_SIZE)
    config = TRANSFORMERS.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=VOCAB_SIZE - 1,
    )
    torch.manual_seed(0)
    TRANSFORMERS.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny: Path) -> Model:
    return load(str(tiny), Job(), torch.float32)


PROMPTS = [[5], [7, 8, 9, 7, 8, 9, 7, 8], [3, 1, 4], [2, 7, 1, 8, 2, 8]]
PARAMS = [SamplingParams(temperature=t, seed=40 + i) for i, t in enumerate((0, 0.5, 1, 0.8))]


class Scripted:
    """Drafts the plain text, but for every fifth token; some rows draft less."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.texts = [prompt + row for prompt, row in zip(PROMPTS, rows, strict=True)]

    def propose(self, decoding: Decoding, count: int) -> torch.Tensor:
        drafts = torch.full((len(self.texts), count), -1)
        for row, (text, so_far) in enumerate(zip(self.texts, decoding.texts, strict=True)):
            for i, token_id in enumerate(text[len(so_far) : len(so_far) + count - row % 2]):
                wrong = (len(so_far) + i) % 5 == 0
                drafts[row, i] = (token_id + wrong) % VOCAB_SIZE
        return drafts


def test_decoding_with_drafts_writes_the_plain_text(tiny_model: Model) -> None:
    sampler = LMHeadSampler(tiny_model.lm_head_weight, max_rows=4 * 5, backend="torch")
    batch = SamplingBatch.from_params(PARAMS, vocab_size=VOCAB_SIZE)
    plain = decode(
        tiny_model, PROMPTS, lambda h, p: sampler(h, batch, p), max_new_tokens=17,
        on_step=lambda: None,
    )  # fmt: skip
    assert len({tuple(row) for row in plain.rows}) == 4
    drafters = {
        "scripted": Scripted(plain.rows),
        "ngram": PromptLookup(),
        "early-exit": EarlyExit(tiny_model, sampler, batch, 2),
    }
    for name, drafter in drafters.items():
        told: list[None] = []
        done = decode_with_drafts(
            tiny_model, PROMPTS, sampler, batch, drafter, num_drafts=4, max_new_tokens=17,
            on_token=lambda: told.append(None),  # noqa: B023 - used at once
        )  # fmt: skip
        assert done.rows == plain.rows, name
        assert len(told) == 17
        assert 0 <= done.accepted <= done.proposed
        if name == "scripted":
            assert done.forwards <= 9 and done.accepted > done.proposed / 2
        for t, step in enumerate(plain.steps):
            torch.testing.assert_close(done.steps[t].hidden_states, step.hidden_states)
            assert torch.equal(done.steps[t].positions, step.positions)
            assert torch.equal(done.steps[t].token_ids, step.token_ids)


def test_early_exit_with_all_the_weights_but_one_layers_leaves_the_model_alone(
    tiny_model: Model,
) -> None:
    sampler = LMHeadSampler(tiny_model.lm_head_weight, max_rows=8, backend="torch")
    batch = SamplingBatch.from_params(PARAMS, vocab_size=VOCAB_SIZE)
    EarlyExit(tiny_model, sampler, batch, 1)
    assert len(tiny_model.trunk.layers) == 3
    for layers in (0, 3):
        with pytest.raises(ValueError, match="draft_layers: expected 1 to 2"):
            EarlyExit(tiny_model, sampler, batch, layers)
    assert isinstance(Drafting("ngram", 4, 0).drafter(tiny_model, sampler, batch), PromptLookup)


def test_prompt_lookup_continues_the_longest_suffix() -> None:
    texts = [[1, 2, 3, 9, 2, 3], [4, 5, 6], [7, 7], [8]]
    state = Decoding(texts, None, torch.zeros(4, 0), torch.zeros(4, 1), torch.zeros(4))
    drafts = PromptLookup().propose(state, 3)
    assert drafts.tolist() == [[9, 2, 3], [-1] * 3, [7, -1, -1], [-1] * 3]


def _options(tiny: Path) -> tuple[object, ...]:
    return (
        *("--model", tiny, "--max-new-tokens", 8, "--prompt", "w5 w7 w9 w5 w7"),
        *("--draft", "early-exit", "--draft-layers", 2, "--num-samples", 5),
    )


@pytest.mark.long
def test_two_ranks_verify_the_same_drafts(tiny: Path) -> None:
    done = run_command(*TORCHRUN, 2, *GENERATE, *_options(tiny))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same tokens: 1 rank = 2 ranks = oracle (40 tokens compared, 0 differ" in done.stdout
    assert re.search(r"same text as plain decoding +5 of 5 rows", done.stdout)


def test_the_command_reports_what_drafts_were_worth(tiny: Path) -> None:
    done = invoke("generate", "--backend", "torch", *_options(tiny))
    assert done.exit_code == 0, done.output
    assert "same tokens: 1 rank = oracle (40 tokens compared, 0 differ" in done.stdout
    assert re.search(r"draft +early-exit", done.stdout)
    assert re.search(r"accepted +[\d.]+% of [1-9]\d* drafts", done.stdout)
    assert re.search(r"tokens per target step +\d\.\d\d", done.stdout)
    assert re.search(r"same text as plain decoding +5 of 5 rows", done.stdout)


def test_wrong_draft_options_are_named(tiny: Path) -> None:
    command = ["generate", "--backend", "torch", "--model", str(tiny), "--draft"]
    done = CliRunner().invoke(app, [*command, "early-exit", "--draft-layers", "9"])
    assert done.exit_code == 1 and "draft_layers: expected 1 to 2" in done.output
    done = CliRunner().invoke(app, [*command, "crystal-ball"])
    assert done.exit_code != 0 and "crystal-ball" in done.output
