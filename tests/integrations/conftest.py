from pathlib import Path

import pytest

from tests.support.tiny_model import save_tiny_llama
from tests.support.tried import need_transformers
from tpsample.agreement import construction


@pytest.fixture(autouse=True)
def without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let samplers take the backend of a server on a CPU, which interprets no kernels."""
    monkeypatch.setattr(construction, "interpreted", lambda: False)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama."""
    need_transformers()
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))
