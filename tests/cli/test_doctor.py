"""`tpsample doctor`, alone and on ranks, without a GPU."""

import importlib.metadata
import itertools
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("rich", reason="needs typer and rich")

import tpsample.cli.doctor
from tests.support.commands import invoke, run_command, starter
from tests.support.tiers import long
from tpsample.core.machine import how_to_install


def test_alone():
    shown = invoke("doctor", "--seconds", 0.1)
    assert shown.exit_code == 0, shown.output
    assert "1 rank, started by hand" in shown.output
    assert "exchange auto  none: one rank" in shown.output
    copied = " ".join(shown.output.split())
    assert "per rank, 1.1 GB beside 2.1 GB of bf16 weights for 128256 x 8192" in copied
    assert "self-check none: ok; " in shown.output
    assert "hint: no GPU is visible" in shown.output


def test_a_cache_says_how_many_kernels_it_lacks(monkeypatch):
    pytest.importorskip("numba", reason="needs the extra cpu")
    from tpsample.backends.numba_.kernels import compiled_ahead

    for missing, said in ((0, "warm"), (2, "2 of 17 to be compiled, about 4 s")):
        monkeypatch.setattr(compiled_ahead, "entries", lambda weight: [None] * 17)
        monkeypatch.setattr(compiled_ahead, "missing_of", lambda weight, n=missing: [None] * n)
        monkeypatch.setattr(compiled_ahead, "SECONDS_EACH", 2)
        ((name, shown),) = tpsample.cli.doctor._cache("numba")
        assert name == "kernel cache"
        assert shown == f"float32 {said}, bfloat16 {said}; once per machine"
    assert tpsample.cli.doctor._cache("torch") == []


def test_wrong_tokens_are_an_error(monkeypatch):
    sample = tpsample.cli.doctor.reference.sample

    def other(*args, **named):
        out = sample(*args, **named)
        out.token_ids.add_(1)
        return out

    monkeypatch.setattr(tpsample.cli.doctor.reference, "sample", other)
    shown = invoke("doctor", "--seconds", 0)
    assert shown.exit_code == 1
    assert "self-check none: 4 TOKENS DIFFER FROM THE ORACLE" in shown.output


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(tpsample.cli.doctor.PACKAGES, "no-such-package", "hf")
    shown = invoke("doctor", "--seconds", 0)
    assert f"hint: no-such-package missing: {how_to_install('hf')}\n" in shown.output


def test_a_version_that_an_adapter_refuses_or_warns_of_has_a_hint(monkeypatch):
    version = importlib.metadata.version
    versions = {"transformers": "5.20.2", "vllm": "0.34.1+cpu", "sglang": "0.5.23"}
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: versions.get(name) or version(name)
    )
    shown = " ".join(invoke("doctor", "--seconds", 0).output.split())
    assert "transformers 5.20.2 " in shown and "vllm 0.34.1+cpu " in shown
    assert "hint: tpsample.integrations.vllm: vllm 0.33 was tried, 0.34.1+cpu is" in shown
    assert "hint: tpsample.integrations.sglang" not in shown
    (hint,) = re.findall(r"hint: tpsample\.integrations\.\S+: [^;]*; pip install '[^']*'", shown)
    assert hint.endswith("5.20.2 is installed; pip install 'transformers==5.24.*'")


def test_a_compiler_that_is_known_to_be_wrong_for_the_gpu_has_a_hint(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    job = SimpleNamespace(device=torch.device("cuda"), world_size=2)
    for triton, hints in (("3.9.0", 1), ("3.7.1", 0)):
        found = tpsample.cli.doctor._hints(job, [{"versions": {"triton": triton}}])
        assert len(found) == hints and all("sm_100" in hint for hint in found)


def test_the_first_step_is_not_timed_because_it_may_compile(monkeypatch):
    clock = itertools.count(0, 100)
    monkeypatch.setattr(tpsample.cli.doctor.time, "perf_counter", lambda: next(clock))
    (line,) = re.findall("self-check.*", invoke("doctor", "--seconds", 0).output)
    assert line.endswith(": ok; 1 step, 4 tokens")
    seen = [0, *(0, 50, 50), *(50, 60, 60), *(60, 70, 70)]  # a start, an end and a look per step
    clock = itertools.chain(seen, itertools.repeat(70))
    (line,) = re.findall("self-check.*", invoke("doctor", "--seconds", 60).output)
    assert line.endswith(": ok; 3 steps, 12 tokens, slowest behind the first 10000.0 ms")


@pytest.mark.parametrize("source", ["torchrun", *long("mpi4py")])
def test_on_two_ranks(source):
    command = (*starter(source), "-m", "tpsample.cli", "doctor", "--seconds", "0.2")
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    assert f"2 ranks, started by {source}" in done.stdout
    assert "exchange auto  collective: the ranks are CPUs" in done.stdout
    for exchange in ("collective", "p2p"):
        assert f"self-check {exchange}: ok; " in done.stdout
    assert "rank 1  " in done.stdout and "DIFFERS" not in done.stdout
