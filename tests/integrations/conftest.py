import importlib.metadata
from pathlib import Path

import pytest

from tests.support.tiny_model import save_tiny_llama
from tpsample.agreement import construction
from tpsample.integrations import TRIED


@pytest.fixture(autouse=True)
def without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let samplers take the backend of a server on a CPU, which interprets no kernels."""
    monkeypatch.setattr(construction, "interpreted", lambda: False)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    tried = TRIED["transformers"]
    if not importlib.metadata.version("transformers").startswith(f"{tried}."):
        pytest.skip(f"needs transformers {tried}, which the adapter supports")
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))
