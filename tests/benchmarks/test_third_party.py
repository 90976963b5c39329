"""Packages of others in a folder: found, called as their interfaces say, or named with a way to add
them. The packages here are small fakes."""

import sys

import pytest
import torch

from benchmarks.lab import baselines, third_party
from benchmarks.lab.harness import Run, execute
from benchmarks.lab.problem import Problem, make_weight
from benchmarks.lab.shapes import TINY
from benchmarks.questions import BENCHMARKS, filters

CPU = torch.device("cpu")
FAKES = {
    "flashinfer/__init__.py": "",
    "flashinfer/sampling.py": """
calls = []

def noted(name):
    def sample(given, *filters):
        calls.append((name, *filters))
        return given.argmax(dim=1).int()
    return sample

sampling_from_logits = noted("logits")
top_k_top_p_sampling_from_logits = noted("top_k, top_p")
top_k_sampling_from_probs = noted("top_k")
top_p_sampling_from_probs = noted("top_p")
min_p_sampling_from_probs = noted("min_p")
""",
    "fused_mm_sampling/__init__.py": "",
    "fused_mm_sampling/core.py": """
from types import SimpleNamespace

fused_mm_sample_triton_kernel = SimpleNamespace(cache={"rows": "tile"}, cache_results=True)

def fused_mm_sample_triton(weights, hidden_states, num_samples, temperature, seed):
    assert temperature.shape == () and temperature == 1
    print("Supports warp specialization: False")
    return (hidden_states @ weights.T).argmax(dim=1, keepdim=True).expand(-1, num_samples)
""",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of packages that the environment names; nothing of it stays imported."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(third_party.FOLDER, str(tmp_path))
    monkeypatch.setattr(third_party, "runs_on", lambda device: True)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in _names()]:
        del sys.modules[name]


def _names() -> set[str]:
    return {path.split("/")[0] for path in FAKES}


def _add_fakes(folder) -> None:
    for path, text in FAKES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)


def _problem() -> Problem:
    return Problem.make(make_weight(TINY.vocab_size, TINY.hidden_size, CPU), 3)


def test_what_is_absent_is_left_out_with_a_way_to_add_it(folder):
    problem = _problem()
    assert set(baselines.single_rank(problem)) == {baselines.RACE, baselines.GUMBEL}
    notes = "\n".join(baselines.notes(CPU, "bf16"))
    assert "FlashInfer was not measured, because there is no package flashinfer" in notes
    assert "FlashSampling was not measured, because there is no package fused_mm" in notes
    assert notes.count(f"set {third_party.FOLDER}=DIR") == 2


def test_those_in_the_folder_are_candidates(folder, capsys):
    _add_fakes(folder)
    result = execute(BENCHMARKS["single_gpu"], Run.small(batches=(2,), repeats=1), None)
    names = {each["candidate"] for each in result.rows if each["kind"] == "baseline"}
    assert names == {baselines.RACE, baselines.GUMBEL, "FlashInfer", "FlashSampling"}
    assert not any("FlashInfer was not" in note for note in result.notes)
    assert "warp specialization" not in capsys.readouterr().out
    problem = _problem()
    argmax = (problem.hidden_states @ problem.weight.T).argmax(dim=1)
    for name in ("FlashInfer", "FlashSampling"):
        assert baselines.single_rank(problem)[name]().tolist() == argmax.tolist()


def test_a_tile_of_other_rows_is_not_kept(folder):
    _add_fakes(folder)
    problem = _problem()
    step = third_party.flash_sampling(problem.hidden_states, problem.weight)
    step()
    from fused_mm_sampling import core

    assert core.fused_mm_sample_triton_kernel.cache == {}
    assert not core.fused_mm_sample_triton_kernel.cache_results
    core.fused_mm_sample_triton_kernel.cache["rows"] = "its own tile"
    step()
    assert core.fused_mm_sample_triton_kernel.cache == {"rows": "its own tile"}


def test_every_filter_has_its_function(folder):
    _add_fakes(folder)
    for name, changes in filters.SETTINGS.items():
        result = third_party.flashinfer_sample(torch.randn(2, 100), **changes)
        assert result.shape == (2,), name
    third_party.flashinfer_sample(torch.randn(2, 100))
    from flashinfer import sampling

    assert sampling.calls == [
        ("top_p", 0.95),
        ("top_k", 50),
        ("top_k, top_p", 50, 0.95),
        ("top_k, top_p", 500, 0.95),
        ("min_p", 0.05),
        ("top_p", 0.001),
        ("logits",),
    ]
