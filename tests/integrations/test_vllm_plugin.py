"""The plug-in that vLLM loads: nothing without its option, the sampler's arguments with it."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import vllm_fakes as fakes
from tests.support.commands import ROOT
from tests.support.stand_ins import stand_in
from tpsample import UnsupportedParameter
from tpsample.integrations import vllm_plugin
from tpsample.integrations.vllm_head import VllmHead


class CPUWorker:
    """vLLM's worker."""

    def __init__(self, additional_config: Any) -> None:
        self.vllm_config = SimpleNamespace(additional_config=additional_config)
        self.model_runner = fakes.v1_runner()
        self.loaded: list[Any] = []

    def load_model(self, **kwargs: Any) -> None:
        self.loaded.append(kwargs)


@pytest.fixture
def vllm(monkeypatch):
    """Stand in for the modules of vLLM that the plug-in asks for; return those of the worker."""
    attached: list[Any] = []
    fake = {
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.v1.worker.cpu_worker": {"CPUWorker": CPUWorker},
        "vllm.distributed.parallel_state": {
            "get_pp_group": lambda: SimpleNamespace(is_last_rank=True)
        },
        "tpsample.integrations.vllm_attach": {
            "attach": lambda runner, **options: attached.append(options) or "head"
        },
    }
    stand_in(monkeypatch, fake)
    return SimpleNamespace(worker=sys.modules["vllm.v1.worker.cpu_worker"], attached=attached)


def test_the_package_declares_it():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read pyproject.toml")
    group = "vllm.general_plugins"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, function),) = project["entry-points"][group].items()
    assert EntryPoint(name, function, group).load() is vllm_plugin.register


def test_registered_twice_it_changes_nothing_until_it_is_asked(vllm):
    vllm_plugin.register()
    first = vllm.worker.CPUWorker
    vllm_plugin.register()
    assert vllm.worker.CPUWorker is first and first is not CPUWorker
    assert (first.__name__, first.__module__) == ("CPUWorker", CPUWorker.__module__)
    for other in ({}, None, {"ascend": {"x": 1}}, SimpleNamespace(tpsample={})):
        worker = first(other)
        worker.load_model(load_dummy_weights=True)
        assert worker.loaded == [{"load_dummy_weights": True}] and not vllm.attached
        assert worker.tpsample_counters() == {}


def test_with_its_option_the_runner_samples_by_these_arguments(vllm):
    vllm_plugin.register()
    its = {"exchange": "p2p", "screening": "int8", "verification": "block"}
    worker = vllm.worker.CPUWorker({"tpsample": its})
    worker.load_model()
    assert worker.loaded == [{}] and worker._head == "head"
    assert vllm.attached == [its]

    class Always(vllm_plugin.with_tpsample(vllm.worker.CPUWorker)):  # type: ignore[misc]
        always = True

    Always({}).load_model()
    assert vllm.attached[1:] == [{}]


def test_a_mode_that_would_be_wrong_is_refused_before_the_model_is_loaded(vllm):
    worker = vllm_plugin.with_tpsample(CPUWorker)({"tpsample": {}})
    worker.model_runner.model_config.enable_trace_replay = True
    with pytest.raises(UnsupportedParameter, match="--enable-trace-replay"):
        worker.load_model()
    assert worker.loaded == []


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (True, r"tpsample: expected an object such as \{\}, got True"),
        (
            {"exchnge": "p2p"},
            "no field 'exchnge'; it has exchange, chunks, backend, screening, verification",
        ),
        ({"exchange": "nccl"}, "exchange: expected 'auto', .*, got 'nccl'"),
        ({"chunks": 0}, "chunks: expected 1 to 64, got 0"),
        ({"chunks": True}, "chunks: expected 1 to 64, got True"),
        ({"screening": "int4"}, "screening: expected None, 'int8', got 'int4'"),
        ({"verification": "standard"}, "expected 'coupled', 'rejection', 'block', got 'standard'"),
    ],
)
def test_wrong_fields_are_refused_by_name(asked, told):
    config = SimpleNamespace(additional_config={"tpsample": asked})
    with pytest.raises(
        UnsupportedParameter, match=f"^--additional-config: tpsample: .*{told}|{told}"
    ):
        vllm_plugin.options_of(config)


def test_options_reach_the_sampler():
    runner = fakes.v1_runner()
    head = VllmHead(
        runner.model.processor, runner, group="alone", depth=1, backend="torch", exchange="p2p"
    )
    assert head.kept.sampler.backend == "torch"
